"""One request a line, its prompt as token ids, under one of `_PROMPTS`.

LLMServingSim writes `input_tok_ids`, `output_tok_ids`, `input_toks` and `arrival_time_ns`; vLLM's
outputs have `prompt_token_ids`; prefixlens reads `token_ids`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from foreword.sim.formats.bodies import session_of, tenant_of
from foreword.sim.formats.fields import count, first_of, moment
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_PROMPTS = ("prompt_token_ids", "input_tok_ids", "input_token_ids", "input_ids", "token_ids")
_ANSWERS = ("output_token_ids", "output_tok_ids", "completion_token_ids", "output_ids")
_TIMES = (
    *("arrival_time_ns", "timestamp_ms", "arrival_ms", "arrival_s", "arrival_time", "timestamp"),
    *("time", "created_at", "created"),
)
_CACHED = ("num_cached_tokens", "cached_tokens")
_LENGTHS = ("prompt_tokens", "num_prompt_tokens", "input_toks", "input_length")
_ANSWER_LENGTHS = ("completion_tokens", "num_output_tokens", "output_toks", "output_length")
_NONE = np.empty(0, np.uint32)


class TokenIds(Reader):
    """Reads rows of token ids."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        found = first_of(item, *_PROMPTS)
        if found is None:
            raise Bad(f"there are no token ids, under {', '.join(_PROMPTS)}")
        answer = first_of(item, *_ANSWERS)
        arrival_s = moment(item, *_TIMES)
        if arrival_s is None:
            arrival_s = 0.0
            self._reading.notes["{n} requests have no time: they come at once, in their order"] += 1
        numbers = self._reading.ids.numbers
        cached, length = first_of(item, *_CACHED), first_of(item, *_LENGTHS)
        ttft_s = moment(item, "ttft_ms", "ttft_s", "ttft")
        if ttft_s is not None and ttft_s < 0:
            raise Bad(f"its time to the first token is {ttft_s} s")
        said = Said(
            arrival_s,
            session_of(item),
            f"{item.get('tenant') or ''} {tenant_of(item)}".strip(),
            None if length is None else count(item, *_LENGTHS),
            count(item, *_ANSWER_LENGTHS, default=0),
            None if cached is None else count(item, *_CACHED),
            ttft_s,
        )
        output_ids = _NONE if answer is None else numbers(answer)
        yield self._reading.token_record(numbers(found), output_ids, said)


FORMATS = (Format("token-ids", lambda item: isinstance(first_of(item, *_PROMPTS), list), TokenIds),)
