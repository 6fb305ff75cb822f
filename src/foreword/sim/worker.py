"""Worker: one engine in virtual time.

The production scheduler, cache and tiers decide what is computed, loaded, kept and dropped; what it
takes is what the costs say. A tier's reads come as its `Reading` says, in a plain replay one load
after another and none late; its writes delay nobody and are counted. What is stored can be read at
once, and what is loaded is never damaged.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import inf

from foreword.core.block import Chain
from foreword.core.cache import KVCache
from foreword.core.cost import Costs, StepFit, StepWork, TierFit
from foreword.core.lease import Probe, Store
from foreword.core.scheduler import Scheduler, Step
from foreword.core.tier import Tier
from foreword.sim.journey import Journey, Sample
from foreword.sim.lane import Piece, TierLane
from foreword.sim.prompt import prompt_chain
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Record


@dataclass(slots=True)
class TierCount:
    """What one tier did."""

    num_hit_tokens: int = 0
    num_loaded_blocks: int = 0
    num_stored_blocks: int = 0
    num_dropped_blocks: int = 0
    num_lost_blocks: int = 0  # that came too late


@dataclass(slots=True)
class WorkerCount:
    """What one worker did."""

    num_requests: int = 0
    num_steps: int = 0
    busy_s: float = 0.0  # in steps
    num_prefilled_tokens: int = 0
    num_decoded_tokens: int = 0
    most_waiting: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    tiers: list[TierCount] = field(default_factory=list)


class Worker:
    """One engine. Its driver sends it requests, lets it begin and end steps, and keeps the clock:
    `begin` says when the step ends, and `next_news_s` when a tier has something."""

    def __init__(self, shape: WorkerShape, id_tokens: int, number: int = 0) -> None:
        self.number = number
        of_blocks = id_tokens > 1
        policy = replace(shape.policy, block_tokens=shape.block_size)
        self._shape = shape
        self._id_tokens = id_tokens
        self._costs = _costs_of(shape)
        self._recent = StepFit(older=1 / 512)
        fits = self._costs.tiers if self._costs is not None else [None] * len(shape.tiers)
        self.cache = KVCache(
            shape.num_blocks + of_blocks,  # and a slot for the mark
            1 if of_blocks else shape.block_size,
            reuse=shape.reuse,
            tiers=[
                Tier(room.num_blocks, shared=room.shared, policy=policy) for room in shape.tiers
            ],
            policy=policy,
            placement=shape.placement,
        )
        self.cache.restores.costs = self.cache.lower.placement.costs = self._costs
        if self._costs is None and shape.cost.prefill_s(1):  # else its engine has learnt no costs
            reads = tuple(room.cost for room in shape.tiers)
            self.cache.lower.placement.costs = Costs.known(
                shape.cost, reads, shape.block_size, shape.block_bytes
            )
        self.scheduler: Scheduler[Sample] = Scheduler(
            self.cache,
            shape.max_num_seqs,
            max(1, shape.max_batch_tokens // id_tokens),
            max(1, shape.max_prefill_tokens // id_tokens),
            shape.order,
        )
        self.count = WorkerCount(tiers=[TierCount() for _ in shape.tiers])
        self.num_queued_tokens = 0  # of prompts without a first token, what was missing of them
        self._inbox: list[list[Sample]] = []
        self._step: Step[Sample] | None = None
        self._num_admitted = 0
        self._num_repeats = 0  # how often the step's decodes run
        self._busy_s = 0.0  # of the last step, until the tiers are told
        self._probes: deque[tuple[float, Probe]] = deque()  # and when each is answered
        self._lanes = [
            TierLane(room, shape.block_bytes, shape.seed + at, fit)
            for at, (room, fit) in enumerate(zip(shape.tiers, fits, strict=True))
        ]

    @property
    def is_stepping(self) -> bool:
        return self._step is not None

    @property
    def next_news_s(self) -> float | None:
        """When a tier has the next load or answer. None: it was asked for none."""
        news = [end_s for lane in self._lanes if (end_s := lane.next_s) is not None]
        news += [at_s for at_s, _probe in self._probes]
        if self.scheduler.next_late_s < inf:
            news.append(self.scheduler.next_late_s)
        return min(news, default=None)

    def chain(self, record: Record, *, keep_partial: bool = False) -> Chain:
        return prompt_chain(record, self._shape.block_size, keep_partial=keep_partial)

    def num_known_tokens(self, chain: Chain) -> int:
        """How many tokens of a prompt are in full blocks that it has. Changes nothing."""
        return self.cache.num_known(chain) * self.cache.block_size * self._id_tokens

    def send(self, record: Record, chain: Chain, now_s: float) -> Journey | None:
        """A request arrives. None: it can never fit."""
        answers = record.answers
        runs = [i for i, answer in enumerate(answers) if i == 0 or answer]
        journey = Journey(record.place, self.number, record.num_tokens, now_s, len(runs))
        shared = chain.copy() if len(runs) > 1 else chain
        samples = [Sample(journey, record, shared if i else chain, i) for i in runs]
        longest = len(chain)
        if self._id_tokens == 1:
            longest += max(sample.num_unsampled for sample in samples) - 1
        if longest > self.cache.pool.num_blocks * self.cache.block_size:
            return None
        known = 0 if record.wants_prompt else self.num_known_tokens(chain)
        journey.num_missing = max(0, record.num_tokens - known)
        self.num_queued_tokens += journey.num_missing
        self.count.num_requests += 1
        self._inbox.append(samples)
        return journey

    def begin(self, now_s: float, until_s: float) -> float | None:
        """Take what came and begin the next step; returns when it ends. None: there is nothing to
        compute before something comes. Decodes run on while no step would begin after `until_s`,
        when something may come, and nothing else changes."""
        self.cache.tick(now_s)
        self._take_answers(now_s)
        for samples in self._inbox:
            for probe in self.scheduler.add(samples):
                latency_s = self._shape.tiers[probe.tier].cost.latency_s
                self._probes.append((now_s + latency_s, probe))
        self._inbox.clear()
        self._take_loads(now_s)
        step = self._schedule()
        self._perform()
        for load in step.loads:
            self._lanes[load.tier].load(load, now_s)
        self.count.most_waiting = max(self.count.most_waiting, len(self.scheduler.waiting))
        for sequence in self.scheduler.running:
            if sequence.journey.admitted_s < 0:
                sequence.journey.admitted_s = now_s
                sequence.journey.turn = self._num_admitted
                self._num_admitted += 1
        if not step.work:
            return None
        self._step = step
        end_s = self._run(step, now_s, until_s)
        self.count.num_steps += self._num_repeats
        self._busy_s = end_s - now_s
        self.count.busy_s += self._busy_s
        return end_s

    def end(self, now_s: float) -> list[Journey]:
        """The step ends. Returns the requests that are done."""
        step = self._step
        assert step is not None
        self._step = None
        self.cache.tick(now_s)
        for sequence, copy in step.copies:
            assert sequence.lease is not None
            self.cache.filled(sequence.lease, copy.num_tokens)
        ready = [s for s, _start, num in step.work if self._settle(s, num)]
        self._perform()
        for sequence in ready:
            self._sampled(sequence, now_s)
        for sequence in ready:
            self.scheduler.start_siblings(sequence)
        done = [s for s in ready if not s.num_unsampled]
        over = [s for s, *_ in step.work if self._is_over(s)]
        for sequence in over:
            sequence.note_reuse()
        done += over
        self.scheduler.finish(done)
        self.count.num_preemptions = self.scheduler.num_preemptions
        self.count.num_evicted_blocks = self.cache.num_evicted_blocks
        return self._ended(done, now_s)

    def _schedule(self) -> Step[Sample]:
        while True:
            num_preemptions = self.scheduler.num_preemptions
            step = self.scheduler.schedule()
            if step.work or step.loads or self.scheduler.num_preemptions == num_preemptions:
                return step

    def _run(self, step: Step[Sample], now_s: float, until_s: float) -> float:
        """When a step ends, and with it those that would only repeat its decodes."""
        work = self._measured(step)
        self.count.num_prefilled_tokens += work.num_tokens
        end_s = now_s + self._shape.cost.step_s(work)
        if self._costs is not None:
            self._recent.add(work, end_s - now_s)
            if self._recent.num_steps % 64 == 0 and self.count.num_prefilled_tokens > 4096:
                self._costs.step = self._recent.solve()
        self._num_repeats = 1
        for _ in range(self._most_repeats(step, work) - 1):
            if end_s >= until_s:
                break
            work.num_decode_pairs += work.num_decoding
            end_s += self._shape.cost.step_s(work)
            self._num_repeats += 1
        self.count.num_decoded_tokens += work.num_decoding * self._num_repeats
        return end_s

    def _measured(self, step: Step[Sample]) -> StepWork:
        if self._id_tokens == 1:
            return step.measure()
        work = StepWork()
        for sequence, start, num in step.work:
            sequence.charge(work, start, num)
        return work

    def _most_repeats(self, step: Step[Sample], work: StepWork) -> int:
        """How often a step's decodes may run before a block is full or an answer ends."""
        others = self.scheduler.waiting or len(step.work) < len(self.scheduler.running)
        if work.num_tokens or step.copies or others:
            return 1
        size = self.cache.block_size
        return min(
            min(sequence.num_unsampled, 1 - len(sequence.chain) % -size)
            for sequence, *_ in step.work
        )

    def _settle(self, sequence: Sample, num_tokens: int) -> bool:
        """Whether its next token is sampled."""
        if self._num_repeats > 1:
            sequence.sample(self._num_repeats - 1)
            num_tokens = self._num_repeats
        done = self.scheduler.settle(sequence, num_tokens)
        return done and not self._is_over(sequence)

    def _sampled(self, sequence: Sample, now_s: float) -> None:
        sequence.sample(1)
        journey = sequence.journey
        if journey.first_token_s < 0:
            self._begun(sequence, now_s)

    def _begun(self, sequence: Sample, now_s: float) -> None:
        """A request has its first token."""
        journey = sequence.journey
        journey.first_token_s = now_s
        self.num_queued_tokens -= journey.num_missing
        num_hits = (sequence.num_cached_tokens or 0) * self._id_tokens
        journey.num_hit_tokens = min(num_hits, journey.num_tokens)
        excess = num_hits - journey.num_hit_tokens  # of the last block, which is no full one
        for tier, num_tokens in sequence.restored.items():
            num_tokens *= self._id_tokens
            if tier == max(sequence.restored):
                num_tokens -= excess
            journey.restored[tier] = num_tokens
            self.count.tiers[tier].num_hit_tokens += num_tokens

    def _is_over(self, sequence: Sample) -> bool:
        """Whether it ends without another token: its prompt is computed and no more is known of it,
        or its client left."""
        lease = sequence.lease
        if lease is None or lease.released:
            return False
        if self._id_tokens > 1:
            return sequence.num_uncomputed == 1
        at = sequence.cancelled_at
        return at is not None and lease.num_computed_tokens >= at

    def _ended(self, done: list[Sample], now_s: float) -> list[Journey]:
        ended = []
        for sequence in done:
            journey = sequence.journey
            if journey.first_token_s < 0 and sequence.cancelled_at is None:
                self._begun(sequence, now_s)  # of blocks' ids: its prompt is its end
            elif journey.first_token_s < 0:
                self.num_queued_tokens -= journey.num_missing
            journey.num_open -= 1
            if not journey.num_open or sequence.cancelled_at is not None:
                journey.ended_s = now_s
                ended.append(journey)
        return ended

    def _take_answers(self, now_s: float) -> None:
        """What was asked in this turn is answered after its step has begun, so in a later one."""
        for at_s, probe in list(self._probes):
            if at_s <= now_s:
                self._probes.remove((at_s, probe))
                self.scheduler.found(probe, 0)

    def _take_loads(self, now_s: float) -> None:
        """Tell the cache of all that came and all that is given up."""
        for tier, count, lane in zip(
            self.cache.lower.tiers, self.count.tiers, self._lanes, strict=True
        ):
            for piece, seconds in lane.settle(now_s, self._busy_s):
                if seconds is None:
                    self.cache.lost(piece.load, piece.start, piece.stop, gone=False)
                    count.num_lost_blocks += piece.stop - piece.start
                else:
                    count.num_loaded_blocks += self._loaded(piece)
            tier.reads = lane.allows(now_s)
        self._busy_s = 0.0
        self._perform()

    def _loaded(self, piece: Piece) -> int:
        """Tell the cache what came. Returns how many blocks are wanted still."""
        num_wanted = 0
        for wanted, run in groupby(range(piece.start, piece.stop), piece.load.awaits):
            blocks = list(run)
            tell = self.cache.loaded if wanted else partial(self.cache.lost, gone=False)
            tell(piece.load, blocks[0], blocks[-1] + 1)
            num_wanted += wanted * len(blocks)
        return num_wanted

    def _perform(self) -> None:
        """Do what the cache wants of the tiers, at once."""
        for effect in self.cache.lower.take_effects():
            count = self.count.tiers[effect.tier]
            if isinstance(effect, Store):
                stop = effect.start + len(effect.block_ids)
                hashes = effect.chain.hashes[effect.start : stop]
                self.cache.lower.stored(effect.tier, hashes, ok=True)
                count.num_stored_blocks += len(hashes)
            else:
                count.num_dropped_blocks += len(effect.hashes)


def _costs_of(shape: WorkerShape) -> Costs | None:
    """What its plans go by at the start."""
    if shape.expected is None:
        return None
    step, tier = shape.expected
    size = max(1, shape.block_bytes)
    fits = [TierFit(tier, max(1, room.reading.cell_bytes // size) * size) for room in shape.tiers]
    return Costs(shape.block_size, shape.block_bytes, shape.max_prefill_tokens, fits, step)
