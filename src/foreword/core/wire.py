"""KV events as they travel between processes: plain objects, which a caller packs as msgpack.

The format is vLLM's (`vllm/distributed/kv_events.py`), which SGLang has too
(`sglang/srt/disaggregation/kv_events.py`). A batch is `[time, events, rank]`, or a map of these
names; an event is a map with its kind under "type", or an array that starts with it. Which of the
two, on either level, depends on the engine's version, so all four are read:

| | batch | events |
|---|---|---|
| vLLM until June 2026, older SGLang | array | arrays |
| vLLM 0.32, SGLang 0.5.23 | array | maps |
| later vLLM | map | maps |

Fields at their default may be left out, at the end of an array too, and unknown ones are passed
over. A hash is an engine's own: its bytes, or an integer of 64 bits, which becomes its 8 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.core.block import BlockHash
from foreword.core.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

# Names in the order of arrays; what is not named in the code below has no reader here.
_BATCH = ("ts", "events", "data_parallel_rank")
_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
# Sent although they are None: vLLM's reader wants them.
_ALWAYS = {"parent_block_hash", "lora_id", "medium", "lora_name"}


class BadBatch(ValueError):
    """What arrived is no batch of KV events; the message says why."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one engine step changed."""

    time_s: float  # since 1970, by the engine's clock
    events: tuple[KVEvent, ...]
    rank: int | None = None  # of a data-parallel engine
    num_unknown: int = 0  # events of kinds that this version does not know, left out


def encode_batch(
    batch: EventBatch, *, batch_as_map: bool = False, events_as_maps: bool = True
) -> list[Any] | dict[str, Any]:
    """Lists, dicts, strings, bytes and numbers, ready to be packed."""
    events = [_encode(event, as_map=events_as_maps) for event in batch.events]
    return _record(_BATCH, (batch.time_s, events, batch.rank), as_map=batch_as_map)


def _encode(event: KVEvent, *, as_map: bool) -> list[Any] | dict[str, Any]:
    kind = type(event).__name__
    values: tuple[Any, ...] = ()
    if isinstance(event, BlockStored):
        lora_id = lora_name = extra_keys = None
        values = (list(event.block_hashes), event.parent_block_hash, list(event.token_ids))
        values += (event.block_size, lora_id, event.medium, lora_name, extra_keys, event.group)
    elif isinstance(event, BlockRemoved):
        values = (list(event.block_hashes), event.medium, event.group)
    return _record(("type", *_FIELDS[kind]), (kind, *values), as_map=as_map)


def _record(
    names: Sequence[str], values: Sequence[Any], *, as_map: bool
) -> list[Any] | dict[str, Any]:
    """Without what is None, where it may be left out: anywhere in a map, at the end of an array."""
    pairs = list(zip(names, values, strict=True))
    if as_map:
        return {name: value for name, value in pairs if value is not None or name in _ALWAYS}
    while pairs and pairs[-1][1] is None and pairs[-1][0] not in _ALWAYS:
        del pairs[-1]
    return [value for _name, value in pairs]


def decode_batch(plain: object) -> EventBatch:
    """The batch that unpacked objects mean. Raises BadBatch, also where one event of it is broken:
    a batch is known whole or not at all."""
    fields = _named(plain, _BATCH)
    time_s, events, rank = (fields.get(name) for name in _BATCH)
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise BadBatch(f"its time is {time_s!r:.40}")
    if not isinstance(events, list | tuple):
        raise BadBatch(f"its events are {events!r:.40}")
    if rank is None:  # SGLang's word for it
        rank = fields.get("attn_dp_rank")
    known = [event for event in map(_decode, events) if event is not None]
    number = _integer(rank)
    return EventBatch(float(time_s), tuple(known), number, len(events) - len(known))


def _decode(plain: object) -> KVEvent | None:
    """None: of a kind that is not known."""
    if isinstance(plain, Mapping):
        kind = plain.get("type")
    elif isinstance(plain, list | tuple) and plain:
        kind = plain[0]
    else:
        raise BadBatch(f"an event is {plain!r:.40}")
    if not isinstance(kind, str):
        raise BadBatch(f"an event's kind is {kind!r:.40}")
    if kind not in _FIELDS:
        return None
    fields = _named(plain, ("type", *_FIELDS[kind]))
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = tuple(_hash(value) for value in _items(fields, "block_hashes"))
    medium = fields.get("medium")
    where = medium if isinstance(medium, str) else DEVICE
    group = _integer(fields.get("group_idx"))
    if kind == "BlockRemoved":
        return BlockRemoved(hashes, where, group)
    parent = fields.get("parent_block_hash")
    tokens, size = tuple(_items(fields, "token_ids")), _integer(fields.get("block_size"))
    if not all(type(token) is int for token in tokens):
        raise BadBatch("a token id is no integer")
    # vLLM's connector names chunks in host memory without saying what is in them (block size 0).
    if size is None or size < (1 if tokens else 0):
        raise BadBatch(f"its block size is {fields.get('block_size')!r:.40}")
    return BlockStored(
        hashes, None if parent is None else _hash(parent), tokens, size, where, group
    )


def _named(plain: object, names: Sequence[str]) -> Mapping[Any, Any]:
    """The fields by name. What an array has beyond the names is a later version's."""
    if isinstance(plain, Mapping):
        return plain
    if isinstance(plain, list | tuple):
        return dict(zip(names, plain, strict=False))
    raise BadBatch(f"it is {plain!r:.40}")


def _items(fields: Mapping[Any, Any], name: str) -> Sequence[Any]:
    value = fields.get(name)
    if not isinstance(value, list | tuple):
        raise BadBatch(f"{name} is {value!r:.40}")
    return value


def _integer(value: object) -> int | None:
    """None for anything else: arrays of versions that differ have other things in its place."""
    return value if type(value) is int else None


def _hash(value: object) -> BlockHash:
    if isinstance(value, bytes) and value:
        return BlockHash(value)
    # vLLM's are unsigned, SGLang's signed.
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return BlockHash((value & ((1 << 64) - 1)).to_bytes(8, "big"))
    raise BadBatch(f"a block's hash is {value!r:.40}")


def replay_endpoint(endpoint: str) -> str:
    """Where batches can be asked for again, unless it is said: the next port. Raises ValueError for
    what is not written as tcp://HOST:PORT."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{endpoint!r} is no endpoint: write it as tcp://127.0.0.1:5557")
    if not 0 < int(port) < 65535:
        raise ValueError(f"{endpoint!r}: the port must be from 1 to 65534")
    return f"{scheme}://{host}:{int(port) + 1}"
