"""Described workloads: traffic as a few parameters, as a trace of made-up tokens, and of the
reference chat what can be counted without one.

Every segment of a prompt (a system prompt, a document, a user's turn, a reply) is tokens of its
own that no other has, so prompts share what they are described to share and nothing else.
"""

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from foreword.core.cost import num_pairs
from foreword.sim.plan import Deployment, Figure
from foreword.sim.trace import Record, Trace

_LAST_ID = 2**32 - 2  # importers keep ids below the mark of sim.prompt


class WorkloadError(Exception):
    """A description that cannot be. The message is for the user."""


class Segments:
    """Hands out tokens that no other segment has."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, num_tokens: int) -> range:
        """Raises WorkloadError where there are no more ids."""
        start, self._next = self._next, self._next + num_tokens
        if self._next > _LAST_ID:
            raise WorkloadError("more than 2^32 different tokens: describe fewer sessions")
        return range(start, self._next)


@dataclass(frozen=True, slots=True)
class Chat:
    """Sessions begin at random, `rate` a second; all have one system prompt."""

    system: int = 4000  # tokens, as all below
    turns: int = 20
    user: int = 100
    reply: int = 300
    sessions: int = 30
    rate: float = 0.1
    think: float = 30.0  # seconds from a request to the session's next, on average

    @property
    def rate_s(self) -> float:
        """Requests a second, when as many sessions end as begin."""
        return self.rate * self.turns

    def prompt_tokens(self, turn: int) -> int:
        """Of a turn, from 1."""
        return self.system + (turn - 1) * (self.user + self.reply) + self.user

    def num_prompt_tokens(self) -> int:
        """Of all turns of a session: what is prefilled without a cache."""
        added = self.turns * (self.turns - 1) // 2 * (self.user + self.reply)
        return self.turns * self.prompt_tokens(1) + added

    def num_new_tokens(self, *, replies_kept: bool) -> int:
        """Of a session, what is prefilled with every earlier turn's KV at hand. Without the replies
        kept each is prefilled once, in the turn that follows."""
        later = self.user if replies_kept else self.user + self.reply
        return self.prompt_tokens(1) + (self.turns - 1) * later

    def num_billed_tokens(self, write: float, read: float) -> float:
        """Of a session, in tokens of plain input, by a provider's factors for what is written to
        its cache and read from it: each turn writes what is new, replies not kept, and reads the
        rest."""
        new = self.num_new_tokens(replies_kept=False)
        return write * new + read * (self.num_prompt_tokens() - new)

    def records(self, draw: random.Random, segments: Segments) -> Iterator[Record]:
        system = segments.new(self.system)
        for number, start_s in enumerate(_starts(draw, self.rate, self.sessions)):
            yield from self._session(f"chat-{number}", start_s, system, draw, segments)

    def _session(
        self, name: str, start_s: float, system: range, draw: random.Random, segments: Segments
    ) -> Iterator[Record]:
        history, now_s = [system], start_s
        for _ in range(self.turns):
            history.append(segments.new(self.user))
            reply = segments.new(self.reply)
            yield _record(history, now_s, reply, name)
            history.append(reply)
            now_s += _pause(draw, self.think)


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions that call tools: each step appends a reply and what the tool said."""

    system: int = 8000  # instructions and tools, the same in all
    task: int = 1000
    steps: int = 30
    reply: int = 200
    result: int = 1000
    sessions: int = 30
    rate: float = 0.05
    think: float = 5.0  # seconds that a tool takes, on average

    @property
    def rate_s(self) -> float:
        """As Chat's."""
        return self.rate * self.steps

    def records(self, draw: random.Random, segments: Segments) -> Iterator[Record]:
        system = segments.new(self.system)
        for number, start_s in enumerate(_starts(draw, self.rate, self.sessions)):
            yield from self._session(f"agent-{number}", start_s, system, draw, segments)

    def _session(
        self, name: str, start_s: float, system: range, draw: random.Random, segments: Segments
    ) -> Iterator[Record]:
        history, now_s = [system, segments.new(self.task)], start_s
        for _ in range(self.steps):
            reply = segments.new(self.reply)
            yield _record(history, now_s, reply, name)
            history += [reply, segments.new(self.result)]
            now_s += _pause(draw, self.think)


@dataclass(frozen=True, slots=True)
class FewShot:
    """Examples in front of each question; each request takes one of `sets` at random."""

    shots: int = 3000
    sets: int = 1
    question: int = 100
    reply: int = 100
    requests: int = 1000
    rate: float = 10.0

    @property
    def rate_s(self) -> float:
        """Requests a second."""
        return self.rate

    def records(self, draw: random.Random, segments: Segments) -> Iterator[Record]:
        shots = [segments.new(self.shots) for _ in range(self.sets)]
        for start_s in _starts(draw, self.rate, self.requests):
            prompt = [draw.choice(shots), segments.new(self.question)]
            yield _record(prompt, start_s, segments.new(self.reply))


@dataclass(frozen=True, slots=True)
class Rag:
    """Documents behind a system prompt, then a question. How often a document is asked for falls
    with its rank to the power of `skew`; with `sort=1` those of a request are put in a fixed order,
    so that requests for the same ones share them all."""

    system: int = 500
    documents: int = 200
    tokens: int = 2000  # of a document
    each: int = 3  # documents of a request
    skew: float = 1.0
    sort: int = 0
    question: int = 100
    reply: int = 300
    requests: int = 1000
    rate: float = 2.0

    @property
    def rate_s(self) -> float:
        """Requests a second."""
        return self.rate

    def records(self, draw: random.Random, segments: Segments) -> Iterator[Record]:
        system = segments.new(self.system)
        documents = [segments.new(self.tokens) for _ in range(self.documents)]
        weights = [1 / (rank**self.skew) for rank in range(1, self.documents + 1)]
        for start_s in _starts(draw, self.rate, self.requests):
            picked: dict[int, None] = {}
            while len(picked) < min(self.each, self.documents):
                picked.setdefault(draw.choices(range(self.documents), weights)[0])
            numbers = sorted(picked) if self.sort else list(picked)
            prompt = [system, *(documents[number] for number in numbers)]
            prompt.append(segments.new(self.question))
            yield _record(prompt, start_s, segments.new(self.reply))


def chat_figures(chat: Chat, site: Deployment) -> list[Figure]:
    """Of one session, whose earlier turns are all on the device."""
    parts = {
        "system": chat.system,
        "turns": chat.turns,
        "user": chat.user,
        "reply": chat.reply,
    }
    last, step = chat.prompt_tokens(chat.turns), site.step
    new = min(last, chat.user + (chat.reply if chat.turns > 1 else chat.system))
    kept = "system + turns × user"
    rates = {"token": step.per_token_s, "pair": step.per_pair_s}
    seconds = "tokens × token + pairs × pair"
    return [
        Figure(
            "prompt tokens of a session",
            chat.num_prompt_tokens(),
            "",
            "turns × (system + user) + turns × (turns - 1) ÷ 2 × (user + reply)",
            parts,
        ),
        Figure(
            "of them new, each reply once",
            chat.num_new_tokens(replies_kept=False),
            "",
            f"{kept} + (turns - 1) × reply",
            parts,
        ),
        Figure(
            "of them new, replies' KV kept", chat.num_new_tokens(replies_kept=True), "", kept, parts
        ),
        Figure(
            "last turn's prefill, nothing kept",
            step.prefill_s(last),
            "s",
            seconds,
            {"tokens": last, "pairs": num_pairs(last, 0), **rates},
        ),
        Figure(
            "last turn's prefill, each reply once",
            step.prefill_s(new, last - new),
            "s",
            seconds,
            {"tokens": new, "pairs": num_pairs(new, last - new), **rates},
        ),
    ]


Workload = Chat | Agents | FewShot | Rag
KINDS: dict[str, type[Workload]] = {
    "chat": Chat,
    "agents": Agents,
    "few-shot": FewShot,
    "rag": Rag,
}


def described(text: str) -> Workload:
    """`chat`, or `chat:turns=20,user=100`: a kind, and parameters that differ from its defaults.
    Raises WorkloadError."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise WorkloadError(f"there is no workload {kind!r}: {', '.join(KINDS)}")
    known = {part.name: part.type for part in fields(KINDS[kind])}
    chosen: dict[str, float] = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in known:
            raise WorkloadError(f"{kind} has no {name!r}: {', '.join(known)}")
        try:
            number = int(value) if known[name] is int else float(value)
        except ValueError:
            number = -1
        if not (0 if name in _MAY_BE_NONE else 1e-6) <= number < 1e9:
            whole = "whole number" if known[name] is int else "number"
            least = "from 0" if name in _MAY_BE_NONE else "above 0"
            raise WorkloadError(f"{kind}: {name}={value} is no {whole} {least}")
        chosen[name] = number
    return KINDS[kind](**chosen)  # type: ignore[arg-type]


def trace_of(workload: Workload, seed: int = 0) -> Trace:
    """Its requests, by arrival. The same seed gives the same trace. Raises WorkloadError."""
    trace, num_tokens = Trace(1), 0
    try:
        for record in workload.records(random.Random(seed), Segments()):
            num_tokens += record.num_tokens
            if num_tokens > _TOKENS_MAX:
                raise WorkloadError(
                    f"the workload has more than {_TOKENS_MAX:,} prompt tokens: fewer requests"
                )
            trace.add(record)
    except WorkloadError:
        trace.close()
        raise
    return trace


_TOKENS_MAX = 300_000_000  # a minute's work, and a gigabyte of the disk
_MAY_BE_NONE = {"system", "reply", "result", "shots", "skew", "sort", "think"}


def _starts(draw: random.Random, rate: float, number: int) -> list[float]:
    """Seconds of arrivals that know nothing of each other."""
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(number)))


def _pause(draw: random.Random, mean_s: float) -> float:
    return draw.expovariate(1 / mean_s) if mean_s else 0.0


def _record(segments: Sequence[range], arrival_s: float, reply: range, session: str = "") -> Record:
    ids = array("I", itertools.chain.from_iterable(segments))
    return Record(
        len(ids),
        ids,
        1,
        arrival_s,
        len(reply),
        array("I", reply),
        session,
    )
