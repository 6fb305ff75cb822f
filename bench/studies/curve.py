"""Hit rate against capacity of a recorded trace, under LRU, FIFO and OPT.

python bench/studies/curve.py [--trace FILE]
"""

import argparse
import itertools

from foreword.sim.replay import Findings, Rules, replay
from foreword.sim.trace import Trace
from foreword.sim.trial import UNLIMITED, Setting
from study import CONVERSATION, main, percent, table, trace_named

# As kvcache-simulator 0.1.3 prints them: the last half, by tokens.
PUBLISHED = {
    704: ("4.6 %", "16.7 %"),
    1_409: ("4.9 %", "23.0 %"),
    5_637: ("13.1 %", "37.3 %"),
    11_275: ("23.3 %", "39.8 %"),
    22_550: ("31.7 %", "39.8 %"),
    45_100: ("37.4 %", "39.8 %"),
}
POLICIES = ("lru", "fifo")
QUICK = 300  # requests


def page(args: argparse.Namespace) -> str:
    with trace_named(args, CONVERSATION) as whole, shortened(whole, args.quick) as trace:
        settings = [Setting(name, (size,)) for size in PUBLISHED for name in POLICIES]
        settings.append(Setting("lru", (UNLIMITED,)))
        late = replay(trace, settings, Rules(warmup=0.5))
        cold = replay(trace, settings, Rules())
        name = args.trace.name if args.trace else CONVERSATION
        return f"""
# How much a cache of which size hits

`python bench/studies/curve.py [--trace FILE]`, on {name}: {cold.num_requests:,} requests,
{cold.ceiling.num_blocks:,} blocks of {cold.block_tokens} tokens, {cold.num_blocks:,} different
ones.

**Run:** the trace through the production cache, one request after another; OPT is what no
cache of full blocks can beat, by the trace's own future. A prompt's unfinished last block takes
room and matches nothing, as in engines that hash full blocks; answers are not in the trace.
**Modelled:** nothing. **Published:**
for the conversation trace, by kvcache-simulator 0.1.3.

The last half of the requests, share of prompt tokens reused:

{curve(late, PUBLISHED if not args.trace else {})}

All requests, from an empty cache:

{curve(cold, {})}

Kimi's own trace, for which 34 % at 1,000 blocks and 55 % without limit are published
(arXiv 2407.00079), is not at hand here; with it,
`python bench/studies/curve.py --trace mooncake_trace.jsonl` prints this page for it.
"""


def shortened(trace: Trace, quick: bool) -> Trace:
    """Its first requests where that is enough."""
    if not quick:
        return trace
    short = Trace(trace.id_tokens)
    for record in itertools.islice(trace, QUICK):
        short.add(record)
    return short


def curve(findings: Findings, published: dict[int, tuple[str, str]]) -> str:
    found = {
        (row.outcome.setting.policy, row.outcome.setting.blocks[0]): row for row in findings.rows
    }
    rows: list[list[str]] = []
    for size in PUBLISHED:
        lru, fifo = (found[name, size] for name in POLICIES)
        shares = [one.token_share for one in (lru.outcome.total, fifo.outcome.total, lru.bound)]
        rows.append([f"{size:,}", *map(percent, [*shares, 1 - lru.opt_share])])
    ceiling = percent(findings.ceiling.token_share)
    rows.append(["no limit", ceiling, ceiling, ceiling, percent(0.0)])
    columns = ["blocks", "LRU", "FIFO", "OPT", "LRU's regret to OPT, hit blocks"]
    if published:
        columns += ["LRU as published", "OPT as published"]
        for row, figures in zip(rows, [*published.values(), ("39.8 %", "39.8 %")], strict=True):
            row += figures
    return table(columns, rows)


if __name__ == "__main__":
    main(__file__, page)
