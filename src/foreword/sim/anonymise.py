"""A trace without its text, token ids and names, as Mooncake's form has it.

Blocks, sessions and tenants are numbered in the order in which they come, so a number says no more
than that two are the same. What stays is what a cache sees: times, lengths, what begins alike.
"""

import json
from collections.abc import Iterator

from foreword.sim.ids import prefixes
from foreword.sim.trace import Trace


def anonymous_lines(trace: Trace, block_size: int = 16) -> Iterator[str]:
    """A line of JSON for each request, by arrival. `block_size` counts for traces of token ids: of
    these, what two prompts share beyond their full blocks is lost."""
    block_tokens = trace.id_tokens if trace.id_tokens > 1 else block_size
    step = block_tokens // trace.id_tokens
    blocks: dict[int, int] = {}
    sessions: dict[str, int] = {}
    tenants: dict[str, int] = {}
    for record in trace:
        ends = prefixes(record.ids, record.tenant)
        named = ends[step - 1 :: step].tolist()
        if len(ends) % step:
            named.append(int(ends[-1]))
        row: dict[str, object] = {
            "timestamp": _whole(round(record.arrival_s * 1000, 3)),
            "input_length": record.num_tokens,
            "output_length": record.num_output_tokens,
            "hash_ids": [blocks.setdefault(one, len(blocks)) for one in named],
            "block_size": block_tokens,
        }
        for name, value, known in (
            ("session_id", record.session, sessions),
            ("tenant", record.tenant, tenants),
        ):
            if value:
                row[name] = str(known.setdefault(value, len(known)))
        if record.num_cached_tokens is not None:
            row["cached_tokens"] = record.num_cached_tokens
        yield json.dumps(row)


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value
