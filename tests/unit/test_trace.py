"""Trace: what is added is read again, by arrival."""

from dataclasses import replace

import pytest

from foreword.sim.trace import Record, Trace, TraceError


def test_records_come_back_by_arrival_and_as_they_were() -> None:
    late = Record(5, [7, 8, 9], 2, 30.0, 4, [1, 2], "s", "t", 4, 0.5)
    late = replace(late, total_s=2.0, sample_lengths=(1, 1), wants_prompt=True, cancelled_at=3)
    early = Record(1, [2**32 - 1], 2, 10.0)
    with Trace(2) as trace:
        for record in (late, early, late):
            trace.add(record)
        found = list(trace)
    assert [list(record.ids) for record in found] == [[2**32 - 1], [7, 8, 9], [7, 8, 9]]
    assert [record.arrival_s for record in found] == [0.0, 20.0, 20.0]
    assert [record.place for record in found] == [0, 1, 2]
    assert (found[0].num_cached_tokens, found[0].ttft_s, found[0].session) == (None, None, "")
    assert (found[1].num_tokens, found[1].num_output_tokens, list(found[1].output_ids)) == (
        (5, 4, [1, 2])
    )
    assert (found[1].session, found[1].tenant, found[1].num_cached_tokens) == ("s", "t", 4)
    assert (found[1].ttft_s, found[1].total_s, found[0].total_s) == (0.5, 2.0, None)
    assert (found[1].sample_lengths, found[1].wants_prompt, found[1].cancelled_at) == (
        ((1, 1), True, 3)
    )
    assert (found[0].sample_lengths, found[0].wants_prompt, found[0].cancelled_at) == (
        ((), False, None)
    )


def test_ids_of_two_sizes_or_too_few_are_refused() -> None:
    with Trace(2) as trace:
        with pytest.raises(TraceError, match="an id stands for 3 tokens here and for 2 before"):
            trace.add(Record(3, [1], 3))
        for num_tokens, ids in ((3, [1]), (2, [1, 2]), (0, [])):
            with pytest.raises(TraceError, match="tokens and"):
                trace.add(Record(num_tokens, ids, 2))
        assert len(trace) == 0
