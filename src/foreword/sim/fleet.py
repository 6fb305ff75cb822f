"""Fleet: workers in virtual time under one clock, and what a trace's requests meet there.

Requests come when the trace says, or sooner by a factor. Where the trace says when answers ended
and the factor is 1, a request that came after an answer waits for that answer: whoever sent it may
have needed it. So a log of one request after another is replayed as one, whatever the costs.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from foreword.sim.routing import ROUTES
from foreword.sim.trace import Trace
from foreword.sim.worker import Journey, Worker, WorkerCount, WorkerShape

_NEWS = 64  # requests between two words of progress


@dataclass(frozen=True, slots=True)
class FleetRules:
    """How a trace is played. `warmup`: the share of its requests that are served and left out."""

    num_workers: int = 1
    routing: str = "round-robin"
    speed_up: float = 1.0
    warmup: float = 0.0
    keep_partial: bool = False  # as `prompt_chain` has it


@dataclass(slots=True)
class Timing:
    """What came of a trace. `journeys` of the requests after the warm-up, in the order of their
    ends, but for those whose client left before the first token. `workers` with the warm-up."""

    journeys: list[Journey] = field(default_factory=list)
    workers: list[WorkerCount] = field(default_factory=list)
    num_refused: int = 0  # too long for a worker
    num_left: int = 0  # of clients that left before the first token
    end_s: float = 0.0  # from the first arrival
    closed: bool = False  # whether requests waited for the answers that they came after


def play(
    trace: Trace,
    shape: WorkerShape,
    rules: FleetRules,
    progress: Callable[[float], None] = lambda _share: None,
) -> Timing:
    """Serve a trace to workers of one shape. `progress` hears how much is done, from 0 to 1."""
    return _Fleet(trace, shape, rules, progress).run()


def answers_before(trace: Trace) -> list[int]:
    """Of each request, by place: the one whose answer was the last to end before it came; -1 where
    none had, or the trace does not say when answers ended."""
    spans = trace.spans
    ended = sorted((end_s, place) for place, (_, end_s) in enumerate(spans) if end_s is not None)
    found = (bisect_right(ended, (came_s, len(spans))) - 1 for came_s, _ in spans)
    return [
        ended[at][1] if at >= 0 and ended[at][1] < place else -1 for place, at in enumerate(found)
    ]


class _Fleet:
    """Events in the order of time: arrivals, ends of steps, loads. Of those at one time all
    arrivals come first, and then each worker that has something to do begins a step."""

    def __init__(
        self,
        trace: Trace,
        shape: WorkerShape,
        rules: FleetRules,
        progress: Callable[[float], None],
    ) -> None:
        self._trace = trace
        self._rules = rules
        self._progress = progress
        self._route = ROUTES[rules.routing]
        self._workers = [
            Worker(shape, trace.id_tokens, number) for number in range(rules.num_workers)
        ]
        self._arrivals_s = [came_s / rules.speed_up for came_s, _ in trace.spans]
        self._answers = answers_before(trace) if rules.speed_up == 1 else [-1] * len(trace)
        self._ended = bytearray(len(trace))  # by place
        self._behind: dict[int, list[int]] = {}  # places that wait for an answer, by its place
        self._next = 0  # place of the next arrival
        self._released: list[int] = []  # of those that waited and wait no more
        self._events: list[tuple[float, int]] = []  # ends of steps and loads: when, which worker
        self._step_ends = [inf] * rules.num_workers
        self._num_routed = 0
        self._timing = Timing(closed=any(at >= 0 for at in self._answers))

    def run(self) -> Timing:
        while (now_s := self._next_s()) < inf:
            due = self._arrivals(now_s)
            while self._events and self._events[0][0] <= now_s:
                worker = self._workers[heappop(self._events)[1]]
                if self._step_ends[worker.number] <= now_s:
                    self._step_ends[worker.number] = inf
                    self._end(worker.end(now_s))
                due.add(worker.number)
            due |= self._arrivals(now_s)  # those that waited for what ended now
            idle = [at for at in sorted(due) if not self._workers[at].is_stepping]
            for at in idle:
                # What others begin now ends who knows when: only the last may look ahead.
                self._begin(self._workers[at], now_s, self._next_s() if at == idle[-1] else now_s)
            self._timing.end_s = now_s
        self._timing.workers = [worker.count for worker in self._workers]
        self._progress(1.0)
        return self._timing

    def _next_s(self) -> float:
        """When the next thing happens; infinity when nothing will."""
        event_s = self._events[0][0] if self._events else inf
        return min(event_s, self._next_arrival_s)

    @property
    def _next_arrival_s(self) -> float:
        return self._arrivals_s[self._next] if self._next < len(self._arrivals_s) else inf

    def _arrivals(self, now_s: float) -> set[int]:
        """Send what comes now to its worker. Returns the workers."""
        due = set()
        while self._next_arrival_s <= now_s:
            place, answer = self._next, self._answers[self._next]
            self._next += 1
            if place % _NEWS == 0:
                self._progress(place / len(self._arrivals_s))
            if answer >= 0 and not self._ended[answer]:
                self._behind.setdefault(answer, []).append(place)
            else:
                self._released.append(place)
        while self._released:
            released, self._released = self._released, []
            due |= {number for place in released if (number := self._send(place, now_s)) >= 0}
        return due

    def _send(self, place: int, now_s: float) -> int:
        """The worker that got the request, or -1."""
        record = self._trace[place]
        counts = place >= int(len(self._trace) * self._rules.warmup)
        if record.cancelled_at == 0:
            self._timing.num_left += counts
        else:
            chain = self._workers[0].chain(record, keep_partial=self._rules.keep_partial)
            at = self._route(self._num_routed, record, chain, self._workers)
            self._num_routed += 1
            if self._workers[at].send(record, chain, now_s) is not None:
                return at
            self._timing.num_refused += counts
        self._answered(place)
        return -1

    def _begin(self, worker: Worker, now_s: float, until_s: float) -> None:
        """Its next step, or the wait for a load."""
        end_s = worker.begin(now_s, until_s)
        if end_s is None:
            end_s = worker.loads_at
        else:
            self._step_ends[worker.number] = end_s
        if end_s is not None:
            heappush(self._events, (end_s, worker.number))

    def _end(self, journeys: list[Journey]) -> None:
        for journey in journeys:
            if journey.place >= int(len(self._trace) * self._rules.warmup):
                if journey.first_token_s < 0:
                    self._timing.num_left += 1
                else:
                    self._timing.journeys.append(journey)
            self._answered(journey.place)

    def _answered(self, place: int) -> None:
        self._ended[place] = 1
        self._released += self._behind.pop(place, ())
