"""A time to live for KV while an agent's tool runs (Continuum, arXiv 2511.02230), against LRU with
as much memory.

    python bench/studies/think_times.py [--trace FILE]
"""

import argparse
from collections import OrderedDict
from collections.abc import Sequence

from foreword.core.block import BlockHash
from foreword.sim.formats.reading import ReadOptions
from foreword.sim.prompt import Visit
from foreword.sim.trace import Record, Trace
from study import SESSIONS, Cache, main, percent, quantile, reference, table, trace_named, visits

COARSE = 512  # tokens of a block
SPREAD_S = 6 * 3600.0  # in which the sessions begin
SEED = 1
LIVES_S = (0, 10, 30, 60, 120, 300, 900, 3600)
QUICK = 200  # requests


class Living:
    """A cache without limit that lets blocks go which nobody asked for during `life_s`."""

    def __init__(self, life_s: float, num_blocks: int, id_tokens: int) -> None:
        self._life_s = life_s
        self._cache = Cache(num_blocks, id_tokens)
        self._used_s: OrderedDict[BlockHash, float] = OrderedDict()  # the longest unused first
        self._now_s = 0.0
        self.block_s = 0.0  # of all blocks, the seconds that they were held
        self.most_blocks = 0
        self.num_hit = 0
        self.prefill_s = 0.0
        self._step = reference().step

    def serve(self, record: Record, seen: Visit) -> None:
        now_s = record.arrival_s
        self._pass_to(now_s)
        hit = self._cache.serve(seen)
        known = min(hit, record.num_tokens - 1)
        self.prefill_s += self._step.prefill_s(record.num_tokens - known, known)
        self.num_hit += hit
        # Children before parents, as they leave.
        for block_hash in reversed(seen.whole.hashes[: seen.num_kept]):
            self._used_s[block_hash] = now_s
            self._used_s.move_to_end(block_hash)
        self.most_blocks = max(self.most_blocks, len(self._used_s))

    def _pass_to(self, now_s: float) -> None:
        num_gone = 0
        while self._used_s:
            ends_s = next(iter(self._used_s.values())) + self._life_s
            if ends_s > now_s or (ends_s == now_s and self._life_s):
                break
            self._used_s.popitem(last=False)
            self.block_s += max(0.0, ends_s - self._now_s)
            num_gone += 1
        self.block_s += len(self._used_s) * (now_s - self._now_s)
        self._let_go(num_gone)
        self._now_s = now_s

    def _let_go(self, num_blocks: int) -> None:
        """Of the production cache, in its own order: what was used last the longest ago."""
        core = self._cache.core
        while num_blocks:
            leaf = core.index.pop_leaf()
            num_idle = core.pool.num_idle_at_end(leaf.block_ids, num_blocks)
            core.pool.drop(core.index.cut(leaf, num_idle)[1])
            num_blocks -= num_idle


def page(args: argparse.Namespace) -> str:
    options = ReadOptions(coarsen=COARSE, spread_s=SPREAD_S, seed=SEED)
    with trace_named(args, SESSIONS, options) as trace:
        most = QUICK if args.quick else None
        name = args.trace.name if args.trace else SESSIONS
        gaps = between(trace, most)
        rows, ceiling = compared(trace, most)
    return f"""
# A time to live while the tool runs

`python bench/studies/think_times.py [--trace FILE]`, on {name}:
sessions of coding agents, coarsened to blocks of {COARSE} tokens. They have no common clock: their
starts are drawn within {SPREAD_S / 3600:g} hours (seed {SEED}), so how many run at once is this
study's choice. From one request of a session to its next: median {quantile(gaps, 0.5):.0f} s, P90
{quantile(gaps, 0.9):.0f} s, P99 {quantile(gaps, 0.99):,.0f} s.

**Run:** the requests through the production cache, by arrival, with every block let go that nobody
has asked for during its time to live; and under LRU, with as much room as that held on average, and
with as much as it held at most. A time to live begins when a request arrives, so it covers the
answer too; requests take no time. **Modelled:** prefill time, as the compute alone of a 16-bit
Llama 3.1 8B. **Published:** CacheTTL (arXiv 2511.02230 v4) improves mean completion times of agents
by over 8 ×, with a time to live for each request from what a reload and the queue cost; one for
all, and no queue, is what is tried here.

{table(COLUMNS, rows)}

Without limit {ceiling} of the tokens hit. A time to live holds memory only while sessions run, so
it hits more than LRU in the memory that it takes on average, where others use the rest. Where the
memory is there all the time, as much as it takes at most, LRU hits more.
"""


COLUMNS = ["time to live", "hit tokens", "prefill left", "GB on average", "GB at most"]
COLUMNS += ["LRU in the average, hit tokens", "LRU in the most, hit tokens"]


def between(trace: Trace, most: int | None) -> list[float]:
    """Seconds from one request of a session to its next."""
    last: dict[str, float] = {}
    gaps = []
    for record, _seen in visits(trace, most):
        if record.session in last:
            gaps.append(record.arrival_s - last[record.session])
        last[record.session] = record.arrival_s
    return gaps


def compared(trace: Trace, most: int | None) -> tuple[list[list[str]], str]:
    num_blocks = sum(-(-record.num_tokens // trace.id_tokens) for record in trace)
    lives = [Living(life_s, num_blocks, trace.id_tokens) for life_s in LIVES_S]
    endless = Living(float("inf"), num_blocks, trace.id_tokens)
    num_tokens, span_s, cold_s = 0, 0.0, 0.0
    step = reference().step
    for record, seen in visits(trace, most):
        num_tokens += record.num_tokens
        span_s = record.arrival_s
        for one in (*lives, endless):
            one.serve(record, seen)
        cold_s += step.prefill_s(record.num_tokens)
    rooms = [(int(one.block_s / span_s), one.most_blocks) for one in lives]
    plain = under_lru(trace, [room for pair in rooms for room in pair], most)
    rows = []
    for life_s, one, (mean, peak) in zip(LIVES_S, lives, rooms, strict=True):
        hits = [one.num_hit, plain[mean], plain[peak]]
        shares = [percent(hit / num_tokens) for hit in hits]
        memory = [gigabytes(mean), gigabytes(peak)]
        left = percent(one.prefill_s / cold_s)
        rows.append([f"{life_s} s", shares[0], left, *memory, *shares[1:]])
    return rows, percent(endless.num_hit / num_tokens)


def under_lru(trace: Trace, rooms: Sequence[int], most: int | None) -> dict[int, int]:
    """By blocks, how many tokens hit."""
    caches = {room: Cache(room, trace.id_tokens) for room in rooms}
    hits = dict.fromkeys(caches, 0)
    for _record, seen in visits(trace, most):
        for room, cache in caches.items():
            hits[room] += cache.serve(seen)
    return hits


def gigabytes(num_blocks: int) -> str:
    return f"{num_blocks * COARSE * reference().kv_bytes / 1e9:,.0f}"


if __name__ == "__main__":
    main(__file__, page)
