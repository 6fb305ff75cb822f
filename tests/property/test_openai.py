"""Whatever a body holds, it becomes a request within the API's limits or a RequestError."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo import EchoEngine
from foreword.core.errors import RequestError
from foreword.server.errors import error_body
from foreword.server.openai import KNOWN, MAX_N, UNSUPPORTED, Kind, parse

ENGINE = EchoEngine(max_model_len=200)
SURROGATES = st.characters(categories=["Cs"])
STRINGS = st.one_of(st.text(max_size=8), st.text(SURROGATES, max_size=2), st.just("user"))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), STRINGS
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), STRINGS, max_size=3)
    | st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)}),
    max_size=3,
)
VALUES = st.recursive(
    SCALARS | MESSAGES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)


def bodies(kind: Kind) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from([*KNOWN[kind], *UNSUPPORTED[kind]]) | STRINGS
    prompt = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat" else {"prompt": "x"}
    return st.dictionaries(names, VALUES, max_size=4).map(
        lambda fields: {"model": "echo", **prompt, **fields}
    )


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_body_is_a_request_or_a_refusal(kind: Kind) -> None:
    num_accepted = 0

    @given(bodies(kind))
    def check(body: dict[str, Any]) -> None:
        nonlocal num_accepted
        try:
            call = parse(ENGINE, kind, json.dumps(body).encode())
        except RequestError as error:
            text = json.dumps(error_body(error), ensure_ascii=False)
            assert len(text.encode()) < 700
            return
        num_accepted += 1
        request = call.requests[0]
        sampling = request.sampling
        assert 1 <= sampling.max_tokens <= ENGINE.card.max_model_len - len(request.prompt)
        assert 0 <= sampling.min_tokens <= sampling.max_tokens
        assert 0 <= sampling.temperature <= 2
        assert 0 <= sampling.top_p <= 1
        assert all(math.isfinite(bias) for bias in sampling.logit_bias.values())
        assert 1 <= request.n * len(call.requests) <= MAX_N
        assert len(request.cache_salt) <= 128
        assert all(stop != "" for stop in sampling.stop)
        assert type(call.stream) is bool

    check()
    assert num_accepted > 5


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestError):
        parse(ENGINE, "text", raw)
