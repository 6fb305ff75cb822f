"""OPT is exact: held against every way to keep blocks, on traces small enough to try them all."""

from collections.abc import Iterable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.cache import KVCache, Refusal
from foreword.sim.opt import Future
from foreword.sim.prompt import visit
from foreword.sim.replay import Rules, replay
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import Setting

Path = tuple[int, ...]  # a block, as the ids up to it: the oracle uses no hash

capacities = st.integers(1, 4)
short = st.lists(st.integers(0, 1), min_size=1, max_size=6)
answers = st.lists(st.integers(0, 1), max_size=4)
requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=9)


def recorded(prompts: list[list[int]]) -> Trace:
    trace = Trace(2)
    for ids in prompts:
        trace.add(Record(2 * len(ids), ids, 2))
    return trace


def subsets(blocks: Iterable[Path], size: int) -> Iterable[tuple[Path, ...]]:
    found = list(blocks)
    return combinations(found, min(size, len(found)))


def paths(prompts: list[list[int]]) -> list[tuple[list[Path], int]]:
    """Of each prompt the blocks, all of which may be reused."""
    return [([tuple(ids[:end]) for end in range(1, len(ids) + 1)], len(ids)) for ids in prompts]


def most_hits(visits: list[tuple[list[Path], int]], capacity: int, *, held: bool) -> int:
    """Blocks reused by the best of all ways to keep `capacity` blocks. A visit: its blocks, and how
    many of them may be reused. `held`: those of the request that runs are kept, all of them; else
    any may be left out, before and after."""
    best: dict[frozenset[Path], int] = {frozenset(): 0}
    for path, num_reusable in visits:
        after: dict[frozenset[Path], int] = {}
        for kept, hits in best.items():
            wanted = enumerate(path[:num_reusable])
            usable = next((at for at, block in wanted if block not in kept), num_reusable)
            forced, free = (path, kept - set(path)) if held else ([], kept | set(path))
            for chosen in subsets(free, capacity - len(forced)):
                state = frozenset((*forced, *chosen))
                after[state] = max(after.get(state, 0), hits + usable)
        best = after
    return max(best.values())


@given(requests, capacities)
def test_no_way_to_keep_blocks_has_more_hits(prompts: list[list[int]], capacity: int) -> None:
    with recorded(prompts) as trace:
        found = replay(trace, [Setting("opt", (capacity,))], Rules()).rows[0].outcome.total
    assert found.num_hit_blocks == most_hits(paths(prompts), capacity, held=False)


@given(requests, capacities)
def test_nor_where_a_request_holds_all_its_blocks(prompts: list[list[int]], capacity: int) -> None:
    """As in a server: the production cache with the policy alone."""
    prompts = [ids[:capacity] for ids in prompts]
    num_hits = 0
    with recorded(prompts) as trace, Future(trace, lambda record: visit(record, 1)) as future:
        cache = KVCache(capacity + 1, 1, policy=future.policy())
        for number, record in enumerate(trace):
            seen = visit(record, 1)
            future.advance(number, seen)
            admitted = cache.admit(seen.prompt)
            assert not isinstance(admitted, Refusal)
            lease, _ = admitted
            num_hits += lease.num_reused_tokens
            cache.filled(lease, seen.num_filled - lease.num_reused_tokens)
            cache.release(lease)
    assert num_hits == most_hits(paths(prompts), capacity, held=True)


@given(
    st.lists(st.tuples(short, answers), min_size=1, max_size=7),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_answers_are_kept_and_no_hits_for_whom_they_answer(
    requests: list[tuple[list[int], list[int]]], capacity: int, block_size: int
) -> None:
    """Nor is a prompt's last token, which is computed in any case."""
    visits = []
    with Trace(1) as trace:
        for prompt, answer in requests:
            trace.add(Record(len(prompt), prompt, output_ids=answer))
            whole = prompt + answer[:-1]
            ends = range(block_size, len(whole) + 1, block_size)
            visits.append(([tuple(whole[:end]) for end in ends], (len(prompt) - 1) // block_size))
        rules = Rules(block_size)
        found = replay(trace, [Setting("opt", (capacity,))], rules).rows[0].outcome.total
    assert found.num_hit_blocks == most_hits(visits, capacity, held=False)
