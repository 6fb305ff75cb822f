"""Replay: what caches find of a trace, on requests small enough to say it by hand."""

from collections.abc import Sequence

import pytest

from foreword.sim.prompt import MARK, prompt_chain, visit
from foreword.sim.replay import Rules, replay
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import UNLIMITED, Outcome, Setting, Tally

PLAIN = Rules()


def traced(records: Sequence[Record]) -> Trace:
    trace = Trace(records[0].id_tokens)
    for record in records:
        trace.add(record)
    return trace


def of_blocks(*prompts: Sequence[int], tenant: str = "") -> list[Record]:
    """Prompts of whole blocks of two tokens."""
    return [Record(2 * len(ids), ids, 2, tenant=tenant) for ids in prompts]


def found(records: Sequence[Record], setting: Setting, rules: Rules = PLAIN) -> Outcome:
    with traced(records) as trace:
        return replay(trace, [setting], rules).rows[0].outcome


def hits(records: Sequence[Record], policy: str, *blocks: int | None) -> int:
    return found(records, Setting(policy, blocks)).total.num_hit_blocks


def test_a_prompt_is_reused_as_far_as_it_is_known_whole_blocks_and_the_last_too() -> None:
    total = found(of_blocks([1, 2, 3], [1, 2, 4], [1, 2, 3]), Setting("lru", (UNLIMITED,))).total
    assert total == Tally(3, 18, 9, num_hit_tokens=10, num_hit_blocks=5)
    assert (total.token_share, total.block_share) == (10 / 18, 5 / 9)


def test_capacity_is_what_the_cache_keeps() -> None:
    """The mark takes none of it."""
    again = of_blocks([1, 2], [3], [1, 2])
    assert [hits(again, "lru", size) for size in (1, 2, 3)] == [0, 1, 2]


def test_policies_differ_as_they_should() -> None:
    records = of_blocks([1], [2], [1], [3], [1], [2])
    assert {name: hits(records, name, 2) for name in ("lru", "fifo", "leaf-fifo", "opt")} == {
        "lru": 2,  # 1 is used between
        "fifo": 1,  # 1 came first, so it leaves for 3
        "leaf-fifo": 1,
        "opt": 3,  # 3 is never kept
    }


def test_plain_fifo_lets_a_parent_go_before_its_child() -> None:
    records = of_blocks([1, 2], [3], [1, 2])
    assert hits(records, "fifo", 2) == 0
    assert hits(records, "leaf-fifo", 2) == 1


def test_an_unfinished_last_block_takes_its_room_and_is_not_found_again() -> None:
    records = [Record(3, [1, 2], 2), Record(2, [3], 2), Record(3, [1, 2], 2)]
    assert found(records, Setting("lru", (3,))).total == Tally(3, 8, 5, 2, 1)
    shared = Rules(keep_partial=True)
    assert found(records, Setting("lru", (3,)), shared).total == Tally(3, 8, 5, 3, 2)
    assert found(records, Setting("lru", (2,)), shared).total == Tally(3, 8, 5, 2, 1)
    assert found(records, Setting("fifo", (3,)), shared).total == Tally(3, 8, 5, 3, 2)
    assert found(records[::2] + records[1:2], Setting("lru", (2,))).total.num_hit_blocks == 1


def test_the_last_id_of_a_chain_is_a_mark_and_an_unfinished_block_its_own() -> None:
    with traced([Record(3, [1, 2], 2), Record(3, [1, 2], 2)]) as trace:
        first, second = (prompt_chain(record, 16).token_ids for record in trace)
    assert first[0] == second[0] == 1
    assert first[-1] == second[-1] == MARK
    assert first[1] != second[1]
    assert prompt_chain(Record(3, [1, 2], 2), 16, keep_partial=True).token_ids == [1, 2, MARK]


def test_a_request_longer_than_the_cache_is_refused_and_counted() -> None:
    records = of_blocks([1, 2, 3], [1], [1, 2, 3], [1])
    outcome = found(records, Setting("lru", (2,)))
    assert (outcome.num_refused, outcome.total) == (2, Tally(4, 16, 8, 2, 1))
    assert found(records, Setting("opt", (2,))).num_refused == 0


def test_what_the_device_evicts_is_found_in_the_tiers() -> None:
    records = of_blocks([1, 2], [3, 4], [5, 6], [1, 2], [5, 6])
    outcome = found(records, Setting("lru", (2, 4, 8)))
    device, host, disk = outcome.tiers
    assert outcome.total.num_hit_blocks == 4
    assert [tier.num_hit_tokens for tier in outcome.tiers] == [0, 4, 4]  # host has lost [1, 2]
    assert (host.num_loaded_blocks, disk.num_loaded_blocks) == (2, 2)
    assert (host.num_stored_blocks, disk.num_stored_blocks) == (8, 6)
    assert (device.num_evicted_blocks, host.num_evicted_blocks, disk.num_evicted_blocks) == (
        8,
        4,
        0,
    )


def test_a_restart_leaves_what_the_disk_has() -> None:
    records = of_blocks([1, 2], [3], [1, 2], [3])
    for blocks, kept in (((9,), 0), ((9, 9), 0), ((9, 0, 9), 3), ((9, 9, 2), 1)):
        rules = Rules(restart_at=0.5)
        assert found(records, Setting("lru", blocks), rules).total.num_hit_blocks == kept, blocks
    assert found(records, Setting("fifo", (9,)), Rules(restart_at=0.5)).total.num_hit_blocks == 0


def test_a_restart_does_not_bind_what_a_setting_is_held_against() -> None:
    with traced(of_blocks([1, 2], [3], [1, 2], [3])) as trace:
        row = replay(trace, [Setting("opt", (9,))], Rules(restart_at=0.5)).rows[0]
    assert (row.outcome.total.num_hit_blocks, row.bound.num_hit_blocks, row.opt_share) == (
        0,
        3,
        0.0,
    )


def test_a_setting_is_held_against_one_cache_of_all_its_blocks() -> None:
    assert str(Setting("lru", (1, 2, 3)).bound) == "opt@6"
    assert Setting("lru", (1, UNLIMITED)).bound.blocks == (UNLIMITED,)
    with traced(of_blocks([1], [2], [1], [2])) as trace:
        findings = replay(trace, [Setting("lru", (1, 0)), Setting("lru", (UNLIMITED,))], PLAIN)
    assert [row.opt_share for row in findings.rows] == [0.0, 1.0]
    assert [row.bound.num_hit_blocks for row in findings.rows] == [1, 2]
    assert (findings.ceiling, findings.num_blocks) == (Tally(4, 8, 4, 4, 2), 2)


def test_warm_up_is_served_and_left_out() -> None:
    records = of_blocks([1, 2], [3], [1, 2], [1, 2], [3])
    outcome = found(records, Setting("lru", (2,)), Rules(warmup=0.5))
    assert outcome.total == Tally(3, 10, 5, 6, 3)
    assert outcome.tiers[0].num_evicted_blocks == 2
    with traced(records) as trace:
        findings = replay(trace, [Setting("lru", (2,))], Rules(warmup=0.5))
    assert (findings.ceiling.num_hit_blocks, findings.num_requests) == (5, 5)


def test_tenants_share_nothing_and_are_added_up_apart() -> None:
    ones, twos = of_blocks([1, 2], [1, 2], tenant="one"), of_blocks([1, 2], tenant="two")
    groups = found([*ones, *twos], Setting("lru", (UNLIMITED,)), Rules(per="tenant")).groups
    assert groups == {"one": Tally(2, 8, 4, 4, 2), "two": Tally(1, 4, 2, 0, 0)}


def test_progress_rises_to_the_end() -> None:
    told: list[float] = []
    with traced(of_blocks(*([i] for i in range(100)))) as trace:
        replay(trace, [Setting("lru", (3,))], PLAIN, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 5


def test_a_visit_says_what_gets_kv() -> None:
    seen = visit(Record(5, [1, 2, 3, 4, 5], output_ids=[6, 7, 8]), 2)
    assert (seen.num_reusable, seen.num_kept, seen.num_slots, seen.num_filled) == (2, 3, 4, 7)
    assert (len(seen.prompt), seen.whole.token_ids) == (5, [1, 2, 3, 4, 5, 6, 7])
    seen = visit(Record(8, [1, 2], 4), 16)
    assert (seen.num_reusable, seen.num_kept, seen.num_slots, seen.num_filled) == (2, 2, 3, 2)
    seen = visit(Record(3, [1, 2, 3], output_ids=[4, 5, 6, 7, 8, 9]), 4)
    assert seen.answer_ends == (4, 8)
    assert visit(Record(4, [1, 2, 3, 4], output_ids=[5, 6, 7]), 4).answer_ends == (6,)
    assert visit(Record(4, [1, 2, 3, 4], output_ids=[5]), 4).answer_ends == ()


def test_what_a_server_does_not_reuse_or_count_is_not_reused_or_counted_here() -> None:
    prompt = [5] * 33
    with Trace(1) as trace:
        trace.add(Record(33, prompt, arrival_s=0.0, cancelled_at=0))
        trace.add(Record(33, prompt, arrival_s=1.0))
        trace.add(Record(33, prompt, arrival_s=2.0, wants_prompt=True))
        found = replay(trace, [Setting("lru", (9,)), Setting("opt", (9,))], Rules())
    for total in (found.ceiling, *(row.outcome.total for row in found.rows)):
        assert (total.num_requests, total.num_hit_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("store", "stored", "hits"),
    [("write-through", 8, 8), ("on-second-use", 0, 0), ("write-back", 8, 8), ("gain", 8, 8)],
)
def test_what_goes_below_the_device_is_as_the_setting_says(
    store: str, stored: int, hits: int
) -> None:
    """Two prompts in turn, where the device holds one."""
    records = of_blocks([1, 2, 3, 0], [4, 5, 6, 0], [1, 2, 3, 0])
    outcome = found(records, Setting("lru", (4, UNLIMITED), store))
    below = outcome.tiers[1]
    assert (below.num_stored_blocks, below.num_hit_tokens) == (stored, hits)
    assert str(Setting("lru", (4, 9), store)).endswith(f":{store}") == (store != "write-through")
