"""Ghost: what other sizes of cache would find of the requests that come, from a sample of blocks.

SHARDS (Waldspurger et al., FAST 2015): of all blocks those are followed whose hash lies below a
limit. Among them a block's stack distance, the number that were used since it was, is the rate's
share of its distance among all; LRU finds it in a cache that has more room than that. A hash is
uniform, so its own bits draw the sample; the limit is halved whenever the sample has grown too
large. A request uses its blocks from the end to the root, as the cache lets them go leaf first, so
LRU over blocks is leaf-first LRU, and one pass answers for every size.

All counts are halved in some 17 hours, so that they tell of the last day.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp

from foreword.core.block import BlockHash, Chain
from foreword.core.cost import StepCost, TierCost, num_pairs

DAY_S = 86400.0
_AGE_EVERY_S = 1.0
_WHOLE = bytes([255]) * 33  # above every hash
# Distances in blocks: a bucket for each to 11, then eight per octave.
_BOUNDS = sorted({ceil(2 ** (i / 8)) for i in range(8 * 40)})

Owner = tuple[str, str]  # a request's cache salt and document


@dataclass(frozen=True, slots=True)
class Served:
    """A request that ended. It looked for the first `num_asked` blocks of its chain, found so many
    in each place, in order, and left `num_kept` behind."""

    owner: Owner
    chain: Chain
    num_asked: int
    num_kept: int
    found: Sequence[int]


@dataclass(frozen=True, slots=True)
class Room:
    """A tier as a Ghost sees it: its room in blocks, and what reading from it costs; None: nothing,
    for the device, or not known."""

    name: str
    num_blocks: int
    cost: TierCost | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What places of some sizes would find: by place the share of the blocks that were looked for,
    what nothing faster has; and the seconds a day that this saves: computing less loading. None
    while computing was not measured."""

    hit_rates: tuple[float, ...]
    saved_s: float | None


class Ghost:
    """Fed each request at its end. Times are the caller's, in seconds."""

    def __init__(
        self, block_size: int, num_places: int, max_blocks: int, max_sampled: int = 8192
    ) -> None:
        """Asked about caches of up to `max_blocks` blocks; `block_size` in tokens."""
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.window_s = 0.0  # in which all was counted, aged as the counts are
        self.clock = 0  # uses of sampled blocks
        self._max_sampled = max_sampled
        self.scale = 1  # blocks for which one of the sample stands
        self._limit = _WHOLE
        # The sample, the least recently used first: when each was used, what it is.
        self._times: list[int] = []
        self._blocks: list[tuple[BlockHash, Owner]] = []
        self._last: dict[BlockHash, int] = {}
        self._now_s: float | None = None
        # Of blocks looked for: how many, and how many blocks came before each, added up.
        self._asked = [0.0, 0.0]
        self._missed = [0.0, 0.0]  # of them, what the sample has too few
        self._near = [[0.0, 0.0] for _ in range(len(_BOUNDS) + 1)]  # the same, by distance
        self._found = [0.0] * num_places  # blocks, really
        self._loads = [0.0] * num_places  # requests that found any there

    def add(self, served: Served, now_s: float) -> None:
        self.age(now_s)
        for place, num_blocks in enumerate(served.found):
            self._found[place] += num_blocks
            self._loads[place] += num_blocks > 0
        num = served.num_asked
        counted = self._count(served.chain.hashes[: served.num_kept], num, served.owner)
        for at, asked in enumerate((num, num * (num - 1) // 2)):
            self._asked[at] += asked
            self._missed[at] += asked - counted[at]
        self._shrink()

    def age(self, now_s: float) -> None:
        """It is so late: what was counted counts less."""
        if self._now_s is None:
            self._now_s = now_s
        passed_s = now_s - self._now_s
        if passed_s < _AGE_EVERY_S:
            return
        left = exp(-passed_s / DAY_S)
        self._now_s = now_s
        self.window_s = self.window_s * left + DAY_S * (1.0 - left)
        for counts in (self._asked, self._missed, self._found, self._loads, *self._near):
            counts[:] = [left * count for count in counts]

    @property
    def num_asked(self) -> float:
        """Blocks that were looked for."""
        return self._asked[0]

    def clear(self) -> None:
        """The cache forgot all."""
        self._times, self._blocks, self._last = [], [], {}

    def depth(self, clock: int) -> int:
        """How many blocks were used since the clock stood there."""
        return (len(self._times) - bisect_right(self._times, clock)) * self.scale

    def owners(self, num_blocks: int) -> dict[Owner, int]:
        """Who used the newest `num_blocks` blocks last, and how many each."""
        held: dict[Owner, int] = {}
        newest = self._blocks[-(num_blocks // self.scale) :] if num_blocks >= self.scale else []
        for _block_hash, owner in newest:
            held[owner] = held.get(owner, 0) + self.scale
        return held

    def lru(self, num_blocks: int) -> tuple[float, float]:
        """Of the blocks looked for, the share that an LRU cache of this size would find, and how
        many blocks came before one of those, on average."""
        full = bisect_right(_BOUNDS, min(num_blocks, self.max_blocks))
        low = _BOUNDS[full - 1] if full else 0
        part = (num_blocks - low) / (_BOUNDS[full] - low) if num_blocks < self.max_blocks else 0.0
        hits, before = (
            sum(near[at] for near in self._near[:full])
            + part * self._near[full][at]
            + self._missed[at] * (num_blocks > 0)
            for at in (0, 1)
        )
        share = hits / self._asked[0] if self._asked[0] else 0.0
        return min(1.0, max(0.0, share)), max(0.0, before) / hits if hits > 0 else 0.0

    def outlook(
        self, places: Sequence[Room], sizes: Sequence[int], block_bytes: int, cost: StepCost | None
    ) -> Outlook:
        """What `places` would do, had they room for `sizes` blocks instead.

        A place keeps what those above it keep too, so that many see no further than the largest.
        With the sizes that they have the figures are what was really found: between those, and
        beyond, the shares of LRU are drawn out linearly to meet them.
        """
        known = self._known(places)
        rates: list[float] = []
        reach, share = 0, 0.0
        for num_blocks in sizes:
            reach = max(reach, num_blocks)
            rates.append(max(0.0, _between(known, self.lru(reach)[0], reach) - share))
            share += rates[-1]
        if cost is None:
            return Outlook(tuple(rates), None)
        saved_s = share * self.block_s(cost, self.lru(reach)[1])
        for at, rate in enumerate(rates):
            saved_s -= rate * self.load_s(places, at, block_bytes)
        per_day = self._asked[0] * DAY_S / self.window_s if self.window_s else 0.0
        return Outlook(tuple(rates), saved_s * per_day)

    def block_s(self, cost: StepCost, num_before: float) -> float:
        """Seconds to compute one block of many, after `num_before` others."""
        size = self.block_size
        pairs = num_pairs(size, 0) + size * size * num_before
        return size * cost.per_token_s + pairs * cost.per_pair_s

    def load_s(self, places: Sequence[Room], at: int, block_bytes: int) -> float:
        """Seconds to load one block from a place, of as many at once as were found there, or else
        anywhere."""
        cost, loads, found = places[at].cost, self._loads[at], self._found[at]
        if cost is None:
            return 0.0
        if not loads:
            loads, found = max(1.0, sum(self._loads)), sum(self._found)
        run = max(1.0, found / loads)
        return cost.load_s(int(run * block_bytes)) / run

    def _known(self, places: Sequence[Room]) -> list[tuple[int, float, float]]:
        """Sizes, the share that LRU would find in each, and the one that was found."""
        reach, real = 0, 0.0
        known = [(0, 0.0, 0.0)]
        for place, found in zip(places, self._found, strict=True):
            if place.num_blocks <= reach:
                known.pop()
            reach = max(reach, place.num_blocks)
            real += found / (self._asked[0] or 1.0)
            known.append((reach, self.lru(reach)[0], real))
        share = known[-1][1]
        most = self.lru(self.max_blocks)[0]
        # Where less than LRU would find is found, for whatever reason, more room finds less, too.
        most *= min(1.0, real / share) if share else 1.0
        known.append((self.max_blocks, self.lru(self.max_blocks)[0], max(real, most)))
        return known

    def _count(
        self, hashes: Sequence[BlockHash], num_asked: int, owner: Owner
    ) -> tuple[float, float]:
        """Use these blocks. Returns how many of those looked for the sample stands for, and the
        blocks before them."""
        limit, scale, last, times = self._limit, self.scale, self._last, self._times
        sampled = [at for at, block_hash in enumerate(hashes) if block_hash < limit]
        keys = [hashes[at] for at in sampled]
        num, start = len(keys), 0
        while start < num and (time := last.get(keys[start])) is not None:
            stop = start + 1  # a run of blocks that were used together last time, too
            while stop < num and last.get(keys[stop]) == time - (stop - start):
                stop += 1
            end = bisect_left(times, time) + 1
            # Newer ones, with those of this request that were taken out already.
            newer = len(times) - end + start
            for distance, at in enumerate(sampled[start:stop], newer):
                if at < num_asked:
                    near = self._near[bisect_right(_BOUNDS, distance * scale)]
                    near[0] += scale
                    near[1] += scale * at
            del times[end - (stop - start) : end], self._blocks[end - (stop - start) : end]
            start = stop
        self.clock += num
        times.extend(range(self.clock - num + 1, self.clock + 1))
        self._blocks.extend((key, owner) for key in reversed(keys))
        last.update(zip(keys, range(self.clock, self.clock - num, -1), strict=True))
        asked = sampled[: bisect_left(sampled, num_asked)]
        return scale * len(asked), scale * sum(asked)

    def _shrink(self) -> None:
        """Forget what no cache that is asked about would still have; then halve the sample while it
        is too large."""
        surplus = len(self._times) - self.max_blocks // self.scale
        if surplus > 0:
            for block_hash, _owner in self._blocks[:surplus]:
                del self._last[block_hash]
            del self._times[:surplus], self._blocks[:surplus]
        while len(self._times) > self._max_sampled:
            self.scale *= 2
            self._limit = ((1 << 64) // self.scale).to_bytes(8, "big")
            kept = [at for at, block in enumerate(self._blocks) if block[0] < self._limit]
            self._times = [self._times[at] for at in kept]
            self._blocks = [self._blocks[at] for at in kept]
            self._last = {
                block[0]: time for time, block in zip(self._times, self._blocks, strict=True)
            }


def _between(known: Sequence[tuple[int, float, float]], share: float, num_blocks: int) -> float:
    """Where a size that LRU finds `share` in lies among those that are known."""
    after = min(bisect_left(known, (num_blocks,)), len(known) - 1)
    low, high = known[max(0, after - 1)], known[after]
    at, end = share - low[1], high[1] - low[1]
    if end <= 0:  # LRU finds nothing more there
        at, end = num_blocks - low[0], high[0] - low[0]
    return low[2] + min(1.0, max(0.0, at / end if end else 0.0)) * (high[2] - low[2])
