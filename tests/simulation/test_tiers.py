"""Seeded worlds with tiers below the device: blocks are stored, evicted, loaded, lost.

As in test_world, with stores that answer some steps later, in any order, and are full, lose blocks,
find them damaged, answer too late, or have what other processes stored. Answers stay true, every
load is reported, and a tier that loses nothing holds no block without its parent.
"""

import pytest

from foreword.core.cost import Costs, StepCost, TierCost
from foreword.core.lease import Drop, Load, Probe, Store
from foreword.core.place import PLACEMENTS
from foreword.core.request import Hints
from foreword.core.tier import Kept, Tier
from laws import check_tier
from world import World


class Place:
    """One store: what it holds, and what it was told to do and has not done."""

    def __init__(self, faults):
        self.held = {}
        self.others = {}  # what other processes stored here
        self.queue = []  # stores and drops, in order
        self.faults = faults


class TieredWorld(World):
    spare = 0.3
    cancelled = 0.2
    recent = 8

    def __init__(self, seed, faults=None):
        self.seed = seed
        super().__init__(seed)
        rate = self.random.choice([0.0, 0.05, 0.4]) if faults is None else faults
        self.places = [Place(rate) for _ in self.cache.lower.tiers]
        if self.random.random() < 0.7:  # else no costs are known: all is stored
            self.cache.lower.placement.costs = self.costs()
        self.probes = []
        self.num_loads = self.num_reported = 0
        self.fates = dict.fromkeys(("loaded", "missing", "late", "unwanted"), 0)

    def tiers(self):
        longest = -(-60 // self.block_size)
        sizes = [self.random.randint(1, 6 * longest) for _ in range(self.random.randint(1, 2))]
        return [
            Tier(size, shared=self.random.random() < 0.3, policy=self.policy)
            for i, size in enumerate(sizes)
        ]

    def placement(self):
        return self.random.choice(list(PLACEMENTS.values()))

    def hints(self):
        """Any that there are; others than `cacheable` change what is stored, and it what is
        shared."""
        draw = self.random
        return Hints(
            prompt_cache_key=draw.choice(["", "", "a", "b"]),
            num_stable_tokens=draw.choice([None, None, draw.randint(0, 40)]),
            max_offload_tokens=draw.choice([None, None, draw.randint(0, 40)]),
            cacheable=draw.random() > 0.1,
        )

    def costs(self):
        """Where a load costs a few times less, or more, than to compute the same."""
        draw = self.random.uniform
        reads = tuple(TierCost(draw(0, 3), draw(0.5, 100)) for _ in self.places)
        return Costs.known(StepCost(1.0), reads, self.block_size, self.block_size)

    @property
    def awaits_tiers(self):
        return bool(self.loads or self.probes)

    def perform(self, effects):
        for effect in effects:
            match effect:
                case Load():
                    self.num_loads += effect.stop - effect.start
                    at = effect.start
                    while at < effect.stop:
                        stop = min(effect.stop, at + self.random.randint(1, 3))
                        self.loads.append([effect, at, stop])
                        at = stop
                case Store():
                    contents = [self.slots.block(block_id) for block_id in effect.block_ids]
                    hashes = effect.chain.hashes[effect.start :][: len(contents)]
                    self.places[effect.tier].queue.append((hashes, contents))
                case Drop():
                    self.places[effect.tier].queue.append((effect.hashes, None))
                case Probe():
                    self.probes.append(effect)

    def work_of_tiers(self):
        """Some of what was asked for happens now."""
        draw = self.random
        for number, place in enumerate(self.places):
            while place.queue and draw.random() < 0.5:
                self.write(number, place, *place.queue.pop(0))
            if place.held and draw.random() < place.faults / 4:
                del place.held[draw.choice(sorted(place.held))]
            if place.others and draw.random() < 0.1:
                del place.others[draw.choice(sorted(place.others))]
            if draw.random() < place.faults / 10:
                self.cache.lower.resize(number, draw.randint(0, 30))
        for probe in [probe for probe in self.probes if draw.random() < 0.5]:
            self.probes.remove(probe)
            others = self.places[probe.tier].others
            there = [h in others for h in probe.chain.hashes[probe.start :]]
            found = there.index(False) if False in there else len(there)
            self.scheduler.found(probe, found if draw.random() >= 0.1 else 0)
        for entry in [load for load in self.loads if draw.random() < 0.4]:
            self.loads.remove(entry)
            self.arrive(*entry)
        self.perform(self.cache.lower.take_effects())

    def write(self, number, place, hashes, contents):
        for at, block_hash in enumerate(hashes):
            if contents is None:
                place.held.pop(block_hash, None)
                continue
            ok = self.random.random() >= place.faults
            if ok:
                place.held[block_hash] = contents[at]
                if self.random.random() < 0.2:
                    place.others[block_hash] = contents[at]
            self.cache.lower.stored(number, [block_hash], ok=ok)

    def arrive(self, load, start, stop):
        place, lease = self.places[load.tier], load.lease
        for at in range(start, stop):
            self.num_reported += 1
            block_hash = lease.chain.hashes[at]
            content = place.held.get(block_hash) or place.others.get(block_hash)
            if self.random.random() < place.faults:
                self.fates["late"] += 1
                self.cache.lost(load, at, at + 1, gone=False)
            elif content is None:
                self.fates["missing"] += 1
                self.cache.lost(load, at, at + 1, gone=True)
            elif lease.released:
                self.fates["unwanted"] += 1
            else:
                self.fates["loaded"] += 1
                self.slots.held[lease.block_ids[at]] = list(content)
                self.cache.loaded(load, at, at + 1)

    def step(self):
        super().step()
        self.work_of_tiers()
        for tier, place in zip(self.cache.lower.tiers, self.places, strict=True):
            check_tier(tier)
            writing = {h for hashes, _ in place.queue for h in hashes}
            kept = {h for h, e in tier._entries.items() if e.kept is not Kept.ABSENT}
            assert set(place.held) <= kept | writing, "the store keeps what the tier forgot"
            assert tier.num_blocks <= max(tier.capacity, 0) or place.faults


@pytest.mark.parametrize("seed", range(40))
def test_no_seed_gives_a_wrong_answer(seed):
    world = TieredWorld(seed)
    report = world.run(60)
    assert report.answers
    for (_, index), (root, prompt, answer) in report.answers.items():
        assert answer == world.truth(root, prompt, len(answer), index)
    for entry in world.loads:
        world.arrive(*entry)
    assert world.num_reported == world.num_loads


def test_the_worlds_are_worth_running():
    worlds = [TieredWorld(seed) for seed in range(12)]
    for world in worlds:
        world.run(200)
    total = {fate: sum(world.fates[fate] for world in worlds) for fate in worlds[0].fates}
    assert min(total.values()) >= 5, total
    assert total["loaded"] > 150, total


@pytest.mark.parametrize("seed", range(10))
def test_a_tier_that_loses_nothing_keeps_no_block_without_its_parent(seed):
    world = TieredWorld(seed, faults=0)
    for tier in world.cache.lower.tiers:
        tier.shared = False
    report = world.run(60)
    assert report.answers
    for tier in world.cache.lower.tiers:
        roots = {s for s, _, _ in report.answers.values()}
        for entry in tier._entries.values():
            if entry.kept is not Kept.ABSENT:
                parent = tier._entries[entry.parent]
                assert parent.kept is not Kept.ABSENT or entry.parent in roots


def test_same_seed_same_world():
    assert TieredWorld(7).run(80) == TieredWorld(7).run(80)
