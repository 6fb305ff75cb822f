"""Leaves: what may leave a place, in its policy's order, as times to live and quotas allow.

First goes what had a time to live that is over; then what a tenant has beyond its quota; then what
the policy says; and last, while nothing else can leave, what has time to live left, the next to end
first. A tenant that wants more than its quota has its own leave before all others'.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from foreword.core.block import BlockHash
from foreword.core.policy import Order, Queue

_Key = TypeVar("_Key", bound=Hashable)

_AFTER = 2.0**40  # more than all counts of uses


class Term(NamedTuple):
    """Until when a block is to be kept, as its place's clock says, and how long after each use."""

    end_s: float = 0.0
    ttl_s: float = 0.0

    def renewed(self, ttl_s: float, now_s: float) -> "Term":
        """After a use, by who asks for so long; a term that has not ended begins anew."""
        ttl_s = max(ttl_s, self.ttl_s if self.end_s > now_s else 0.0)
        return Term(now_s + ttl_s, ttl_s) if ttl_s else NO_TERM


NO_TERM = Term()


class Tenant(Generic[_Key]):
    """One that has a quota, of blocks, and what may leave of its own, the least recently used
    first, and what has a time to live after all others."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.num_blocks = 0
        self.offers: dict[_Key, int] = {}
        self.queue = Queue(self.offers)


@dataclass(slots=True)
class Leaves(Generic[_Key]):
    """The candidates of one place. Its owner tells of which tenant's chains a key is, by their
    root."""

    order: Order[_Key]
    tenants: dict[BlockHash, Tenant[_Key]] = field(default_factory=dict)
    _terms: dict[_Key, int] = field(default_factory=dict)  # candidates with a time to live
    _ends: Queue[_Key] = field(init=False)
    _owners: dict[_Key, Tenant[_Key]] = field(default_factory=dict)
    _over: dict[BlockHash, Tenant[_Key]] = field(default_factory=dict)  # those beyond their quota
    _serial: int = 0

    def __post_init__(self) -> None:
        self._ends = Queue(self._terms)

    @property
    def candidates(self) -> set[_Key]:
        return {*self.order.candidates, *self._terms}

    def limit(self, root: BlockHash, quota: int) -> None:
        """A tenant may keep so many blocks. Before it keeps any."""
        self.tenants[root] = Tenant(quota)

    def count(self, root: BlockHash, num_blocks: int) -> None:
        """So many blocks more are kept; negative: fewer."""
        if tenant := self.tenants.get(root):
            tenant.num_blocks += num_blocks
            if tenant.num_blocks > tenant.quota:
                self._over[root] = tenant
            else:
                self._over.pop(root, None)

    def emptied(self, order: Order[_Key]) -> "Leaves[_Key]":
        """The same quotas for a place that holds nothing."""
        return Leaves(order, {root: Tenant(one.quota) for root, one in self.tenants.items()})

    def exceeds(self, root: BlockHash | None, num_more: int) -> bool:
        """Whether a tenant would be beyond its quota with so many blocks more."""
        tenant = self.tenants.get(root) if root else None
        return tenant is not None and tenant.num_blocks + num_more > tenant.quota

    def offer(
        self,
        key: _Key,
        root: BlockHash,
        term: Term,
        uses: tuple[int, int],
        hashes: Sequence[BlockHash],
    ) -> None:
        """As Order.offer; `uses`: when it came and was last used."""
        self._serial += 1
        if term.end_s:
            self.order.withdraw(key)
            self._ends.offer(key, term.end_s, self._serial)
        else:
            self._terms.pop(key, None)
            self.order.offer(key, *uses, hashes)
        if tenant := self.tenants.get(root):
            self._owners[key] = tenant
            rank = _AFTER + term.end_s if term.end_s else uses[1]
            tenant.queue.offer(key, rank, self._serial)

    def withdraw(self, key: _Key) -> None:
        self.order.withdraw(key)
        self._terms.pop(key, None)
        if tenant := self._owners.pop(key, None):
            tenant.offers.pop(key, None)

    def pop_own(self, root: BlockHash | None, num_more: int) -> _Key | None:
        """The first to leave of a tenant that exceeds its quota so. None: there is none."""
        if root is None or not self.exceeds(root, num_more):
            return None
        return self._taken(self.tenants[root].queue.first())

    def pop(self) -> _Key | None:
        """The one that leaves first. No candidate again until offered. None: there is none."""
        timed = self._ends.first()
        if timed is not None and timed[0] <= self.order.now_s:
            return self._taken(timed)
        for tenant in self._over.values():
            if first := tenant.queue.first():
                return self._taken(first)
        key = self.order.pop()
        if key is None:
            return self._taken(timed)
        self.withdraw(key)
        return key

    def _taken(self, first: tuple[float, int, _Key] | None) -> _Key | None:
        if first is None:
            return None
        self.withdraw(first[2])
        return first[2]
