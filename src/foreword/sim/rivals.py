"""Rules of others for what to load of a prefix that a tier has, as constants, in virtual time.

Each is that of a published system, read in its source; the same scheduler, device and tier serve
all of them. A request is kept back while its prefix is read from the front, others go on; what came
counts as known when the request is scheduled, the rest is computed.

- `always`: all that is found, however long it takes. vLLM's offloading (0.32, vllm/v1/kv_offload)
  has no deadline for a load. LMCache's `min_retrieve_tokens` is 0 by default and its
  `blocking_timeout_secs` 10 (lmcache/v1/config.py): `always-10s`.
- SGLang's HiCache prefetches from its storage where at least 256 tokens are found
  (`prefetch_threshold` of sglang/srt/mem_cache/hiradix_cache.py, as all of these), and by its
  policy `best_effort` takes what came by the time that the scheduler turns to the request, by
  `wait_complete` waits for all, by `timeout` for 1 s (`prefetch_timeout_base`) and 0.25 s for each
  1,024 tokens (`prefetch_timeout_per_ki_token`).
"""

from dataclasses import dataclass, field, replace
from math import inf

from foreword.core.block import TOKEN_BYTES, Chain
from foreword.core.cache import Refusal
from foreword.core.lease import BlockState, Lease, Load
from foreword.sim.journey import Journey
from foreword.sim.lane import TierLane
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Record
from foreword.sim.worker import Worker


@dataclass(frozen=True, slots=True)
class Rule:
    """Load what is found where it is at least `num_tokens`, and wait for it for `patience_s` and
    `per_token_s` for each token; with `waits` off no longer than the request waits anyway."""

    num_tokens: int = 0
    patience_s: float = inf
    per_token_s: float = 0.0
    waits: bool = True


RIVALS = {
    "always": Rule(),
    "always-10s": Rule(patience_s=10.0),
    "256-best-effort": Rule(256, waits=False),
    "256-wait-complete": Rule(256),
    "256-timeout": Rule(256, 1.0, 0.25 / 1024),
}


@dataclass(slots=True, eq=False)
class _Held:
    """A request whose prefix is being read."""

    record: Record
    chain: Chain
    lease: Lease
    until_s: float
    came: set[int] = field(default_factory=set)  # blocks

    @property
    def num_leading(self) -> int:
        return next(at for at in range(len(self.came) + 1) if at not in self.came)


class RivalWorker:
    """A Worker that is driven by a rule. `num_found`: by a request's place, how many of its leading
    blocks the one tier of `shape` has."""

    def __init__(self, shape: WorkerShape, rule: Rule, num_found: dict[int, int]) -> None:
        (room,) = shape.tiers
        self._worker = Worker(replace(shape, tiers=()), 1)
        self._lane = TierLane(room, shape.block_bytes, shape.seed)
        self._rule = rule
        self._num_found = num_found
        self._held: dict[Lease, _Held] = {}
        self._until_s = inf  # for the first of them

    @property
    def is_stepping(self) -> bool:
        return self._worker.is_stepping

    @property
    def next_news_s(self) -> float | None:
        next_s = min(self._until_s, self._lane.next_s or inf)
        return None if next_s == inf else next_s

    def send(self, record: Record, chain: Chain, now_s: float) -> None:
        """A request arrives."""
        rule, num_blocks = self._rule, self._num_found[record.place]
        num_tokens = num_blocks * chain.block_size
        if num_blocks and num_tokens >= rule.num_tokens:
            admitted = self._worker.cache.admit(_leading(chain, num_blocks))
            if not isinstance(admitted, Refusal):
                until_s = now_s + rule.patience_s + rule.per_token_s * num_tokens
                held = _Held(record, chain, admitted[0], until_s)
                self._held[held.lease] = held
                self._until_s = min(self._until_s, until_s)
                held.lease.states[:] = bytes([BlockState.LOADING]) * num_blocks
                self._lane.load(Load(held.lease, 0, 0, num_blocks), now_s)
                return
        self._worker.send(record, chain, now_s)

    def begin(self, now_s: float, until_s: float) -> float | None:
        ready = self._received(now_s)
        if now_s >= self._until_s:
            ready |= {held: None for held in self._held.values() if held.until_s <= now_s}
        if not (self._rule.waits or self._worker.scheduler.waiting):
            ready |= dict.fromkeys(self._held.values())
        for held in ready:
            self._let_go(held, now_s)
        return self._worker.begin(now_s, until_s)

    def _received(self, now_s: float) -> dict[_Held, None]:
        """Take what came. Returns the requests that have all."""
        whole: dict[_Held, None] = {}
        for piece, _seconds in self._lane.settle(now_s):
            held = self._held.get(piece.load.lease)
            if held is not None:
                held.came.update(range(piece.start, piece.stop))
                if len(held.came) * held.chain.block_size == len(held.lease.chain):
                    whole[held] = None
        return whole

    def end(self, now_s: float) -> list[Journey]:
        return self._worker.end(now_s)

    def _let_go(self, held: _Held, now_s: float) -> None:
        """What came of its prefix is known from now on."""
        del self._held[held.lease]
        self._until_s = min((other.until_s for other in self._held.values()), default=inf)
        if held.num_leading:
            self._worker.cache.filled(held.lease, held.num_leading * held.chain.block_size)
        self._worker.cache.release(held.lease)
        self._worker.send(held.record, held.chain, now_s)


def _leading(chain: Chain, num_blocks: int) -> Chain:
    """Of its first blocks, not hashed again."""
    part, num_tokens = Chain(chain.root, chain.block_size), num_blocks * chain.block_size
    part.token_ids = chain.token_ids[:num_tokens]
    part.key = chain.key[: num_tokens * TOKEN_BYTES]
    part.hashes = chain.hashes[:num_blocks]
    return part
