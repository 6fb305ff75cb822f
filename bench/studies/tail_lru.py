"""Tail-optimised LRU (arXiv 2510.15152) against LRU: hits, and the tail of modelled first tokens.

python bench/studies/tail_lru.py [--trace FILE]
"""

import argparse
import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence

from foreword.core.block import BlockHash
from foreword.core.policy import Policy, Ranked
from foreword.sim.prompt import Visit
from foreword.sim.trace import Record, Trace
from foreword.sim.workload import Segments
from study import (
    BLOCK_SIZE,
    CONVERSATION,
    Cache,
    main,
    percent,
    quantile,
    reference,
    table,
    trace_named,
    visits,
)

MFU = 0.4
GOALS_S = (0.2, 0.5, 1.0)  # of a first token; the paper has the first
CAPACITIES = (2_560_000, 5_120_000, 15_360_000)  # tokens: 5,000 blocks of 512 and more
CHAT_GOALS_S = (0.1, 0.2)
CHAT_CAPACITIES = (50_000, 100_000, 200_000)
CHATS = 300
QUICK = 300  # requests
_SAFE = 2.0**40  # what may go before all else ranks below every clock


class TailOptimised:
    """What a chat can do without goes first. Its next prompt is taken to be its last one, the
    answer, and a turn of the usual length: where no more than `spare_tokens` of that lie behind
    the start of a block, the block is safe to drop. Among the safe ones, and then among the others,
    the least recently used."""

    def __init__(self, spare_tokens: int, block_tokens: int) -> None:
        self._spare_tokens = spare_tokens
        self._block_tokens = block_tokens
        self._is_safe: dict[BlockHash, bool] = {}
        self._turn_tokens = 0.0  # what prompts add to what is known of them, on average
        self._num_turns = 0
        self.policy = Policy(
            "tail-optimised", lambda _capacity, _tokens: Ranked(self._rank, by_run=False)
        )

    def see(self, record: Record, seen: Visit, num_known: int) -> None:
        """A request that is about to be served; an endless cache knows so many of its tokens."""
        if 2 * num_known > record.num_tokens:  # less is another chat with the same opening
            self._num_turns += 1
            added = record.num_tokens - num_known
            self._turn_tokens += (added - self._turn_tokens) / self._num_turns
        expected = record.num_tokens + record.num_output_tokens + self._turn_tokens
        for number, block_hash in enumerate(seen.whole.hashes):
            behind = expected - number * self._block_tokens
            self._is_safe[block_hash] = behind <= self._spare_tokens

    def _rank(self, _added: int, last_used: int, of: BlockHash | None) -> float:
        return last_used - (_SAFE if of is None or self._is_safe.get(of) else 0.0)


def page(args: argparse.Namespace) -> str:
    with trace_named(args, CONVERSATION) as trace:
        most = QUICK if args.quick else None
        recorded = table(COLUMNS, compared(trace, CAPACITIES, GOALS_S, most))
        name = args.trace.name if args.trace else CONVERSATION
    num_chats = 20 if args.quick else CHATS
    with chats(num_chats) as trace:
        made_up = table(COLUMNS, compared(trace, CHAT_CAPACITIES, CHAT_GOALS_S, None))
    return f"""
# LRU for the tail

`python bench/studies/tail_lru.py [--trace FILE]`, on {name}, and on
{num_chats} made-up chats whose lengths and turns differ widely.

**Run:** requests through the production cache, one after another, under LRU and under
tail-optimised LRU (arXiv 2510.15152), which is a policy of this study's own: first those blocks go
that a chat's next turn can do without and still compute no more tokens than the goal allows.
**Modelled:** first tokens, as the compute alone of Llama 3.1 8B in 16 bits on one H100 at {MFU:g}
of its peak: no queue, no decoding. **Published**, on WildChat, at best: P90 down by 27.5 %, P95 by
23.9 %, first tokens later than 200 ms by 38.9 %.

{name}:

{recorded}

Made-up chats:

{made_up}

Where room is short the tail falls, as published, and the mean rises: short chats pay for long ones.
Where there is room LRU is better in all of it, since long chats that have ended keep what they
needed, and short ones that go on lose it. On recorded prompts some of the gain is not of the tail:
their unfinished last blocks, which nothing finds again, count as safe.

*Goal*: the seconds that the policy is given, and, with it, the tokens that may be computed in them;
in brackets what differs from LRU. *Later*: the share of requests whose first token takes longer
than {", ".join(f"{goal:g}" for goal in LATE_S)} s.
"""


LATE_S = (0.2, 0.5, 1.0)
COLUMNS = ["room, tokens", "goal", "hit tokens", "mean, ms", "P90, ms", "P95, ms", "P99, ms"]
COLUMNS += [f"later than {late:g} s" for late in LATE_S]


def spare(goal_s: float) -> int:
    """Tokens that a prefill from nothing computes within the goal."""
    step = reference(MFU).step
    return bisect_right(range(1, 10**6), goal_s, key=step.prefill_s)


def compared(
    trace: Trace, capacities: Sequence[int], goals_s: Sequence[float], most: int | None
) -> list[list[str]]:
    """Rows of the table. The last one is of a cache without limit."""
    id_tokens = trace.id_tokens
    block_tokens = id_tokens if id_tokens > 1 else BLOCK_SIZE
    tails = {
        (size, goal): TailOptimised(spare(goal), block_tokens)
        for size in capacities
        for goal in goals_s
    }
    caches = {(size, 0.0): Cache(size // block_tokens, id_tokens) for size in capacities}
    for (size, goal), tail in tails.items():
        caches[size, goal] = Cache(size // block_tokens, id_tokens, tail.policy)
    num_blocks = sum(-(-(one.num_tokens + one.num_output_tokens) // block_tokens) for one in trace)
    endless = Cache(num_blocks, id_tokens)
    hits: dict[tuple[int, float], list[int]] = {key: [] for key in caches}
    lengths, known = [], []
    for record, seen in visits(trace, most):
        lengths.append(record.num_tokens)
        known.append(endless.serve(seen))
        for tail in tails.values():
            tail.see(record, seen, known[-1])
        for key, cache in caches.items():
            hits[key].append(cache.serve(seen))
    rows = []
    for size in capacities:
        base = figures(lengths, hits[size, 0.0])
        rows.append([f"{size:,}", "LRU", *cells(base)])
        for goal in goals_s:
            label = f"{goal:g} s, {spare(goal):,} tokens"
            rows.append(["", label, *cells(figures(lengths, hits[size, goal]), base)])
    return [*rows, ["no limit", "", *cells(figures(lengths, known))]]


def figures(lengths: Sequence[int], hits: Sequence[int]) -> list[float]:
    """The share of tokens that hit; mean, P90, P95, P99 in ms; the shares of late ones."""
    step = reference(MFU).step
    known = [min(hit, length - 1) for length, hit in zip(lengths, hits, strict=True)]
    seconds = [
        step.prefill_s(length - hit, hit) for length, hit in zip(lengths, known, strict=True)
    ]
    late = [sum(one > limit for one in seconds) / len(seconds) for limit in LATE_S]
    tail = [1e3 * quantile(seconds, share) for share in (0.9, 0.95, 0.99)]
    return [sum(hits) / sum(lengths), 1e3 * statistics.fmean(seconds), *tail, *late]


def cells(found: Sequence[float], base: Sequence[float] | None = None) -> list[str]:
    texts = [percent(found[0]), *(f"{value:,.0f}" for value in found[1:5])]
    texts += map(percent, found[5:])
    for at, before in enumerate(base or ()):
        if at and before:
            texts[at] += f" ({found[at] / before - 1:+.0%})"
    return texts


def chats(number: int) -> Trace:
    """Turns of users and replies of drawn lengths, a few of them very long; turns of all chats by
    drawn times."""
    draw, segments = random.Random(0), Segments()
    system = segments.new(200)
    trace = Trace(1)
    for _ in range(number):
        now_s, history = draw.uniform(0, 3600), [system]
        while True:
            history.append(segments.new(1 + min(20_000, int(draw.lognormvariate(4.5, 1.7)))))
            reply = segments.new(1 + min(4_000, int(draw.lognormvariate(5.5, 0.8))))
            ids = [token for part in history for token in part]
            trace.add(
                Record(len(ids), ids, 1, now_s, num_output_tokens=len(reply), output_ids=reply)
            )
            history.append(reply)
            now_s += draw.expovariate(1 / 60)
            if draw.random() < 0.15 or len(ids) > 60_000:
                break
    return trace


if __name__ == "__main__":
    main(__file__, page)
