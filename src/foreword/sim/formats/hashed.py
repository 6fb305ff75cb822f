"""One request a line, its blocks as ids: Mooncake's traces and what others write in that form.

Mooncake (FAST25-release of kvcache-ai/Mooncake): `timestamp` in ms, `input_length`,
`output_length`, `hash_ids` of 512 tokens each, the last for what is left. aiperf and
kvcache-simulator add `session_id`, `delay` in ms after the row before, `block_size` or
`block_tokens`. Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): `timestamp` in seconds, ids of
16 tokens, `chat_id`, `parent_chat_id` (-1 begins a chat), `turn`, `type`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.reading import (
    Format,
    Lengths,
    Reading,
    count,
    number,
    prompt_tokens,
    text,
)
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_OF_BAILIAN = {"chat_id", "parent_chat_id"}


class Mooncake:
    """Reads rows of Mooncake's kind."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.options.block_size or 512
        self._last: dict[str, tuple[float, int]] = {}  # arrival and first id, by session

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        num_tokens = prompt_tokens(item, "input_length")
        num_output_tokens = count(item, "output_length", default=0)
        session = text(item, "session_id", "session")
        if item.get("hash_ids") is None:
            arrival_s = self._arrival_s(item, session, None)
            yield Lengths(num_tokens, arrival_s, num_output_tokens, session)
            return
        id_tokens = count(item, "block_size", "block_tokens", default=self._block_size)
        if not id_tokens:
            raise Bad("its blocks have a size of 0")
        cached = count(item, "cached_tokens", default=-1)
        ids = self._reading.ids
        blocks = ids.prompt(ids.numbers(item["hash_ids"]), num_tokens, id_tokens)
        yield Record(
            num_tokens,
            blocks,
            id_tokens,
            self._arrival_s(item, session, blocks[0]),
            num_output_tokens,
            session=session,
            tenant=f"{text(item, 'tenant')} {text(item, 'model')}".strip(),  # models share no KV
            num_cached_tokens=None if cached < 0 else cached,
        )

    def _arrival_s(self, item: Mapping[str, Any], session: str, first_id: int | None) -> float:
        stamp, delay = number(item, "timestamp"), number(item, "delay")
        last = self._last.get(session) if session else None
        if stamp is not None:
            arrival_s = stamp / 1000
        elif last is None:
            arrival_s = self._reading.start_s() if session else 0.0
        else:
            arrival_s = last[0] + (delay or 0.0) / 1000
            self._reading.notes[
                "{n} arrivals count from the row before, without the time of its answer"
            ] += 1
            if last[1] != first_id:
                self._reading.notes[
                    "{n} rows begin otherwise than the row before in their session; they are taken "
                    "as they are, where aiperf would send the session's earlier rows before them"
                ] += 1
        if session:
            self._last[session] = (arrival_s, first_id or 0)
        return arrival_s


class Bailian:
    """Reads rows of Bailian's kind."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.options.block_size or 16
        self._roots: dict[str, str] = {}  # the first chat_id of each chat's chain

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        num_tokens = prompt_tokens(item, "input_length")
        num_output_tokens = count(item, "output_length", default=0)
        chat, parent = text(item, "chat_id"), text(item, "parent_chat_id")
        stamp = number(item, "timestamp")
        if stamp is None:
            raise Bad("there is no timestamp")
        root = self._roots.get(parent, parent) if parent not in ("", "-1") else chat
        if item.get("hash_ids") is None:
            yield Lengths(num_tokens, stamp, num_output_tokens, root)
        else:
            ids = self._reading.ids
            blocks = ids.prompt(ids.numbers(item["hash_ids"]), num_tokens, self._block_size)
            yield Record(
                num_tokens, blocks, self._block_size, stamp, num_output_tokens, session=root
            )
        self._roots[chat] = root


FORMATS = (
    Format("Bailian", lambda item: item.keys() >= _OF_BAILIAN, Bailian),
    Format(
        "Mooncake",
        lambda item: "input_length" in item and not item.keys() & _OF_BAILIAN,
        Mooncake,
    ),
)
