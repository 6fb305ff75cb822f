"""Tier: what one place below the device holds of our own, and which block leaves it first.

Flat, by block hash, whole blocks only. A block leaves before its parent: only those without
children are offered, and a parent counts as used when a child was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from foreword.core.block import BlockHash
from foreword.core.leaves import NO_TERM, Leaves, Term
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
    root: BlockHash
    parent: BlockHash | None = None  # None: not known, for it was never stored here
    kept: Kept = Kept.ABSENT
    num_children: int = 0
    added: int = 0
    last_used: int = 0
    term: Term = NO_TERM


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
        self.leaves = Leaves(self.order)
        self._has_terms = False
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
        found = list(entries)
        roots = dict(found)  # of each block, once it is looked for
        for block_hash, parent in found:
            root, above = parent, list[BlockHash]()
            while (next_above := roots.get(root)) is not None:
                above.append(root)
                root = next_above
            roots.update(dict.fromkeys(above, root))
            self._add(block_hash, parent, Kept.READY, root)

    def make_room(
        self, protected: BlockHash | None = None, root: BlockHash | None = None
    ) -> list[BlockHash]:
        """Remove blocks until one more fits, a child of `protected`, or what is over a capacity
        that became less; returns what must be dropped. Does not remove `protected`: there may be
        no room then. A chain of `root`, by default that of `protected`, has room in its quota."""
        dropped: list[BlockHash] = []
        passed = False
        room = 0 if protected is None else 1
        if root is None and protected is not None:
            root = self._root(protected)
        while True:
            if self.leaves.exceeds(root, 1):
                victim = self.leaves.pop_own(root, 1)
            elif self.num_blocks + room > self.capacity:
                victim = self.leaves.pop()
            else:
                break
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
        while len(taken) < count and (leaf := self.leaves.pop()) is not None:
            if held(leaf):
                passed[leaf] = None
                continue
            entry = self._entries[leaf]
            taken[leaf], entry.kept = entry.kept, Kept.ABSENT
            self.leaves.count(entry.root, -1)
            forgotten += self._forget(leaf, entry)
        enough = len(taken) == count
        if not enough:
            for block_hash, entry in reversed(forgotten):
                self._entries[block_hash] = entry
                if entry.parent is not None:
                    self._entries[entry.parent].num_children += 1
                    self.leaves.withdraw(entry.parent)
            for block_hash, kept in taken.items():
                entry = self._entries[block_hash]
                entry.kept = kept
                self.leaves.count(entry.root, 1)
                self._offer(block_hash)
        for block_hash in passed:
            self._offer(block_hash)
        if not enough:
            return None
        for block_hash in taken:
            self.order.removed(block_hash, (block_hash,), whole=True)
        self.num_blocks -= count
        return list(taken)

    def claim(
        self, block_hash: BlockHash, parent: BlockHash, root: BlockHash | None = None
    ) -> bool:
        """Count a block that is not kept in, for a Store that is to come; of a chain of `root`, by
        default that of `parent`. False: no room."""
        root = root or self._root(parent)
        if self.num_blocks >= self.capacity or self.leaves.exceeds(root, 1):
            return False
        self._add(block_hash, parent, Kept.WRITING, root)
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
        self.leaves.withdraw(block_hash)
        self.leaves.count(entry.root, -1)
        self.order.removed(block_hash, (block_hash,), whole=True)
        self.num_blocks -= 1
        self._forget(block_hash, entry)

    def clear(self) -> list[BlockHash]:
        """Forget all; returns what must be dropped."""
        dropped = [h for h, entry in self._entries.items() if entry.kept is not Kept.ABSENT]
        self._entries.clear()
        now_s, self.order = self.order.now_s, self._policy.order(self.capacity)
        self.order.now_s = now_s
        self.leaves = self.leaves.emptied(self.order)
        self.num_blocks = 0
        return dropped

    def touch(self, hashes: Sequence[BlockHash], stop: int, ttl_s: float = 0.0) -> None:
        """A request used hashes[:stop]: the last of them that is kept counts as used now, and with
        it all above. They are to be kept for so long from now on."""
        self._has_terms |= ttl_s > 0
        if self.order.by_path or self._has_terms:
            found = self._entries.get
            path = [h for h in hashes[:stop] if (entry := found(h)) is not None and entry.kept]
            self.order.used_blocks(path)
            for block_hash in path if self._has_terms else ():
                entry = self._entries[block_hash]
                entry.term = entry.term.renewed(ttl_s, self.order.now_s)
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

    def _root(self, block_hash: BlockHash) -> BlockHash:
        entry = self._entries.get(block_hash)
        return entry.root if entry is not None else block_hash

    def _leading(self, hashes: Sequence[BlockHash], start: int, stop: int, least: Kept) -> int:
        entries = self._entries
        for at in range(start, stop):
            entry = entries.get(hashes[at])
            if entry is None or entry.kept < least:
                return at - start
        return stop - start

    def _add(self, block_hash: BlockHash, parent: BlockHash, kept: Kept, root: BlockHash) -> None:
        entry = self._entries.setdefault(block_hash, _Entry(root))
        assert not entry.kept, "kept already"
        if entry.parent is None:
            entry.parent = parent
            self._entries.setdefault(parent, _Entry(root)).num_children += 1
            self.leaves.withdraw(parent)
        self._clock += 1
        entry.kept, entry.added, entry.last_used = kept, self._clock, self._clock
        entry.root = root
        self.num_blocks += 1
        self.leaves.count(root, 1)
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
            last_used, term, block_hash = entry.last_used, entry.term, entry.parent
            entry = self._entries[block_hash]
            entry.term = max(entry.term, term)
            entry.num_children -= 1
            entry.last_used = max(entry.last_used, last_used)
        if not entry.num_children:
            self._offer(block_hash)
        return forgotten

    def _offer(self, block_hash: BlockHash) -> None:
        entry = self._entries[block_hash]
        if entry.kept and not entry.num_children:
            uses = entry.added, entry.last_used
            self.leaves.offer(block_hash, entry.root, entry.term, uses, (block_hash,))
