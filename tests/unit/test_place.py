"""What goes below the device, by each policy's name, and how it is learnt what is worth it."""

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.cost import Costs, StepCost, TierCost
from foreword.core.lease import Copy, Load, Store
from foreword.core.place import Gain, OnSecondUse, WriteBack, WriteThrough
from foreword.core.request import NO_HINTS, Hints
from foreword.core.reuse import Likeness, ReuseRates
from foreword.core.tier import Tier
from laws import check_index, check_pool, check_tier

ROOT = BlockHash(b"root" * 8)
OTHER = BlockHash(b"tone" * 8)
# Computing a block takes 2 s, and moving one 0.5 s.
COSTS = Costs.known(StepCost(1.0), (TierCost(0.0, 2.0),), 2, 1)


class Bench:
    """A cache with one tier, and what it was told to store: block hashes by request."""

    def __init__(self, placement, num_blocks=8, capacity=100, costs=None):
        self.tier = Tier(capacity)
        self.cache = KVCache(num_blocks, 2, tiers=[self.tier], placement=placement)
        self.cache.lower.placement.costs = costs
        self.slots = {}  # slot: the hash of the block in it
        self.kept = {}  # block hash: what was written

    def perform(self):
        stored = []
        for effect in self.cache.lower.take_effects():
            if isinstance(effect, Store):
                for at, block_id in enumerate(effect.block_ids, effect.start):
                    block_hash = effect.chain.hashes[at]
                    assert self.slots[block_id] == block_hash, "its bytes are overwritten"
                    stored.append(block_hash)
                self.cache.lower.stored(effect.tier, stored, ok=True)
        check_tier(self.tier)
        return stored

    def run(self, tokens, root=ROOT, hints=NO_HINTS, answer=()):
        """A request, from admission to its end. Returns how many blocks were stored for it."""
        lease, effects = self.cache.admit(Chain(root, 2, tokens), hints=hints)
        stored = self.perform()
        for effect in effects:
            if isinstance(effect, Copy):
                self.cache.filled(lease, effect.num_tokens)
            elif isinstance(effect, Load):
                self.fill(lease, range(effect.start, effect.stop))
                self.cache.loaded(effect, effect.start, effect.stop)
        self.fill(lease, range(lease.num_computed_tokens // 2, len(lease.chain.hashes)))
        self.cache.filled(lease, len(tokens) - lease.num_computed_tokens)
        for token in answer:
            assert self.cache.extend(lease, len(lease.chain) + 1)
            lease.chain.extend((token,))
            self.fill(lease, range(lease.num_computed_tokens // 2, len(lease.chain.hashes)))
            self.cache.filled(lease, 1)
        stored += self.perform()
        self.cache.release(lease)
        stored += self.perform()
        check_pool(self.cache, [])
        check_index(self.cache)
        self.lease = lease
        return len(stored)

    def fill(self, lease, blocks):
        for at in blocks:
            self.slots[lease.block_ids[at]] = lease.chain.hashes[at]

    def forget(self):
        """Evict all from the device, by a request that leaves nothing."""
        size = 2 * self.cache.pool.num_blocks
        chain = Chain(BlockHash(b"else" * 8), 2, range(size))
        lease, _ = self.cache.admit(chain, hints=Hints(cacheable=False))
        stored = self.perform()
        self.slots.clear()
        self.cache.release(lease)
        return len(stored)


def fresh(number, size=9):
    """A prompt that nobody sent before."""
    return [1000 * number + at for at in range(size)]


def test_write_through_stores_all_at_once():
    bench = Bench(WriteThrough)
    assert bench.run(fresh(1), answer=(5, 6, 7)) == 6
    assert bench.run(fresh(1)) == 0
    assert bench.forget() == 0


def test_on_second_use_stores_what_is_used_again():
    bench = Bench(OnSecondUse, num_blocks=20)
    prompt = fresh(1)
    assert bench.run(prompt) == 0
    assert bench.run([*prompt[:4], *fresh(2)]) == 2, "what two requests have in common"
    assert bench.run(prompt) == 2, "and the rest, though nothing new was published"
    bench.forget()
    assert bench.run(prompt) == 0
    assert bench.lease.restored == {0: 8}


def test_write_back_stores_what_is_evicted_with_what_it_stands_on():
    bench = Bench(WriteBack, num_blocks=7)
    assert bench.run(fresh(1, 9)) == 0
    assert bench.run(fresh(2, 7)) == 4, "two slots are missing: of a part of a block, and a block"
    assert bench.forget() == 3
    assert bench.tier.num_blocks == 4 + 3, "each once"
    assert bench.run(fresh(1, 9)) == 0
    assert bench.lease.restored == {0: 8}


def test_write_back_has_the_bytes_before_a_slot_is_written_again():
    """`Bench.perform` asserts it; here all slots change hands at once, again and again."""
    bench = Bench(WriteBack, num_blocks=4)
    for number in range(6):
        bench.run(fresh(number, 8))
    assert bench.tier.num_blocks == 5 * 4


def test_write_back_keeps_the_limit_of_a_request_that_is_gone():
    bench = Bench(WriteBack)
    bench.run(fresh(1), hints=Hints(max_offload_tokens=4))
    assert bench.forget() == 2
    bench.run(fresh(1))
    bench.run(fresh(1), hints=Hints(max_offload_tokens=9))
    assert bench.forget() == 2, "what nobody limits goes down"


@pytest.mark.parametrize("placement", [WriteThrough, OnSecondUse, WriteBack, Gain])
def test_only_so_many_tokens_go_down(placement):
    bench = Bench(placement)
    hints = Hints(max_offload_tokens=5)
    assert bench.run(fresh(1), hints=hints) + bench.run(fresh(1), hints=hints) + bench.forget() == 2


@pytest.mark.parametrize("placement", [WriteThrough, OnSecondUse, WriteBack, Gain])
def test_what_is_not_cacheable_is_nowhere_and_nobody_waits_for_it(placement):
    bench = Bench(placement)
    hints = Hints(cacheable=False)
    assert bench.run(fresh(1), hints=hints) == bench.run(fresh(1), hints=hints) == 0
    assert bench.lease.num_reused_tokens == 0
    assert bench.cache.pool.num_blank == bench.cache.pool.num_blocks
    lease, _ = bench.cache.admit(Chain(ROOT, 2, fresh(1)), hints=hints)
    other, _ = bench.cache.admit(Chain(ROOT, 2, fresh(1, 5)))
    assert (lease.leads, other.leads) == (None, other.chain.hashes[0])


def test_it_may_reuse_what_others_left():
    bench = Bench(WriteThrough)
    bench.run(fresh(1))
    bench.run(fresh(1), hints=Hints(cacheable=False))
    assert bench.lease.num_reused_tokens == 8


def test_before_costs_are_known_gain_writes_through():
    bench = Bench(Gain)
    for number in range(50):
        assert bench.run(fresh(number)) == 4


def test_gain_learns_that_nobody_asks_again():
    bench = Bench(Gain, costs=COSTS)
    stored = [bench.run(fresh(number)) for number in range(100)]
    assert stored[0] == 4
    assert sum(stored[50:]) == 0


def test_what_was_refused_is_stored_at_its_next_use():
    bench = Bench(Gain, costs=COSTS)
    for number in range(60):
        bench.run(fresh(number))
    prompt = fresh(999)
    assert bench.run(prompt) == 0
    bench.forget()
    assert bench.run(prompt) == 4, "the device had lost it: one prefill is what the error cost"
    other = fresh(998)
    assert bench.run(other) == 0
    assert bench.run(other) == 4, "the device has it still"
    bench.forget()
    bench.run(prompt)
    assert bench.lease.restored == {0: 8}


def test_stable_openings_go_down_and_their_tails_do_not():
    """Each prompt is an opening, of 20 that take turns, and a tail of its own."""
    bench = Bench(Gain, num_blocks=20, costs=COSTS, capacity=400)
    tails = openings = 0
    for number in range(400):
        opening = fresh(number % 20, 8)
        stored = bench.run([*opening, *fresh(10_000 + number, 9)])
        if number >= 200:
            tails += stored
            bench.cache.lower.take_effects()
            openings += bench.tier.num_ready(bench.lease.chain.hashes, 0, 4)
    assert openings == 4 * 200
    assert tails < 0.1 * 4 * 200


def test_a_new_tenant_starts_with_what_is_known_of_all():
    bench = Bench(Gain, costs=COSTS)
    for number in range(60):
        bench.run(fresh(number))
    assert bench.run(fresh(61), root=OTHER) == 0


def test_tenants_and_documents_are_learnt_apart():
    """One comes back when the device has lost it, the other never."""
    for of in ("tenant", "document"):
        bench = Bench(Gain, costs=COSTS, capacity=2000)
        again = {"root": OTHER} if of == "tenant" else {"hints": Hints(prompt_cache_key="again")}
        for number in range(150):
            bench.run(fresh(2 * number))
            bench.run(fresh(2 * number + 1), **again)
            if number:
                bench.forget()
                bench.run(fresh(2 * number - 1), **again)
        assert bench.run(fresh(900)) == 0, of
        assert bench.run(fresh(901), **again) == 4, of


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "expected"),
    [(0.0, 10.0, 4), (0.0, 0.4, 0), (9.0, 10.0, 0), (4.0, 10.0, 4)],
)
def test_a_tier_that_is_slower_than_computing_gets_nothing(latency_s, bytes_per_s, expected):
    costs = Costs.known(StepCost(1.0), (TierCost(latency_s, bytes_per_s),), 2, 1)
    assert Bench(Gain, costs=costs).run(fresh(1)) == expected


def test_a_full_tier_takes_what_is_worth_more_than_what_leaves():
    """Five prompts in turn, as many as fit, and between them others that nobody asks again."""
    restored = {}
    for placement in (Gain, WriteThrough):
        bench = Bench(placement, num_blocks=4, capacity=20, costs=COSTS)
        restored[placement] = 0
        for number in range(400):
            bench.run(fresh(number % 5, 8))
            restored[placement] += sum(bench.lease.restored.values()) if number >= 200 else 0
            bench.run(fresh(1000 + number, 8))
    assert restored[WriteThrough] == 0, "each turn drops what the next one asks"
    assert restored[Gain] > 0.9 * 6 * 200


def test_a_stable_prefix_goes_down_whatever_is_known():
    bench = Bench(Gain, costs=COSTS)
    for number in range(60):
        bench.run(fresh(number))
    assert bench.run(fresh(70), hints=Hints(num_stable_tokens=5)) == 2
    assert bench.run(fresh(70), hints=Hints(num_stable_tokens=5)) == 2, "what was used again too"


def test_rates_start_from_the_general_and_forget():
    rates = ReuseRates(2, 10)
    general, special = rates.counts("all"), rates.counts("one")

    def rate(*classes):
        return rates.rates(Likeness(classes))

    assert rate(general, special) == [1.0, 1.0]
    general[:2] = 400.0, 100.0
    assert rate(general, special) == [pytest.approx(0.25, abs=0.01), 1.0], "each tier has its own"
    special[:2] = 4.0, 4.0
    assert rate(general, special)[0] == pytest.approx(0.63, abs=0.01)
    alike = Likeness((general,))
    for at in range(3000):
        rates.watch(BlockHash(bytes([at % 256, at >> 8]) * 16), alike)
        rates.advance(1)
    assert general[0] < 520, "the past counts less and less"
    assert rates.rates(alike)[0] < 0.03


def test_a_late_use_makes_up_for_what_was_counted():
    rates = ReuseRates(1, 2)
    chain = Chain(ROOT, 2, fresh(1))
    counts = rates.counts("all")
    rates.watch(chain.hashes[3], Likeness((counts,)))
    rates.advance(100)
    assert counts == [1.0, 0.0]
    assert rates.used(chain.hashes, [(None, 0, 2)]) == 4
    assert counts == [1.0, 1.0]


def test_what_the_device_still_has_says_nothing():
    rates = ReuseRates(1, 2)
    chain = Chain(ROOT, 2, fresh(1))
    counts = rates.counts("all")
    rates.watch(chain.hashes[3], Likeness((counts,)))
    assert rates.used(chain.hashes, [(None, 0, 4)]) == 4
    rates.advance(100)
    assert counts == [0.0, 0.0]


@pytest.mark.parametrize("known", range(10))
def test_refused_blocks_are_found_to_the_last(known):
    rates = ReuseRates(1, 2)
    chain = Chain(ROOT, 2, fresh(1, 40))
    rates.refused(chain.hashes, 3, 3 + known)
    assert rates.used(chain.hashes, [(None, 0, 3)]) == 3 + known


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("foreword.core.reuse._MAX_WATCHED", 50)
    monkeypatch.setattr("foreword.core.reuse._MAX_REFUSED", 50)
    monkeypatch.setattr("foreword.core.reuse._MAX_CLASSES", 20)
    bench = Bench(Gain, num_blocks=8, costs=COSTS)
    for number in range(300):
        bench.run(fresh(number), root=BlockHash(bytes([number % 250]) * 32))
    rates = bench.cache.lower.placement._rates
    assert len(rates._watched) + len(rates._watched_before) <= 100
    assert len(rates._refused) + len(rates._refused_before) <= 2 * (50 + 4)
    assert len(rates._classes) <= 20
    assert len(rates._due) <= 51
    assert not bench.cache.lower.placement._pieces
