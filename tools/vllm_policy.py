"""Replay a trace through vLLM's own CPU tier, with its LRU, its ARC and ForewordPolicy.

    python tools/vllm_policy.py mooncake_fast25_conversation.jsonl.gz

Runs where vLLM is installed. The trace is Mooncake's (github.com/kvcache-ai/Mooncake,
FAST25-release): a JSON object per line with `input_length` in tokens and `hash_ids` of 512 of them
each, equal where the whole prefix is. Prints what share of the blocks was found, what was kept in
vain, and the CPU time that vLLM's manager took with each policy. The last three rows are made-up
prompts of 2,000 chunks.
"""

import argparse
import gzip
import json
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TypeVar

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCK_TOKENS = 512
STEP_BLOCKS = 16  # 8,192 tokens: what vLLM computes in one step unless told otherwise
MODULE = {"ForewordPolicy": "foreword.plugins.vllm"}
POLICIES = ("lru", "arc", "ForewordPolicy")
PHASES = ("look up", "load", "store", "finish")
SAMPLE_REQUESTS = 100

R = TypeVar("R")
Prompt = Sequence[OffloadKey]  # its full blocks, the first one first


@dataclass
class Outcome:
    """What one replay gave. Times are CPU seconds inside vLLM's manager, the policy's included."""

    num_blocks: int = 0
    num_found: int = 0
    num_refused: int = 0  # calls for which vLLM's manager had no room
    orphans_max: int = 0  # kept without the block before them, at worst
    unusable: list[float] = field(default_factory=list)  # share of the kept, sampled
    times_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Kept:
    """What the tier holds, from what its manager says it stored and evicted."""

    def __init__(self, parents: dict[OffloadKey, OffloadKey | None]) -> None:
        self.parents = parents
        self.keys: set[OffloadKey] = set()
        self.num_orphans = 0
        self._num_children: Counter[OffloadKey | None] = Counter()

    def add(self, key: OffloadKey) -> None:
        parent = self.parents[key]
        self.keys.add(key)
        self._num_children[parent] += 1
        self.num_orphans += (parent is not None and parent not in self.keys) - self._num_children[
            key
        ]

    def drop(self, key: OffloadKey) -> None:
        parent = self.parents[key]
        self.keys.remove(key)
        self._num_children[parent] -= 1
        self.num_orphans -= (parent is not None and parent not in self.keys) - self._num_children[
            key
        ]

    def share_unusable(self) -> float:
        """Of the blocks kept, those that some block before them is missing for."""
        usable: dict[OffloadKey, bool] = {}
        for key in self.keys:
            above: list[OffloadKey] = []
            at: OffloadKey | None = key
            while at is not None and at in self.keys and at not in usable:
                above.append(at)
                at = self.parents[at]
            whole = at is None or usable.get(at, False)
            usable.update(dict.fromkeys(above, whole))
        return 1 - sum(usable.values()) / max(1, len(usable))


class Replay:
    """Prompts through vLLM's manager as its connector drives it: `num_running` at a time, a step of
    each in turn, a transfer done when its request's next step begins."""

    def __init__(
        self, policy: str, capacity: int, prompts: Sequence[Prompt], num_running: int = 1
    ) -> None:
        self.manager = CPUOffloadingManager(capacity, policy, MODULE.get(policy))
        self.outcome = Outcome()
        self.kept = Kept(parents_of(prompts))
        self._num_running = num_running
        self._waiting = iter(enumerate(prompts))
        self._running: deque[Iterator[None]] = deque()
        self._num_ended = 0

    def run(self) -> Outcome:
        while self.advance():
            pass
        return self.outcome

    def advance(self) -> bool:
        """The next step of one request; False when there is none."""
        while len(self._running) < self._num_running:
            if (prompt := next(self._waiting, None)) is None:
                break
            self._running.append(self.request(*prompt))
        if not self._running:
            return False
        request = self._running.popleft()
        if next(request, "ended") != "ended":
            self._running.append(request)
            return True
        self._num_ended += 1
        if self._num_ended % SAMPLE_REQUESTS == 0:
            self.outcome.unusable.append(self.kept.share_unusable())
        return True

    def request(self, number: int, prompt: Prompt) -> Iterator[None]:
        """One request; each `yield` ends a scheduler step."""
        manager, outcome = self.manager, self.outcome
        context = ReqContext(str(number))
        for at, key in enumerate(prompt):
            context.set_offload_key_position(key, (at + 1) * BLOCK_TOKENS)
        manager.on_new_request(context)
        while (found := self.timed("look up", self.look_up, prompt, context)) is None:
            yield
        outcome.num_blocks += len(prompt)
        outcome.num_found += found
        if found:
            self.timed("load", manager.prepare_load, prompt[:found], context)
            yield
            self.timed("load", manager.complete_load, prompt[:found], context)
        stored = found
        for computed in range(found + STEP_BLOCKS, len(prompt) + STEP_BLOCKS, STEP_BLOCKS):
            offered = prompt[stored:computed]
            store = self.timed("store", manager.prepare_store, offered, context)
            if store is None:
                outcome.num_refused += 1
                yield
                continue
            stored += len(offered)
            for key in store.evicted_keys:
                self.kept.drop(key)
            for key in store.keys_to_store:
                self.kept.add(key)
            outcome.orphans_max = max(outcome.orphans_max, self.kept.num_orphans)
            yield
            self.timed("store", manager.complete_store, store.keys_to_store, context)
        self.timed("finish", manager.on_request_finished, context)

    def look_up(self, prompt: Prompt, context: ReqContext) -> int | None:
        """Leading blocks found; None while one of them is being stored."""
        for at, key in enumerate(prompt):
            result = self.manager.lookup(key, context)
            if result is LookupResult.HIT_PENDING:
                return None
            if result is LookupResult.MISS:
                return at
        return len(prompt)

    def timed(self, phase: str, call: Callable[..., R], *args: object) -> R:
        begin_s = time.thread_time()
        result = call(*args)
        self.outcome.times_s[phase] += time.thread_time() - begin_s
        return result


def parents_of(prompts: Sequence[Prompt]) -> dict[OffloadKey, OffloadKey | None]:
    parents: dict[OffloadKey, OffloadKey | None] = {}
    for prompt in prompts:
        for parent, key in zip([None, *prompt], prompt, strict=False):
            assert parents.setdefault(key, parent) == parent, "equal ids, different prefixes"
    return parents


def offload_key(name: object) -> OffloadKey:
    return make_offload_key(sha256(repr(name).encode()).digest(), 0)


def read_trace(path: Path) -> list[Prompt]:
    """The last block of a prompt is left out unless it is full: nobody can find it."""
    with gzip.open(path, "rt") as lines:
        requests = [json.loads(line) for line in lines]
    return [
        [offload_key(i) for i in request["hash_ids"][: request["input_length"] // BLOCK_TOKENS]]
        for request in requests
    ]


def made_up(seed: int, num_prompts: int, length: int) -> list[Prompt]:
    """Prompts of up to `length` blocks, most of which go on from some block of an earlier one."""
    random = Random(seed)
    prompts: list[Prompt] = [[]]
    for number in range(num_prompts):
        known = random.choice(prompts[-40:])
        shared = known[: random.randint(0, len(known))] if random.random() < 0.8 else []
        new = range(length - len(shared) if length > 500 else random.randint(0, length))
        prompts.append([*shared, *(offload_key((number, at)) for at in new)])
    return prompts[1:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacities", type=int, nargs="+", default=[1000, 3000, 10000, 30000])
    parser.add_argument("--running", type=int, default=1, help="requests at a time")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    runs = [(capacity, read_trace(args.trace)) for capacity in args.capacities]
    runs.append((20_000, made_up(0, 200, 2000)))  # prompts of 2,000 chunks: what a call costs
    print("| blocks | policy | found | kept in vain, mean | orphans, at most | refused |", end="")
    print(" µs per block | " + " | ".join(f"{phase}" for phase in PHASES) + " |")
    print("|--:|---|" + "--:|" * (5 + len(PHASES)))
    for capacity, prompts in runs:
        replays = [Replay(policy, capacity, prompts, args.running) for policy in POLICIES]
        while any([replay.advance() for replay in replays]):  # in turns: noise meets all alike
            pass
        for policy, replay in zip(POLICIES, replays, strict=True):
            print(row(capacity, policy, replay.outcome), flush=True)
    return 0


def row(capacity: int, policy: str, outcome: Outcome) -> str:
    us = [1e6 * seconds / outcome.num_blocks for seconds in outcome.times_s.values()]
    unusable = sum(outcome.unusable) / max(1, len(outcome.unusable))
    cells = [
        f"{capacity:,}",
        policy,
        f"{outcome.num_found / outcome.num_blocks:.2%}",
        f"{unusable:.1%}",
        f"{outcome.orphans_max:,}",
        f"{outcome.num_refused:,}",
        *(f"{value:.2f}" for value in [sum(us), *us]),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
