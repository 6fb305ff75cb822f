"""The policies on public traces: how much of OPT the default one has, and that it is never far
below LRU; `foreword replay TRACE --policy lru,gittins --blocks SIZES` prints the same."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from foreword.core.block import BlockHash
from foreword.core.policies import DEFAULT, POLICIES
from foreword.sim.importer import read_trace
from foreword.sim.prompt import Visit
from foreword.sim.replay import Finding, Rules, replay
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import CoreTrial, Setting
from traces import shared

# Of OPT, in percent, by blocks.
LEAST = {
    "mooncake_fast25_conversation": {5_000: 50.0, 10_000: 65.0, 30_000: 91.0},
    "mooncake_fast25_synthetic": {5_000: 55.0, 10_000: 72.0},
}
# Of a trace's different blocks, and how many points of its blocks the policy may be below LRU.
SLACK = {0.02: 0.8, 0.05: 0.5, 0.2: 0.5}
OTHERS = ("lmcache_agent_miniswe", "tracelab_example_sanitized")


def found(trace: Trace, settings: Sequence[Setting]) -> dict[Setting, Finding]:
    rows = replay(trace, settings, Rules()).rows
    return {row.outcome.setting: row for row in rows}


@pytest.mark.parametrize("name", [*LEAST, *OTHERS])
def test_the_default_policy_has_much_of_opt_and_is_never_far_below_lru(name: str) -> None:
    """Where a prompt fits: a device without room for it refuses it, whatever the policy."""
    goals = LEAST.get(name, {})
    with read_trace(shared(f"{name}.jsonl.gz")) as trace:
        ceiling = replay(trace, [Setting("lru", (None,))], Rules())
        most = max(-(-record.num_tokens // ceiling.block_tokens) for record in trace)
        sizes = {max(most, int(part * ceiling.num_blocks)): slack for part, slack in SLACK.items()}
        wanted = [Setting(one, (size,)) for size in sizes for one in ("lru", DEFAULT.name)]
        rows = found(trace, [*wanted, *(Setting(DEFAULT.name, (size,)) for size in goals)])
    for size, slack in sizes.items():
        lru, ours = (rows[Setting(one, (size,))].outcome.total for one in ("lru", DEFAULT.name))
        assert 100 * ours.block_share >= 100 * lru.block_share - slack, size
    for size, least in goals.items():
        assert 100 * rows[Setting(DEFAULT.name, (size,))].opt_share >= least, size


def renamed(trace: Trace, seed: int) -> Iterator[Record]:
    """The same requests with other ids of their blocks."""
    draw, names = Random(seed), dict[int, int]()
    for record in trace:
        ids = [names.setdefault(one, draw.getrandbits(31)) for one in record.ids]
        yield Record(record.num_tokens, ids, record.id_tokens, record.arrival_s)


def test_names_of_blocks_make_no_difference() -> None:
    settings = [Setting(name, (1_000,)) for name in POLICIES if name != "fifo"]
    with read_trace(shared("mooncake_fast25_synthetic.jsonl.gz")) as trace, Trace(512) as other:
        for record in renamed(trace, 1):
            other.add(record)
        before, after = found(trace, settings), found(other, settings)
    for one in settings:
        assert before[one].outcome.total == after[one].outcome.total


def hashes(trial: CoreTrial) -> Iterator[BlockHash]:
    """Of all full blocks in the device."""
    nodes = list(trial._cache.index._roots.values())
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.parent is not None:
            yield from node.hashes


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_all_that_is_kept_of_a_prompt_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a prompt that are in the device, wherever in it, are those that are reused."""
    find = CoreTrial.find

    def checked(trial: CoreTrial, record: Record, seen: Visit) -> tuple[int, int] | None:
        kept = set(hashes(trial))
        hits = find(trial, record, seen)
        assert hits is None or hits[1] == len(kept.intersection(seen.prompt.hashes))
        return hits

    monkeypatch.setattr(CoreTrial, "find", checked)
    with read_trace(shared("mooncake_fast25_synthetic.jsonl.gz")) as trace, Trace(512) as part:
        for record, _ in zip(trace, range(500), strict=False):
            part.add(record)
        assert found(part, [Setting("leaf-fifo" if name == "fifo" else name, (900,))])
