"""Read settings, build the objects, start things: the only composition root."""
