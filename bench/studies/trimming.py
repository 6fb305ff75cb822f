"""What trimming the history of chats does to hits: append only, a sliding window, steps, summaries.

python bench/studies/trimming.py
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foreword.sim.trace import Record, Trace
from foreword.sim.workload import Segments
from study import BLOCK_SIZE, REFERENCE, Cache, main, percent, reference, table, visits

WINDOW = 10  # turns that are kept
STEP = 10  # turns beyond them, before many are dropped at once
SUMMARY = 300  # tokens
SYSTEM, USER, REPLY = 2_000, 100, 300
SESSIONS, TURNS = 20, 60
ENDLESS = 200_000  # blocks


@dataclass
class History:
    """A chat's turns, each of a question and its reply, and the summary of those before `start`."""

    turns: list[tuple[range, range]]
    start: int = 0
    summary: range | None = None


# Called before each turn: what to drop, and what to put in its place.
Trim = Callable[[History, Segments], None]


def append_only(_history: History, _segments: Segments) -> None:
    return


def window(history: History, _segments: Segments) -> None:
    history.start = max(0, len(history.turns) - WINDOW)


def window_in_steps(history: History, _segments: Segments) -> None:
    if len(history.turns) - history.start >= WINDOW + STEP:
        history.start = len(history.turns) - WINDOW


def summary(history: History, segments: Segments) -> None:
    before = history.start
    window(history, segments)
    if history.start > before:
        history.summary = segments.new(SUMMARY)


def summary_in_steps(history: History, segments: Segments) -> None:
    before = history.start
    window_in_steps(history, segments)
    if history.start > before:
        history.summary = segments.new(SUMMARY)


WAYS: dict[str, Trim] = {
    "append only": append_only,
    f"the last {WINDOW} turns": window,
    f"{WINDOW} to {WINDOW + STEP - 1} turns, cut in steps": window_in_steps,
    f"a new summary each turn, and {WINDOW} turns": summary,
    f"a summary at each cut, and {WINDOW} to {WINDOW + STEP - 1} turns": summary_in_steps,
}


def page(args: argparse.Namespace) -> str:
    sessions, turns = (2, 25) if args.quick else (SESSIONS, TURNS)
    return f"""
# What trimming the history does to hits

`python bench/studies/trimming.py`. {sessions} chats at once with one system prompt of {SYSTEM:,}
tokens, {turns} turns of {USER} tokens of the user and {REPLY} of the reply, by turns; made-up
tokens.

**Run:** the prompts through the production cache with room for all of them, blocks of
{BLOCK_SIZE} tokens, replies kept. **Modelled:** prefill seconds of {REFERENCE}; a summary is taken
to cost nothing to write. **Published:** "trimming can halve the hit rate", the project's own rule
of thumb.

{compared(sessions, turns)}

A window that moves with every turn changes what follows the system prompt each time, so the whole
window is computed again: its prompts are a part as long, and it computes more of them than
appending does. Cutting rarely, and many turns at once, keeps most of both.
"""


def compared(sessions: int, turns: int) -> str:
    rows: list[list[str | int]] = []
    step = reference().step
    for name, trim in WAYS.items():
        cache = Cache(ENDLESS, 1)
        num_tokens = num_hit = 0
        seconds, longest = 0.0, 0
        with chats(trim, sessions, turns) as trace:
            for record, seen in visits(trace):
                hit = cache.serve(seen)
                num_tokens += record.num_tokens
                num_hit += hit
                seconds += step.prefill_s(record.num_tokens - hit, hit)
                longest = max(longest, record.num_tokens)
        computed = num_tokens - num_hit
        rows.append(
            [name, longest, num_tokens, percent(num_hit / num_tokens), computed, f"{seconds:.2f}"]
        )
    columns = ["history", "longest prompt", "prompt tokens", "reused", "computed", "prefill, s"]
    return table(columns, rows)


def chats(trim: Trim, sessions: int, turns: int) -> Trace:
    """Every session's first turn, then every session's second, and so on, in drawn order."""
    trace = Trace(1)
    for record in _records(trim, sessions, turns):
        trace.add(record)
    return trace


def _records(trim: Trim, sessions: int, turns: int) -> Iterator[Record]:
    draw, segments = random.Random(0), Segments()
    system = segments.new(SYSTEM)
    histories = [History([]) for _ in range(sessions)]
    for _ in range(turns):
        for history in draw.sample(histories, sessions):
            trim(history, segments)
            question, reply = segments.new(USER), segments.new(REPLY)
            kept = [part for turn in history.turns[history.start :] for part in turn]
            parts = [system, *([history.summary] if history.summary else []), *kept, question]
            ids = [token for part in parts for token in part]
            yield Record(len(ids), ids, num_output_tokens=REPLY, output_ids=reply)
            history.turns.append((question, reply))


if __name__ == "__main__":
    main(__file__, page)
