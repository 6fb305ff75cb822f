"""Decide what each step computes: which sequences, how many tokens of each, within a budget.

Running sequences come first, one token for those that decode; then waiting ones are admitted in
the order of `Waiting`. A sequence whose next block another one is computing is passed over, holding
nothing, and asks again when that one has come further, so nothing ever waits on a lock. One that a
tier loads blocks for runs: it computes what is before those, and goes on when they came or are
late.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from foreword.core.block import Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.cost import StepWork
from foreword.core.lease import Copy, Load, Probe
from foreword.core.plan import ALONE, Present
from foreword.core.sequence import Sequence
from foreword.core.waiting import LONGEST_PREFIX, Waiting

_Sequence = TypeVar("_Sequence", bound=Sequence)


@dataclass(slots=True)
class Step(Generic[_Sequence]):
    """What to run: the copies first, then the new tokens, each stretch by its sequence, its first
    token and how many; in the order of their places where a sequence has several. Loads go their
    way."""

    loads: list[Load] = field(default_factory=list)
    copies: list[tuple[_Sequence, Copy]] = field(default_factory=list)
    work: list[tuple[_Sequence, int, int]] = field(default_factory=list)

    def measure(self) -> StepWork:
        """What it computes, as far as its seconds depend on it. Ask before it is run."""
        measured = StepWork()
        for sequence, start, num_tokens in self.work:
            measured.add(num_tokens, start, is_decoding=sequence.is_decoding)
        return measured


class Scheduler(Generic[_Sequence]):
    """`max_batch_tokens` bounds a step while anything decodes next to it, and `max_prefill_tokens`
    when nothing does: large chunks are cheaper but would stall the streams."""

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_prefill_tokens: int,
        order: str = LONGEST_PREFIX,
    ) -> None:
        self.cache = cache
        self.waiting: Waiting[_Sequence] = Waiting(cache, order)
        self.running: list[_Sequence] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._num_arrivals = 0
        self._probed: dict[Chain, _Sequence] = {}

    def add(self, samples: list[_Sequence]) -> list[Probe]:
        """Queue the samples of one request: the first computes the prompt for all of them. It waits
        for what the probes find; each is to be told `found`, soon."""
        samples[0].siblings = samples[1:]
        self._num_arrivals += 1
        for sample in samples:
            sample.arrival = self._num_arrivals
        self.waiting.add(samples[0])
        probes = [] if samples[0].reports_prompt else self.cache.probe(samples[0].chain)
        if probes:
            samples[0].num_probes = len(probes)
            self._probed[samples[0].chain] = samples[0]
        return probes

    def found(self, probe: Probe, num_blocks: int) -> None:
        """A tier has `num_blocks` blocks from the probe's start on; 0 too where it did not say."""
        sequence = self._probed.get(probe.chain)
        if sequence is None:
            return  # it was cancelled
        sequence.elsewhere[probe.tier] = probe.start + num_blocks if num_blocks else 0
        sequence.num_probes -= 1
        if not sequence.num_probes:
            del self._probed[probe.chain]

    def schedule(self) -> Step[_Sequence]:
        """The next step. Empty when nothing waits or runs, when all that do wait for a tier, or
        when the only one that ran was preempted and waits for its turn again."""
        step: Step[_Sequence] = Step()
        num_preemptions = self.num_preemptions
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        prefilling = [sequence for sequence in self.running if not sequence.is_decoding]
        budget = self._max_batch_tokens if decoding else self._max_prefill_tokens
        for sequence in decoding:
            if sequence.lease is not None and self._make_room(sequence, step):
                step.work.append((sequence, len(sequence.chain) - 1, 1))
        budget -= len(step.work)
        for sequence in prefilling:
            if sequence.lease is not None:
                budget = self._prefill(sequence, step, budget)
        if self.num_preemptions == num_preemptions:
            self._admit(step, budget)
        return step

    @property
    def next_late_s(self) -> float:
        """When something is late that a tier is to bring, by the cache's clock."""
        leases = (sequence.lease for sequence in self.running)
        return min((lease.late_at_s for lease in leases if lease is not None), default=inf)

    def settle(self, sequence: _Sequence, num_tokens: int) -> bool:
        """`num_tokens` were computed. True when the newest token's logits are wanted: sample."""
        assert sequence.lease is not None
        self.cache.filled(sequence.lease, num_tokens)
        if sequence.num_uncomputed:
            return False
        if sequence.num_cached_tokens is None:
            self.cache.restores.judge(sequence.lease)
        sequence.note_reuse()
        return True

    def start_siblings(self, sequence: _Sequence) -> None:
        """The prompt is computed: the other samples start from its blocks."""
        if sequence.siblings:
            assert sequence.lease is not None
            self.cache.publish_end(sequence.lease)
            self.waiting.put_back(sequence.siblings)
            sequence.siblings = []

    def finish(self, sequences: Iterable[_Sequence]) -> None:
        """Forget sequences, done or cancelled, and release what they lease."""
        gone = dict.fromkeys(sequences)
        for sequence in gone:
            self._probed.pop(sequence.chain, None)
            if sequence.lease is not None:
                self.cache.release(sequence.lease)
                sequence.lease = None
            else:
                self.waiting.discard(sequence)
        self.running = [s for s in self.running if s not in gone]

    def _prefill(self, sequence: _Sequence, step: Step[_Sequence], budget: int) -> int:
        """Compute what a sequence can, within the budget; returns what is left of that."""
        assert sequence.lease is not None
        if budget > 0:
            for start, stop in self.cache.computable(sequence.lease):
                num_tokens = sequence.chunk(budget, stop - start)
                step.work.append((sequence, start, num_tokens))
                budget -= num_tokens
                if num_tokens < stop - start or not budget:
                    break
        return budget

    def _present(self) -> Present:
        """How things stand for a sequence that is admitted now."""
        costs = self.cache.restores.costs
        if costs is None or costs.step is None:
            return ALONE
        num_ahead = sum(s.num_uncomputed for s in self.running if not s.is_decoding)
        num_others = len(self.running) + len(self.waiting) - 1  # itself waits still
        return Present(costs.compute_s(0, num_ahead), num_others)

    def _admit(self, step: Step[_Sequence], budget: int) -> None:
        if budget <= 0 or len(self.running) >= self._max_num_seqs:
            return
        for sequence in self.waiting.next_up():
            sequence.take_chain()
            admitted = self.cache.admit(
                sequence.chain,
                match=not sequence.reports_prompt,
                elsewhere=sequence.elsewhere,
                present=self._present(),
                hints=sequence.hints,
            )
            if admitted is Refusal.NO_ROOM:
                break
            if isinstance(admitted, Refusal):
                sequence.follow(self.cache.leader(sequence.chain))
                continue
            self.waiting.discard(sequence)
            sequence.lease, effects = admitted
            self.running.append(sequence)
            step.loads += [effect for effect in effects if isinstance(effect, Load)]
            copy = sequence.lease.copy
            if copy is None:
                budget = self._prefill(sequence, step, budget)
            else:
                step.copies.append((sequence, copy))
                start = sequence.lease.num_reused_tokens
                num_tokens = sequence.chunk(budget, len(sequence.chain) - start)
                step.work.append((sequence, start, num_tokens))
                budget -= num_tokens
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                break

    def _make_room(self, sequence: _Sequence, step: Step[_Sequence]) -> bool:
        """Lease a slot for the newest token, preempting the youngest while there is no room."""
        assert sequence.lease is not None
        while not self.cache.extend(sequence.lease, len(sequence.chain)):
            youngest = max(self.running, key=lambda s: (s.arrival, s.index))
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: _Sequence, step: Step[_Sequence]) -> None:
        """Take back a lease. What was computed stays cached: a soon return is cheap."""
        assert sequence.lease is not None
        if sequence.lease.num_computed_tokens > sequence.lease.num_reused_tokens:
            sequence.note_reuse()
        self.cache.release(sequence.lease)
        sequence.lease = None
        self.running.remove(sequence)
        self.waiting.put_back([sequence])
        step.work = [work for work in step.work if work[0] is not sequence]
        step.loads = [load for load in step.loads if not load.lease.released]
        self.num_preemptions += 1
