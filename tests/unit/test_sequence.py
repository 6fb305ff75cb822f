"""Tokens to text, piece by piece."""

from tokenizers import Tokenizer, decoders, models

from foreword.engine.sequence import TextStream

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
