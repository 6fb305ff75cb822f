"""Decide what KV to reuse, keep, load or drop. Pure: no I/O, clock, randomness or torch."""
