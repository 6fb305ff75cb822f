"""Trial: one cache of a size and a policy, served one request after another, and what it gave.

It is a production KVCache with its tiers below. Each request is released before the next, and what
the cache wants done is done at once: there is no clock.
"""

from dataclasses import dataclass, field, replace

from foreword.core.cache import KVCache, Refusal
from foreword.core.cost import Costs, StepCost, TierCost
from foreword.core.lease import Copy, Lease, Load, Store
from foreword.core.place import PLACEMENTS, WriteThrough
from foreword.core.policies import POLICIES
from foreword.core.policy import FIFO
from foreword.core.tier import Tier
from foreword.sim.opt import Future
from foreword.sim.prompt import Visit
from foreword.sim.trace import Record

UNLIMITED = None
ENDLESS = "unlimited"  # its word
TIERS = ("device", "host", "disk")  # the fastest first
LASTING = ("disk",)  # what a restart finds again
OPT = "opt"
PLAIN_FIFO = "fifo"
LEAF_FIFO = "leaf-fifo"
# Without a clock, to move a block is taken to cost this share of computing it: about what it is for
# an 8B model on an H100 with a fast SSD.
MOVE_SHARE = 0.5
_MOVE = TierCost(0.0, 1 / MOVE_SHARE)  # of tokens of a byte
# The core's fifo goes by its name in full here, beside the plain one.
CORE_POLICIES = {
    **{name: one for name, one in POLICIES.items() if one is not FIFO},
    LEAF_FIFO: FIFO,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache to try: how many blocks each of TIERS holds, the device's from 1; UNLIMITED: all.
    `store`: what goes below the device."""

    policy: str
    blocks: tuple[int | None, ...]
    store: str = WriteThrough.name

    def __str__(self) -> str:
        """As it is written on a command line: lru@1000+5000+30000:gain."""
        sizes = (ENDLESS if size is UNLIMITED else str(size) for size in self.blocks)
        store = "" if self.store == WriteThrough.name else f":{self.store}"
        return f"{self.policy}@{'+'.join(sizes)}{store}"

    @property
    def bound(self) -> "Setting":
        """What no cache of as many blocks beats: all of them in one place, under OPT."""
        sizes = [size for size in self.blocks if size is not UNLIMITED]
        return Setting(OPT, (sum(sizes) if len(sizes) == len(self.blocks) else UNLIMITED,))


@dataclass(slots=True)
class Tally:
    """Prompts, and what was reused of them. An unfinished last block counts as one."""

    num_requests: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_hit_tokens: int = 0
    num_hit_blocks: int = 0

    def add(self, size: tuple[int, int], hits: tuple[int, int]) -> None:
        """One prompt's tokens and blocks, and those that were reused."""
        self.num_requests += 1
        self.num_tokens += size[0]
        self.num_blocks += size[1]
        self.num_hit_tokens += hits[0]
        self.num_hit_blocks += hits[1]

    @property
    def token_share(self) -> float:
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def block_share(self) -> float:
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(slots=True)
class TierTally:
    """What one place did. The device stores what is computed or loaded, and loads nothing."""

    num_hit_tokens: int = 0  # found there, and nowhere faster
    num_loaded_blocks: int = 0
    num_stored_blocks: int = 0
    num_evicted_blocks: int = 0


@dataclass(slots=True)
class Outcome:
    """What one setting gave, after the warm-up."""

    setting: Setting
    tiers: list[TierTally]  # as `setting.blocks`
    total: Tally = field(default_factory=Tally)
    groups: dict[str, Tally] = field(default_factory=dict)  # by session or tenant, where asked for
    num_refused: int = 0  # longer than the device: counted in `total`, and nothing reused


class Trial:
    """A setting on trial. Subclasses say what a request finds."""

    def __init__(self, setting: Setting, future: Future, block_size: int, id_tokens: int) -> None:
        """`block_size` in ids, of `id_tokens` tokens each."""
        self.outcome = Outcome(setting, [TierTally() for _ in setting.blocks])
        self.future = future
        self.block_size = block_size
        self.id_tokens = id_tokens
        most = future.all_slots
        self.room = [most if size is UNLIMITED else min(size, most) for size in setting.blocks]

    def restart(self) -> None:
        """The process ends and starts again: only LASTING tiers have what they had."""
        raise NotImplementedError

    def find(self, record: Record, seen: Visit) -> tuple[int, int] | None:
        """Serve a request, from its admission to its release: how many tokens and blocks of its
        prompt were reused. None: it is too long to be served."""
        raise NotImplementedError

    def forget_counts(self) -> None:
        """The warm-up is over."""
        self.outcome = Outcome(self.outcome.setting, [TierTally() for _ in self.room])

    def serve(self, record: Record, seen: Visit, group: str | None = None) -> None:
        """One request, counted, as a server counts it: when its first token comes."""
        if record.cancelled_at is not None:
            return
        size = record.num_tokens, -(-record.num_tokens // (self.block_size * self.id_tokens))
        hits = self.find(record, seen)
        self.outcome.num_refused += hits is None
        self.outcome.total.add(size, hits or (0, 0))
        if group is not None:
            self.outcome.groups.setdefault(group, Tally()).add(size, hits or (0, 0))


class CoreTrial(Trial):
    """The production cache. A device that holds ids of blocks has one slot more, for the mark."""

    def __init__(self, setting: Setting, future: Future, block_size: int, id_tokens: int) -> None:
        super().__init__(setting, future, block_size, id_tokens)
        if setting.policy == OPT:
            self._policy = future.policy()
        else:
            named = CORE_POLICIES[setting.policy]
            self._policy = replace(named, block_tokens=block_size * id_tokens)
        self._tiers = [Tier(size, policy=self._policy) for size in self.room[1:]]
        self._cache = self._started()

    def restart(self) -> None:
        self._tiers = [
            tier if name in LASTING else Tier(tier.capacity, policy=self._policy)
            for name, tier in zip(TIERS[1:], self._tiers, strict=False)
        ]
        self._cache = self._started()

    def find(self, record: Record, seen: Visit) -> tuple[int, int] | None:
        cache = self._cache
        if seen.num_slots > cache.pool.num_blocks:
            return None
        cache.tick(record.arrival_s if self.future.is_timed else record.place)
        num_evicted = cache.num_evicted_blocks
        admitted = cache.admit(seen.prompt, match=seen.reuses)
        assert not isinstance(admitted, Refusal), "it fits, and nothing else runs"
        lease, effects = admitted
        for effect in effects:
            if isinstance(effect, Copy):
                cache.filled(lease, effect.num_tokens)
            else:
                cache.loaded(effect, effect.start, effect.stop)
        hits = self._count_hits(record, lease, effects)
        num_prompt = min(seen.num_filled, len(seen.prompt))
        cache.filled(lease, num_prompt - lease.num_computed_tokens)
        lease.chain = seen.whole  # the prompt, and what its answer adds
        for end in seen.answer_ends:  # as it grows in a server: block by block
            grown = cache.extend(lease, end)
            assert grown, "it fits, and nothing else runs"
            cache.filled(lease, end - lease.num_computed_tokens)
        cache.release(lease)
        self.outcome.tiers[0].num_evicted_blocks += cache.num_evicted_blocks - num_evicted
        if self._tiers:
            self._keep()
        return hits

    def _count_hits(
        self, record: Record, lease: Lease, effects: list[Copy | Load]
    ) -> tuple[int, int]:
        tallies, last = self.outcome.tiers, 0
        for effect in effects:
            if isinstance(effect, Load):
                last = 1 + effect.tier
                num_blocks = effect.stop - effect.start
                tallies[last].num_loaded_blocks += num_blocks
                tallies[last].num_hit_tokens += num_blocks * self.block_size * self.id_tokens
        num_ids = lease.num_reused_tokens
        num_tokens = num_ids * self.id_tokens
        restored = sum(lease.restored.values())
        tallies[0].num_hit_tokens += (num_ids - restored) * self.id_tokens
        if num_tokens > record.num_tokens:  # the last block is no full one
            tallies[last].num_hit_tokens -= num_tokens - record.num_tokens
            num_tokens = record.num_tokens
        return num_tokens, num_ids // self.block_size

    def _keep(self) -> None:
        """Do what the cache wants of the tiers."""
        lower = self._cache.lower
        for effect in lower.take_effects():
            tally = self.outcome.tiers[1 + effect.tier]
            if isinstance(effect, Store):
                stop = effect.start + len(effect.block_ids)
                lower.stored(effect.tier, effect.chain.hashes[effect.start : stop], ok=True)
                tally.num_stored_blocks += stop - effect.start
            else:
                tally.num_evicted_blocks += len(effect.hashes)

    def _started(self) -> KVCache:
        num_slots = self.room[0] + (self.id_tokens > 1)
        cache = KVCache(
            num_slots,
            self.block_size,
            tiers=self._tiers,
            policy=self._policy,
            placement=PLACEMENTS[self.outcome.setting.store],
        )
        reads = (_MOVE,) * len(self._tiers)
        cache.lower.placement.costs = Costs.known(
            StepCost(1.0), reads, self.block_size, self.block_size
        )
        return cache
