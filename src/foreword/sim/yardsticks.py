"""Caches that no server can be, to hold others against: OPT, which knows the future; a plain FIFO.

Neither is the core with another policy, so neither shares its mistakes.
"""

from collections import Counter, OrderedDict
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
    """What is needed again last leaves first, and what is not needed is not kept (Belady's rule). A
    request takes no room while it runs. So no cache of full blocks has more hits, counted in blocks
    over the whole trace, however it works (tests/property/test_opt.py).

    It takes no more than counting: of the blocks that a request needs, the deepest leaves first, so
    what is left of them is the beginning of its prompt.
    """

    def restart(self) -> None:
        self._num_kept = 0
        self._needed: dict[int, int] = {}  # how many blocks are kept, by who needs them next
        self._furthest: list[int] = []  # the same requests, negative, as a heap; done ones too

    def find(self, record: Record, seen: Visit) -> tuple[int, int]:
        num_hits = self._needed.pop(record.place, 0)
        self._num_kept -= num_hits
        for request, num_blocks in Counter(self.future.uses).items():
            if request != NEVER:
                if request not in self._needed:
                    self._needed[request] = 0
                    heappush(self._furthest, -request)
                self._needed[request] += num_blocks
                self._num_kept += num_blocks
        return self.counted(record, num_hits, self._evicted())

    def _evicted(self) -> int:
        """Lets what is too much go; returns how many blocks."""
        surplus = max(0, self._num_kept - self.capacity)
        self._num_kept -= surplus
        left = surplus
        while left:
            request = -self._furthest[0]
            gone = min(left, self._needed[request])
            self._needed[request] -= gone
            left -= gone
            if not self._needed[request]:
                del self._needed[request]
                heappop(self._furthest)
        return surplus
