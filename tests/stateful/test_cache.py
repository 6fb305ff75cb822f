"""Any order of calls keeps the laws, serves only true KV, and reuses all that it could."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.cost import Costs, StepCost, TierCost
from foreword.core.errors import PinsFull
from foreword.core.lease import Drop, Load
from foreword.core.place import PLACEMENTS
from foreword.core.policies import POLICIES
from foreword.core.request import NO_HINTS, Hints
from foreword.core.tier import Tier
from laws import Listener, Slots, check_index, check_leases, check_pool, check_tier

HINTS = st.just(NO_HINTS) | st.builds(
    Hints,
    prompt_cache_key=st.sampled_from(["", "a"]),
    num_stable_tokens=st.none() | st.integers(0, 12),
    max_offload_tokens=st.none() | st.integers(0, 12),
    cacheable=st.booleans(),
)
ROOTS = [BlockHash(bytes([i]) * 32) for i in range(2)]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(2, 14),
        alphabet=st.sampled_from([1, 2, 3, 50]),  # with many, a wrong copy shows
        policy=st.sampled_from(list(POLICIES.values())),
        below=st.tuples(
            st.sampled_from([None, 3, 40]),  # blocks of the tier, if there is one
            st.sampled_from(list(PLACEMENTS.values())),
            st.sampled_from([None, 0.01, 0.5]),  # s to move a block that is computed in 1 s
        ),
        quota=st.sampled_from([None, 0, 2, 5]),
    )
    def start(self, block_size, num_blocks, alphabet, policy, below, quota):
        room, placement, move_s = below
        self.block_size, self.alphabet = block_size, alphabet
        tiers = [] if room is None else [Tier(room, policy=policy)]
        self.cache = KVCache(
            num_blocks,
            block_size,
            record_events=True,
            tiers=tiers,
            policy=policy,
            placement=placement,
        )
        if tiers and move_s is not None:
            reads = (TierCost(0.0, 1 / move_s),)
            self.cache.lower.placement.costs = Costs.known(StepCost(1.0), reads, 1, 1)
        if quota is not None:
            self.cache.limit(ROOTS[1], [quota] * (1 + len(tiers)))
        self.now_s = 0.0
        self.below = {}  # block hash: what its slot held when it was stored
        self.slots = Slots(num_blocks, block_size)
        self.listener = Listener()
        self.leases = []
        self.prompts = [[]]
        self.stored = {}  # block id -> all tokens, root first, that its cached part stands for

    def note_stored(self, lease):
        """What the cache holds now, from what was computed: not from what the index says."""
        for at, block_id in enumerate(lease.block_ids):
            stop = min((at + 1) * self.block_size, lease.num_computed_tokens)
            if self.cache.pool.cached[block_id] and stop > at * self.block_size:
                self.stored[block_id] = (lease.chain.root, *lease.chain.token_ids[:stop])

    def reusable(self, chain):
        held = self.cache.pool.cached
        asked = (chain.root, *chain.token_ids[:-1])
        best = 1
        for block_id, tokens in self.stored.items():
            if held[block_id]:
                pairs = zip(tokens, asked, strict=False)
                size = min(len(tokens), len(asked))
                best = max(best, next((i for i, (a, b) in enumerate(pairs) if a != b), size))
        return best - 1

    def perform(self):
        """What the cache wants of its tier, before anything is written to a slot."""
        for effect in self.cache.lower.take_effects():
            if isinstance(effect, Drop):
                for block_hash in effect.hashes:
                    del self.below[block_hash]
                continue
            hashes = effect.chain.hashes[effect.start :]
            for block_hash, block_id in zip(hashes, effect.block_ids, strict=False):
                held = self.slots.block(block_id)
                assert held[-1][0] == effect.chain.root
                stop = len(held[-1]) - 1
                assert list(held[-1][1:]) == effect.chain.token_ids[:stop]
                assert effect.chain.hashes[stop // self.block_size - 1] == block_hash
                self.below[block_hash] = held
            self.cache.lower.stored(effect.tier, hashes[: len(effect.block_ids)], ok=True)

    @rule(
        data=st.data(),
        root=st.sampled_from(ROOTS),
        match=st.sampled_from([True, True, False]),
        hints=HINTS,
    )
    def admit(self, data, root, match, hints):
        base = data.draw(st.sampled_from(self.prompts))
        tokens = base[: data.draw(st.integers(0, len(base)))]
        letters = st.integers(0, self.alphabet - 1)
        tokens = (tokens + data.draw(st.lists(letters, min_size=1, max_size=8)))[:30]
        self.prompts.append(tokens)
        chain = Chain(root, self.block_size, tokens)
        free, reusable = self.cache.pool.num_free, self.reusable(chain) if match else 0
        admitted = self.cache.admit(chain, match=match, hints=hints)
        self.perform()
        if admitted is Refusal.PASSED_OVER:
            assert match
            assert any(lease.leads in chain.hashes for lease in self.leases)
            return
        needed = -(-len(tokens) // self.block_size)
        if admitted is Refusal.NO_ROOM:
            assert needed > free or self.cache.pool.num_leased > 0
            return
        lease, copies = admitted
        self.leases.append(lease)
        loads = [effect for effect in copies if isinstance(effect, Load)]
        for load in loads:
            for at in range(load.start, load.stop):
                self.slots.held[lease.block_ids[at]] = list(self.below[chain.hashes[at]])
            self.cache.loaded(load, load.start, load.stop)
            self.note_stored(lease)
        if loads:
            assert lease.num_reused_tokens >= reusable // self.block_size * self.block_size
            return
        if lease.num_reused_tokens != reusable:
            assert self.cache.pool.num_free == 0, "less than possible only for want of room"
            assert lease.num_reused_tokens == reusable // self.block_size * self.block_size
        for copy in copies:
            assert copy.target in lease.block_ids

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def compute(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        if lease.copy is not None:
            self.slots.copy(lease.copy)
            self.cache.filled(lease, lease.copy.num_tokens)
        else:
            room = len(lease.block_ids) * self.block_size
            left = min(len(lease.chain), room) - lease.num_computed_tokens
            num_tokens = data.draw(st.integers(0, left))
            self.slots.compute(lease, lease.num_computed_tokens, num_tokens)
            self.cache.filled(lease, num_tokens)
        if lease.num_computed_tokens % self.block_size == 0:
            self.note_stored(lease)
        else:
            full = lease.num_computed_tokens // self.block_size
            for at in range(full):
                stop = (at + 1) * self.block_size
                self.stored[lease.block_ids[at]] = (
                    lease.chain.root,
                    *lease.chain.token_ids[:stop],
                )

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def generate(self, data):
        """A token was sampled: the chain grows, and the lease if there is room."""
        lease = data.draw(st.sampled_from(self.leases))
        before = list(lease.block_ids)
        if lease.copy is None and len(lease.chain) < 40:
            fits = self.cache.extend(lease, len(lease.chain) + 1)
            self.perform()
            grown = len(lease.chain) // self.block_size + 1
            if fits:
                lease.chain.extend((data.draw(st.integers(0, self.alphabet - 1)),))
                assert len(lease.block_ids) == max(grown, len(before))
            else:
                assert lease.block_ids == before
                assert self.cache.pool.num_free == 0

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def publish_end(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        if lease.copy is None:
            self.cache.publish_end(lease)
            self.note_stored(lease)

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(seconds=st.sampled_from([0.5, 5.0, 50.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.cache.tick(self.now_s)

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(data=st.data(), root=st.sampled_from(ROOTS))
    def pin(self, data, root):
        chain = Chain(root, self.block_size, data.draw(st.sampled_from(self.prompts)))
        before = dict(self.cache.pins.held)
        try:
            self.cache.pin(chain)
        except PinsFull:
            assert self.cache.pins.held == before

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(data=st.data(), root=st.sampled_from(ROOTS))
    def unpin(self, data, root):
        self.cache.unpin(Chain(root, self.block_size, data.draw(st.sampled_from(self.prompts))))

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data(), ttl_s=st.sampled_from([0.0, 0.0, 10.0, 100.0]))
    def release(self, data, ttl_s):
        lease = data.draw(st.sampled_from(self.leases))
        lease.hints = replace(lease.hints, ttl_s=ttl_s or None)
        self.leases.remove(lease)
        self.cache.release(lease)
        self.note_stored(lease)

    @rule()
    def clear(self):
        if self.cache.clear():
            self.perform()
            assert not self.below
            assert not self.leases
            self.stored.clear()
        else:
            assert self.leases

    @invariant()
    def laws(self):
        if not hasattr(self, "cache"):
            return
        check_pool(self.cache, self.leases)
        check_index(self.cache)
        check_leases(self.leases, self.block_size)
        self.perform()
        for tier in self.cache.lower.tiers:
            check_tier(tier)
            kept = {h for h, entry in tier._entries.items() if entry.kept}
            assert kept == set(self.below)
            assert {tier._entries[h].parent for h in kept} <= kept | set(ROOTS), "below its parent"
        for lease in self.leases:
            self.slots.check(lease, lease.num_computed_tokens)
        self.listener.hear(self.cache.take_events())
        self.listener.check(self.cache)


TestCache = CacheMachine.TestCase
