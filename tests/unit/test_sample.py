"""Tokens to text, piece by piece."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from foreword.core.block import BlockHash, Chain
from foreword.core.request import Request, SamplingParams
from foreword.engine.sample import Sample
from foreword.engine.text import TextStream

# As in Llama 2 and Gemma: a character outside the vocabulary is written as its bytes.
VOCAB = {"<unk>": 0, "x": 1, "<0x41>": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "B": 6, "END": 7}


def byte_fallback() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def pieces(token_ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(byte_fallback(), stop)
    return [stream.push(token_id)[0] for token_id in token_ids] + [stream.flush()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert pieces([1, 3, 4, 5, 6]) == ["x", "", "", "\N{EURO SIGN}", "B", ""]


def test_stray_bytes_do_not_end_the_text() -> None:
    text = "".join(pieces([1, 2, 3, 6, 1, 3, 4, 5]))
    assert text.startswith("x")
    assert text.endswith("Bx\N{EURO SIGN}")
    assert "\N{REPLACEMENT CHARACTER}" in text


def test_an_unfinished_character_at_the_end_stays_unfinished() -> None:
    assert "".join(pieces([1, 3, 4])).startswith("x\N{REPLACEMENT CHARACTER}")


def test_a_stop_string_over_several_tokens_is_left_out() -> None:
    stream = TextStream(byte_fallback(), ("xB",))
    assert stream.push(6) == ("B", False)
    assert stream.push(1) == ("", False)
    assert stream.push(6) == ("", True)
    assert stream.num_characters == 3


END = VOCAB["END"]


def answered(likes: list[int], **changes: Any) -> tuple[str, str | None, int]:
    """Text, finish reason and tokens of a greedy sample whose model likes `likes`, best first."""
    params = SamplingParams(temperature=0, **{"max_tokens": 5, **changes})
    request = Request("id", (1, 2), params)
    text = TextStream(byte_fallback(), params.stop)
    sequence = Sample(request, 0, Chain(BlockHash(bytes(32)), 4, request.prompt), 0, text)
    logits = torch.zeros(len(VOCAB))
    for rank, token_id in enumerate(likes):
        logits[token_id] = 5.0 - rank
    whole = ""
    while sequence.finish_reason is None:
        whole += sequence.advance(logits, {END}).text
    return whole, sequence.finish_reason, sequence.num_sampled


def test_the_end_token_ends_and_has_no_text() -> None:
    assert answered([END, 1]) == ("", "stop", 1)
    assert answered([END, 1], ignore_eos=True)[1:] == ("length", 5)


@pytest.mark.parametrize("num", [1, 4, 5])
def test_no_end_token_comes_before_min_tokens(num: int) -> None:
    expected = ("stop", num + 1) if num < 5 else ("length", 5)
    assert answered([END, 1], min_tokens=num) == ("x" * num, *expected)


def test_no_stop_string_counts_before_min_tokens() -> None:
    assert answered([1], stop=("xx",)) == ("", "stop", 2)
    assert answered([1], stop=("xx",), min_tokens=2) == ("xx", "stop", 4)
