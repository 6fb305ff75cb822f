"""ReuseRates: how likely blocks of a class are used again once the device has lost them.

Of each request some blocks are watched, each as one of its classes. A use settles it: where the
device had the block it says nothing, else it counts for each tier that came into question, whether
that had it or not. What was not used for as long as the device keeps anything counts as not used; a
later use makes up for that, as long as the block is remembered.
"""

from collections import deque
from collections.abc import Hashable, Sequence

from foreword.core.block import BlockHash

# Of a class, for each tier: how many watched blocks were settled, and how many of them were used.
Counts = list[float]
# Where blocks come from that a request uses, first and end: a tier's number, or None: the device.
Source = tuple[int | None, int, int]

_MAX_CLASSES = 4096
_MAX_KNOWN = 1 << 16  # blocks of one generation; two are remembered
_MAX_COUNT = 512.0  # beyond it the past counts half
_TRUST = 4.0  # so many settled blocks weigh as much as what is known of the class above
_WINDOW = 2  # times what the device holds


class _Watch:
    __slots__ = ("classes", "is_open")

    def __init__(self, classes: Sequence[Counts]) -> None:
        self.classes = classes
        self.is_open = True


class ReuseRates:
    """Of `num_tiers` tiers below a device of `num_blocks` blocks."""

    def __init__(self, num_tiers: int, num_blocks: int) -> None:
        self._num_tiers = num_tiers
        self._window = _WINDOW * num_blocks
        self._stride = 1 + num_blocks // _MAX_KNOWN
        self._classes: dict[Hashable, Counts] = {}
        # By hash: who watches a block, or None for one that was refused.
        self._young: dict[BlockHash, _Watch | None] = {}
        self._old: dict[BlockHash, _Watch | None] = {}
        self._due: deque[tuple[int, _Watch]] = deque()  # when each counts as not used
        self._clock = 0  # blocks computed

    def counts(self, key: Hashable) -> Counts:
        """Of a class, new ones for one that is not known."""
        found = self._classes.get(key)
        if found is None:
            if len(self._classes) >= _MAX_CLASSES:
                del self._classes[next(iter(self._classes))]
            found = self._classes[key] = [0.0] * (2 * self._num_tiers)
        return found

    def rate(self, classes: Sequence[Counts], tier: int, prior: float = 1.0) -> float:
        """Of a block that is of these classes, the general ones first: each special one says the
        more the more was seen of it."""
        for counts in classes:
            prior = (counts[2 * tier + 1] + _TRUST * prior) / (counts[2 * tier] + _TRUST)
        return prior

    def used(self, hashes: Sequence[BlockHash], sources: Sequence[Source]) -> int:
        """A request uses blocks of a chain, from its first to what is computed. Returns how many
        leading ones were there before, as far as is remembered."""
        young, old = self._young, self._old
        known = [at for at, h in enumerate(hashes) if h in young or h in old]
        for at in known:
            watch = young.pop(hashes[at], None) or old.pop(hashes[at], None)
            if watch is not None:
                found = (place for place, first, stop in sources if first <= at < stop)
                self._settle(watch, next(found, self._num_tiers - 1))
        return max(known[-1] + 1 if known else 0, sources[-1][2] if sources else 0)

    def watch(self, block_hash: BlockHash, classes: Sequence[Counts]) -> None:
        """See whether a block is used again; nothing where that is under way."""
        if not (self._young.get(block_hash) or self._old.get(block_hash)):
            watch = _Watch(classes)
            self._remember(block_hash, watch)
            self._due.append((self._clock + self._window, watch))

    def refused(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks that were not stored: their next use is their second."""
        for block_hash in (*hashes[:: self._stride], *hashes[-1:]):
            if block_hash not in self._young and block_hash not in self._old:
                self._remember(block_hash, None)

    def advance(self, num_blocks: int) -> None:
        """So many blocks were computed."""
        self._clock += num_blocks
        while self._due and (self._due[0][0] <= self._clock or len(self._due) > _MAX_KNOWN):
            watch = self._due.popleft()[1]
            if watch.is_open:
                watch.is_open = False
                for counts in watch.classes:
                    for tier in range(self._num_tiers):
                        _add(counts, tier, 1, 0)

    def _settle(self, watch: _Watch, place: int | None) -> None:
        if place is not None:
            for counts in watch.classes:
                for tier in range(place + 1):
                    _add(counts, tier, watch.is_open, 1)
        watch.is_open = False

    def _remember(self, block_hash: BlockHash, watch: _Watch | None) -> None:
        if len(self._young) >= _MAX_KNOWN:
            self._young, self._old = {}, self._young
        self._young[block_hash] = watch


def _add(counts: Counts, tier: int, settled: int, used: int) -> None:
    at = 2 * tier
    counts[at] += settled
    counts[at + 1] = min(counts[at], counts[at + 1] + used)
    if counts[at] > _MAX_COUNT:
        counts[at] /= 2
        counts[at + 1] /= 2
