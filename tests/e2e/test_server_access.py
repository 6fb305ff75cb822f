"""Who may call, from where, how many at once; tokens and metrics, which answer no prompt."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo import EchoEngine
from foreword.cli.main import main
from foreword.core.stats import EngineStats, Histogram, TierStats
from foreword.server.metrics import SHOWN
from serving import serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODY: dict[str, Any] = {"model": "echo", "prompt": "hello"}


@contextmanager
def asking(engine: EchoEngine, **access: Any) -> Iterator[httpx.Client]:
    with serving(engine, **access) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(engine: EchoEngine) -> Iterator[httpx.Client]:
    with asking(engine, api_keys=["one", "two"]) as http:
        yield http


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Basic one"}, "missing_api_key"),
        ({"Authorization": "Bearer"}, "missing_api_key"),
        (bearer("three"), "invalid_api_key"),
        (bearer("onetwo"), "invalid_api_key"),
    ],
)
def test_without_a_known_key_nothing_is_served(
    guarded: httpx.Client, engine: EchoEngine, headers: dict[str, str], code: str
) -> None:
    answers = [
        guarded.post(TEXT, json=BODY, headers=headers),
        guarded.post(CHAT, content=b"{", headers=headers),
        guarded.post("/tokenize", json=BODY, headers=headers),
        guarded.post("/detokenize", json={"tokens": [97]}, headers=headers),
        guarded.post("/cache/clear", headers=headers),
        guarded.get("/cache/whatif", headers=headers),
        guarded.get("/cache/worth", headers=headers),
        guarded.get("/v1/models", headers=headers),
        guarded.get("/v1/models/echo", headers=headers),
    ]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == code
    assert engine.requests == []
    assert guarded.get("/health").status_code == guarded.get("/metrics").status_code == 200


def test_each_key_has_a_cache_of_its_own(guarded: httpx.Client, engine: EchoEngine) -> None:
    def cached(key: str, **fields: Any) -> int:
        answer = guarded.post(TEXT, json={**BODY, **fields}, headers=bearer(key))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("two"), cached("one"), cached("two")] == [0, 0, 4, 4]
    assert [cached("one", cache_salt="a"), cached("one", cache_salt="a")] == [0, 4]
    salt = engine.requests[0].cache_salt
    assert cached("two", cache_salt=salt) == 0
    assert "one" not in salt


def test_a_browser_may_call_from_named_origins_only(engine: EchoEngine) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    with asking(engine, cors_origins=["https://chat.example"]) as http:
        for origin, allowed in (("https://chat.example", True), ("https://other.example", False)):
            asked = http.options(TEXT, headers={"Origin": origin, **preflight})
            answer = http.post(TEXT, json=BODY, headers={"Origin": origin})
            assert asked.is_success is allowed
            assert answer.status_code == 200
            for response in (asked, answer):
                found = response.headers.get("Access-Control-Allow-Origin")
                assert (found == origin) is allowed
    with asking(engine) as http:
        answer = http.post(TEXT, json=BODY, headers={"Origin": "https://chat.example"})
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_again(
    http: httpx.Client, client: openai.OpenAI, engine: EchoEngine, stream: bool
) -> None:
    engine.busy = True
    answer = http.post(TEXT, json={**BODY, "stream": stream})
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="echo", prompt="x")


def test_tokens_and_text(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "echo", "prompt": "hi"}).json()
    assert answer == {"count": 2, "max_model_len": 1000, "tokens": [104, 105]}
    messages = [{"role": "user", "content": "hi"}]
    rendered = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = http.post("/detokenize", json={"model": "echo", "tokens": rendered}).json()
    assert text == {"prompt": "user: hi\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [1, 256]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
    ],
)
def test_bad_fields_of_tokenize(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_metrics_are_the_engine_s_counts(http: httpx.Client, engine: EchoEngine) -> None:
    ttft_s = Histogram()
    for seconds in (0.005, 0.025, 0.3, 99):
        ttft_s.add(seconds)
    disk = TierStats("disk", num_hit_tokens=5, num_bytes=99, lost={"late": 3}, read_s=ttft_s)
    engine.stats = EngineStats(
        num_queries=4, num_hit_tokens=12, ttft_s=ttft_s, device_bytes=77, tiers=(disk,)
    )
    answer = http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    process = {name for name in families if name.startswith("process_")}
    assert {
        "process_resident_memory_bytes",
        "process_open_fds",
    } <= process or sys.platform != "linux"
    assert {name: families[name].type for name in set(families) - process} == {
        shown.name: shown.kind for shown in SHOWN
    }
    values = {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["foreword_prefix_cache_queries_total{}"] == 4
    assert values['foreword_prefix_cache_hit_tokens_total{"tier": "device"}'] == 7
    assert values['foreword_prefix_cache_hit_tokens_total{"tier": "disk"}'] == 5
    assert values["foreword_kv_cache_disk_usage_bytes{}"] == 99
    assert values["foreword_kv_cache_cpu_usage_bytes{}"] == 0
    assert values['foreword_kv_cache_offload_blocks_lost_total{"reason": "late"}'] == 3
    assert values['foreword_kv_cache_offload_read_latency_seconds_count{"tier": "disk"}'] == 4, (
        "one for each read"
    )
    assert values["foreword_kv_cache_gpu_usage_bytes{}"] == 77
    assert values["foreword_ttft_seconds_count{}"] == 4
    assert values["foreword_ttft_seconds_sum{}"] == pytest.approx(99.33)
    buckets = {
        bound: values[f'foreword_ttft_seconds_bucket{{"le": "{bound}"}}']
        for bound in ("0.01", "0.025", "0.25", "0.5", "60.0", "+Inf")
    }
    assert buckets == {"0.01": 1, "0.025": 2, "0.25": 2, "0.5": 3, "60.0": 3, "+Inf": 4}


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_cache_of_a_running_server(
    http: httpx.Client, engine: EchoEngine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.stats = EngineStats(
        num_queries=4, num_hits=1, num_hit_tokens=30, num_miss_tokens=10, num_evicted_blocks=3
    )
    code, text = command(capsys, "cache", "stats", "--url", url, "--json")
    found = json.loads(text)
    assert code == 0
    assert (found["requests"], found["requests_that_reused"]) == (4, 1)
    assert (found["prompt_tokens"], found["share_reused"]) == (40, 0.75)
    assert (found["ttft_mean_s"], found["evicted_blocks"]) == (None, 3)
    http.post(TEXT, json=BODY)
    assert command(capsys, "cache", "clear", "--url", url, "--json") == (
        0,
        '{\n  "cleared": true\n}\n',
    )
    usage = http.post(TEXT, json=BODY).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_cache_in_use_is_not_cleared(
    http: httpx.Client, engine: EchoEngine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.step_s = 0.05
    with http.stream("POST", TEXT, json={**BODY, "ignore_eos": True, "stream": True}) as response:
        lines = response.iter_lines()  # held, since dropping it closes the stream
        assert next(lines)
        assert http.post("/cache/clear").status_code == 409
        code, text = command(capsys, "cache", "clear", "--url", url)
    assert code == 1
    assert "Requests are running" in text


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("stats", "clear"):
        code, text = command(capsys, "cache", words, "--url", "http://127.0.0.1:9")
        assert code == 1
        assert "no server answers at http://127.0.0.1:9" in text
