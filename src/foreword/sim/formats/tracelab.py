"""TraceLab: rounds of coding agents, one a line, with what the provider's own cache had of each.

The shape is uw-syfi/TraceLab's: `session_id`, `round_index`, `input_tokens_total` =
`prefix_tokens` + `newly_append_tokens`, `output_tokens`, `timing_events` with ISO times. It has
neither text nor ids. So ids are made: a round begins with as much of the round before it in its
session as the provider found cached, and goes on with what nothing else has.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.fields import count, moment, objects, prompt_tokens, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading
from foreword.sim.ids import OWN_MAX
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record, TraceError

_INPUTS = ("user_message", "tool_result")
Runs = list[tuple[int, int]]  # first id and how many


class TraceLab(Reader):
    """Reads one round at a time; keeps the ids of each session's latest, as runs."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._block_size = reading.options.block_size or 64
        self._next_id = 0
        self._latest: dict[str, Runs] = {}

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        num_tokens = prompt_tokens(item, "input_tokens_total")
        cached, added = count(item, "prefix_tokens"), count(item, "newly_append_tokens")
        if cached + added != num_tokens:
            raise Bad(f"{cached} prefix and {added} new tokens are not its {num_tokens}")
        session = text(item, "session_id")
        if not session:
            raise Bad("the round has no session_id")
        arrival_s = _sent_s(objects(item, "timing_events"))
        num_output_tokens = count(item, "output_tokens", default=0)
        runs, known = self._runs(session, cached, -(-num_tokens // self._block_size))
        ids = array("I")
        for first, length in runs:
            ids.extend(range(first, first + length))
        yield Record(
            num_tokens,
            ids,
            self._block_size,
            arrival_s,
            num_output_tokens,
            session=session,
            num_cached_tokens=cached,
        )
        self._latest[session] = _first(runs, num_tokens // self._block_size)
        self._reading.notes[
            "{n} rounds have ids made of what the provider found cached: a replay gives its hits "
            "again, and sees neither what sessions share nor what the provider had let go"
        ] += 1
        self._reading.notes[
            "{n} rounds found more cached than the round before had, of its answer or of other "
            "sessions: that part is new here"
        ] += known < cached // self._block_size

    def _runs(self, session: str, cached: int, num_blocks: int) -> tuple[Runs, int]:
        """The ids of a round, and how many of them were the round's before."""
        wanted = cached // self._block_size
        runs: Runs = []
        for first, length in self._latest.get(session, ()):
            length = min(length, wanted - sum(length for _, length in runs))
            if length:
                runs.append((first, length))
        known = sum(length for _, length in runs)
        if num_blocks > known:
            runs.append((self._next_id, num_blocks - known))
            self._next_id += num_blocks - known
            if self._next_id > OWN_MAX:
                raise TraceError(f"over {OWN_MAX} blocks: read it with a larger block size")
        return runs, known


def _first(runs: Runs, num_blocks: int) -> Runs:
    """The full blocks: the last one may stand for fewer tokens, and is another when it is full."""
    found: Runs = []
    for first, length in runs:
        length = min(length, num_blocks)
        num_blocks -= length
        if length:
            found.append((first, length))
    return found


def _sent_s(events: list[dict[str, Any]]) -> float:
    """When a round was sent: after the last of its inputs; where it names none, before its first
    output. Raises Bad."""
    inputs = [event for event in events if event.get("event_type") in _INPUTS]
    times = [moment(event, "timestamp") for event in inputs or events]
    known = [time for time in times if time is not None]
    if not known:
        raise Bad("the round has no time, in timing_events")
    return max(known) if inputs else min(known)


FORMATS = (
    Format(
        "tracelab",
        lambda item: item.keys() >= {"prefix_tokens", "newly_append_tokens"},
        TraceLab,
    ),
)
