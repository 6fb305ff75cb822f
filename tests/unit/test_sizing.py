"""What traffic asks for: by hand on little of it, and against the chat that is known by formula."""

import math
from collections.abc import Sequence

import pytest

from foreword.core.cost import TierCost
from foreword.sim.catalogue import HARDWARE, MODELS
from foreword.sim.plan import Deployment, PlannedTier, Table, deployment
from foreword.sim.sizing import (
    BUSY,
    Source,
    Verdict,
    decode_s,
    first_token_s,
    first_tokens_s,
    sizes_of,
    verdict,
)
from foreword.sim.trace import Record, Trace, TraceError
from foreword.sim.traffic import Traffic, traffic_of
from foreword.sim.workload import (
    Agents,
    Chat,
    FewShot,
    Rag,
    WorkloadError,
    chat_figures,
    described,
    trace_of,
)
from formulas import by_formula

HOST = PlannedTier("host", 0, TierCost(0.0, 64e9))
SLOW = PlannedTier("disk", 0, TierCost(0.0, 1e9))


def site(*tiers: PlannedTier) -> Deployment:
    return deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], tiers=tiers)


def table(found: Verdict, name: str) -> Table:
    (one,) = [one for one in found.tables if one.name == name]
    return one


def traffic(hits: dict[int, Sequence[int]], lengths: Sequence[int], span_s: float = 0.0) -> Traffic:
    return Traffic(lengths, [100] * len(lengths), span_s, hits)


def test_a_first_token_takes_what_makes_it_quickest() -> None:
    place = site(HOST, SLOW)
    step = place.step
    assert first_token_s(place, 1000, []) == step.prefill_s(1000)
    assert first_token_s(place, 1000, [(None, 400)]) == step.prefill_s(600, 400)
    host_s = 500 * 131_072 / 64e9 + step.prefill_s(100, 900)
    assert first_token_s(place, 1000, [(None, 400), (HOST, 900)]) == pytest.approx(host_s)
    # a disk that reads slower than it computes is left alone, after others and alone
    assert first_token_s(place, 1000, [(None, 400), (SLOW, 900)]) == step.prefill_s(600, 400)
    both = [(None, 400), (HOST, 900), (SLOW, 950)]
    assert first_token_s(place, 1000, both) == pytest.approx(host_s)
    # the last token is computed, wherever the prompt is
    assert first_token_s(place, 1000, [(None, 1000)]) == step.prefill_s(1, 999)


def test_a_tier_gets_the_smallest_size_that_saves_enough() -> None:
    curve = {1000: [0, 0], 2000: [0, 500], 4000: [0, 980], 8000: [20, 990]}
    (host,) = sizes_of(site(HOST), traffic(curve, [1000, 1000]), device_tokens=1000)
    assert host.num_tokens == 4000  # the last doubling saves 3 % more
    rows = host.table.rows
    assert [row["bytes"] for row in rows] == [131_072 * n for n in (2000, 4000, 8000)]
    saved = [float(row["saved_s"] or 0) for row in rows]
    gigabytes = 2000 * 131_072 / 1e9
    assert rows[1]["saved_s_per_gb"] == pytest.approx((saved[1] - saved[0]) / gigabytes)
    assert rows[1]["saved_s_per_price"] is None
    (slow,) = sizes_of(site(SLOW), traffic(curve, [1000, 1000]), device_tokens=1000)
    assert (slow.num_tokens, max(float(row["saved_s"] or 0) for row in slow.table.rows)) == (0, 0)


def test_a_tier_that_may_only_be_small_leaves_the_rest_to_the_next() -> None:
    curve = {1000: [0, 0], 2000: [0, 500], 4000: [0, 980]}
    small = PlannedTier("host", 2000 * 131_072, TierCost(0.0, 64e9), per_gb=2.0)
    disk = PlannedTier("disk", 0, TierCost(0.0, 14e9))
    host, below = sizes_of(site(small, disk), traffic(curve, [1000, 1000]), device_tokens=1000)
    assert (host.num_tokens, below.num_tokens) == (2000, 4000)
    (row,) = host.table.rows
    assert row["saved_s_per_price"] == pytest.approx(float(row["saved_s_per_gb"] or 0) / 2)


def test_replicas_and_queue_follow_the_rate() -> None:
    place = site(HOST)
    busy = traffic({10**6: [0] * 100}, [10_000] * 100, span_s=5.0)  # 20 requests a second
    found = verdict(place, busy)
    work_s = place.step.prefill_s(10_000)
    decoding_s, parts = decode_s(place, busy)
    sequences = place.device_tokens / 10_100
    assert parts["sequences"] == pytest.approx(sequences)
    read = place.weights_bytes + sequences * 10_100 * 131_072
    assert decoding_s == pytest.approx(100 * read / 3.35e12 / sequences)
    (figure, *_) = found.figures
    assert figure.name == "replicas, nothing kept"
    assert figure.value == pytest.approx(20 * (work_s + decoding_s) / BUSY)
    row = table(found, "time to the first token").rows[0]
    assert row["replicas"] == math.ceil(figure.value)
    rate = 20 / math.ceil(figure.value)
    slowed_s = work_s / (1 - rate * decoding_s)
    wait_s = rate * slowed_s**2 / (2 * (1 - rate * slowed_s))
    assert row["queued_mean_s"] == pytest.approx(work_s + wait_s)
    assert "no rate" not in " ".join(found.notes)


def test_each_formula_of_traffic_gives_its_figure() -> None:
    place = site(HOST, SLOW)
    curve = {4000: [0, 500], 8000: [900, 950], 10**6: [950, 950]}
    for chat in (Chat(), Chat(system=0, turns=1), Chat(turns=2, reply=0)):
        figures = chat_figures(chat, place)
        figures += verdict(place, traffic(curve, [1000, 1000], span_s=0.001)).figures
        assert len(figures) >= 9
        for figure in figures:
            assert by_formula(figure) == pytest.approx(figure.value), figure.name


def test_without_times_there_is_no_rate() -> None:
    found = verdict(site(HOST), traffic({1000: [0]}, [500]))
    assert not [figure for figure in found.figures if figure.name.startswith("replicas")]
    row = table(found, "time to the first token").rows[0]
    assert (row["replicas"], row["queued_mean_s"]) == (None, None)
    assert "no rate" in found.notes[0]


def test_a_curve_from_the_core_is_the_chats_formula() -> None:
    """With room for all, each turn computes its user tokens and what an unfinished block and the
    last token of a reply cost, which has no KV."""
    chat = Chat(system=4000, turns=5, sessions=3, rate=1e-6)  # one after another
    with trace_of(chat) as trace:
        found = traffic_of(trace, [7_000])
    lengths, hits = list(found.num_tokens), list(found.known(10**9))
    assert sum(lengths) == 3 * chat.num_prompt_tokens()
    computed = [length - hit for length, hit in zip(lengths, hits, strict=True)]
    assert computed == [4100, 101, 101, 101, 101, *[100, 101, 101, 101, 101] * 2]
    assert list(found.hits) == sorted(found.hits)
    assert 7_000 // 16 * 16 in found.hits
    shares = [found.share(one) for one in found.hits.values()]
    assert shares == sorted(shares)


def test_an_empty_trace_is_refused() -> None:
    with Trace(1) as trace, pytest.raises(TraceError, match="no requests"):
        traffic_of(trace, [])


def test_ids_of_blocks_give_whole_blocks() -> None:
    with Trace(512) as trace:
        for tail in (3, 4):
            trace.add(Record(1100, [1, 2, tail], 512))
        found = traffic_of(trace, [])
    assert list(found.known(10**9)) == [0, 1024]
    assert max(found.hits) == 2048  # two full blocks, and an unfinished one of each


def test_workloads_share_what_they_say() -> None:
    with trace_of(Agents(sessions=2, steps=3, think=1e-6, rate=1e-6)) as trace:
        found = list(trace)
    assert [record.num_tokens for record in found] == [9000, 10_200, 11_400] * 2
    assert found[0].ids[:8000] == found[3].ids[:8000]
    assert found[0].ids[8000] != found[3].ids[8000]
    assert found[1].ids[:9200] == found[0].ids + found[0].output_ids
    with trace_of(FewShot(sets=3, requests=50)) as trace:
        assert len({record.ids[0] for record in trace}) == 3
    with trace_of(Rag(documents=3, each=2, sort=1, requests=50)) as trace:
        firsts = {(record.ids[500], record.ids[2500]) for record in trace}
    assert len(firsts) == 3  # pairs in order: 12, 13, 23
    with trace_of(Chat(sessions=1, turns=2), seed=1) as one, trace_of(Chat(sessions=1)) as two:
        assert one[0].arrival_s == two[0].arrival_s == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("talk", "no workload 'talk': chat, agents"),
        ("chat:turn=3", "chat has no 'turn': system, turns"),
        ("chat:turns=0", "turns=0 is no whole number above 0"),
        ("rag:skew=x", "skew=x is no number from 0"),
        ("chat:turns", "turns= is no whole number"),
    ],
)
def test_a_description_that_cannot_be_says_what_can(text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        described(text)


def test_a_description_changes_what_it_names() -> None:
    assert described("chat:turns=3,think=0") == Chat(turns=3, think=0.0)
    with pytest.raises(WorkloadError, match="fewer sessions"):
        trace_of(Chat(turns=1, system=2**31, user=2**31, sessions=1))


def test_sources_are_taken_by_request() -> None:
    seen = first_tokens_s(site(), traffic({}, [100, 200]), [Source(None, [0, 150])])
    assert seen == [site().step.prefill_s(100), site().step.prefill_s(50, 150)]
