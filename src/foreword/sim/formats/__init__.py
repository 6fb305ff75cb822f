"""Formats of traces: a file for each family, and the order in which a file's first record is held
against them."""

from foreword.sim.formats import bodies, hashed, sessions
from foreword.sim.formats.reading import Format

FORMATS: tuple[Format, ...] = (*sessions.FORMATS, *hashed.FORMATS, *bodies.FORMATS)
