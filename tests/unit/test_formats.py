"""Formats of agents, chats, gateways, spans and token ids: small files in their true shapes."""

import json

import pytest

from foreword.sim.importer import NoPrefixes, ReadOptions, read_lengths, read_trace
from foreword.sim.trace import TraceError
from traces import ASKED, ATTRIBUTES, PAYLOAD, ROUND, SPAN, read, records, shared, stream


def otlp(*spans):
    """Spans as OTLP's JSON has them."""

    def value(one):
        if isinstance(one, str):
            return {"stringValue": one}
        return {"intValue": str(one)}

    made = [
        {
            "traceId": "5b8e",
            "spanId": "eee1",
            "startTimeUnixNano": str(1767323045500000000 + index * 10**9),
            "attributes": [{"key": key, "value": value(one)} for key, one in attributes.items()],
        }
        for index, attributes in enumerate(spans)
    ]
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": made}]}]}


def test_tracelab_rounds_have_what_the_provider_found_cached():
    second = {**ROUND, "input_tokens_total": 900, "prefix_tokens": 640, "newly_append_tokens": 260}
    compacted = {**second, "prefix_tokens": 70, "newly_append_tokens": 830}
    other = {**ROUND, "session_id": "codex:1"}
    (one, two, three, four), notes = records(ROUND, second, compacted, other)
    assert (one.id_tokens, len(one.ids), one.num_cached_tokens) == (64, 11, 300)
    assert list(two.ids)[:10] == list(one.ids)[:10]
    assert two.ids[10] != one.ids[10]
    assert list(three.ids)[:1] == list(one.ids)[:1]
    assert not set(three.ids[1:]) & {*one.ids, *two.ids}
    assert not set(four.ids) & {*one.ids, *two.ids, *three.ids}
    assert any(note.startswith("4 rounds have ids made of") for note in notes)
    assert any(note.startswith("2 rounds found more cached") for note in notes)
    for change, what in (
        ({"prefix_tokens": 301}, "301 prefix and 400 new tokens are not its 700"),
        ({"session_id": ""}, "the round has no session_id"),
        ({"timing_events": []}, "the round has no time"),
        ({"timing_events": [{"timestamp": "once"}]}, "timestamp is 'once', not a time"),
    ):
        with pytest.raises(TraceError, match=f"line 2: {what}"):
            read(ROUND, {**ROUND, **change})


def test_tracelabs_sample():
    with read_trace(shared("tracelab_example_sanitized.jsonl.gz")) as trace:
        found = list(trace)
    assert len(found) == 19
    assert {record.session.split(":")[0] for record in found} == {"claude", "codex"}
    assert all(record.num_cached_tokens <= record.num_tokens for record in found)


def test_litellm():
    (one,), notes = records(PAYLOAD)
    assert (one.session, one.tenant, one.num_output_tokens) == ("t1", "gpt-4o", 2)
    assert one.ttft_s == 0.5
    assert one.num_cached_tokens / one.num_tokens == pytest.approx(0.5, abs=0.05)
    unseen = [
        {**PAYLOAD, "cache_hit": True},
        {**PAYLOAD, "status": "failure"},
        {**PAYLOAD, "call_type": "aembedding"},
    ]
    found, notes = records(PAYLOAD, *unseen)
    assert len(found) == 1
    assert [note for note in notes if "left out" in note] == [
        "1 calls are left out: answered from the gateway's own cache",
        "1 calls are left out: they failed",
        "1 calls are left out: of the kind aembedding",
    ]
    hidden = {**PAYLOAD, "messages": [{"role": "user", "content": "redacted-by-litellm"}]}
    with pytest.raises(TraceError, match="line 1: its text is left out"):
        read(hidden)
    with pytest.raises(NoPrefixes):
        read({**PAYLOAD, "messages": None})
    with pytest.raises(TraceError, match="there is no startTime"):
        read({**PAYLOAD, "startTime": None})
    spoken = {**PAYLOAD, "call_type": "aresponses"}
    tools = {**PAYLOAD, "model_parameters": {"tools": [{"type": "function", "name": "f"}]}}
    found, _ = records(PAYLOAD, spoken, tools, {**PAYLOAD, "messages": "Hello"})
    assert list(found[0].ids) == list(found[1].ids)
    assert list(found[2].ids)[:2] != list(found[0].ids)[:2]


def test_spans_in_any_wrapping_are_the_same_prompt():
    structured = {**ATTRIBUTES, "gen_ai.input.messages": ASKED}
    flat = {"start_time": SPAN["start_time"], **ATTRIBUTES}
    with read(SPAN) as trace:
        one = trace[0]
        assert trace.format_name == "otel"
    assert (one.session, one.tenant, one.num_output_tokens) == ("c1", "gpt-4o", 7)
    assert one.num_cached_tokens / one.num_tokens == pytest.approx(0.75, abs=0.05)
    for other in ({**SPAN, "attributes": structured}, flat, otlp(ATTRIBUTES)):
        (two,), _ = records(other)
        assert (list(two.ids), two.session, two.num_cached_tokens) == (
            (list(one.ids), "c1", one.num_cached_tokens)
        )


def test_spans_of_older_conventions():
    older = {
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be short.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "Weather in Paris?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "It rains.",
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.usage.cache_read_input_tokens": 75,
    }
    underscored = {key.replace(".", "_", 2): value for key, value in ATTRIBUTES.items()}
    (new,), _ = records(SPAN)
    (old,), _ = records({**SPAN, "attributes": older})
    (odd,), _ = records({**SPAN, "attributes": underscored})
    assert list(old.ids) == list(new.ids) == list(odd.ids)
    assert (old.num_cached_tokens, odd.num_cached_tokens) == (new.num_cached_tokens,) * 2
    assert (old.session, odd.session) == ("0x1", "c1")
    assert len(old.output_ids) == 3
    event = {"name": "gen_ai.content.prompt", "attributes": {"gen_ai.prompt": json.dumps(ASKED)}}
    bare = {key: ATTRIBUTES[key] for key in ATTRIBUTES if "messages" not in key}
    (told,), _ = records({**SPAN, "attributes": bare, "events": [event]})
    assert list(told.ids) == list(new.ids)


def test_spans_with_tools_go_on_after_their_answer():
    call = {"type": "tool_call", "id": "c", "name": "weather", "arguments": {"city": "Paris"}}
    said = {"role": "assistant", "parts": [call], "finish_reason": "tool_call"}
    result = {"type": "tool_call_response", "id": "c", "response": "rain"}
    tools = json.dumps([{"type": "function", "name": "weather"}])
    first = {**ATTRIBUTES, "gen_ai.tool.definitions": tools}
    history = [*ASKED, {**said}, {"role": "tool", "parts": [result]}]
    second = {**first, "gen_ai.input.messages": json.dumps(history)}
    first["gen_ai.output.messages"] = json.dumps([said])
    (one, two), _ = records(otlp(first, second))
    whole = [*one.ids, *one.output_ids]
    assert list(two.ids)[: len(whole)] == whole
    assert two.arrival_s == pytest.approx(1.0)


def test_spans_that_are_no_calls_or_have_no_text():
    tool = {**ATTRIBUTES, "gen_ai.operation.name": "execute_tool"}
    found, _ = records(otlp({"http.method": "GET"}, tool, {"gen_ai.agent.name": "a"}, ATTRIBUTES))
    assert len(found) == 1
    bare = {key: ATTRIBUTES[key] for key in ATTRIBUTES if "messages" not in key}
    with pytest.raises(NoPrefixes):
        read({**SPAN, "attributes": bare})
    for change, what in (
        ({"gen_ai.input.messages": json.dumps(ASKED)[:-5]}, "is cut off, or no JSON"),
        ({"gen_ai.input.messages": "[7]"}, "not a list of objects"),
        ({"gen_ai.usage.cache_read.input_tokens": -1}, "cache_read.input_tokens is -1"),
        ({"gen_ai.usage.input_tokens": "many"}, "not a whole number"),
    ):
        with pytest.raises(TraceError, match=f"line 2: .*{what}"):
            read(SPAN, {**SPAN, "attributes": {**ATTRIBUTES, **change}})
    beside = {**ATTRIBUTES, "gen_ai.usage.cache_read.input_tokens": 101}
    (one,), notes = records({**SPAN, "attributes": beside})
    assert one.num_cached_tokens is None
    assert "1 spans count more cached than input tokens: left out" in notes
    with pytest.raises(TraceError, match="a span has no start time"):
        read(ATTRIBUTES)


def test_sharegpt_asks_once_for_each_turn_of_a_user():
    chat = [
        {"from": "human", "value": "Hello, who are you?"},
        {"from": "gpt", "value": "A language model."},
        {"from": "human", "value": "Which?"},
    ]
    empty = {"id": "b", "conversations": []}
    text = json.dumps([{"id": "a", "conversations": chat}, empty], indent=2)
    (one, two), notes = records(text)
    assert list(two.ids)[: one.num_tokens] == list(one.ids)
    assert list(two.ids)[one.num_tokens :][: len(one.output_ids)] == list(one.output_ids)
    assert len(two.output_ids) == 0
    assert (one.session, two.arrival_s - one.arrival_s) == ("a", pytest.approx(60))
    assert "1 conversations have no turn of a user" in notes
    assert "1 turns follow the turn before by 60 s: no times" in notes
    assert any(note.startswith("1 sessions have no clock in common") for note in notes)
    wild = {"conversation": [{"role": "user", "content": chat[0]["value"]}], "model": "m"}
    (three,), _ = records({**wild, "timestamp": "2026-01-02T03:04:05"})
    assert list(three.ids) == list(one.ids)
    with pytest.raises(TraceError, match="line 1: a turn does not say whom it is from"):
        read({"conversations": [{"value": "x"}]})
    with pytest.raises(TraceError, match=r"line 3: a content is a string"):
        read('[{"conversations": []},\n\n{"conversations": [{"from": "human", "value": 7}]}]')


def test_agents_of_lmcache():
    rows = [
        {"timestamp": 1760428436442742 + i, "input": "abcd" * (i + 1), "output": "12345"}
        for i in range(2)
    ]
    (one, two), _ = records(*({**row, "session_id": "s"} for row in rows))
    assert (one.num_tokens, two.num_tokens, one.num_output_tokens) == (1, 2, 2)
    assert two.arrival_s == pytest.approx(1e-6, rel=0.2)
    with pytest.raises(TraceError, match="input and output are not both text"):
        read({**rows[0], "session_id": "s", "input": None})


def test_lmcaches_agents():
    with read_trace(shared("lmcache_agent_miniswe.jsonl.gz")) as trace:
        assert len(trace) == 402
        assert len({record.session for record in trace}) == 20
        assert trace.format_name == "lmcache-agents"
        assert any("put in order" in note for note in trace.notes)
        assert trace[401].arrival_s == pytest.approx(552.13, abs=0.01)


def test_token_ids():
    rows = [
        {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4, 5], "arrival_s": 7.5},
        {"input_toks": 2, "output_toks": 1, "arrival_time_ns": 9_000_000_000}
        | {"input_tok_ids": [1, 2], "output_tok_ids": [3]},
        {"token_ids": [1, 2**40, -1], "timestamp": 10, "session_id": "s", "tenant": "t"}
        | {"num_cached_tokens": 2, "ttft_ms": 500},
    ]
    found, _ = records(*rows)
    assert [list(record.ids)[:2] for record in found[:2]] == [[1, 2], [1, 2]]
    assert list(found[0].output_ids) == [4, 5]
    assert [record.arrival_s for record in found] == [0.0, 1.5, 2.5]
    assert (found[2].session, found[2].tenant, found[2].num_cached_tokens) == ("s", "t", 2)
    assert found[2].ttft_s == 0.5
    assert max(found[2].ids) < 2**32 - 1
    for row, what in (
        ({"token_ids": []}, "its prompt is empty"),
        ({"token_ids": [1], "input_toks": 2}, "1 token ids, and it counts 2"),
        ({"token_ids": [1], "num_cached_tokens": 2}, "2 cached tokens of a prompt of 1"),
        ({"token_ids": [1], "ttft_s": -1}, "time to the first token is -1"),
        ({"token_ids": "abc"}, "there are no|a list of ids is expected"),
        ({"text": "abc"}, "there are no token ids"),
    ):
        with pytest.raises(TraceError, match=f"line 2: .*({what})"):
            read(rows[0], row)
    with pytest.raises(TraceError, match="blocks of any size can be replayed"):
        read(*rows, coarsen=512)


AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
BURST = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]


def test_lengths():
    for lines, arrival_s in (
        ([*AZURE, "2023-11-16 18:15:50.9951690,396,109"], 4.314579),
        ([*BURST, "5,ChatGPT,374,44,418,Conversation log", "45,GPT-4,396,109,505,API log"], 40),
    ):
        with pytest.raises(NoPrefixes, match="line 2: this trace has lengths"):
            read(*lines)
        one, two = read_lengths(stream(*lines))
        assert (one.num_tokens, one.num_output_tokens) == (374, 44)
        assert two.arrival_s - one.arrival_s == pytest.approx(arrival_s, abs=1e-5)
    for row, what in (
        ("2023-11-16 18:15:50,x,1", "ContextTokens is 'x'"),
        ("2023-11-16 18:15:50,-1,1", "ContextTokens is '-1'"),
        ("2023-11-16 18:15:50,0,1", "its prompt is empty"),
        ("yesterday,1,1", "TIMESTAMP is 'yesterday', not a time"),
        (",1,1", "there is no TIMESTAMP"),
        ("2023-11-16 18:15:50,1", "2 columns, and the first line names 3"),
    ):
        with pytest.raises(TraceError, match=f"line 3: .*{what}"):
            read_lengths(stream(*AZURE, row))
    kept = read_lengths(stream(*AZURE, "x,1"), ReadOptions(on_bad="skip"))
    assert len(kept) == 1


def test_azures_trace():
    path = shared("azure_llm_2023_conv.csv.gz")
    assert len(read_lengths(path)) == 19_366
    with pytest.raises(NoPrefixes):
        read_trace(path)


def test_tracelab_an_unfilled_block_is_another_when_it_is_full():
    rows = [
        {"session_id": "s", "input_tokens_total": total, "prefix_tokens": cached}
        | {"newly_append_tokens": total - cached, "output_tokens": 1}
        | {
            "timing_events": [
                {"event_type": "user_message", "timestamp": f"2026-06-01T05:40:{at}Z"}
            ]
        }
        for at, (total, cached) in enumerate([(100, 0), (200, 128)], start=10)
    ]
    with read_trace(stream(*rows)) as trace:
        first, second = (list(record.ids) for record in trace)
    assert first[0] == second[0]
    assert first[1] not in second
