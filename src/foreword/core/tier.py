"""Tier: what one place below the device holds of our own, and which block leaves it first.

Flat, by block hash, whole blocks only. A block leaves before its parent: only those without
children are offered, and a parent counts as used when a child was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from foreword.core.block import BlockHash
from foreword.core.policies import DEFAULT
from foreword.core.policy import Policy


class Kept(IntEnum):
    """How much of a block a tier has. Only nothing is false: to ask for that takes 0.02 µs, and
    0.4 to compare with the name of a member, in Python 3.11."""

    ABSENT = 0  # nothing; known because children of it are kept
    WRITING = 1  # a Store is under way
    READY = 2


@dataclass(slots=True)
class _Entry:
    parent: BlockHash | None = None  # None: not known, for it was never stored here
    kept: Kept = Kept.ABSENT
    num_children: int = 0
    added: int = 0
    last_used: int = 0


class Tier:
    """Room for `capacity` blocks. `reads` and `writes` say whether it takes part at present: its
    driver turns them off while the place hangs or fails. While it is not `enabled` nobody waits for
    it, but it is tried."""

    def __init__(self, capacity: int, *, shared: bool = False, policy: Policy = DEFAULT) -> None:
        """With `shared`, others write there too: what it holds of theirs is found by Probe."""
        self.capacity = capacity
        self.shared = shared
        self.reads = True
        self.writes = True
        self.enabled = True
        self.next_probe_s = 0.0
        self.num_blocks = 0  # kept or being written
        self._entries: dict[BlockHash, _Entry] = {}
        self.order = policy.order(capacity)
        self._policy = policy
        self._clock = 0

    def num_ready(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """How many blocks of hashes[start:stop], from the first on, can be loaded."""
        return self._leading(hashes, start, stop, Kept.READY)

    def num_kept(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """How many, from the first on, need not be stored."""
        return self._leading(hashes, start, stop, Kept.WRITING)

    def restore(self, entries: Iterable[tuple[BlockHash, BlockHash]]) -> None:
        """Block hashes and their parents, found when the place was opened, the least recently
        used first."""
        for block_hash, parent in entries:
            self._add(block_hash, parent, Kept.READY)

    def make_room(self, protected: BlockHash | None = None) -> list[BlockHash]:
        """Remove blocks until one more fits, or what is over a capacity that became less; returns
        what must be dropped. Does not remove `protected`: there may be no room then."""
        dropped: list[BlockHash] = []
        passed = False
        room = 0 if protected is None else 1
        while self.num_blocks + room > self.capacity:
            victim = self.order.pop()
            if victim is None:
                break
            if victim == protected:
                passed = True
                continue
            self.remove(victim)
            dropped.append(victim)
        if passed and protected is not None:
            self._offer(protected)
        return dropped

    def take(self, count: int, held: Callable[[BlockHash], bool]) -> list[BlockHash] | None:
        """Remove `count` blocks, none that is `held` nor any above such a one; returns them. None,
        and all is as it was, when there are not so many."""
        taken: dict[BlockHash, Kept] = {}
        forgotten: list[tuple[BlockHash, _Entry]] = []
        passed: dict[BlockHash, None] = {}
        while len(taken) < count and (leaf := self.order.pop()) is not None:
            if held(leaf):
                passed[leaf] = None
                continue
            entry = self._entries[leaf]
            taken[leaf], entry.kept = entry.kept, Kept.ABSENT
            forgotten += self._forget(leaf, entry)
        enough = len(taken) == count
        if not enough:
            for block_hash, entry in reversed(forgotten):
                self._entries[block_hash] = entry
                if entry.parent is not None:
                    self._entries[entry.parent].num_children += 1
                    self.order.withdraw(entry.parent)
            for block_hash, kept in taken.items():
                self._entries[block_hash].kept = kept
                self._offer(block_hash)
        for block_hash in passed:
            self._offer(block_hash)
        if not enough:
            return None
        for block_hash in taken:
            self.order.removed(block_hash, (block_hash,), whole=True)
        self.num_blocks -= count
        return list(taken)

    def claim(self, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Count a block that is not kept in, for a Store that is to come. False: no room."""
        if self.num_blocks >= self.capacity:
            return False
        self._add(block_hash, parent, Kept.WRITING)
        return True

    def stored(self, block_hash: BlockHash) -> None:
        """A Store came to its end; the block can be loaded."""
        entry = self._entries.get(block_hash)
        if entry is not None and entry.kept is Kept.WRITING:
            entry.kept = Kept.READY

    def remove(self, block_hash: BlockHash) -> None:
        """The tier has this block no more, or never got it. Its children wait for the next Store
        of it: nothing can reach them before."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.kept is Kept.ABSENT:
            return
        entry.kept = Kept.ABSENT
        self.order.withdraw(block_hash)
        self.order.removed(block_hash, (block_hash,), whole=True)
        self.num_blocks -= 1
        self._forget(block_hash, entry)

    def clear(self) -> list[BlockHash]:
        """Forget all; returns what must be dropped."""
        dropped = [h for h, entry in self._entries.items() if entry.kept is not Kept.ABSENT]
        self._entries.clear()
        now_s, self.order = self.order.now_s, self._policy.order(self.capacity)
        self.order.now_s = now_s
        self.num_blocks = 0
        return dropped

    def touch(self, hashes: Sequence[BlockHash], stop: int) -> None:
        """A request used hashes[:stop]: the last of them that is kept counts as used now, and with
        it all above."""
        if self.order.by_path:
            found = self._entries.get
            path = [h for h in hashes[:stop] if (entry := found(h)) is not None and entry.kept]
            self.order.used_blocks(path)
        self.renew(hashes, stop)

    def renew(self, hashes: Sequence[BlockHash], stop: int) -> None:
        """hashes[:stop] are wanted still, by a request that runs: as `touch`, where that only says
        when."""
        for at in reversed(range(stop)):
            entry = self._entries.get(hashes[at])
            if entry is not None and entry.kept:
                self._clock += 1
                entry.last_used = self._clock
                self._offer(hashes[at])
                return

    def _leading(self, hashes: Sequence[BlockHash], start: int, stop: int, least: Kept) -> int:
        entries = self._entries
        for at in range(start, stop):
            entry = entries.get(hashes[at])
            if entry is None or entry.kept < least:
                return at - start
        return stop - start

    def _add(self, block_hash: BlockHash, parent: BlockHash, kept: Kept) -> None:
        entry = self._entries.setdefault(block_hash, _Entry())
        assert not entry.kept, "kept already"
        if entry.parent is None:
            entry.parent = parent
            self._entries.setdefault(parent, _Entry()).num_children += 1
            self.order.withdraw(parent)
        self._clock += 1
        entry.kept, entry.added, entry.last_used = kept, self._clock, self._clock
        self.num_blocks += 1
        self._offer(block_hash)

    def _forget(self, block_hash: BlockHash, entry: _Entry) -> list[tuple[BlockHash, _Entry]]:
        """Take an entry that holds nothing and leads to nothing out, and so those above it.
        Returns them, the lowest first."""
        forgotten: list[tuple[BlockHash, _Entry]] = []
        while not entry.kept and not entry.num_children:
            del self._entries[block_hash]
            forgotten.append((block_hash, entry))
            if entry.parent is None:
                return forgotten
            last_used, block_hash = entry.last_used, entry.parent
            entry = self._entries[block_hash]
            entry.num_children -= 1
            entry.last_used = max(entry.last_used, last_used)
        if not entry.num_children:
            self._offer(block_hash)
        return forgotten

    def _offer(self, block_hash: BlockHash) -> None:
        entry = self._entries[block_hash]
        if entry.kept and not entry.num_children:
            self.order.offer(block_hash, entry.added, entry.last_used, (block_hash,))
