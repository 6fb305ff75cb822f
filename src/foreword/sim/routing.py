"""Routing: which worker of a fleet a request goes to.

`round-robin`: each in turn. `hash`: by the session, else by the prompt's first block, so that what
begins alike meets again; another number of workers moves as few as can be. `prefix`: who has most
of the prompt, and among equals who has least queued. `soonest`: who has the least to compute before
this request's first token, its own part of the prompt included. Those that are equal in all of this
take turns.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

from foreword.core.block import Chain
from foreword.sim.trace import Record
from foreword.sim.worker import Worker

# Given the number of the request, its record and its chain: the place of a worker.
Route = Callable[[int, Record, Chain, Sequence[Worker]], int]


def _round_robin(number: int, _record: Record, _chain: Chain, workers: Sequence[Worker]) -> int:
    return number % len(workers)


def _hash(_number: int, record: Record, chain: Chain, workers: Sequence[Worker]) -> int:
    """Rendezvous hashing: the worker whose digest with the key is greatest."""
    first = chain.hashes[0] if chain.hashes else chain.root + bytes(chain.key)
    key = chain.root + record.session.encode() if record.session else first
    return max(range(len(workers)), key=lambda at: sha256(key + at.to_bytes(4, "big")).digest())


def _prefix(number: int, _record: Record, chain: Chain, workers: Sequence[Worker]) -> int:
    return max(
        range(len(workers)),
        key=lambda at: (
            workers[at].num_known_tokens(chain),
            -workers[at].num_queued_tokens,
            -((at - number) % len(workers)),
        ),
    )


def _soonest(number: int, _record: Record, chain: Chain, workers: Sequence[Worker]) -> int:
    return min(
        range(len(workers)),
        key=lambda at: (
            workers[at].num_queued_tokens - workers[at].num_known_tokens(chain),
            (at - number) % len(workers),
        ),
    )


ROUTES: dict[str, Route] = {
    "round-robin": _round_robin,
    "hash": _hash,
    "prefix": _prefix,
    "soonest": _soonest,
}
