"""Request bodies: what two prompts share in text, they share in ids, whichever API asks."""

import csv
import io
import json

import pytest

from foreword.sim.importer import ReadOptions, read_trace
from foreword.sim.trace import TraceError
from traces import read, records

SYSTEM = "You answer in one word. " * 20
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TURN = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "It is Paris, as everybody knows."}
CHAT = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, TURN], "tools": [TOOL]}


def shared_tokens(first, second):
    """How many ids two records share from their start."""
    pairs = zip(first.ids, second.ids, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(first.ids))


def text_of(record):
    return record.ids.tobytes().replace(b"\xff", b"").decode()


def test_a_chat_begins_with_tools_and_goes_on_after_its_answer():
    longer = {**CHAT, "messages": [*CHAT["messages"], ANSWER, {**TURN, "content": "And of Italy?"}]}
    first = {"request": CHAT, "response": {"choices": [{"message": ANSWER}]}, "timestamp": 1.5}
    (one, two), notes = records(first, {"request": longer, "timestamp": 4.0})
    assert text_of(one).startswith('<|tool|>\n{"type":"function"')
    assert SYSTEM in text_of(one)
    assert shared_tokens(one, two) == one.num_tokens
    assert list(two.ids)[one.num_tokens :][: len(one.output_ids)] == list(one.output_ids)
    assert one.num_output_tokens == len(one.output_ids) == 8
    assert two.arrival_s == 2.5
    assert notes == [
        "4 bytes of text count as a token in 2 prompts: an estimate; a tokenizer gives the model's "
        "own"
    ]


@pytest.mark.parametrize(
    "same",
    [
        {"messages": [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, TURN]},
        {"system": SYSTEM, "messages": [TURN]},
        {
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": TURN["content"]}]}],
        },
        {"instructions": SYSTEM, "input": TURN["content"]},
        {"instructions": SYSTEM, "input": [TURN]},
        {
            "instructions": SYSTEM,
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": TURN["content"]}],
                }
            ],
        },
    ],
)
def test_one_prompt_however_it_is_asked(same):
    (one, two), _ = records(CHAT, {"model": "m", "tools": [TOOL], **same})
    assert list(one.ids) == list(two.ids)


def test_order_and_model_and_salt_make_another_prompt():
    turned = {**TOOL, "function": dict(reversed(TOOL["function"].items()))}
    found, _ = records(
        CHAT, {**CHAT, "tools": [turned]}, {**CHAT, "model": "n"}, {**CHAT, "cache_salt": "s"}
    )
    assert shared_tokens(found[0], found[1]) < 30
    assert [record.tenant for record in found] == ["m", "m", "n", "s m"]


def test_calls_and_results_come_back_as_they_were_said():
    """The same ids as an answer and as history; of each API."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    openai = [
        {"request": CHAT, "response": {"choices": [{"message": said}]}},
        {**CHAT, "messages": [*CHAT["messages"], said, result]},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Let me look.", "signature": "x"}
    back = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
    content = [thought, {"type": "text", "text": "I look."}, use]
    anthropic = [
        {"body": CHAT, "response_body": {"role": "assistant", "content": content}},
        {
            **CHAT,
            "messages": [
                *CHAT["messages"],
                {"role": "assistant", "content": content},
                {"role": "user", "content": [back]},
            ],
        },
    ]
    asked = {"model": "m", "input": [TURN]}
    item = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    reasoned = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}
    output = [{**reasoned, "id": "r1"}, {**item, "id": "f1", "status": "completed"}]
    responses = [
        {"request": asked, "response": {"output": output}},
        {**asked, "input": [TURN, reasoned, item, given]},
    ]
    for lines in (openai, anthropic, responses):
        (one, two), _ = records(*lines)
        whole = list(one.ids) + list(one.output_ids)
        assert list(two.ids)[: len(whole)] == whole
        assert len(one.output_ids) > 4
        assert "42" in text_of(two)


def test_images_are_the_same_where_their_bytes_are_and_count_little():
    def asked(source):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{source}"}}
        content = [{"type": "text", "text": "What is it?"}, image, {"type": "text", "text": "?"}]
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    (one, two, other), notes = records(asked("A" * 9000), asked("A" * 9000), asked("B" * 9000))
    assert list(one.ids) == list(two.ids) != list(other.ids)
    assert one.num_tokens < 40
    assert any(note.startswith("3 images, sounds or files count") for note in notes)


@pytest.mark.parametrize(
    ("usage", "cached", "prompt"),
    [
        ({"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 50}}, 0.25, 200),
        ({"input_tokens": 200, "input_tokens_details": {"cached_tokens": 50}}, 0.25, 200),
        ({"input_tokens": 50, "cache_read_input_tokens": 150}, 0.75, 200),
        (
            {
                "input_tokens": 25,
                "cache_read_input_tokens": 75,
                "cache_creation_input_tokens": 50,
            },
            0.5,
            150,
        ),
        ({"prompt_tokens": 200}, None, 200),
    ],
)
def test_usage(usage, cached, prompt):
    answer = {"usage": {**usage, "output_tokens": 7}}
    (one,), notes = records({"request": CHAT, "response": answer})
    assert one.num_output_tokens == 7
    share = None if one.num_cached_tokens is None else one.num_cached_tokens / one.num_tokens
    assert share == (cached if cached is None else pytest.approx(cached, abs=0.01))
    assert any(note.startswith(f"the log counts {prompt} prompt tokens") for note in notes)


@pytest.mark.parametrize(
    ("extra", "session"),
    [
        ({"prompt_cache_key": "k", "user": "u"}, "k"),
        ({"metadata": {"session_id": "s"}}, "s"),
        ({"metadata": {"user_id": "user_1_session_2"}}, "user_1_session_2"),
        ({"user": "u"}, "u"),
        ({"conversation": {"id": "c"}}, "c"),
        ({"conversation": "c"}, "c"),
        ({}, ""),
    ],
)
def test_sessions(extra, session):
    (one,), _ = records({**CHAT, **extra})
    assert one.session == session


def test_completions():
    found, _ = records(
        {"model": "m", "prompt": "Once upon a time"},
        {"model": "m", "prompt": ["Once upon a time", "there was"]},
        {"model": "m", "prompt": [1, 2, 3]},
        {"model": "m", "prompt": [[1, 2, 3], [4]]},
        {"prompt": "Once upon a time"},
    )
    assert [record.num_tokens for record in found] == [4, 4, 3, 3, 3, 1, 4]
    assert list(found[0].ids) == list(found[1].ids)
    assert list(found[3].ids) == list(found[4].ids) == [1, 2, 3]


def test_rows_of_a_csv_file():
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["created_at", "request_json", "response_json", "session_id"])
    for minute in (1, 2):
        body = json.dumps({**CHAT, "messages": [{**TURN, "content": f'a\n"b", {minute}'}]})
        writer.writerow([f"2026-01-02T03:0{minute}:00Z", body, '{"usage": null}', "s"])
    with read_trace(io.BytesIO(table.getvalue().encode())) as trace:
        assert [record.arrival_s for record in trace] == [0.0, 60.0]
        assert {record.session for record in trace} == {"s"}
        assert trace.format_name == "bodies"
    broken = table.getvalue().replace('""tools""', '""tools')
    with pytest.raises(TraceError, match="line 2: no JSON"):
        read_trace(io.BytesIO(broken.encode()))


def test_other_places_of_a_body():
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    (one,), _ = records(batch)
    (two,), _ = records({"request_json": json.dumps(CHAT)})
    assert list(one.ids) == list(two.ids)


def test_a_tokenizer_gives_the_ids_and_is_asked_once_for_what_repeats():
    asked = []

    def tokenize(text):
        asked.append(text)
        return [ord(letter) for letter in text]

    longer = {**CHAT, "messages": [*CHAT["messages"], ANSWER]}
    found, notes = records(CHAT, longer, tokenize=tokenize)
    assert "".join(map(chr, found[0].ids)).endswith(f"<|user|>\n{TURN['content']}<|assistant|>\n")
    assert len(asked) == len(set(asked))
    assert notes == ["2 requests have no time: they come at once, in their order"]
    with pytest.raises(TraceError, match="line 1: the tokenizer gives what is no token id"):
        read(CHAT, tokenize=lambda text: [-1])


def test_text_in_mooncakes_form():
    rows = [
        {"session_id": "a", "messages": [TURN], "output_length": 50, "timestamp": 1000},
        {"session_id": "a", "messages": [TURN, ANSWER, TURN], "output_length": 30, "delay": 2000},
        {"text_input": "Hello world", "output_length": 4, "timestamp": 5000},
        {"payload": {"model": "m", "messages": [TURN]}, "timestamp": 6000, "output_length": 1},
    ]
    with read(*rows) as trace:
        found = list(trace)
        assert trace.format_name == "mooncake-text"
    assert [record.arrival_s for record in found] == [0.0, 2.0, 4.0, 5.0]
    assert [record.num_output_tokens for record in found] == [50, 30, 4, 1]
    assert shared_tokens(found[0], found[1]) == found[0].num_tokens
    with pytest.raises(TraceError, match="message_mode is delta"):
        read({**rows[0], "message_mode": "delta"})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"messages": []}, "its prompt is empty"),
        ({"messages": None, "input": None}, "its prompt is empty"),
        ({"messages": [7]}, "not a list of objects"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": 7}]}, "a content is a string or a list"),
        ({"messages": [{"role": "user", "content": [7]}]}, "a part of a content is an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        (
            {"messages": [{"role": "user", "content": "redacted-by-litellm"}]},
            "its text is left out",
        ),
        ({"model": "m", "input": "x", "previous_response_id": "r"}, "goes on from a previous"),
        ({"model": "m", "input": [{"type": "item_reference", "id": "r"}]}, "the server keeps"),
        ({"model": "m", "input": 7}, "neither a string nor a list"),
        ({"model": "m", "prompt": ""}, "its prompt is empty"),
        ({"model": "m", "prompt": []}, "its prompt is empty"),
        ({"model": "m", "prompt": [1.5]}, "a list of ids is expected, not float"),
        ({"request": CHAT, "timestamp": "soon"}, "timestamp is 'soon', not a time"),
        ({"request": "{"}, "no JSON"),
        ({"request": CHAT, "response": {"usage": {"prompt_tokens": -1}}}, "prompt_tokens is -1"),
        (
            {
                "request": CHAT,
                "response": {
                    "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}
                },
            },
            "6 cached tokens of a prompt of 5",
        ),
    ],
)
def test_a_bad_body_is_named(body, what):
    with pytest.raises(TraceError, match=f"line 2: .*{what}"):
        read(CHAT, body)
    with read_trace(
        io.BytesIO(f"{json.dumps(CHAT)}\n{json.dumps(body)}\n".encode()), ReadOptions(on_bad="skip")
    ) as trace:
        assert len(trace) == 1
