"""Workers in virtual time: the same hits as without a clock where nothing overlaps, one result for
one trace, and times that are those of the costs."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from foreword.core.cost import StepCost, TierCost
from foreword.core.policies import DEFAULT
from foreword.core.policy import LRU
from foreword.core.waiting import ARRIVAL
from foreword.sim.fleet import FleetRules, answers_before, play
from foreword.sim.importer import read_trace
from foreword.sim.replay import Rules, replay
from foreword.sim.routing import ROUTES
from foreword.sim.shape import TierRoom, WorkerShape
from foreword.sim.timing import percentile, spread, summary
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import Setting
from foreword.sim.worker import Worker
from traces import shared

COST = StepCost(1e-3, 1e-6, 5e-3, 2e-3, 1e-6, 1e-4)
FREE = StepCost(0.0)
BUSY = WorkerShape(40, COST, 4, 1 << 10, max_num_seqs=6, max_batch_tokens=16, max_prefill_tokens=48)
BUSY = replace(BUSY, policy=LRU)  # as replays without a clock, which ages do not count for


def generated(seed, id_tokens=1, rate=0.0, num_requests=80):
    """Prompts that branch off earlier ones and their answers, `rate` requests a second; at 0 one
    comes long after the other."""
    draw = Random(seed)
    trace, known, at = Trace(id_tokens), [[]], 0.0
    for _ in range(num_requests):
        base = draw.choice(known[-10:])
        ids = base[: draw.randint(0, len(base))][:60]
        ids = ids + [draw.randrange(50) for _ in range(draw.randint(1, 12))]
        answer = [draw.randrange(50) for _ in range(draw.randint(1, 9))] if id_tokens == 1 else []
        known.append([*ids, *answer])
        at += draw.expovariate(rate) if rate else 1000.0
        num_tokens = len(ids) * id_tokens - (draw.randrange(id_tokens) if id_tokens > 1 else 0)
        session = f"s{draw.randrange(5)}"
        trace.add(Record(num_tokens, ids, id_tokens, at, len(answer), answer, session))
    return trace


def told(timing):
    """All that came of each request."""
    return {
        j.place: (j.sent_s, j.admitted_s, j.first_token_s, j.ended_s, j.num_hit_tokens, j.restored)
        for j in timing.journeys
    }


def num_hits(timing):
    return sum(journey.num_hit_tokens for journey in timing.journeys)


def instant(trace, blocks, block_size=4):
    """Hit tokens by tier, without a clock."""
    outcome = replay(trace, [Setting("lru", blocks)], Rules(block_size)).rows[0].outcome
    return [tier.num_hit_tokens for tier in outcome.tiers]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("id_tokens", [1, 16])
def test_one_after_the_other_is_a_replay_without_a_clock(seed, id_tokens):
    """With costs too, as long as nothing overlaps, whatever the number of sequences of a step."""
    with generated(seed, id_tokens) as trace:
        for blocks in (30, 90) if id_tokens == 1 else (75, 150):
            expected = instant(trace, (blocks,))
            for cost in (FREE, COST):
                shape = replace(BUSY, num_blocks=blocks, cost=cost)
                timing = play(trace, shape, FleetRules())
                assert timing.num_refused == 0
                assert [num_hits(timing)] == expected


@pytest.mark.parametrize("seed", range(1, 5))
def test_tiers_below_are_those_of_a_replay_without_a_clock(seed):
    rooms = (TierRoom("host", 30, TierCost(1e-3, 1e6)), TierRoom("disk", 60, TierCost(1e-2, 1e5)))
    with generated(seed) as trace:
        timing = play(trace, replace(BUSY, num_blocks=25, tiers=rooms), FleetRules())
        expected = instant(trace, (25, 30, 60))
    below = [count.num_hit_tokens for count in timing.workers[0].tiers]
    assert [num_hits(timing) - sum(below), *below] == expected
    assert all(below)


def test_the_conversation_trace_is_that_without_a_clock():
    """Served one at a time at no cost: all that came together waits in the order of the trace."""
    with read_trace(shared("mooncake_fast25_conversation.jsonl.gz")) as trace:
        shape = WorkerShape(5637, FREE, 512, max_num_seqs=1, policy=LRU, order=ARRIVAL)
        timing = play(trace, shape, FleetRules())
        assert [num_hits(timing)] == instant(trace, (5637,))
    assert timing.end_s == max(journey.sent_s for journey in timing.journeys)


@pytest.mark.parametrize("seed", range(5))
def test_one_trace_has_one_result_and_time_runs_forward(seed):
    rules = FleetRules(num_workers=3, routing="soonest")
    with generated(seed, rate=60.0) as trace:
        timing = play(trace, BUSY, rules)
        assert told(timing) == told(play(trace, BUSY, rules))
    ends = [journey.ended_s for journey in timing.journeys]
    assert ends == sorted(ends)
    assert timing.end_s == ends[-1]
    assert len(told(timing)) == 80
    for journey in timing.journeys:
        assert journey.sent_s <= journey.admitted_s < journey.first_token_s <= journey.ended_s


@pytest.mark.parametrize("routing", ROUTES)
def test_a_fleet_of_one_is_a_worker(routing):
    shape = replace(BUSY, num_blocks=22)
    with generated(1, rate=60.0) as trace:
        alone = play(trace, shape, FleetRules())
        assert told(play(trace, shape, FleetRules(routing=routing))) == told(alone)
    assert alone.workers[0].num_preemptions > 0
    assert alone.workers[0].most_waiting > 3


@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_changes_nothing(monkeypatch, seed):
    """Decodes that run on together end when, and as, they would one by one."""
    num_ends, end = [0], Worker.end

    def counted(worker, now_s):
        num_ends[-1] += 1
        return end(worker, now_s)

    monkeypatch.setattr(Worker, "end", counted)
    with generated(seed, rate=20.0) as trace:
        ahead = play(trace, BUSY, FleetRules(num_workers=2))
        num_ends.append(0)
        monkeypatch.setattr(Worker, "_most_repeats", lambda *_: 1)
        stepwise = play(trace, BUSY, FleetRules(num_workers=2))
    assert ahead.workers[0].num_steps == stepwise.workers[0].num_steps
    assert num_ends[-2] < 0.8 * num_ends[-1]
    for place, found in told(ahead).items():
        assert found[:4] == pytest.approx(told(stepwise)[place][:4])
        assert found[4:] == told(stepwise)[place][4:]


def one(*records):
    trace = Trace(records[0].id_tokens)
    for record in records:
        trace.add(record)
    return trace


def test_a_first_token_comes_when_its_steps_are_done():
    """60 prompt tokens in steps of 48 and 12, then two more tokens in two steps of one sequence."""
    with one(Record(60, list(range(60)), 1, 0.0, 3, [1, 2, 3])) as trace:
        (journey,) = play(trace, BUSY, FleetRules()).journeys
    first_s = COST.prefill_s(48) + COST.prefill_s(12, 48)
    assert journey.first_token_s == pytest.approx(first_s)
    decodes_s = 2 * (COST.per_step_s + COST.per_decode_s) + (61 + 62) * COST.per_decode_pair_s
    assert journey.ended_s == pytest.approx(first_s + decodes_s)


def test_ids_of_blocks_cost_what_their_tokens_do():
    """A prompt of two blocks of 16 and 5 tokens; then the same again, of which its last token is
    computed; then with another end."""
    shape = replace(BUSY, cost=StepCost(1.0, 0.01))
    prompts = [(37, [1, 2, 3]), (32, [1, 2]), (33, [1, 2, 4])]
    records = (Record(num, ids, 16, 1e6 * at) for at, (num, ids) in enumerate(prompts))
    with one(*records) as trace:
        found = [j.first_token_s - j.sent_s for j in play(trace, shape, FleetRules()).journeys]
    pairs = [sum(range(start, stop + 1)) for start, stop in ((1, 37), (32, 32), (33, 33))]
    assert found == pytest.approx([37 + 0.37 * 19, 1 + 0.32, 1 + 0.33])
    assert found == pytest.approx(
        [num + 0.01 * pair for num, pair in zip((37, 1, 1), pairs, strict=True)]
    )


def test_a_load_takes_its_time_behind_others():
    """Two prompts of 40 tokens are pushed out by two others, and come back from the disk together:
    each is 10 blocks of 1 KiB, of which the last is computed."""
    room = TierRoom("disk", 100, TierCost(0.5, 9 << 10))
    shape = replace(BUSY, num_blocks=20, cost=FREE, tiers=(room,))
    a, b, c, d = ([k] * 40 for k in (1, 2, 3, 4))
    times = [(a, 0), (b, 10), (c, 20), (d, 20), (a, 30), (b, 30)]
    with one(*(Record(40, ids, 1, float(at)) for ids, at in times)) as trace:
        timing = play(trace, shape, FleetRules())
    waits = {j.place: j.first_token_s - j.sent_s for j in timing.journeys}
    assert [waits[place] for place in range(6)] == pytest.approx([0, 0, 0, 0, 1.5, 3.0])
    disk = timing.workers[0].tiers[0]
    assert (disk.num_hit_tokens, disk.num_loaded_blocks, disk.num_stored_blocks) == (72, 18, 40)


def test_who_asks_a_shared_tier_waits_for_the_next_step():
    """It came while a step ran; the answer comes at once, and the step after that has begun."""
    room = TierRoom("disk", 100, TierCost(0.0, 1e9))
    shape = replace(BUSY, cost=StepCost(0.0, 0.0, 1.0), max_prefill_tokens=1000)
    first_s = []
    for shared_by_others in (False, True):
        tiers = (replace(room, shared=shared_by_others),)
        with one(
            Record(8, [1] * 8, 1, 0.0, 9, [1] * 9), Record(8, [2] * 8, 1, 2.5, 1, [1])
        ) as trace:
            timing = play(trace, replace(shape, tiers=tiers), FleetRules())
        first_s.append({journey.place: journey.first_token_s for journey in timing.journeys})
    assert first_s == [{0: 1.0, 1: 4.0}, {0: 1.0, 1: 5.0}]


def test_what_came_after_an_answer_comes_as_long_after_it():
    """A log of one request after another, replayed by a worker that is a thousand times slower."""
    records = [
        Record(40, [at] * 40, 1, 2.0 * at, 3, [1, 2, 3], total_s=1.5, rest_s=0.1) for at in range(5)
    ]
    with one(*records) as trace:
        assert answers_before(trace) == [-1, 0, 1, 2, 3]
        slow = replace(BUSY, cost=StepCost(1.0))
        found = sorted(play(trace, slow, FleetRules()).journeys, key=lambda j: j.place)
        for before, after in pairwise(found):
            assert after.sent_s - before.ended_s == pytest.approx(0.4)
        timing = play(trace, slow, FleetRules(closed=False))
        assert [j.sent_s for j in timing.journeys] == [0, 2, 4, 6, 8]
        assert timing.num_after == 0
        sooner = play(trace, slow, FleetRules(speed_up=4.0))
        assert [j.sent_s for j in sooner.journeys] == [0, 0.5, 1, 1.5, 2]


def test_what_cannot_fit_and_who_leaves_hold_up_nobody():
    records = [
        Record(200, [7] * 200, 1, 0.0, total_s=0.5),  # 50 blocks
        Record(40, [1] * 40, 1, 1.0, total_s=1.0, cancelled_at=0),
        Record(100, [2] * 100, 1, 3.0, total_s=1.0, cancelled_at=48),
        Record(100, [2] * 100, 1, 5.0, 2, [1, 2], total_s=1.0),
    ]
    with one(*records) as trace:
        timing = play(trace, BUSY, FleetRules())
        assert (timing.num_refused, timing.num_left) == (1, 2)
        (journey,) = timing.journeys
        assert journey.num_hit_tokens == 48
        shown = summary(timing, trace, BUSY, FleetRules())
    assert (shown["requests"], shown["refused_requests"], shown["left_requests"]) == (1, 1, 2)
    assert shown["hit_share"] == 0.48


def test_samples_share_their_prompt_and_end_each_by_itself():
    whole = Record(10, list(range(10)), 1, 0.0, 9, list(range(9)), sample_lengths=(5, 0, 1, 3))
    with one(whole, replace(whole, arrival_s=9.0, wants_prompt=True)) as trace:
        timing = play(trace, BUSY, FleetRules())
    first, second = timing.journeys
    assert (first.num_hit_tokens, second.num_hit_tokens) == (0, 0)
    # The prompt once, and its last token for each of the other samples that had an answer.
    assert timing.workers[0].num_prefilled_tokens == 2 * (10 + 2)
    assert timing.workers[0].num_decoded_tokens == 2 * (4 + 0 + 2)


def workers_of(trace, routing, num_workers=3, **shape):
    rules = FleetRules(num_workers=num_workers, routing=routing)
    timing = play(trace, replace(BUSY, **shape), rules)
    return {journey.place: journey.worker for journey in timing.journeys}


def test_hashing_sends_a_session_or_an_opening_to_one_worker():
    with generated(2, rate=20.0) as trace:
        places = workers_of(trace, "hash")
        by_session = {(trace[place].session, worker) for place, worker in places.items()}
        assert len(by_session) == 5
    opening = [5, 6, 7, 8]
    with one(*(Record(6, [*opening, at, at], 1, float(at)) for at in range(9))) as trace:
        assert len(set(workers_of(trace, "hash").values())) == 1


def test_another_worker_moves_few_sessions():
    with one(*(Record(4, [1] * 4, 1, float(at), session=str(at)) for at in range(300))) as trace:
        before, after = workers_of(trace, "hash", 4), workers_of(trace, "hash", 5)
    moved = [place for place in before if before[place] != after[place]]
    assert 30 < len(moved) < 90
    assert {after[place] for place in moved} == {4}


def test_the_longest_prefix_wins_and_soonest_looks_at_the_queue_too():
    a, b = [1] * 40, [2] * 40
    times = [(a, 0.0), (b, 10.0), (a + b, 20.0), (b, 30.0), (a, 30.0001), (a, 30.0002)]
    with one(*(Record(len(ids), ids, 1, at) for ids, at in times)) as trace:
        # b is new to all, and nobody has anything to do: workers take turns.
        assert workers_of(trace, "prefix") == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 0}
        slow = workers_of(trace, "soonest", cost=StepCost(10.0))
    assert slow[0] == 0
    assert slow[1] == 1
    assert slow[2] == 2


def test_asking_a_worker_what_it_knows_changes_nothing():
    def nodes(node):
        return [(len(node.block_ids), node.last_used)] + [
            found for child in node.sorted_children for found in nodes(child)
        ]

    worker = Worker(replace(BUSY, cost=FREE), 1)
    record = Record(40, list(range(40)))
    chain = worker.chain(record)
    assert worker.send(record, chain, 0.0) is not None
    assert worker.begin(0.0, 0.0) == 0.0
    worker.end(0.0)
    before = nodes(worker.cache.index.root(chain.root))
    for cut, known in ((40, 36), (39, 36), (17, 16), (3, 0)):
        part = worker.chain(Record(cut, list(range(cut))))
        assert worker.num_known_tokens(part) == known
    assert nodes(worker.cache.index.root(chain.root)) == before


def test_a_worker_has_as_much_room_in_blocks_of_any_size():
    room = TierRoom("disk", 64, TierCost(0.0, 1.0))
    shape = WorkerShape(100, COST, 16, 1 << 10, (room,)).of_blocks(512)
    assert (shape.num_blocks, shape.block_bytes, shape.tiers[0].num_blocks) == (3, 1 << 15, 2)
    assert shape.of_blocks(512) is shape
    assert shape.policy is DEFAULT


def test_percentiles_are_values_that_occurred():
    values = [float(at) for at in range(1, 11)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.9, 0.99)] == [1, 5, 9, 10]
    shown = spread(reversed(values))
    assert (shown["median"], shown["p90"], shown["mean"]) == (5, 9, 5.5)
    assert shown["cdf"][-1] == [10, 1.0]
    assert spread([])["median"] == 0
