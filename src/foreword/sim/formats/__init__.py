"""Formats of traces: a file for each family, and the order in which a file's first record is held
against them."""

from foreword.sim.formats import (
    bodies,
    chats,
    gateways,
    hashed,
    lengths,
    logs,
    request_log,
    sessions,
    spans,
    tokens,
    tracelab,
)
from foreword.sim.formats.reading import Format

FORMATS: tuple[Format, ...] = (
    *request_log.FORMATS,
    *sessions.FORMATS,
    *tracelab.FORMATS,
    *logs.FORMATS,
    *tokens.FORMATS,
    *hashed.FORMATS,
    *gateways.FORMATS,
    *spans.FORMATS,
    *chats.FORMATS,
    *lengths.FORMATS,
    *bodies.FORMATS,  # the last: many a log has a request in it
)
