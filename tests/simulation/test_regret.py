"""Tiers of every speed in virtual time: what is played is what the cells say, no request is much
slower for a tier, and what turns slow is turned off."""

import pytest

from foreword.cli.bench_regret import BAD, GOOD, shape_of, total
from foreword.core.block import BlockHash, Chain
from foreword.core.cost import TierCost
from foreword.core.lease import BlockState, Lease, Load
from foreword.sim.lane import TierLane
from foreword.sim.regret import Cell, grid, judged, measure, play, prefill_s, stream, switched
from foreword.sim.rivals import RIVALS
from foreword.sim.shape import Reading, TierRoom
from foreword.sim.worker import Worker
from foreword.store.patience import LOAD_S

SHAPE = shape_of("llama-3.1-8b", "h100")
COST = TierCost(0.01, 1000.0)  # a block of 100 bytes in 0.1 s


def load_of(num_blocks):
    chain = Chain(BlockHash(bytes(32)), 1, range(num_blocks + 1))
    states = bytearray([BlockState.LOADING]) * num_blocks
    return Load(Lease(chain, list(range(num_blocks)), states, 0, 0, 0, None), 0, 0, num_blocks)


def lane(num_readers=2, later=(), seed=0, **reading):
    reading = Reading(num_readers, num_readers, 100, 64, **reading)
    return TierLane(TierRoom("tier", 100, COST, reading=reading, later=later), 100, seed)


def came(tier, until_s):
    """Blocks and when they were told, looked at whenever there is something."""
    found = []
    while (now_s := tier.next_s) is not None and now_s <= until_s:
        found += [
            (piece.start, round(now_s, 9), seconds is not None)
            for piece, seconds in tier.settle(now_s)
        ]
    return found


def test_latencies_overlap_and_bytes_do_not():
    tier = lane()
    tier.load(load_of(4), 1.0)
    assert came(tier, 9) == [(3, 1.11, True), (2, 1.21, True), (1, 1.31, True), (0, 1.41, True)]
    alone = lane(num_readers=1)
    alone.load(load_of(2), 1.0)
    assert came(alone, 9) == [(1, 1.11, True), (0, 1.22, True)]


def test_a_tier_may_become_another():
    tier = lane(num_readers=1, later=((1.1, TierCost(0.5, 1000.0)),))
    tier.load(load_of(3), 1.0)
    assert came(tier, 9) == [(2, 1.11, True), (1, 1.71, True), (0, 2.31, True)]


def test_a_read_that_stalls_holds_up_its_reader_and_what_is_late_is_given_up():
    tier = lane(stall_share=1.0, stall_s=(5.0, 5.0), gives_up=True)
    tier.load(load_of(3), 1.0)
    late_s = round(1.0 + LOAD_S + 300 / 100e6, 9)
    assert came(tier, 3) == [(at, late_s, False) for at in (2, 1, 0)]
    assert not tier.allows(4.0)
    assert came(tier, 20) == []  # they come back, and nobody waits for them
    assert tier.allows(20.0)


def test_stalls_are_drawn_by_seed():
    def times(seed):
        tier = lane(seed=seed, stall_share=0.3)
        tier.load(load_of(20), 0.0)
        return came(tier, 1e9)

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_without_a_cache_a_prompt_alone_takes_its_steps():
    cell = Cell(1e9, 1e-3, 0.0, 3000, together=False)
    asked = stream(cell, SHAPE, 5, 1)
    shape = SHAPE.__class__(10_000, SHAPE.cost, 16, SHAPE.block_bytes, reuse=False)
    seconds = play(Worker(shape, 1), asked, together=False)
    assert seconds == pytest.approx([prefill_s(SHAPE, one.record.num_tokens) for one in asked])


def test_what_is_slower_and_what_is_quicker():
    found = judged([1.0, 1.0, 1.0, 1.0], [1.0, 1.012, 1.0105, 0.5])
    assert (found["regretted_share"], found["faster_share"]) == (0.25, 0.25)
    assert found["p99_ratio"] == 1.012


def test_a_quick_tier_wins_and_no_tier_loses_much():
    """By the same measure as the bench, of a small grid; the others' constant rules lose there."""
    cells = grid([0.2e9, 50e9], [1e-4, 0.05], [0.0, 0.01], [256, 4096])
    rows = list(measure(cells, SHAPE, 20, list(RIVALS), 3))
    ours = total(rows, "ours")
    assert ours["regretted_share"] <= 0.02
    assert ours["p99_ratio"] <= 1.01
    assert total(rows, "always")["regretted_share"] > 0.4
    assert total(rows, "256-wait-complete")["regretted_share"] > 0.3
    best = [judged(by["off"], by["ours"]) for cell, by in rows if is_best(cell)]
    assert max(one["mean_ratio"] for one in best) < 0.7


def is_best(cell):
    quick = cell.bytes_per_s == 50e9 and cell.latency_s == 1e-4
    return quick and cell.num_tokens == 4096 and not cell.stall_share and not cell.together


@pytest.mark.parametrize("bad", BAD)
def test_a_tier_that_turns_slow_is_off_in_20_requests_and_on_in_a_minute(bad):
    found = switched(SHAPE, (GOOD, bad), 4096, 240, 1)
    assert not found["off_while_good"]
    assert found["off_after_requests"] <= 20
    assert 0 <= found["on_after_s"] <= 60
    assert "lost" in found["why"][0]
