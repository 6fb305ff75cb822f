"""Trace files for tests: a few lines, or the public ones where they lie beside the checkout."""

import io
import json
from pathlib import Path

import pytest

from foreword.sim.importer import ReadOptions, read_trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"

# A record of each format in its true shape.
ROW = {"timestamp": 27_482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}
SESSION = {
    "id": "s1",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 20,
    "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 9, "hash_ids": [1, 2]},
        {
            "t": 50.0,
            "type": "subagent",
            "agent_id": "agent_001",
            "requests": [
                {"t": 0.5, "type": "s", "model": "m", "in": 64, "out": 3, "hash_ids": [9]},
                {"t": 60.0, "type": "s", "model": "m", "in": 64, "out": 3, "hash_ids": [9]},
            ],
        },
        {
            "t": 70,
            "type": "s",
            "model": "m",
            "in": 192,
            "out": 9,
            "hash_ids": [1, 2, 3],
            "ttft": 1.5,
        },
    ],
}
ROUND = {
    "provider": "claude",
    "session_id": "claude:92ee",
    "round_index": 0,
    "input_tokens_total": 700,
    "prefix_tokens": 300,
    "newly_append_tokens": 400,
    "output_tokens": 93,
    "timing_events": [
        {"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.000Z"},
        {"event_type": "text", "timestamp": "2026-06-01T05:40:29.887Z"},
    ],
}
PAYLOAD = {
    "id": "chatcmpl-1",
    "trace_id": "t1",
    "call_type": "acompletion",
    "stream": True,
    "status": "success",
    "startTime": 1760428436.5,
    "endTime": 1760428440.0,
    "completionStartTime": 1760428437.0,
    "model": "gpt-4o",
    "cache_hit": None,
    "prompt_tokens": 40,
    "completion_tokens": 5,
    "messages": [{"role": "user", "content": "Hello there, how are you?"}],
    "response": {
        "choices": [{"message": {"role": "assistant", "content": "Fine."}}],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 20},
        },
    },
    "model_parameters": {"temperature": 0.5},
    "metadata": {"user_api_key_hash": "88dc"},
}
ASKED = [{"role": "user", "parts": [{"type": "text", "content": "Weather in Paris?"}]}]
ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "gpt-4o",
    "gen_ai.conversation.id": "c1",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be short."}]),
    "gen_ai.input.messages": json.dumps(ASKED),
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.output_tokens": 7,
    "gen_ai.usage.cache_read.input_tokens": 75,
}
SPAN = {
    "name": "chat gpt-4o",
    "context": {"trace_id": "0x1", "span_id": "0x2"},
    "start_time": "2026-01-02T03:04:05.500000Z",
    "end_time": "2026-01-02T03:04:06.500000Z",
    "attributes": ATTRIBUTES,
    "events": [],
}
_HEAD = "(APIServer pid=7) {} 11-30 12:00:0{} [logger.py:45] "
VLLM = [
    "INFO 11-30 11:59:58 [api_server.py:1995] vLLM API server version 0.32.0, args: {'a': 1}",
    "WARNING: it can't be helped",
    _HEAD.format("DEBUG", 1) + "Request cmpl-1 details: prompt: 'it''s prompt_token_ids: [9]', "
    "prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.",
    _HEAD.format("INFO", 1) + "Received request cmpl-1: params: SamplingParams(n=1), "
    "lora_request: None.",
    _HEAD.format("DEBUG", 1) + 'Request cmpl-2 details: prompt: "it\'s", '
    "prompt_token_ids: [1, 2, 4, 5], prompt_embeds shape: None.",
    _HEAD.format("INFO", 1) + "Received request cmpl-2: params: SamplingParams(n=1), "
    "lora_request: LoRARequest(lora_name='sql', lora_int_id=1, lora_path='/l').",
    _HEAD.format("INFO", 2) + "Generated response cmpl-2 (streaming delta): output: 'x', "
    "output_token_ids: [6], finish_reason: None",
    _HEAD.format("INFO", 3) + "Generated response cmpl-2 (streaming complete): output: 'xy', "
    "output_token_ids: [6, 7], finish_reason: stop",
    'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK',
]
OLD_VLLM = (
    "INFO 11-30 12:00:01 [logger.py:39] Received request cmpl-9: prompt: 'a b', params: "
    "SamplingParams(n=1, stop=['x']), prompt_token_ids: [1, 2], prompt_embeds shape: None, "
    "lora_request: None, prompt_adapter_request: None."
)
FINISH = (
    "[2025-05-27 20:00:14 TP0] Finish: obj=GenerateReqInput(rid='r1', text=\"it's input_ids=[8]\", "
    "input_ids=[5, 6, 7], lora_path=None, stream=True), out={'text': 'a', 'output_ids': [8, 9], "
    "'meta_info': {'id': 'r1', 'finish_reason': {'type': 'length', 'length': 2}, "
    "'prompt_tokens': 3, 'completion_tokens': 2, 'cached_tokens': 1, 'e2e_latency': 1.5}}"
)


def shared(name):
    """A public trace."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} does not lie beside the checkout, in ../shared/traces")
    return path


def read_trace_file(name):
    """The trace that a public file is."""
    with shared(name).open("rb") as file:
        return read_trace(file, ReadOptions())


def stream(*lines):
    """A file of these lines: text as it is, anything else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return io.BytesIO("".join(f"{text}\n" for text in texts).encode())


def read(*lines, **options):
    """The trace that a file of these lines is."""
    return read_trace(stream(*lines), ReadOptions(**options))


def ids(trace):
    return [list(record.ids) for record in trace]


def records(*lines, **options):
    """What the trace holds that a file of these lines is, and its notes."""
    with read(*lines, **options) as trace:
        return list(trace), trace.notes
