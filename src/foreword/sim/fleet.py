"""Fleet: workers in virtual time under one clock, and what a trace's requests meet there.

Requests come when the trace says, or sooner by a factor. Where it also says when answers ended, a
request comes as long after the last answer before it as it did: whoever sent it may have waited for
that answer. So a log of one request after another is replayed as one, whatever the costs.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from foreword.sim.journey import Journey
from foreword.sim.routing import ROUTES
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Trace
from foreword.sim.worker import Worker, WorkerCount

_NEWS = 64  # requests between two words of progress


@dataclass(frozen=True, slots=True)
class FleetRules:
    """How a trace is played. `warmup`: the share of its requests that are served and left out."""

    num_workers: int = 1
    routing: str = "round-robin"
    speed_up: float = 1.0
    closed: bool = True  # requests come after answers, where the trace says when these ended
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
    num_after: int = 0  # requests that came after an answer, not when the trace says


def play(
    trace: Trace,
    shape: WorkerShape,
    rules: FleetRules,
    progress: Callable[[float], None] = lambda _share: None,
    follows: Mapping[int, tuple[int, float]] | None = None,
) -> Timing:
    """Serve a trace to workers of one shape. `progress` hears how much is done, from 0 to 1. Of
    requests that come after an answer `follows` has, by place, whose it is and how long after; in
    place of what the trace says of that."""
    return _Fleet(trace, shape, rules, progress, follows).run()


def answers_before(trace: Trace) -> list[int]:
    """Of each request, by place: the one whose answer was the last to end before it came; -1 where
    none had, or the trace does not say when answers ended."""
    spans = trace.spans
    ended = sorted(
        (span.ended_s, place) for place, span in enumerate(spans) if span.ended_s is not None
    )
    found = (bisect_right(ended, (span.came_s, len(spans))) - 1 for span in spans)
    return [
        ended[at][1] if at >= 0 and ended[at][1] < place else -1 for place, at in enumerate(found)
    ]


def _observed(trace: Trace, rules: FleetRules) -> dict[int, tuple[int, float]]:
    """After which answer requests came, and how long after, where the trace says it."""
    if not rules.closed or rules.speed_up != 1:
        return {}
    spans, found = trace.spans, {}
    for place, answer in enumerate(answers_before(trace)):
        ended_s = spans[answer].ended_s if answer >= 0 else None
        if ended_s is not None:
            gap_s = max(0.0, spans[place].came_s - ended_s - spans[answer].rest_s)
            found[place] = answer, gap_s
    return found


class _Fleet:
    """Events in the order of time: arrivals, ends of steps, news of tiers. Of those at one time all
    arrivals come first, and then each worker that has something to do begins a step."""

    def __init__(
        self,
        trace: Trace,
        shape: WorkerShape,
        rules: FleetRules,
        progress: Callable[[float], None],
        follows: Mapping[int, tuple[int, float]] | None,
    ) -> None:
        self._trace = trace
        self._rules = rules
        self._progress = progress
        self._route = ROUTES[rules.routing]
        self._workers = [
            Worker(shape, trace.id_tokens, number) for number in range(rules.num_workers)
        ]
        self._arrivals: list[tuple[float, int]] = []  # when, and the request's place
        self._after: dict[int, list[tuple[float, int]]] = {}  # the same from an answer's end on
        self._events: list[tuple[float, int]] = []  # ends of steps and news of tiers: when, who
        self._step_ends = [inf] * rules.num_workers
        self._num_sent = 0
        self._first_counted = int(len(trace) * rules.warmup)
        self._timing = Timing()
        self._expect(_observed(trace, rules) if follows is None else follows)

    def run(self) -> Timing:
        while (now_s := self._next_s()) < inf:
            due = self._receive(now_s)
            while self._events and self._events[0][0] <= now_s:
                worker = self._workers[heappop(self._events)[1]]
                if self._step_ends[worker.number] <= now_s:
                    self._step_ends[worker.number] = inf
                    self._end(worker.end(now_s))
                due.add(worker.number)
            due |= self._receive(now_s)  # what comes as soon as an answer ends
            idle = [at for at in sorted(due) if not self._workers[at].is_stepping]
            for at in idle:
                # What others begin now ends who knows when: only the last may look ahead.
                self._begin(self._workers[at], now_s, self._next_s() if at == idle[-1] else now_s)
            self._timing.end_s = now_s
        self._timing.workers = [worker.count for worker in self._workers]
        self._progress(1.0)
        return self._timing

    def _expect(self, follows: Mapping[int, tuple[int, float]]) -> None:
        """Note when each request comes, or after which answer."""
        for place, span in enumerate(self._trace.spans):
            if place in follows:
                answer, gap_s = follows[place]
                self._after.setdefault(answer, []).append((gap_s, place))
                self._timing.num_after += 1
            else:
                self._arrivals.append((span.came_s / self._rules.speed_up, place))

    def _next_s(self) -> float:
        """When the next thing happens; infinity when nothing will."""
        return min(
            self._events[0][0] if self._events else inf,
            self._arrivals[0][0] if self._arrivals else inf,
        )

    def _receive(self, now_s: float) -> set[int]:
        """Send what comes now to its worker. Returns the workers."""
        due = set()
        while self._arrivals and self._arrivals[0][0] <= now_s:
            number = self._send(heappop(self._arrivals)[1], now_s)
            if number is not None:
                due.add(number)
        return due

    def _send(self, place: int, now_s: float) -> int | None:
        """The worker that got the request. None: it is over at once."""
        record = self._trace[place]
        if self._num_sent % _NEWS == 0:
            self._progress(self._num_sent / len(self._trace))
        self._num_sent += 1
        if record.cancelled_at == 0:
            self._timing.num_left += place >= self._first_counted
        else:
            chain = self._workers[0].chain(record, keep_partial=self._rules.keep_partial)
            at = self._route(self._num_sent - 1, record, chain, self._workers)
            if self._workers[at].send(record, chain, now_s) is not None:
                return at
            self._timing.num_refused += place >= self._first_counted
        self._answered(place, now_s)
        return None

    def _begin(self, worker: Worker, now_s: float, until_s: float) -> None:
        """Its next step, or the wait for a tier."""
        end_s = worker.begin(now_s, until_s)
        if end_s is None:
            end_s = worker.next_news_s
        else:
            self._step_ends[worker.number] = end_s
        if end_s is not None:
            heappush(self._events, (end_s, worker.number))

    def _end(self, journeys: list[Journey]) -> None:
        for journey in journeys:
            if journey.place >= self._first_counted:
                if journey.first_token_s < 0:
                    self._timing.num_left += 1
                else:
                    self._timing.journeys.append(journey)
            self._answered(journey.place, journey.ended_s)

    def _answered(self, place: int, ended_s: float) -> None:
        for gap_s, follower in self._after.pop(place, ()):
            heappush(self._arrivals, (ended_s + gap_s, follower))
