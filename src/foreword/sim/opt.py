"""The future of a trace: when each of its blocks is needed next. OPT goes by it.

That is at the next request that has the block, if it may find it there. Where it computes the block
in any case, as it does what it answers, there is no need to keep it until then.
"""

import tempfile
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Self

from foreword.core.block import BlockHash
from foreword.core.policy import Policy, Ranked
from foreword.sim.prompt import Visit
from foreword.sim.trace import Record, Trace

NEVER = 2**31 - 1
_AT_ONCE = 64  # records: a trace is read onwards, so its end comes in pieces of so many


class Future:
    """When each block of a trace is needed next. Memory is by different blocks; what is known of
    each request lies in a temporary file until its turn."""

    def __init__(
        self,
        trace: Trace,
        visited: Callable[[Record], Visit],
        progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Reads the trace once, from its end. `progress` hears how much is done, from 0 to 1."""
        self.uses: Sequence[int] = ()  # of the blocks of the request that is served, in its order
        self.next_uses: dict[BlockHash, int] = {}  # of all up to it
        self.most_slots = 0  # of one request
        self._file = tempfile.TemporaryFile(buffering=1 << 16)  # noqa: SIM115 - closed by `close`
        self._places = array("q", bytes(8 * len(trace)))
        uses: dict[BlockHash, int] = {}
        for stop in range(len(trace), 0, -_AT_ONCE):
            start = max(0, stop - _AT_ONCE)
            pieces: list[array[int]] = []
            for number in reversed(range(start, stop)):
                seen = visited(trace[number])
                hashes = seen.whole.hashes[: seen.num_kept]
                pieces.append(array("i", map(uses.get, hashes, repeat(NEVER))))
                uses.update(zip(hashes[: seen.num_reusable], repeat(number), strict=False))
                uses.update(zip(hashes[seen.num_reusable :], repeat(NEVER), strict=False))
                self.most_slots = max(self.most_slots, seen.num_slots)
            for number, piece in zip(range(start, stop), reversed(pieces), strict=True):
                self._places[number] = self._file.tell()
                self._file.write(piece)
            progress(1 - start / len(trace))
        self.num_blocks = len(uses)  # different ones
        self.is_timed = len(trace) > 0 and trace[len(trace) - 1].arrival_s > 0
        # What an endless cache may hold: all of them, an unfinished one of each request, and those
        # of the request that runs once more.
        self.all_slots = len(uses) + len(trace) + self.most_slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def advance(self, number: int, seen: Visit) -> None:
        """Request `number`, from 0, is served now: its blocks are needed at their next uses. Call
        it for each, in order, before a cache is asked."""
        self._file.seek(self._places[number])
        uses: array[int] = array("i")
        uses.frombytes(self._file.read(uses.itemsize * seen.num_kept))
        self.uses = uses
        self.next_uses.update(zip(seen.whole.hashes, uses, strict=False))

    def policy(self) -> Policy:
        """What is needed again last leaves first. What has no hash can only be copied from, and
        leaves before all others."""
        next_uses = self.next_uses

        def rank(_added: int, _last_used: int, block_hash: BlockHash | None) -> float:
            return -next_uses[block_hash] if block_hash else -2.0 * NEVER

        return Policy("opt", lambda _capacity, _tokens: Ranked(rank, by_run=False))
