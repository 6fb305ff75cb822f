"""The request log: a line of JSON for each request that ended, from which a replay can be made.

It holds prompts and answers as token ids. A thread of its own makes and writes the lines, and what
cannot be written is dropped and counted: no request waits for the log or fails with it.

The first line of a run has `foreword` (the version), `started` (Unix seconds) and what a replay
needs to know of the engine. A line with `costs` has the newest StepCost, learnt from all steps so
far, and with it the seconds that tiers' threads took to read a block. A line with `cleared` says
when all prefixes were forgotten. `foreword.sim.formats.request_log` reads them.
"""

import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword import __version__
from foreword.core.cost import StepFit
from foreword.core.stats import TierStats
from foreword.store.workers import Workers

if TYPE_CHECKING:  # which imports torch, and a file that cannot be written shows at once
    from foreword.engine.stream import Stream

log = logging.getLogger("foreword.engine")

_WAITING_TOKENS_MAX = 1 << 22  # of requests whose lines wait to be written
_COSTS_EVERY = 64  # requests; in the beginning sooner
_CLOSE_S = 5.0

Learnt = Callable[[], tuple[StepFit, Sequence[TierStats]]]  # called by the engine's thread


class RequestLog:
    """A file that lines are added to. `begin` before anything else, `close` at the end."""

    def __init__(self, path: Path) -> None:
        """Afterwards nobody else may read the file. Raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.fchmod(self._file, 0o600)
        self._path = path
        self._key = secrets.token_bytes(16)  # kept nowhere: nobody can try salts on the digests
        self._unix_s = time.time() - time.monotonic()
        self._thread = Workers("foreword-request-log", 1)
        self._learnt: Learnt | None = None
        self._head = b""  # of the run, until it is written
        # Each is counted by one thread: the engine's, and the log's.
        self._num_added = self._num_added_tokens = self._num_refused = 0
        self._num_written_tokens = self._num_failed = 0
        self._warned = False

    @property
    def num_dropped(self) -> int:
        """Requests that have no line."""
        return self._num_refused + self._num_failed

    def begin(self, facts: Mapping[str, Any], learnt: Learnt) -> None:
        """A run of an engine that `facts` tell of; `learnt` says what it knows of its costs."""
        self._learnt = learnt
        head = _encoded({"foreword": __version__, "started": time.time(), **facts})
        self._head = b"\n" + head if _ends_in_a_line(self._path) else head
        self._thread.put(partial(self._write_line, b""))

    def add(self, stream: "Stream", rest_s: float) -> None:
        """A request ended, and for so long the engine went on before it took in others. Called by
        the engine's thread."""
        line = self._line(stream, rest_s)
        num_tokens = len(stream.request.prompt) + sum(map(len, line["answer_ids"]))
        if self._num_added_tokens + num_tokens - self._num_written_tokens > _WAITING_TOKENS_MAX:
            self._num_refused += 1
            self._warn("too many lines wait to be written")
            return
        self._num_added_tokens += num_tokens
        self._thread.put(partial(self._write_request, line, num_tokens))
        self._num_added += 1
        if self._num_added % _COSTS_EVERY == 0 or self._num_added & (self._num_added - 1) == 0:
            self._add_costs()

    def cleared(self) -> None:
        """All prefixes were forgotten. Called by the engine's thread."""
        self._thread.put(partial(self._write_line, _encoded({"cleared": time.time()})))

    def close(self) -> None:
        """The engine ended."""
        if self._learnt is not None:
            self._add_costs()
        if self._thread.close(_CLOSE_S):
            os.close(self._file)

    def _line(self, stream: "Stream", rest_s: float) -> dict[str, Any]:
        request, samples = stream.request, stream.samples
        num_prompt, first = len(request.prompt), stream.first_token_s
        line: dict[str, Any] = {
            "arrival": self._unix_s + stream.submitted_s,
            "tenant": self._tenant(request.cache_salt),
            "n": request.n,
            "ttft": None if first is None else first - stream.submitted_s,
            "total": stream.ended_s - stream.submitted_s,
            "rest": rest_s,
            "finish": [sample.finish_reason or "cancelled" for sample in samples],
            "prompt_ids": request.prompt,
            "answer_ids": [sample.chain.token_ids[num_prompt:] for sample in samples],
        }
        if any(line["answer_ids"]):
            line["cached"] = samples[0].num_cached_tokens or 0
            line["restored"] = dict(samples[0].restored)  # of these, by the tier's place
        else:
            line["computed"] = stream.num_computed_tokens
        if request.sampling.prompt_logprobs is not None:
            line["prompt_logprobs"] = True
        return line

    def _tenant(self, salt: str) -> str:
        return hmac.digest(self._key, salt.encode(), "sha256").hex()[:16] if salt else ""

    def _add_costs(self) -> None:
        assert self._learnt is not None
        fit, tiers = self._learnt()
        self._thread.put(partial(self._write_costs, fit, tiers))

    def _write_costs(self, fit: StepFit, tiers: Sequence[TierStats]) -> None:
        cost = fit.solve()
        if cost is None:
            return
        reads = [tier.busy_s / max(1, tier.num_loaded_blocks) for tier in tiers]
        costs = {"steps": fit.num_steps, **asdict(cost), "read_block_s": reads}
        self._write(_encoded({"costs": costs}))

    def _write_line(self, line: bytes) -> None:
        self._write(line)

    def _write_request(self, line: Mapping[str, Any], num_tokens: int) -> None:
        self._num_failed += not self._write(_encoded(line))
        self._num_written_tokens += num_tokens

    def _write(self, line: bytes) -> bool:
        """On the log's thread. A line is there whole or not at all, and none before the first."""
        rest = memoryview(self._head + line)
        num_bytes = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._cut(num_bytes - len(rest))
            self._warn(str(error.strerror))
            return False
        self._head = b""
        return True

    def _cut(self, num_bytes: int) -> None:
        """Take the beginning of a line back."""
        try:
            if num_bytes:
                os.ftruncate(self._file, os.fstat(self._file).st_size - num_bytes)
        except OSError as error:
            log.debug("%s ends within a line: %s", self._path, error.strerror)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s lacks requests, /metrics says how many: %s", self._path, why)


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _ends_in_a_line(path: Path) -> bool:
    """Whether a file's last line is not whole: a run before was killed while it wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        return file.read(1) not in (b"", b"\n")
