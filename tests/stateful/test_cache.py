"""Any order of calls keeps the laws, serves only true KV, and reuses all that it could."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.policies.gittins import GITTINS
from foreword.core.policy import FIFO, LRU
from laws import Listener, Slots, check_index, check_leases, check_pool

ROOTS = [BlockHash(bytes([i]) * 32) for i in range(2)]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(2, 14),
        alphabet=st.sampled_from([1, 2, 3, 50]),  # with many, a wrong copy shows
        policy=st.sampled_from([LRU, FIFO, GITTINS]),
    )
    def start(self, block_size, num_blocks, alphabet, policy):
        self.block_size, self.alphabet = block_size, alphabet
        self.cache = KVCache(num_blocks, block_size, record_events=True, policy=policy)
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

    @rule(data=st.data(), root=st.sampled_from(ROOTS), match=st.sampled_from([True, True, False]))
    def admit(self, data, root, match):
        base = data.draw(st.sampled_from(self.prompts))
        tokens = base[: data.draw(st.integers(0, len(base)))]
        letters = st.integers(0, self.alphabet - 1)
        tokens = (tokens + data.draw(st.lists(letters, min_size=1, max_size=8)))[:30]
        self.prompts.append(tokens)
        chain = Chain(root, self.block_size, tokens)
        free, reusable = self.cache.pool.num_free, self.reusable(chain) if match else 0
        admitted = self.cache.admit(chain, match=match)
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

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.release(lease)
        self.note_stored(lease)

    @rule()
    def clear(self):
        if self.cache.clear():
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
        for lease in self.leases:
            self.slots.check(lease, lease.num_computed_tokens)
        self.listener.hear(self.cache.take_events())
        self.listener.check(self.cache)


TestCache = CacheMachine.TestCase
