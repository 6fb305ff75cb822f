"""One cache for all nodes against a cache in each: Mooncake, FAST'25, figure 10.

python bench/studies/global_cache.py [--trace FILE]
"""

import argparse
import random
from collections.abc import Callable, Sequence

from foreword.sim.prompt import Visit
from foreword.sim.trace import Record, Trace
from study import (
    CONVERSATION,
    SYNTHETIC,
    Cache,
    main,
    percent,
    reference,
    table,
    trace_named,
    visits,
)

NODES = 10
NODE_TOKENS = 3_000_000
UNEVEN = 1.1  # times the mean that a node may have computed and still be asked for its prefixes
QUICK = 300  # requests
# What they print for conversation, tool and agent, and synthetic, in the order of their figure.
PUBLISHED = "2.22, 1.38 and 2.36"

# Which node a request goes to, of how many prompt tokens each has computed.
Route = Callable[[Visit, Sequence[Cache], Sequence[int]], int]


def at_random() -> Route:
    draw = random.Random(0)
    return lambda _seen, nodes, _loads: draw.randrange(len(nodes))


def by_first_block(seen: Visit, nodes: Sequence[Cache], _loads: Sequence[int]) -> int:
    return int.from_bytes(seen.prompt.hashes[0][:8]) % len(nodes)


def by_prefix(seen: Visit, nodes: Sequence[Cache], loads: Sequence[int]) -> int:
    """Of the nodes that have computed little more than the mean, the one that knows most; of those
    the one that has computed least."""
    most = UNEVEN * sum(loads) / len(nodes)
    allowed = [at for at, load in enumerate(loads) if load <= most]
    return max(allowed, key=lambda at: (nodes[at].known(seen), -loads[at]))


def page(args: argparse.Namespace) -> str:
    names = [None] if args.trace else [CONVERSATION, SYNTHETIC]
    most = QUICK if args.quick else None
    rows = [row for name in names for row in compared(args, name, most)]
    return f"""
# One cache for all nodes, or one in each

`python bench/studies/global_cache.py [--trace FILE]`. {NODES} nodes with room for
{NODE_TOKENS:,} tokens each, against one cache of {NODES * NODE_TOKENS:,} tokens.

**Run:** the traces through {NODES} production caches and through one, LRU, one request after
another, from empty caches. *At random*: each request to any node; *first block*: by the hash of
its first block; *longest prefix*: to the node that knows most of it, among those that have computed
at most {UNEVEN} times the mean. **Modelled:** prefill time, as the compute of a 16-bit Llama 3.1
8B.
**Published:** Mooncake (FAST'25, figure 10): a global cache hits {PUBLISHED} times as much as local
ones on conversation, tool and agent, and synthetic, and prefill takes down to 0.52 of the time. How
their requests reach a node is not said in what is at hand. Their tool and agent trace is not at
hand either: with it, `python bench/studies/global_cache.py --trace toolagent_trace.jsonl`.

{table(COLUMNS, rows)}

*Busiest node*: its share of all computed tokens ({percent(1 / NODES)} would be even). Requests that
go where their prefix is leave a global cache little to add; on conversation all prompts begin with
one block, so its hash sends them all to one node.
"""


COLUMNS = ["trace", "local, routed", "local hits", "global hits", "global ÷ local"]
COLUMNS += ["prefill time, global ÷ local", "busiest node"]


def compared(
    args: argparse.Namespace, name: str | None, most: int | None
) -> list[list[str | float]]:
    routes: dict[str, Route] = {
        "at random": at_random(),
        "first block": by_first_block,
        "longest prefix": by_prefix,
    }
    with trace_named(args, name or "") as trace:
        everywhere = outcome(trace, NODES * NODE_TOKENS, 1, by_prefix, most)
        rows: list[list[str | float]] = []
        for way, route in routes.items():
            local = outcome(trace, NODE_TOKENS, NODES, route, most)
            rows.append(
                [
                    (name or args.trace.name).removesuffix(".jsonl.gz"),
                    way,
                    percent(local[0]),
                    percent(everywhere[0]),
                    f"{everywhere[0] / local[0]:.2f}" if local[0] else "",
                    f"{everywhere[1] / local[1]:.2f}",
                    percent(local[2]),
                ]
            )
    return rows


def outcome(
    trace: Trace, node_tokens: int, num_nodes: int, route: Route, most: int | None
) -> tuple[float, float, float]:
    """The share of tokens that hit, seconds of prefill, and the busiest node's share of them."""
    nodes = [Cache(node_tokens // trace.id_tokens, trace.id_tokens) for _ in range(num_nodes)]
    loads = [0] * num_nodes
    step, seconds = reference().step, 0.0
    num_tokens = num_hit = 0
    for record, seen in visits(trace, most):
        at = route(seen, nodes, loads)
        hit = nodes[at].serve(seen)
        loads[at] += record.num_tokens - hit
        seconds += step.prefill_s(*remaining(record, hit))
        num_tokens += record.num_tokens
        num_hit += hit
    return num_hit / num_tokens, seconds, max(loads) / sum(loads)


def remaining(record: Record, hit: int) -> tuple[int, int]:
    """Tokens to compute, at least one, and those before them."""
    known = min(hit, record.num_tokens - 1)
    return record.num_tokens - known, known


if __name__ == "__main__":
    main(__file__, page)
