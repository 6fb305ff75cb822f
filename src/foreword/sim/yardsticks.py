"""Caches that no server can be, to hold others against: OPT, which knows the future; a plain FIFO.

Neither is the core with another policy, so neither shares its mistakes.
"""

from bisect import bisect_left
from collections import OrderedDict
from heapq import heappop, heappush

from foreword.core.block import BlockHash
from foreword.sim.opt import NEVER, Future
from foreword.sim.prompt import Visit
from foreword.sim.trace import Record
from foreword.sim.trial import Setting, Trial


class Yardstick(Trial):
    """One place, of full blocks, with nothing below it."""

    def __init__(self, setting: Setting, future: Future, block_size: int, id_tokens: int) -> None:
        super().__init__(setting, future, block_size, id_tokens)
        (self.capacity,) = self.room
        self.restart()

    def counted(self, record: Record, num_hits: int, num_evicted: int) -> tuple[int, int]:
        """What `find` returns for so many leading blocks."""
        tally = self.outcome.tiers[0]
        num_tokens = min(num_hits * self.block_size * self.id_tokens, record.num_tokens)
        tally.num_hit_tokens += num_tokens
        tally.num_evicted_blocks += num_evicted
        return num_tokens, num_hits


class FifoTrial(Yardstick):
    """Blocks leave in the order in which they came, whatever depends on them, as in
    kvcache-simulator. In the core a block never leaves before its children: that makes of FIFO
    almost an LRU."""

    def restart(self) -> None:
        self._queue: OrderedDict[BlockHash, None] = OrderedDict()

    def find(self, record: Record, seen: Visit) -> tuple[int, int]:
        queue, hashes = self._queue, seen.whole.hashes
        num_hits = num_evicted = 0
        while num_hits < seen.num_reusable and hashes[num_hits] in queue:
            num_hits += 1
        for block_hash in hashes[: seen.num_kept]:
            if block_hash not in queue:
                if len(queue) == self.capacity:
                    queue.popitem(last=False)
                    num_evicted += 1
                queue[block_hash] = None
        return self.counted(record, num_hits, num_evicted)


class OptTrial(Yardstick):
    """What is needed again last leaves first, and what is never needed is not kept (Belady's rule).

    A request takes no room while it runs. So no cache of full blocks has more hits, counted in
    blocks over the whole trace, however it works (tests/property/test_opt.py).
    """

    def restart(self) -> None:
        self._kept: set[BlockHash] = set()  # with each block those before it
        # By the request that needs them next, blocks along its path. Who visits a block takes those
        # before it too: so what a later request adds lies before what an earlier one did.
        self._needed: dict[int, list[BlockHash]] = {}
        self._furthest: list[int] = []  # the same requests, negative, as a heap; done ones too

    def find(self, record: Record, seen: Visit) -> tuple[int, int]:
        kept, hashes, uses = self._kept, seen.whole.hashes, self.future.uses
        num_hits = bisect_left(
            range(seen.num_reusable), True, key=lambda at: hashes[at] not in kept
        )
        self._needed.pop(record.place, None)
        num_needed = bisect_left(uses, NEVER)  # a block is needed no later than its children
        kept.difference_update(hashes[num_needed:num_hits])
        kept.update(hashes[:num_needed])
        start = 0
        while start < num_needed:
            request = uses[start]
            stop = bisect_left(uses, request + 1, start)
            if request not in self._needed:
                heappush(self._furthest, -request)
            self._needed[request] = hashes[start:stop] + self._needed.get(request, [])
            start = stop
        return self.counted(record, num_hits, self._evicted())

    def _evicted(self) -> int:
        """Lets what is too much go; returns how many blocks."""
        surplus = num_blocks = max(0, len(self._kept) - self.capacity)
        while surplus:
            needed = self._needed.get(-self._furthest[0])
            if not needed:
                self._needed.pop(-heappop(self._furthest), None)
                continue
            gone = needed[-surplus:]
            del needed[-surplus:]
            self._kept.difference_update(gone)
            surplus -= len(gone)
        return num_blocks
