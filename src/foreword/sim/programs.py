"""Programs: groups of requests whose prompts form a tree, some of which need answers of others.

Many programs have one opening, so all prompts together are a tree too. Every segment is tokens that
no other has. They come as a batch, all known at the start, or one program after another at random.
"""

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from foreword.core.block import BlockHash
from foreword.sim.prompt import visit
from foreword.sim.trace import Record, Trace
from foreword.sim.workload import Segments


@dataclass(frozen=True, slots=True)
class Call:
    """One request. It comes `pause_s` after the answer of call `after` of its program, or with the
    program itself."""

    prompt: Sequence[range]
    reply: range
    after: int | None = None
    pause_s: float = 0.0


Program = list[Call]
Kind = Callable[[random.Random, Segments, int], Iterator[Program]]


def few_shot(draw: random.Random, segments: Segments, num: int) -> Iterator[Program]:
    """An instruction that all have, examples that a program has, 24 questions at once."""
    opening = segments.new(300)
    for _ in range(num):
        shots = segments.new(draw.randint(1200, 2400))
        yield [
            Call([opening, shots, segments.new(draw.randint(40, 160))], segments.new(8))
            for _ in range(24)
        ]


def self_consistency(draw: random.Random, segments: Segments, num: int) -> Iterator[Program]:
    """A question of whose answer 16 are drawn, behind examples that all have."""
    opening = segments.new(1500)
    for _ in range(num):
        question = segments.new(draw.randint(100, 900))
        yield [Call([opening, question], segments.new(draw.randint(60, 140))) for _ in range(16)]


def tree_of_thought(draw: random.Random, segments: Segments, num: int) -> Iterator[Program]:
    """A problem, then three levels of thoughts, each of which four go on from."""
    opening = segments.new(600)
    for _ in range(num):
        program = [Call([opening, segments.new(draw.randint(100, 400))], _reply(draw, segments))]
        level = [0]
        for _ in range(3):
            next_level = []
            for at in level:
                history = [*program[at].prompt, program[at].reply]
                for _ in range(4):
                    hint = segments.new(draw.randint(15, 40))
                    next_level.append(len(program))
                    program.append(Call([*history, hint], _reply(draw, segments), at))
            level = next_level
        yield program


def agents(draw: random.Random, segments: Segments, num: int) -> Iterator[Program]:
    """Tools and instructions that all have, a task, and 12 steps, each after a tool has run for two
    seconds on average."""
    opening = segments.new(4000)
    for _ in range(num):
        history = [opening, segments.new(draw.randint(100, 500))]
        program: Program = []
        for step in range(12):
            reply = _reply(draw, segments)
            after, pause_s = (step - 1, draw.expovariate(0.5)) if step else (None, 0.0)
            program.append(Call(list(history), reply, after, pause_s))
            history += [reply, segments.new(draw.randint(50, 750))]
        yield program


def _reply(draw: random.Random, segments: Segments) -> range:
    return segments.new(draw.randint(60, 140))


KINDS: Mapping[str, Kind] = {
    "few-shot": few_shot,
    "self-consistency": self_consistency,
    "tree-of-thought": tree_of_thought,
    "agents": agents,
}


def batch(programs: Sequence[Program], draw: random.Random) -> Trace:
    """All requests at once, in a drawn order. What they will answer is not known: each is a prompt
    of its own, also where its text has an answer of another."""
    trace = Trace(1)
    calls = list(chain.from_iterable(programs))
    draw.shuffle(calls)
    for call in calls:
        ids = _ids(call)
        trace.add(Record(len(ids), ids, num_output_tokens=len(call.reply)))
    return trace


def arriving(
    programs: Sequence[Program], rate: float, draw: random.Random
) -> tuple[Trace, dict[int, tuple[int, float]]]:
    """Programs that begin at random, `rate` a second, and of each request that needs an answer
    whose it is, by place, and how long after it comes."""
    trace, follows = Trace(1), {}
    starts_s = accumulate(draw.expovariate(rate) for _ in programs)
    for program, start_s in zip(programs, starts_s, strict=True):
        first = len(trace)
        for at, call in enumerate(program):
            if call.after is not None:
                follows[first + at] = first + call.after, call.pause_s
            ids = _ids(call)
            reply = array("I", call.reply)
            trace.add(Record(len(ids), ids, 1, start_s, len(reply), reply))
    return trace, follows


def one_by_one(trace: Trace, rate: float, draw: random.Random) -> Trace:
    """The requests of a trace, in its order, each at random, `rate` a second."""
    coming, now_s = Trace(trace.id_tokens), 0.0
    for record in trace:
        now_s += draw.expovariate(rate)
        coming.add(replace(record, arrival_s=now_s))
    return coming


def most_hit_blocks(trace: Trace, block_size: int) -> tuple[int, int]:
    """How many full blocks of its prompts any server can reuse, in whatever order it takes them and
    however large its cache is; and how many there are, but for those with a prompt's last token,
    which is always computed.

    A block is computed at least once before it is reused: in a prompt that others share it with, or
    where nobody looks for it, in an answer or at the end of a prompt.
    """
    total = 0
    sought: set[BlockHash] = set()
    given: set[BlockHash] = set()
    for record in trace:
        seen = visit(record, block_size)
        total += seen.num_reusable
        sought.update(seen.whole.hashes[: seen.num_reusable])
        given.update(seen.whole.hashes[seen.num_reusable : seen.num_kept])
    return total - len(sought - given), total


def _ids(call: Call) -> "array[int]":
    return array("I", chain.from_iterable(call.prompt))
