"""Request logs of vLLM and SGLang, where they hold the prompts' token ids.

vLLM (`--enable-log-requests`, with VLLM_LOGGING_LEVEL=DEBUG from 0.11 on): `Request ID details:
prompt: ..., prompt_token_ids: [...]`, before 0.11 `Received request ID: prompt: ..., params: ...,
prompt_token_ids: [...]`; answers, with `--enable-log-outputs`: `Generated response ID: output: ...,
output_token_ids: [...]`. SGLang (`--log-requests --log-requests-level 3`): `Finish: obj=Generate
ReqInput(rid=..., input_ids=[...], ...), out={...}`, or one JSON object a line with `event`
`request.finished` (`--log-requests-format json`). Lower levels cut long prompts in the middle.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from foreword.sim.formats.fields import count, first_of, mapping, moment, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_NONE = np.empty(0, np.uint32)
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
_SHORT = re.compile(r"""['"][\w.:-]{0,80}['"]""")
_IDS = r"(\[[\d, ]*\](?: \.\.\. \[[\d, ]*\])?|None)"
_VLLM_ASKED = re.compile(rf"(?:Request|Received request) (\S+?):? .*?prompt_token_ids: {_IDS}")
_VLLM_TOLD = re.compile(rf"Generated response (\S+?)(?: \([\w ]+\))?: .*output_token_ids: {_IDS}")
_VLLM_NAMED = re.compile(r"Received request (\S+?): ")
_VLLM_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_SGLANG_IDS = re.compile(rf"\binput_ids={_IDS}")
_SGLANG_OUTPUT = re.compile(rf"'output_ids': {_IDS}")
_SGLANG_FIELD = re.compile(r"'(\w+)': ([\w.+-]+)")
_LORA = re.compile(r"\blora_(?:name|path)='([^']*)'")
_YEAR_S = 366 * 86400.0
_NUM_PENDING_MAX = 2000  # requests whose answers are waited for


def _plain(line: str) -> str:
    """A log's line without the texts in it, which may hold anything."""
    return _QUOTED.sub(lambda found: found[0] if _SHORT.fullmatch(found[0]) else "''", line)


def _ids(shown: str) -> list[int] | None:
    """Raises Bad for ids that were cut."""
    if " ... " in shown:
        raise Bad("the middle of its token ids is cut out: log at level 3")
    if shown == "None":
        return None
    try:
        return [int(one) for one in shown[1:-1].split(",")] if shown != "[]" else []
    except ValueError as error:
        raise Bad("its token ids are no list of numbers") from error


def vllm_line(line: str) -> Mapping[str, Any] | None:
    """A prompt or an answer; None for all that else is in a log."""
    if "Request " not in line and "request " not in line and "Generated response " not in line:
        return None
    plain = _plain(line)
    lora = _LORA.search(plain)
    tenant = "" if lora is None else lora[1]
    if found := _VLLM_ASKED.search(plain):
        time = _VLLM_TIME.search(plain)
        arrival_s = None if time is None else _of_year([int(part) for part in time.groups()])
        asked = {"ids": _ids(found[2]), "arrival_s": arrival_s, "tenant": tenant}
        return {"vllm": "asked", "id": found[1], **asked}
    if found := _VLLM_NAMED.search(plain):
        return {"vllm": "named", "id": found[1], "tenant": tenant}
    found = _VLLM_TOLD.search(plain)
    if found is None or "(streaming delta)" in plain:
        return None
    return {"vllm": "told", "id": found[1], "ids": _ids(found[2])}


def _of_year(parts: list[int]) -> float:
    """Seconds of a time without a year; of a leap year, where any day can be."""
    month, day, hour, minute, second = parts
    try:
        return datetime(2024, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError as error:
        raise Bad(f"its time cannot be: {error}") from error


class VLLM(Reader):
    """Joins prompts with their answers."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        reading.in_order = False  # they come with their answers
        self._pending: dict[str, tuple[list[int], Said]] = {}
        self._latest_s = -math.inf
        self._num_named = self._num_asked = 0
        self._longest = self._num_longest = 0

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        name, pending = item["id"], self._pending
        if item["vllm"] == "named":
            self._num_named += 1
            if name in pending and item["tenant"]:
                ids, said = pending[name]
                pending[name] = ids, replace(said, tenant=item["tenant"])
        elif item["vllm"] == "told":
            if name in pending:
                yield self._made(name, item["ids"] or [])
        else:
            self._asked(item)
            if len(pending) > _NUM_PENDING_MAX:
                yield self._made(next(iter(pending)), [])

    def _asked(self, item: Mapping[str, Any]) -> None:
        ids, arrival_s = item["ids"], item["arrival_s"]
        if ids is None:
            raise Bad("it has no token ids: its prompt is given as embeddings")
        if arrival_s is None:
            raise Bad("the line has no time")
        if item["id"] in self._pending:
            raise Bad(f"there is a request {item['id']} already, without its answer")
        self._num_asked += 1
        if arrival_s < self._latest_s - _YEAR_S / 2:  # the times have no year
            arrival_s += _YEAR_S
        # They tick in seconds: a microsecond keeps those of one tick in the log's order.
        self._latest_s = max(arrival_s, self._latest_s + 1e-6)
        self._pending[item["id"]] = ids, Said(self._latest_s, tenant=item["tenant"])
        if len(ids) > self._longest:
            self._longest, self._num_longest = len(ids), 0
        self._num_longest += len(ids) == self._longest

    def end(self) -> Iterator[Record | Lengths]:
        """The requests whose answers the log does not show. Raises Bad where it shows no prompt."""
        if self._num_named and not self._num_asked:
            raise Bad(
                "the log names requests and shows no prompts: vLLM shows them with "
                "VLLM_LOGGING_LEVEL=DEBUG and --enable-log-requests"
            )
        if self._num_longest > 1:
            self._reading.notes[
                f"{{n}} prompts have the greatest length, {self._longest}: if --max-log-len cut "
                "them there, what is behind is missing"
            ] = self._num_longest
        for name in list(self._pending):
            yield self._made(name, [])

    def _made(self, name: str, output: list[int]) -> Record:
        ids, said = self._pending.pop(name)
        numbers = self._reading.ids.numbers
        return self._reading.token_record(numbers(ids), numbers(output), said)


def sglang_line(line: str) -> Mapping[str, Any] | None:
    """A finished request; None for all that else is in a log."""
    if "Finish: " not in line or "obj=" not in line:
        return None
    plain = _plain(line)
    time, ids = _SGLANG_TIME.search(plain), _SGLANG_IDS.search(plain)
    output = _SGLANG_OUTPUT.search(plain)
    found = dict(_SGLANG_FIELD.findall(plain))
    lora = _LORA.search(plain)
    wanted = ("prompt_tokens", "completion_tokens", "cached_tokens")
    timed = ("request_received_ts", "e2e_latency", "ttft")
    return {
        "event": "request.finished",
        "timestamp": None if time is None else time[1],
        "obj": {
            "input_ids": None if ids is None else _ids(ids[1]),
            "lora_path": None if lora is None else lora[1],
        },
        "out": {
            "output_ids": None if output is None else _ids(output[1]),
            "meta_info": {
                name: int(found[name]) for name in wanted if found.get(name, "").isdigit()
            }
            | {name: float(found[name]) for name in timed if _is_number(found.get(name, ""))},
        },
    }


def _is_number(shown: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", shown) is not None


class SGLang(Reader):
    """Reads finished requests."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        reading.in_order = False  # they come as they finish

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        if item.get("event") != "request.finished":
            return
        asked, out = mapping(item, "obj"), mapping(item, "out")
        meta = mapping(out, "meta_info") or out
        ids = asked.get("input_ids")
        if ids is None:
            raise Bad("it has no input_ids: log at level 3, of requests with token ids")
        if isinstance(ids, list) and "..." in ids:
            raise Bad("the middle of its token ids is cut out: log at level 3")
        arrival_s = moment(meta, "request_received_ts")
        if arrival_s is None:
            finished_s = moment(item, "timestamp")
            if finished_s is None:
                raise Bad("the line has no time")
            arrival_s = finished_s - (moment(meta, "e2e_latency") or 0.0)
        output = out.get("output_ids")
        numbers = self._reading.ids.numbers
        cached = first_of(meta, "cached_tokens")
        said = Said(
            arrival_s,
            "",
            text(asked, "lora_path") if isinstance(asked.get("lora_path"), str) else "",
            count(meta, "prompt_tokens", default=0) or None,
            count(meta, "completion_tokens", default=0),
            None if cached is None else count(meta, "cached_tokens"),
            moment(meta, "ttft"),
        )
        is_cut = not isinstance(output, list) or "..." in output
        yield self._reading.token_record(numbers(ids), _NONE if is_cut else numbers(output), said)


FORMATS = (
    Format("vllm-log", lambda item: "vllm" in item, VLLM, line=vllm_line),
    Format(
        "sglang-log",
        lambda item: str(item.get("event")).startswith("request.") and "obj" in item,
        SGLang,
        line=sglang_line,
    ),
)
