"""What the cache is worth: the engine's thread feeds a Ghost and a Ledger, anybody reads them."""

import time
from collections.abc import Sequence
from threading import Lock

from foreword.core.cache import KVCache
from foreword.core.cost import StepCost, TierCost
from foreword.core.ghost import DAY_S, Ghost, Room, Served
from foreword.core.worth import Balance, Supposed, WhatIf, Worth
from foreword.engine.ledger import Account, Accounts, Ledger
from foreword.engine.stats import Counts
from foreword.engine.stream import Stream
from foreword.engine.transfer import Transfer

TIMES = (0.0, 0.5, 1.0, 2.0, 4.0)  # a place's size, in the rows of `what_if`
NUM_ROWS = 20  # of a dimension, in `balance`
_MORE_BLOCKS = 8  # at least, to see what more room is worth


class Value:
    """Of one engine's cache, whose blocks have so many bytes of KV."""

    def __init__(
        self, cache: KVCache, block_bytes: int, transfer: Transfer, counts: Counts
    ) -> None:
        self._cache = cache
        self._block_bytes = block_bytes
        self._transfer = transfer
        self._counts = counts
        self._lock = Lock()
        sizes = [cache.pool.num_blocks, *(tier.capacity for tier in cache.lower.tiers)]
        self._ghost = Ghost(cache.block_size, len(sizes), int(max(TIMES) * max(sizes)))
        self._ledger = Ledger.of(len(sizes))

    def add(self, stream: Stream) -> None:
        """A request ended. Called by the engine's thread."""
        if stream.first_token_s is None or not self._cache.reuse:
            return
        with self._lock:
            for sample in stream.samples:
                served = self._served(stream, sample.index)
                self._ghost.add(served, stream.ended_s)
                if not sample.index:
                    self._ledger.add(served, self._ghost.clock, stream.ended_s)

    def clear(self) -> None:
        """The cache forgot all. Called by the engine's thread."""
        with self._lock:
            self._ghost.clear()

    def what_if(self) -> WhatIf:
        """As `foreword.core.worth.Value`."""
        cost, places = self._counts.fit.copy().solve(), self._places()
        sizes = [place.num_blocks for place in places]
        rows: list[Supposed] = []
        with self._lock:
            ghost = self._ghost
            ghost.age(time.monotonic())
            for at, place in enumerate(places):
                for times in TIMES:
                    num_blocks = int(times * place.num_blocks)
                    wanted = [*sizes[:at], num_blocks, *sizes[at + 1 :]]
                    outlook = ghost.outlook(places, wanted, self._block_bytes, cost)
                    num_bytes = num_blocks * self._block_bytes
                    rows.append(Supposed(place.name, times, num_blocks, num_bytes, outlook))
            return WhatIf(
                ghost.window_s,
                ghost.num_asked,
                ghost.scale,
                self._cache.block_size,
                tuple(place.name for place in places),
                tuple(
                    ghost.load_s(places, at, self._block_bytes) if place.cost or not at else None
                    for at, place in enumerate(places)
                ),
                ghost.outlook(places, sizes, self._block_bytes, cost),
                tuple(rows),
            )

    def balance(self, tenant: str) -> Balance:
        """As `foreword.core.worth.Value`."""
        cost, places = self._counts.fit.copy().solve(), self._places()
        now_s, ledger = time.monotonic(), self._ledger
        with self._lock:
            self._ghost.age(now_s)
            ledger.age(now_s)
            judge = _Judge(self._ghost, places, self._block_bytes, cost)
            return Balance(
                self._ghost.window_s,
                tuple(place.name for place in places),
                tuple(judge.tenant(account) for account in _most(ledger.tenants, "")),
                tuple(judge.document(account) for account in _most(ledger.documents, tenant)),
                tuple(judge.segment(account) for account in _most(ledger.segments, tenant)),
            )

    def _served(self, stream: Stream, index: int) -> Served:
        """What is counted of a sample. What it looked for, only the first one did."""
        request, sample = stream.request, stream.samples[index]
        size, chain = self._cache.block_size, sample.chain
        looked = not index and request.sampling.prompt_logprobs is None
        num_asked = (len(request.prompt) - 1) // size if looked else 0
        below = [sample.restored.get(at, 0) // size for at in range(len(self._cache.lower.tiers))]
        found = [(sample.num_cached_tokens or 0) // size - sum(below), *below]
        if not looked:
            found = [0] * len(found)
        owner = (request.cache_salt, request.hints.prompt_cache_key)
        return Served(owner, chain, num_asked, (len(chain) - 1) // size, found)

    def _places(self) -> list[Room]:
        places = [Room("device", self._cache.pool.num_blocks)]
        for tier, stats in zip(self._cache.lower.tiers, self._transfer.stats, strict=True):
            cost = None
            if stats.num_loaded_blocks and stats.busy_s:
                # What a block took on average: how many came at once is in it.
                bytes_per_s = stats.num_loaded_blocks * self._block_bytes / stats.busy_s
                cost = TierCost(0.0, bytes_per_s)
            places.append(Room(stats.name, tier.capacity, cost))
        # Where others share a tier, its room changes with them.
        most = int(max(TIMES) * max(place.num_blocks for place in places))
        self._ghost.max_blocks = max(self._ghost.max_blocks, most)
        return places


class _Judge:
    """Says of accounts what they are worth, all at one time."""

    def __init__(
        self, ghost: Ghost, places: Sequence[Room], block_bytes: int, cost: StepCost | None
    ) -> None:
        self._ghost = ghost
        self._places = places
        self._block_bytes = block_bytes
        self._cost = cost
        self._held = [ghost.owners(place.num_blocks) for place in places]
        self._room_s = self._worth_of_room()

    def tenant(self, account: Account) -> Worth:
        salt = account.owner[0]
        return self._worth(
            account,
            [sum(num for owner, num in held.items() if owner[0] == salt) for held in self._held],
        )

    def document(self, account: Account) -> Worth:
        return self._worth(account, [held.get(account.owner, 0) for held in self._held])

    def segment(self, account: Account) -> Worth:
        num_newer, size = self._ghost.depth(account.clock), account.stop - account.start
        room = (place.num_blocks - num_newer for place in self._places)
        return self._worth(account, [min(size, max(0, num)) for num in room])

    def _worth(self, account: Account, held: Sequence[int]) -> Worth:
        """`held`: blocks by place."""
        ghost, size = self._ghost, self._ghost.block_size
        restored = self._block_bytes * sum(account.loaded[1:])
        restore_s = sum(
            num_blocks * ghost.load_s(self._places, at, self._block_bytes)
            for at, num_blocks in enumerate(account.loaded)
        )
        per_token_s = None
        if self._cost is not None:
            num_before = account.num_before / (account.num_blocks or 1.0)
            per_token_s = ghost.block_s(self._cost, num_before) / size
        return Worth(
            account.owner,
            account.start * size,
            account.stop * size,
            account.token_ids,
            account.num_requests,
            account.missed,
            size * account.num_blocks / (account.num_reuses or 1.0),
            account.num_reuses,
            per_token_s,
            restored,
            restored / restore_s if restore_s else None,
            self._room_s * max(held),
            tuple(num_blocks * self._block_bytes for num_blocks in held),
        )

    def _worth_of_room(self) -> float:
        """Seconds that one block more of room would have saved, in the time that is counted."""
        sizes = [place.num_blocks for place in self._places]
        more = max(_MORE_BLOCKS, max(sizes) // 8)
        grown = [num + more if num == max(sizes) else num for num in sizes]
        now, then = (
            self._ghost.outlook(self._places, wanted, self._block_bytes, self._cost).saved_s
            for wanted in (sizes, grown)
        )
        if now is None or then is None:
            return 0.0
        return max(0.0, then - now) / more * self._ghost.window_s / DAY_S


def _most(accounts: Accounts, tenant: str) -> list[Account]:
    """Those of a tenant, or of all, that reused most; of segments where requests parted."""
    shown = [
        account
        for account in accounts.rows.values()
        if (not tenant or f"{account.owner[0]}:".startswith(f"{tenant}:"))
        and (not account.stop or account.num_requests > 1)
    ]
    return sorted(shown, key=lambda account: -account.num_blocks)[:NUM_ROWS]
