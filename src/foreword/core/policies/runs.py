"""Runs: what policies know that go by history, of blocks that live and die together.

Blocks in a row that came with one request and were last used by one request are one Run, whatever
their number. When the end of a run leaves, a Ghost of it stays for a while; blocks that come again
are known by it. Each run is of a kind, which its policy gives it, and its candidate waits in the
queue of that kind.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from foreword.core.block import BlockHash
from foreword.core.policy import Order, Queue, Span

_Key = TypeVar("_Key", bound=Hashable)


class Run:
    """`num_blocks` blocks of one kind, used together `num_uses` times, `used_s` the last of them
    and `earlier_s` the one before (less than all times: there was none)."""

    __slots__ = (
        "came",
        "continued",
        "earlier_s",
        "follower",
        "ghost",
        "kind",
        "leaf",
        "num_blocks",
        "num_uses",
        "request",
        "used_s",
    )

    def __init__(self, kind: int, used_s: float, request: int = -1) -> None:
        self.kind = kind
        self.came = 0  # when, by its order's count of offers
        self.used_s = used_s
        self.request = request  # that used it last
        self.earlier_s = float("-inf")
        self.num_uses = 1
        self.num_blocks = 0
        self.continued = False  # whether a request went on from its end
        self.follower: Run | None = None  # what that request used after it
        self.ghost: Ghost | None = None  # of its evicted end
        self.leaf: Hashable | None = None  # of it, as last offered

    def part(self, num_blocks: int) -> "Run":
        """Its first blocks become a run of their own, which this one follows."""
        head = Run(self.kind, self.used_s, self.request)
        head.came, head.earlier_s, head.num_uses = self.came, self.earlier_s, self.num_uses
        head.num_blocks = num_blocks
        head.follower = self
        self.num_blocks -= num_blocks
        return head


class Ghost(Run):
    """Blocks that left. `tails` has a number for each, the hash of its hash, from the last one on:
    a word in place of a hundred bytes."""

    __slots__ = ("tails",)

    def __init__(self, run: Run) -> None:
        super().__init__(run.kind, run.used_s)
        self.earlier_s, self.num_uses, self.continued = run.earlier_s, run.num_uses, run.continued
        self.tails = array("q")

    def num_shared(self, numbers: Sequence[int], start: int) -> int:
        """How many of its first blocks are numbers[start:]. Chained: agreement is a prefix."""
        size = min(self.num_blocks, len(numbers) - start)
        tails = self.tails
        return bisect_left(range(size), True, key=lambda i: tails[-1 - i] != numbers[start + i])


class RunOrder(Order[_Key]):
    """An order that has runs, and ghosts of up to `max_ghosts` blocks. What a policy adds: which
    kind a run is of, and which kind leaves first."""

    by_path = True
    by_run = True

    def __init__(self, num_kinds: int, max_ghosts: int) -> None:
        super().__init__()
        self._max_ghosts = max_ghosts
        self._runs: dict[_Key, Run] = {}
        self._ghosts: dict[int, Ghost] = {}  # by the first block; the oldest first
        self.num_ghosts = [0] * num_kinds  # blocks
        self.queues: list[Queue[_Key]] = [Queue(self.candidates) for _ in range(num_kinds)]
        self.num_blocks = [0] * num_kinds  # that are kept, and have a run
        self._request = 0
        self._stranger = Run(0, 0.0)  # for what no request that has ended used
        self._growing: Ghost | None = None  # not filed yet
        self._leaving: Run | None = None  # whose end left last
        self._next: _Key | None = None  # what is the end of that run now

    def begin(self, known: list[Run], recalled: Run, num_fresh: int) -> int:
        """A request uses runs that are kept, what comes again after them, if that has any blocks,
        and `num_fresh` blocks that are new; returns of what kind these are. The others know nothing
        of this use yet."""
        raise NotImplementedError

    def reuse(self, run: Run) -> None:
        """A run that is kept or came again is used: what does that change of it?"""
        raise NotImplementedError

    def choose(self) -> _Key | None:
        """Which candidate leaves: the first one of some kind's queue."""
        raise NotImplementedError

    def rank(self, run: Run) -> float:
        """Among those of its kind; the least leaves first."""
        return run.used_s

    def recall(self, ghost: Ghost, num_blocks: int) -> None:
        """So many blocks of a ghost came again."""

    def forget(self, ghost: Ghost) -> None:
        """A ghost ends, and nothing of it came again."""

    def made(self, run: Run) -> None:
        """A run or a ghost begins. Once it ends it has no blocks."""

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        run = self._runs.get(key)
        if run is None:
            run = self._stranger
            run.used_s, run.came = self.now_s, self.num_offers
        elif run is self._leaving:
            self._next = key
        self.offer_run(key, run)

    def offer_run(self, key: _Key, run: Run) -> None:
        run.leaf = key
        self.num_offers += 1
        self.queues[run.kind].offer(key, self.rank(run), self.num_offers)

    def sort(self, run: Run, kind: int) -> None:
        """A run is of that kind from now on."""
        self.num_blocks[run.kind] -= run.num_blocks
        self.num_blocks[kind] += run.num_blocks
        run.kind = kind

    def pop(self) -> _Key | None:
        """A run that has begun to leave goes on until it is used or gone."""
        key = self._next
        if key is None or key not in self.candidates:
            key = self.choose()
            if key is None:
                return None
            self._leaving = self._runs.get(key)
        self._next = None
        del self.candidates[key]
        return key

    def split(self, head: _Key, tail: _Key) -> None:
        if tail in self._runs:
            self._runs[head] = self._runs[tail]

    def removed(self, key: _Key, hashes: Sequence[BlockHash], *, whole: bool) -> None:
        run = self._runs.pop(key, None) if whole else self._runs.get(key)
        if run is None or not hashes:
            return
        run.num_blocks -= len(hashes)
        self.num_blocks[run.kind] -= len(hashes)
        ghost = run.ghost
        if ghost is None or ghost is not self._growing:
            self._settle()
            if ghost is not None and self._ghosts.get(ghost.tails[-1]) is ghost:
                del self._ghosts[ghost.tails[-1]]
                self.num_ghosts[ghost.kind] -= ghost.num_blocks
            else:
                ghost = run.ghost = Ghost(run)
                self.made(ghost)
            self._growing = ghost
        ghost.tails.extend(map(hash, reversed(hashes)))
        ghost.num_blocks += len(hashes)

    def used(self, path: Sequence[Span[_Key]], split: Callable[[_Key, int], _Key]) -> None:
        self._settle()
        known, new = self._met(path)
        recalled, fresh = self._use(known, [one for _key, hashes in new for one in hashes])
        num_left = recalled.num_blocks
        for key, hashes in new:
            here = min(num_left, len(hashes))  # now, for a split takes them off
            num_left -= here
            if 0 < here < len(hashes):
                self._runs[split(key, here)] = recalled
                here = 0
            if hashes:
                self._runs[key] = recalled if here else fresh
        last = [run for run in (*known, recalled, fresh) if run.num_blocks][-1:]
        if last and path[-1][0] not in self._runs:  # no full block: it stays as long as its parent
            self._runs[path[-1][0]] = last[0]

    def used_blocks(self, path: Sequence[_Key]) -> None:
        """What is known is looked up once a run."""
        self._settle()
        found, known, at = self._runs.get, list[Run](), 0
        while at < len(path) and (run := found(path[at])) is not None:
            stop = at + run.num_blocks
            if stop > len(path) or found(path[stop - 1]) is not run:
                keys = [key for key in path[at:stop] if found(key) is run]
                run, stop = self._part(run, keys, len(keys)), at + len(keys)
            known.append(run)
            at = stop
        new = [key for key in path[at:] if key not in self._runs]
        recalled, fresh = self._use(known, new)
        num_recalled = recalled.num_blocks
        self._runs.update(dict.fromkeys(new[:num_recalled], recalled))
        self._runs.update(dict.fromkeys(new[num_recalled:], fresh))

    def _use(self, known: list[Run], new: Sequence[Hashable]) -> tuple[Run, Run]:
        """A request used these runs and these blocks, by their hashes. Returns the runs of those
        that come again, which are the first, and of the others; there may be none of either."""
        self._request += 1
        self._leaving = self._next = None
        recalled = self._recall(new)
        fresh = Run(0, self.now_s, self._request)
        fresh.num_blocks = len(new) - recalled.num_blocks
        fresh.came = recalled.came = self.num_offers
        fresh.kind = self.begin(known, recalled, fresh.num_blocks)
        self.num_blocks[fresh.kind] += fresh.num_blocks
        self.num_blocks[recalled.kind] += recalled.num_blocks
        recalled.continued = False
        for run in (*known, recalled):
            run.num_uses += 1
            self.reuse(run)
            run.earlier_s, run.used_s = run.used_s, self.now_s
            run.request, run.ghost = self._request, None
        begun = [run for run in (recalled, fresh) if run.num_blocks]
        follower = None
        for run in reversed([*known, *begun]):
            run.follower, follower = follower, run
        for run in begun:
            self.made(run)
        return recalled, fresh

    def _met(self, path: Sequence[Span[_Key]]) -> tuple[list[Run], list[Span[_Key]]]:
        """The runs that a path knows, each used as a whole, for the rest of it is parted; and what
        is of none yet."""
        parts: dict[Run, list[Span[_Key]]] = {}
        new: list[Span[_Key]] = []
        for span in path:
            run = self._runs.get(span[0])
            if run is None:
                new.append(span)
            else:
                parts.setdefault(run, []).append(span)
        known = []
        for run, spans in parts.items():
            count = sum(len(hashes) for _key, hashes in spans)
            whole = count == run.num_blocks
            known.append(run if whole else self._part(run, [key for key, _ in spans], count))
        return known, new

    def _part(self, run: Run, keys: Sequence[_Key], num_blocks: int) -> Run:
        """The first blocks of a run, which these keys stand for, become one of their own."""
        head = run.part(num_blocks)
        self._runs.update(dict.fromkeys(keys, head))
        self.made(head)
        return head

    def _recall(self, new: Sequence[Hashable]) -> Run:
        """What comes again of evicted blocks, from the first of the new ones on; its ghosts end."""
        recalled, at = Run(0, self.now_s), 0
        if not new or hash(new[0]) not in self._ghosts:
            return recalled
        numbers = list(map(hash, new))
        while at < len(numbers) and (ghost := self._ghosts.pop(numbers[at], None)) is not None:
            shared = ghost.num_shared(numbers, at)
            self.recall(ghost, shared)
            at += shared
            self.num_ghosts[ghost.kind] -= shared
            ghost.num_blocks -= shared
            recalled.num_uses = max(recalled.num_uses, ghost.num_uses)
            recalled.kind, recalled.used_s = ghost.kind, ghost.used_s
            recalled.earlier_s = ghost.earlier_s
            recalled.continued = ghost.continued and not ghost.num_blocks
            if ghost.num_blocks:
                del ghost.tails[-shared:]
                self._file(ghost)
                break
        recalled.num_blocks = at
        return recalled

    def _settle(self) -> None:
        """File the ghost that grew, and let go what is too much."""
        if self._growing is None:
            return
        self._file(self._growing)
        self.num_ghosts[self._growing.kind] += self._growing.num_blocks
        self._growing = None
        while sum(self.num_ghosts) > self._max_ghosts:
            self._end(self._ghosts.pop(next(iter(self._ghosts))))

    def _end(self, ghost: Ghost) -> None:
        self.forget(ghost)
        self.num_ghosts[ghost.kind] -= ghost.num_blocks
        ghost.num_blocks = 0

    def _file(self, ghost: Ghost) -> None:
        """Keep a ghost by its first block, as the newest. One of that block before it is of no use:
        it was there again meanwhile."""
        other = self._ghosts.pop(ghost.tails[-1], None)
        if other is not None:
            self._end(other)
        self._ghosts[ghost.tails[-1]] = ghost
