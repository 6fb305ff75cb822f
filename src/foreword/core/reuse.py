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
_MAX_WATCHED = 1 << 13  # blocks of one generation; two are remembered
_MAX_REFUSED = 1 << 16  # likewise
_STRIDE = 4
_REFRESH = 64  # times in a window
_MAX_COUNT = 512.0  # beyond it the past counts half
_TRUST = 4.0  # so many settled blocks weigh as much as what is known of the class above
_WINDOW = 2  # times what the device holds


class Likeness:
    """What alike blocks have in common: counts of their classes, the general ones first; and from
    these how likely such a block is used again, by tier, worked out now and then."""

    __slots__ = ("classes", "due", "rates")

    def __init__(self, classes: Sequence[Counts]) -> None:
        self.classes = classes
        self.rates: list[float] = []
        self.due = -1


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
        self._classes: dict[Hashable, Counts] = {}
        self._watched: dict[BlockHash, _Watch] = {}
        self._watched_before: dict[BlockHash, _Watch] = {}
        self._refused: set[BlockHash] = set()
        self._refused_before: set[BlockHash] = set()
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

    def rates(self, alike: Likeness, prior: float = 1.0) -> list[float]:
        """Of such a block, by tier: each special class says the more the more was seen of it."""
        if alike.due <= self._clock:
            alike.due = self._clock + self._window // _REFRESH + 1
            alike.rates = [prior] * self._num_tiers
            for tier in range(self._num_tiers):
                rate = prior
                for counts in alike.classes:
                    rate = (counts[2 * tier + 1] + _TRUST * rate) / (counts[2 * tier] + _TRUST)
                alike.rates[tier] = rate
        return alike.rates

    def used(self, hashes: Sequence[BlockHash], sources: Sequence[Source]) -> int:
        """A request uses blocks of a chain, from its first to what is computed. Returns how many
        leading ones were there before, as far as is remembered."""
        num_used = sources[-1][2] if sources else 0
        first = num_used + -num_used % _STRIDE
        probes = (*hashes[num_used : num_used + 1], *hashes[first::_STRIDE])
        for refused in (self._refused, self._refused_before):
            if not refused.isdisjoint(probes):
                last = max(at for at, h in enumerate(probes) if h in refused)
                at = first + (last - 1) * _STRIDE if last else num_used
                ends = range(at, min(at + _STRIDE, len(hashes)))
                num_used = 1 + max(end for end in ends if hashes[end] in refused)
                break
        for watched in (self._watched, self._watched_before):
            if not watched.keys().isdisjoint(hashes):
                for at in [at for at, h in enumerate(hashes) if h in watched]:
                    num_used = max(num_used, at + 1)
                    found = (place for place, first, stop in sources if first <= at < stop)
                    self._settle(watched.pop(hashes[at]), next(found, self._num_tiers - 1))
        return num_used

    def watch(self, block_hash: BlockHash, alike: Likeness) -> None:
        """See whether a block is used again; nothing where that is under way."""
        if block_hash in self._watched or block_hash in self._watched_before:
            return
        if len(self._watched) >= _MAX_WATCHED:
            self._watched, self._watched_before = {}, self._watched
        watch = self._watched[block_hash] = _Watch(alike.classes)
        self._due.append((self._clock + self._window, watch))

    def refused(self, hashes: Sequence[BlockHash], start: int, stop: int) -> None:
        """Blocks of a chain that were not stored: their next use is their second. Remembers the
        first ones, the last one, and of those between each that lies at a whole stride."""
        if start >= stop:
            return
        if len(self._refused) > _MAX_REFUSED:
            self._refused, self._refused_before = set(), self._refused
        between = hashes[start + -start % _STRIDE : stop : _STRIDE]
        self._refused.update(hashes[start : min(start + _STRIDE, stop)], between)
        self._refused.add(hashes[stop - 1])

    def advance(self, num_blocks: int) -> None:
        """So many blocks were computed."""
        self._clock += num_blocks
        while self._due and (self._due[0][0] <= self._clock or len(self._due) > _MAX_WATCHED):
            watch = self._due.popleft()[1]
            if watch.is_open:
                watch.is_open = False
                for counts in watch.classes:
                    for at in range(0, 2 * self._num_tiers, 2):
                        counts[at] += 1.0
                        if counts[at] > _MAX_COUNT:
                            _forget(counts, at)

    def _settle(self, watch: _Watch, place: int | None) -> None:
        if place is not None:
            for counts in watch.classes:
                for at in range(0, 2 * place + 2, 2):
                    counts[at] += watch.is_open
                    counts[at + 1] = min(counts[at], counts[at + 1] + 1.0)
                    if counts[at] > _MAX_COUNT:
                        _forget(counts, at)
        watch.is_open = False


def _forget(counts: Counts, at: int) -> None:
    counts[at] /= 2
    counts[at + 1] /= 2
