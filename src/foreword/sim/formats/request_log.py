"""The request log of `foreword serve`: its requests, and the engine that served them.

`foreword.engine.request_log` says what the lines hold. After a restart, and where all prefixes were
forgotten, nothing earlier is found again: from there on tenants have other names here. So a replay
keeps what a server had forgotten, and lets it go first, for it is used no more.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from foreword.core.cost import StepCost, TierCost
from foreword.core.place import PLACEMENTS, WriteThrough
from foreword.core.policies import POLICIES
from foreword.core.policy import LRU
from foreword.sim.formats.fields import count, mapping, number, objects, text
from foreword.sim.formats.reading import Format, Reader, Reading
from foreword.sim.ids import OWN_MAX
from foreword.sim.pieces import Bad, unpacked
from foreword.sim.shape import TierRoom, WorkerShape
from foreword.sim.trace import Record, TraceError

_COST_MAX_S = 1e6  # of anything that an engine does once
_TIME_MAX_S = 1e11  # of a date, too
_HEADS = (b'{"foreword":', b'{"costs":')  # of lines that are no requests


@dataclass(frozen=True, slots=True)
class LoggedEngine:
    """The engine of a log's last run. `num_cost_steps`: steps that its costs were learnt from; 0
    where it had none, and all costs are 0."""

    model: str
    shape: WorkerShape
    num_cost_steps: int


class RequestLog(Reader):
    """Reads a log line by line."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._num_runs = 0
        self._num_epochs = 0  # restarts, and times that all prefixes were forgotten

    def read(self, item: Mapping[str, Any]) -> Iterator[Record]:
        if "started" in item:
            self._begin(item)
        elif "cleared" in item:
            self._num_epochs += 1
        elif "costs" not in item:
            yield self._request(item)

    def _begin(self, item: Mapping[str, Any]) -> None:
        notes = self._reading.notes
        self._num_runs += 1
        if self._num_runs > 1:
            self._num_epochs += 1
            notes["{n} restarts: what a run found on disk of earlier ones is not replayed"] += 1
        if any(count(tier, "found", default=0) for tier in objects(item, "tiers")):
            notes["{n} runs began with KV on disk, whose prompts are not in the log"] += 1

    def _request(self, item: Mapping[str, Any]) -> Record:
        prompt = _ids(item, "prompt_ids")
        if not prompt:
            raise Bad("its prompt is empty")
        answers = item.get("answer_ids")
        if not isinstance(answers, list):
            raise Bad("answer_ids is no list")
        answers = [_ids({"answer_ids": answer}, "answer_ids") for answer in answers]
        lengths = [len(answer) for answer in answers]
        tenant = text(item, "tenant")
        epoch = f" {self._num_epochs}" if self._num_epochs else ""
        return Record(
            len(prompt),
            prompt,
            1,
            _seconds(item, "arrival"),
            sum(lengths),
            [token for answer in answers for token in answer],
            tenant=f"{tenant}{epoch}",
            num_cached_tokens=None if item.get("cached") is None else count(item, "cached"),
            ttft_s=None if item.get("ttft") is None else _seconds(item, "ttft"),
            total_s=_seconds(item, "total"),
            rest_s=0.0 if item.get("rest") is None else min(_COST_MAX_S, _seconds(item, "rest")),
            sample_lengths=lengths if len(lengths) > 1 else (),
            wants_prompt=bool(item.get("prompt_logprobs")),
            cancelled_at=None if any(lengths) else count(item, "computed", default=0),
        )


def read_engine(path: Path) -> LoggedEngine | None:
    """The engine of a log. None where the file is no log of `foreword serve`. Raises TraceError for
    a log that does not say enough, and OSError."""
    run: Mapping[str, Any] = {}
    costs: Mapping[str, Any] = {}
    with path.open("rb") as stream:
        lines = unpacked(stream)
        if not lines.peek(len(_HEADS[0])).startswith(_HEADS[0]):
            return None
        for line in _whole(lines):
            if not line.startswith(_HEADS):
                continue
            try:
                item = json.loads(line)
                run = item if "started" in item else run
                costs = mapping(item, "costs") if "costs" in item else costs
            except (ValueError, RecursionError, Bad):
                continue  # a line that was cut off; reading the requests names it
    if not run:
        return None
    try:
        return _engine(run, costs)
    except Bad as bad:
        raise TraceError(f"{path}: {bad}") from bad


def _whole(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Up to where a packed file is cut off; reading the requests says that it is."""
    try:
        yield from lines
    except Bad:
        return


def _engine(run: Mapping[str, Any], costs: Mapping[str, Any]) -> LoggedEngine:
    reads = costs.get("read_block_s") or []
    block_bytes = count(run, "block_bytes")
    tiers = [
        TierRoom(
            text(tier, "name"),
            count(tier, "blocks"),
            _read_cost(reads[at : at + 1], block_bytes),
            bool(tier.get("shared")),
        )
        for at, tier in enumerate(objects(run, "tiers"))
    ]
    named = ["device", *(tier.name for tier in tiers)]
    if len(set(named)) < len(named):
        raise Bad("two of its tiers have one name")
    names = [field.name for field in fields(StepCost)]
    shape = WorkerShape(
        count(run, "blocks"),
        StepCost(**{name: _cost(costs, name) for name in names}),
        block_size=count(run, "block_size"),
        block_bytes=block_bytes,
        tiers=tuple(tiers),
        max_num_seqs=count(run, "max_num_seqs"),
        max_batch_tokens=count(run, "max_batch_tokens"),
        max_prefill_tokens=count(run, "max_prefill_tokens"),
        reuse=bool(run.get("reuse")),
        policy=POLICIES.get(text(run, "evict"), LRU),  # a log may be older than its words
        placement=PLACEMENTS.get(text(run, "store"), WriteThrough),
    )
    room = (shape.num_blocks, shape.block_size, shape.max_num_seqs, shape.max_batch_tokens)
    if not (all(room) and shape.max_prefill_tokens):
        raise Bad("its engine has no room")
    return LoggedEngine(text(run, "model"), shape, count(costs, "steps", default=0))


def _cost(costs: Mapping[str, Any], name: str) -> float:
    found = number(costs, name) or 0.0
    if not 0 <= found <= _COST_MAX_S:
        raise Bad(f"{name} is {found}, not from 0 to {_COST_MAX_S:g} seconds")
    return found


def _read_cost(read_block_s: list[Any], block_bytes: int) -> TierCost:
    """Of a tier whose threads took so long for a block; at no cost where it read none."""
    seconds = read_block_s[0] if read_block_s else 0
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise Bad(f"read_block_s has {seconds!r}, no number of seconds")
    return TierCost(0.0, block_bytes / seconds if seconds and block_bytes else math.inf)


def _seconds(item: Mapping[str, Any], name: str) -> float:
    found = number(item, name)
    if found is None or not 0 <= found <= _TIME_MAX_S:
        raise Bad(f"{name} is {item.get(name)!r}, not a number from 0")
    return found


def _ids(item: Mapping[str, Any], name: str) -> list[int]:
    found = item.get(name)
    if not isinstance(found, list) or not all(
        type(one) is int and 0 <= one < OWN_MAX for one in found
    ):
        raise Bad(f"{name} is no list of token ids")
    return found


FORMATS = (Format("foreword", lambda item: item.keys() >= {"foreword", "started"}, RequestLog),)
