"""When the rows of Mooncake's form come: by their `timestamp`, or after the row before."""

from collections.abc import Mapping
from typing import Any

from foreword.sim.formats.fields import number
from foreword.sim.formats.reading import Reading

_EPOCH_S, _EPOCH_MS = 1e9, 1e10  # a first timestamp between them is seconds since 1970, not ms


class RowClock:
    """Arrivals of rows. `timestamp` is in ms; KV Cache Lab's traces write seconds since 1970 in it.
    aiperf's rows of a session may have a `delay` in ms after the answer to the row before."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._unit_s: float | None = None
        self._latest_s: dict[str, float] = {}  # by session

    def arrival_s(self, item: Mapping[str, Any], session: str) -> float:
        """Raises Bad."""
        stamp, delay_ms = number(item, "timestamp"), number(item, "delay") or 0.0
        notes = self._reading.notes
        if stamp is not None:
            if self._unit_s is None:
                is_epoch = _EPOCH_S <= stamp < _EPOCH_MS
                self._unit_s = 1.0 if is_epoch else 1e-3
                if is_epoch:
                    notes["timestamps are taken as seconds since 1970, not as ms"] += 1
            arrival_s = stamp * self._unit_s
        elif not session:
            arrival_s = 0.0
            notes["{n} requests have no time: they come at once, in their order"] += 1
        elif session in self._latest_s:
            arrival_s = self._latest_s[session] + delay_ms / 1000
            notes["{n} arrivals count from the row before, without the time of its answer"] += 1
        else:
            arrival_s = self._reading.start_s()
        if session:
            self._latest_s[session] = arrival_s
        return arrival_s
