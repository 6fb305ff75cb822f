"""Traces of lengths alone: when requests came and how long they were, not what they share.

Azure's LLM inference traces (AzurePublicDataset): `TIMESTAMP,ContextTokens,GeneratedTokens`.
BurstGPT: `Timestamp` in s, `Model`, `Request tokens`, `Response tokens`, `Total tokens`,
`Log Type`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.fields import moment, text
from foreword.sim.formats.reading import Format, Lengths, Reader
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record


class Lines(Reader):
    """Reads rows of a CSV file with these columns."""

    def __init__(self, when: str, prompt: str, answer: str) -> None:
        self._when, self._prompt, self._answer = when, prompt, answer

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        arrival_s = moment(item, self._when)
        if arrival_s is None:
            raise Bad(f"there is no {self._when}")
        num_tokens = _whole(item, self._prompt)
        if not num_tokens:
            raise Bad("its prompt is empty")
        session = text(item, "Session ID")
        yield Lengths(num_tokens, arrival_s, _whole(item, self._answer), session)


def _whole(item: Mapping[str, Any], name: str) -> int:
    found = str(item.get(name, "")).strip()
    if not (found.isascii() and found.isdigit() and len(found) < 10):
        raise Bad(f"{name} is {found[:40]!r}, not a whole number from 0")
    return int(found)


def _format(name: str, when: str, prompt: str, answer: str) -> Format:
    columns = {when, prompt, answer}
    return Format(
        name,
        lambda item: item.keys() >= columns,
        lambda reading: Lines(when, prompt, answer),
        is_header=lambda names: set(names) >= columns,
    )


FORMATS = (
    _format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _format("burstgpt", "Timestamp", "Request tokens", "Response tokens"),
)
