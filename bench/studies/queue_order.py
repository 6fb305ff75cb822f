"""In which order a queue is served: SGLang's longest prefix first against the depth-first optimum.

python bench/studies/queue_order.py
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from foreword.sim.prompt import Visit, visit
from foreword.sim.trace import Record
from foreword.sim.workload import Segments
from study import Cache, main, percent, table

ID_TOKENS = 16
QUEUES = (16, 64, 256)  # requests that wait, and can be compared
REQUESTS = 512
# Room of the cache: times what the longest request takes. From once on depth first is optimal.
ROOMS = (1.5, 4.0)


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and the place of the one whose answer it needs."""

    seen: Visit
    num_ids: int
    after: int | None = None


Batch = Sequence[Job]  # depth first


class Tree:
    """Builds prompts out of segments (in ids of 16 tokens), depth first."""

    def __init__(self) -> None:
        self._segments = Segments()
        self.jobs: list[Job] = []

    def new(self, num_ids: int) -> range:
        return self._segments.new(num_ids)

    def ask(self, parts: Sequence[range], after: int | None = None) -> int:
        ids = [one for part in parts for one in part]
        seen = visit(Record(len(ids) * ID_TOKENS, ids, ID_TOKENS), ID_TOKENS)
        self.jobs.append(Job(seen, len(ids), after))
        return len(self.jobs) - 1


def few_shot(tree: Tree, num: int) -> None:
    """Eight sets of examples, short questions."""
    for _ in range(8):
        shots = tree.new(64)
        for _ in range(num // 8):
            tree.ask([shots, tree.new(8)])


def documents(tree: Tree, num: int) -> None:
    """A system prompt, long documents, several questions to each."""
    system = tree.new(16)
    for _ in range(num // 8):
        document = tree.new(128)
        for _ in range(8):
            tree.ask([system, document, tree.new(4)])


def thoughts(tree: Tree, num: int) -> None:
    """A tree of thought: four branches at each of four levels."""
    for _ in range(num // 256):
        _branch(tree, [tree.new(32)], 4)


def _branch(tree: Tree, path: list[range], levels: int) -> None:
    if not levels:
        tree.ask(path)
        return
    for _ in range(4):
        _branch(tree, [*path, tree.new(16)], levels - 1)


def judges(tree: Tree, num: int) -> None:
    """Essays under one instruction, each judged in eight dimensions and then in sum."""
    instruction = tree.new(24)
    for _ in range(num // 9):
        essay = tree.new(48)
        for _ in range(8):
            tree.ask([instruction, essay, tree.new(6)])
        tree.ask([instruction, essay, tree.new(24)])


def chats(tree: Tree, num: int) -> None:
    """Eight turns each, a turn after its forerunner."""
    system = tree.new(32)
    for _ in range(num // 8):
        history, last = [system], None
        for _ in range(8):
            history.append(tree.new(16))
            last = tree.ask(history, last)


WORKLOADS: dict[str, Callable[[Tree, int], None]] = {
    "few-shot": few_shot,
    "documents": documents,
    "tree of thought": thoughts,
    "judges": judges,
    "chats": chats,
}
Pick = Callable[[Cache, Sequence[int], Batch], int]  # which of those that wait, by their arrival


def first_come(_cache: Cache, _waiting: Sequence[int], _jobs: Batch) -> int:
    return 0


def longest_prefix(cache: Cache, waiting: Sequence[int], jobs: Batch) -> int:
    """Of equal ones the first."""
    return max(range(len(waiting)), key=lambda at: (cache.known(jobs[waiting[at]].seen), -at))


def served(batch: Batch, order: Iterator[int], cache: Cache, pick: Pick, queue: int) -> int:
    """Hit ids when of `queue` waiting requests, kept full from `order`, one is picked each time."""
    waiting: list[int] = []
    done, num_hit = set(), 0
    early = list(order)
    while early or waiting:
        for place in [one for one in early if batch[one].after is None or batch[one].after in done]:
            if len(waiting) == queue:
                break
            waiting.append(place)
            early.remove(place)
        place = waiting.pop(pick(cache, waiting, batch))
        num_hit += cache.serve(batch[place].seen) // ID_TOKENS
        done.add(place)
    return num_hit


def depth_first(batch: Batch, num_blocks: int) -> int:
    """Hit ids."""
    cache = Cache(num_blocks, ID_TOKENS)
    return served(batch, iter(range(len(batch))), cache, first_come, 1)


def page(args: argparse.Namespace) -> str:
    num = 256 if args.quick else REQUESTS
    queues = QUEUES[:1] if args.quick else QUEUES
    columns = ["batch", "room", "optimum: hit tokens", "first come, of optimum"]
    columns += [f"longest prefix of {queue}, of optimum" for queue in queues]
    rows, means = compared(num, queues)
    return f"""
# In which order a queue is served

`python bench/studies/queue_order.py`. Batches of about {num} requests whose prompts are trees,
made-up tokens, arriving in drawn order; a chat's turn arrives when the one before is done.

**Run:** each batch through the production cache, LRU, one request after another, once in each
order; the cache has {ROOMS[0]} and {ROOMS[1]} times the room of the longest request. *Depth first*
serves the whole batch in the order of its tree, which no order beats where the longest request fits
(arXiv 2312.07104): it hits what a cache without limit does. *Longest prefix first* picks from a
queue that is kept full.
**Modelled:** nothing; SGLang serves many at once, which is left out. **Published:** its order
reaches 96 % of the optimal hit rate on average.

{table(columns, rows)}

On average over batches and rooms: {means}.
"""


def compared(num: int, queues: Sequence[int]) -> tuple[list[list[str]], str]:
    rows, shares = [], []
    for name, grow in WORKLOADS.items():
        tree = Tree()
        grow(tree, num)
        batch = tree.jobs
        order = list(range(len(batch)))
        random.Random(0).shuffle(order)
        longest = max(job.num_ids for job in batch)
        for room in ROOMS:
            blocks = int(room * longest)
            ways = [(first_come, 1), *((longest_prefix, queue) for queue in queues)]
            best = depth_first(batch, blocks)
            assert best == depth_first(batch, sum(job.num_ids for job in batch)), "as without limit"
            reached = [
                served(batch, iter(order), Cache(blocks, ID_TOKENS), pick, queue) / best
                for pick, queue in ways
            ]
            shares.append(reached)
            optimum = percent(best / sum(job.num_ids for job in batch))
            rows.append([name, f"{room} ×", optimum, *map(percent, reached)])
    means = [sum(column) / len(column) for column in zip(*shares, strict=True)]
    names = ["first come", *(f"longest prefix of {queue}" for queue in queues)]
    told = ", ".join(f"{name} {percent(mean)}" for name, mean in zip(names, means, strict=True))
    return rows, told


if __name__ == "__main__":
    main(__file__, page)
