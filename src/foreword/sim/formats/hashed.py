"""One request a line, its blocks as ids: Mooncake's traces and what others write in that form.

Mooncake (FAST25-release of kvcache-ai/Mooncake): `timestamp` in ms, `input_length`,
`output_length`, `hash_ids` of 512 tokens each, the last for what is left. aiperf and
kvcache-simulator add `session_id`, `delay` in ms after the row before, `block_size` or
`block_tokens`. Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): `timestamp` in seconds, ids of
16 tokens, `chat_id`, `parent_chat_id` (-1 begins a chat), `turn`, `type`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.fields import count, number, prompt_tokens, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading
from foreword.sim.formats.rows import RowClock
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_OF_BAILIAN = {"chat_id", "parent_chat_id"}
_OTHERWISE = (
    "{n} rows begin otherwise than the row before in their session; they are taken as they are, "
    "where aiperf would send the session's earlier rows before them"
)


class Mooncake(Reader):
    """Reads rows of Mooncake's kind."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.options.block_size or 512
        self._clock = RowClock(reading)
        self._first_ids: dict[str, int] = {}  # by session, of the row before

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        num_tokens = prompt_tokens(item, "input_length")
        num_output_tokens = count(item, "output_length", default=0)
        session = text(item, "session_id", "session")
        if item.get("hash_ids") is None:
            arrival_s = self._clock.arrival_s(item, session)
            yield Lengths(num_tokens, arrival_s, num_output_tokens, session)
            return
        id_tokens = count(item, "block_size", "block_tokens", default=self._block_size)
        if not id_tokens:
            raise Bad("its blocks have a size of 0")
        cached = count(item, "cached_tokens", default=-1)
        ids = self._reading.ids
        blocks = ids.prompt(ids.numbers(item["hash_ids"]), num_tokens, id_tokens)
        if session and "timestamp" not in item:
            self._reading.notes[_OTHERWISE] += self._first_ids.get(session, blocks[0]) != blocks[0]
            self._first_ids[session] = blocks[0]
        yield Record(
            num_tokens,
            blocks,
            id_tokens,
            self._clock.arrival_s(item, session),
            num_output_tokens,
            session=session,
            tenant=f"{text(item, 'tenant')} {text(item, 'model')}".strip(),  # models share no KV
            num_cached_tokens=None if cached < 0 else cached,
        )


class Bailian(Reader):
    """Reads rows of Bailian's kind."""

    def __init__(self, reading: Reading) -> None:
        self._ids = reading.ids
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
            ids = self._ids.numbers(item["hash_ids"])
            blocks = self._ids.prompt(ids, num_tokens, self._block_size)
            yield Record(
                num_tokens, blocks, self._block_size, stamp, num_output_tokens, session=root
            )
        self._roots[chat] = root


FORMATS = (
    Format("bailian", lambda item: item.keys() >= _OF_BAILIAN, Bailian),
    Format(
        "mooncake",
        lambda item: "input_length" in item and not item.keys() & _OF_BAILIAN,
        Mooncake,
    ),
)
