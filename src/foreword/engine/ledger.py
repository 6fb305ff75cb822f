"""Ledger: whom the cache serves and whether that is worth its room: by tenant, by document, by
segment.

A segment is an opening that several requests went on from in different ways: a node of the tree of
prefixes, from where the last such node above it ends. It is found where the reuse of two requests
came to the same end.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import exp

from foreword.core.ghost import DAY_S, Owner, Served

OPENING_TOKENS = 32  # of a segment that are kept, for people to see which it is
_AGE_EVERY_S = 600.0


@dataclass(slots=True)
class Account:
    """What one key's requests reused, in blocks. All counts fade as a Ghost's do."""

    loaded: list[float]  # blocks, by place
    missed: float = 0.0  # at most so many requests came before the account was opened
    num_requests: float = 0.0  # of a segment: those whose reuse ended with it
    num_reuses: float = 0.0
    num_blocks: float = 0.0
    num_before: float = 0.0  # blocks before each of those, added up
    owner: Owner = ("", "")
    clock: int = 0  # the Ghost's, after the last use
    start: int = 0  # of a segment, in blocks
    stop: int = 0
    token_ids: tuple[int, ...] = ()

    def reused(self, start: int, found: Sequence[int], stop: int) -> None:
        """One more request reused blocks `start` to `stop`; it found so many in each place."""
        self.num_reuses += 1
        self.num_blocks += stop - start
        self.num_before += (stop - start) * (start + stop - 1) / 2
        first = 0
        for place, num_blocks in enumerate(found):
            last = first + num_blocks
            self.loaded[place] += max(0, min(last, stop) - max(first, start))
            first = last

    def lie(self, start: int, stop: int) -> None:
        """The segment begins elsewhere than it did: so it does in what was counted."""
        self.start, self.stop = start, stop
        num_blocks = self.num_reuses * (stop - start)
        share = num_blocks / self.num_blocks if self.num_blocks else 0.0
        self.loaded = [share * num for num in self.loaded]
        self.num_blocks, self.num_before = num_blocks, num_blocks * (start + stop - 1) / 2

    def fade(self, left: float) -> None:
        self.loaded = [left * num for num in self.loaded]
        self.missed *= left
        self.num_requests *= left
        self.num_reuses *= left
        self.num_blocks *= left
        self.num_before *= left


class Accounts:
    """Of the keys that come most often. Where there are more than `max_rows`, the half that came
    least goes. Of n requests an account lacks `missed` at most, and that is at most 2 n / max_rows:
    each time that the bound grows by one, half of the rows are that much above it, by requests that
    each counted once. So whoever comes more often than that is always there."""

    def __init__(self, max_rows: int, num_places: int) -> None:
        self.rows: dict[Hashable, Account] = {}
        self._max_rows = max_rows
        self._num_places = num_places
        self._missed = 0.0

    def count(self, key: Hashable) -> Account:
        """One more request of this key."""
        account = self.rows.get(key)
        if account is None:
            if len(self.rows) == self._max_rows:
                self._drop()
            account = self.rows[key] = Account([0.0] * self._num_places, self._missed)
        account.num_requests += 1
        return account

    def fade(self, left: float) -> None:
        self._missed *= left
        for account in self.rows.values():
            account.fade(left)

    def _drop(self) -> None:
        most = sorted(self.rows.items(), key=lambda row: row[1].num_requests + row[1].missed)
        half = self._max_rows // 2
        last = most[half - 1][1]
        self._missed = max(self._missed, last.num_requests + last.missed)
        self.rows = dict(most[half:])


@dataclass(slots=True)
class Ledger:
    """`tenants` by cache salt, `documents` by salt and name, `segments` by the hash of their last
    block."""

    tenants: Accounts
    documents: Accounts
    segments: Accounts
    _aged_s: float | None = field(default=None, init=False)

    @classmethod
    def of(cls, num_places: int) -> "Ledger":
        return cls(*(Accounts(rows, num_places) for rows in (128, 128, 256)))

    def add(self, served: Served, clock: int, now_s: float) -> None:
        """After the Ghost was told, whose clock stands there."""
        self.age(now_s)
        num_found = sum(served.found)
        accounts = [self.tenants.count(served.owner[0])]
        if served.owner[1]:
            accounts.append(self.documents.count(served.owner))
        for account in accounts:
            account.owner, account.clock = served.owner, clock
            if num_found:
                account.reused(0, served.found, num_found)
        if num_found:
            self._add_segments(served, num_found, clock)

    def _add_segments(self, served: Served, num_found: int, clock: int) -> None:
        chain, rows = served.chain, self.segments.rows
        met = [at for at, key in enumerate(chain.hashes[: num_found - 1]) if key in rows]
        accounts = [(rows[chain.hashes[at]], at + 1) for at in met]
        accounts.append((self.segments.count(chain.hashes[num_found - 1]), num_found))
        start = 0
        for account, stop in accounts:
            if account.num_requests > 1 or stop == num_found:  # others went on from there
                if (account.start, account.stop) != (start, stop):
                    account.owner = served.owner
                    account.lie(start, stop)
                    first = start * chain.block_size
                    account.token_ids = tuple(chain.token_ids[first : first + OPENING_TOKENS])
                account.clock = clock
                account.reused(start, served.found, stop)
                start = stop

    def age(self, now_s: float) -> None:
        if self._aged_s is None:
            self._aged_s = now_s
        if now_s - self._aged_s >= _AGE_EVERY_S:
            left = exp((self._aged_s - now_s) / DAY_S)
            self._aged_s = now_s
            for accounts in (self.tenants, self.documents, self.segments):
                accounts.fade(left)
