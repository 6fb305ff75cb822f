"""Replay: what caches of several sizes and policies would have reused of a trace, in one pass.

Requests come one after another, by their order alone. Each chain is hashed once for all caches, and
once before, from the trace's end, for OPT.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from foreword.sim.opt import Future
from foreword.sim.prompt import Visit, visit
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import (
    CORE_POLICIES,
    OPT,
    PLAIN_FIFO,
    UNLIMITED,
    CoreTrial,
    Outcome,
    Setting,
    Tally,
    Trial,
)
from foreword.sim.yardsticks import FifoTrial, OptTrial

POLICY_NAMES = (*CORE_POLICIES, PLAIN_FIFO, OPT)
BLOCK_SIZE = 16  # tokens; the server's own
_FUTURE_SHARE = 0.2  # of the time, for the progress that is told
_NEWS = 16  # requests between two words of it


@dataclass(frozen=True, slots=True)
class Rules:
    """How a trace is replayed. `warmup` and `restart_at` are shares of its requests."""

    block_size: int = BLOCK_SIZE  # for traces of token ids; others have their own
    keep_partial: bool = False  # as `prompt_chain` has it
    warmup: float = 0.0  # served, and left out of all figures
    restart_at: float | None = None  # there the process starts anew
    per: Literal["session", "tenant"] | None = None  # what to add up apart

    def block_tokens(self, id_tokens: int) -> int:
        """Tokens of a block of a trace whose ids stand for so many."""
        return id_tokens if id_tokens > 1 else self.block_size


@dataclass(frozen=True, slots=True)
class Finding:
    """What a setting gave, and what its bound would have, which never restarts."""

    outcome: Outcome
    bound: Tally

    @property
    def opt_share(self) -> float:
        """How many of the bound's hit blocks it has. At most 1: OPT has most over the whole trace,
        which after a warm-up may leave it with fewer."""
        hit, most = self.outcome.total.num_hit_blocks, self.bound.num_hit_blocks
        return min(1.0, hit / most) if most else 1.0


@dataclass(frozen=True, slots=True)
class Findings:
    """`rows` as the settings were asked for. `ceiling`: what an endless cache of full blocks
    reuses. The warm-up counts in what follows: requests, those with tokens of an answer, and
    different blocks."""

    rows: list[Finding]
    ceiling: Tally
    num_requests: int
    num_answers: int
    num_blocks: int
    block_tokens: int


def replay(
    trace: Trace,
    settings: Sequence[Setting],
    rules: Rules,
    progress: Callable[[float], None] = lambda _share: None,
) -> Findings:
    """Serve a trace to a cache of each setting. `progress` hears how much is done, from 0 to 1."""

    def visited(record: Record) -> Visit:
        return visit(record, rules.block_size, keep_partial=rules.keep_partial)

    with Future(trace, visited, lambda share: progress(share * _FUTURE_SHARE)) as future:
        run = _Run(trace, settings, rules, future)
        for number, record in enumerate(trace):
            run.serve(record, visited(record))
            if number % _NEWS == 0:
                progress(_FUTURE_SHARE + (1 - _FUTURE_SHARE) * number / len(trace))
    progress(1.0)
    return run.findings(settings)


def trial_of(setting: Setting, future: Future, block_size: int, id_tokens: int) -> Trial:
    """Of the class that its policy needs."""
    made: type[Trial] = CoreTrial
    if len(setting.blocks) == 1:
        made = {PLAIN_FIFO: FifoTrial, OPT: OptTrial}.get(setting.policy, CoreTrial)
    return made(setting, future, block_size, id_tokens)


class _Run:
    """The caches of all settings and of their bounds, side by side."""

    def __init__(
        self, trace: Trace, settings: Sequence[Setting], rules: Rules, future: Future
    ) -> None:
        self._rules = rules
        self._future = future
        self._num_requests = len(trace)
        self._starts_at = int(len(trace) * rules.warmup)
        self._restarts_at = int(len(trace) * rules.restart_at) if rules.restart_at else None
        self._block_tokens = rules.block_tokens(trace.id_tokens)
        self._ceiling = Tally()
        self._num_answers = 0
        # By setting, and whether its process restarts.
        keys = dict.fromkeys((setting, self._restarts_at is not None) for setting in settings)
        bounds = (setting.bound for setting in settings)
        keys |= dict.fromkeys((one, False) for one in bounds if UNLIMITED not in one.blocks)
        ids = self._block_tokens // trace.id_tokens
        self._trials = {key: trial_of(key[0], future, ids, trace.id_tokens) for key in keys}

    def serve(self, record: Record, seen: Visit) -> None:
        """One request, to all caches."""
        if record.place == self._starts_at:
            self._ceiling = Tally()
            for trial in self._trials.values():
                trial.forget_counts()
        if record.place == self._restarts_at:
            for (_setting, restarts), trial in self._trials.items():
                if restarts:
                    trial.restart()
        size = record.num_tokens, -(-record.num_tokens // self._block_tokens)
        if record.cancelled_at is None:
            self._ceiling.add(size, self._known(record, seen))
        self._num_answers += len(record.output_ids) > 0
        self._future.advance(record.place, seen)
        group = getattr(record, self._rules.per) if self._rules.per else None
        for trial in self._trials.values():
            trial.serve(record, seen, group)

    def findings(self, settings: Sequence[Setting]) -> Findings:
        rows = []
        for setting in settings:
            outcome = self._trials[setting, self._restarts_at is not None].outcome
            limited = UNLIMITED not in setting.bound.blocks
            bound = self._trials[setting.bound, False].outcome.total if limited else self._ceiling
            rows.append(Finding(outcome, bound))
        return Findings(
            rows,
            self._ceiling,
            self._num_requests,
            self._num_answers,
            self._future.num_blocks,
            self._block_tokens,
        )

    def _known(self, record: Record, seen: Visit) -> tuple[int, int]:
        """Tokens and blocks of the prompt that an earlier request had too. Where a block was seen,
        all before it were."""
        hashes, met = seen.prompt.hashes, self._future.next_uses
        num = bisect_left(range(seen.num_reusable), True, key=lambda at: hashes[at] not in met)
        return min(num * self._block_tokens, record.num_tokens), num
