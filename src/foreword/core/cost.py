"""What computing and loading KV cost, in seconds; and how to learn it from what was run and read.

A token's prefill has a part of its own (the weights) and one for each token before it (attention).
What a tier takes is a latency, and a time for each byte asked of it that has not come.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

EARLY_TOKENS = 128  # of a step's prefill
_CLEARLY = 1 + 1e-9  # among sets of costs that explain as much the first one counts
_SINGULAR = 1e-9  # of a pivot of equations whose diagonal is 1
_HEAVY = 1e9  # a weight at which sums are made smaller


def num_pairs(num_tokens: int, context: int) -> int:
    """How many (token, token that it attends to) pairs `num_tokens` tokens after `context` others
    have: each attends to those before it and to itself."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


@dataclass(slots=True)
class StepWork:
    """What one step computes: tokens that are prefilled and the pairs that they have; sequences
    that decode, a token each, and the pairs of those."""

    num_tokens: int = 0
    num_pairs: int = 0
    num_decoding: int = 0
    num_decode_pairs: int = 0

    def add(self, num_tokens: int, context: int, *, is_decoding: bool = False) -> None:
        """Of one sequence, `num_tokens` tokens after `context` others."""
        pairs = num_pairs(num_tokens, context)
        if is_decoding:
            self.num_decoding += num_tokens
            self.num_decode_pairs += pairs
        else:
            self.num_tokens += num_tokens
            self.num_pairs += pairs


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step of an engine. `per_step_s` is paid once; a prefill of few tokens keeps a
    device less busy than one of many, so the first EARLY_TOKENS may cost more; decoding sequences
    have a token each, and attend to all of their context."""

    per_token_s: float
    per_pair_s: float = 0.0
    per_step_s: float = 0.0
    per_decode_s: float = 0.0  # for each decoding sequence
    per_decode_pair_s: float = 0.0
    per_early_token_s: float = 0.0  # beside per_token_s

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        """Seconds to compute `num_tokens` tokens after `context` others, in one step."""
        if not num_tokens:
            return 0.0
        return self.step_s(StepWork(num_tokens, num_pairs(num_tokens, context)))

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return (
            work.num_tokens * self.per_token_s
            + work.num_pairs * self.per_pair_s
            + self.per_step_s
            + work.num_decoding * self.per_decode_s
            + work.num_decode_pairs * self.per_decode_pair_s
            + min(work.num_tokens, EARLY_TOKENS) * self.per_early_token_s
        )


NUM_COSTS = 6  # of StepCost's fields


@dataclass(slots=True)
class StepFit:
    """The StepCost that explains best how long steps took: least squares, no cost below 0. Of the
    steps only sums are kept: of products of what each cost is paid for, in StepCost's order, and
    of products of that and the seconds. Each step makes those before it count less by a share of
    `older`."""

    older: float = 0.0
    num_steps: int = 0
    weight: float = 1.0  # of the next step; the sums are as if the first had 1
    products: list[list[float]] = field(
        default_factory=lambda: [[0.0] * NUM_COSTS for _ in range(NUM_COSTS)]
    )
    moments: list[float] = field(default_factory=lambda: [0.0] * NUM_COSTS)

    def add(self, work: StepWork, seconds: float) -> None:
        """A step that took so long."""
        paid = (
            work.num_tokens,
            work.num_pairs,
            1,
            work.num_decoding,
            work.num_decode_pairs,
            min(work.num_tokens, EARLY_TOKENS),
        )
        self.num_steps += 1
        for at, one in enumerate(paid):
            if one:
                row, weighed = self.products[at], one * self.weight
                for column, other in enumerate(paid):
                    row[column] += weighed * other
                self.moments[at] += weighed * seconds
        self.weight /= 1 - self.older
        if self.weight > _HEAVY:
            self.products = [[part / self.weight for part in row] for row in self.products]
            self.moments = [part / self.weight for part in self.moments]
            self.weight = 1.0

    def copy(self) -> "StepFit":
        """These sums as they are now, for another thread to solve."""
        products = [row.copy() for row in self.products]
        return StepFit(self.older, self.num_steps, self.weight, products, self.moments.copy())

    def solve(self) -> StepCost | None:
        """None before any step. Some milliseconds: all sets of costs that are not 0 are tried."""
        best, most = None, 0.0
        for bits in range(1, 1 << NUM_COSTS):
            chosen = [at for at in range(NUM_COSTS) if bits >> at & 1]
            costs = self._solve(chosen)
            if costs is None or min(costs) < 0:
                continue
            # At a minimum, what the errors' squares sum up to is the less the greater this is.
            explained = sum(c * self.moments[i] for c, i in zip(costs, chosen, strict=True))
            if explained > most * _CLEARLY:
                best, most = dict(zip(chosen, costs, strict=True)), explained
        if best is None:
            return None
        return StepCost(*(best.get(at, 0.0) for at in range(NUM_COSTS)))

    def _solve(self, chosen: list[int]) -> list[float] | None:
        """The normal equations of these costs, by elimination. None where they do not tell them
        apart."""
        scale = [self.products[i][i] ** 0.5 for i in chosen]
        if not all(scale):
            return None
        rows = [
            [self.products[i][j] / (of_i * of_j) for j, of_j in zip(chosen, scale, strict=True)]
            + [self.moments[i] / of_i]
            for i, of_i in zip(chosen, scale, strict=True)
        ]
        size = len(chosen)
        for at in range(size):
            pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
            rows[at], rows[pivot] = rows[pivot], rows[at]
            if abs(rows[at][at]) < _SINGULAR:
                return None
            for i in range(size):
                if i != at:
                    share = rows[i][at] / rows[at][at]
                    rows[i] = [x - share * y for x, y in zip(rows[i], rows[at], strict=True)]
        return [rows[at][size] / rows[at][at] / scale[at] for at in range(size)]


@dataclass(frozen=True, slots=True)
class TierCost:
    """Reading from a tier: seconds before its first byte, then bytes per second, which `shared_by`
    readers that are always busy split among them."""

    latency_s: float
    bytes_per_s: float
    shared_by: int = 1

    def load_s(self, num_bytes: int) -> float:
        """Seconds to read so many bytes at once; nothing takes none."""
        if not num_bytes:
            return 0.0
        return self.latency_s + num_bytes * self.shared_by / self.bytes_per_s


_OLDER = 1 / 64  # of the weight of reads, that they lose with each that comes after
_FAR = 2.0  # times what was expected; a read that is further off counts as late, or by chance
_NUM_FAR = 4  # reads in a row so far off, on one side: the tier has changed
_ALIKE = 0.01  # of a read's weight: one of another size would have been as far off
_RARELY = 1 / 256  # of the weight of a read in how many are late
_ERRORS = 3.0  # mean errors after what was expected a read is late
_AT_LEAST_S = 0.0002  # and not before


class TierFit:
    """The TierCost that explains how long a tier's reads took, least squares over those of late;
    how far off it is; and how many come late. `queued_bytes`, which its driver keeps, were asked of
    the tier and have not come."""

    def __init__(self, start: TierCost, read_bytes: int) -> None:
        """`start` holds until reads say more; `read_bytes` is how much is read at a time."""
        self.cost = start
        self.read_bytes = read_bytes
        self.queued_bytes = 0
        self.num_reads = 0
        self.error = 0.25  # of a read's seconds, on average
        self.late_share = 0.0  # of reads
        self._far: list[float] = []  # of the last reads, how many times as long as expected
        self._sums = [0.0] * 5
        for num_bytes in (read_bytes, 8 * read_bytes):
            self._add(num_bytes, start.load_s(num_bytes), 1.0)

    def add(self, num_bytes: int, seconds: float) -> None:
        """A read came so long after it began, when `num_bytes` were under way, its own too."""
        expected_s = self.cost.load_s(num_bytes)
        self.num_reads += 1
        self.late_share += (float(seconds > self._late_s(expected_s)) - self.late_share) * _RARELY
        ratio = seconds / expected_s
        if self._far and (self._far[0] > 1) is not (ratio > 1):
            self._far.clear()
        if 1 / _FAR <= ratio <= _FAR:
            self._far.clear()
            self.error += (abs(ratio - 1) - self.error) * _OLDER
            self._sums = [part * (1 - _OLDER) for part in self._sums]
            self._add(num_bytes, seconds, 1.0)
            other = (8 if num_bytes < 4 * self.read_bytes else 1) * self.read_bytes
            self._add(other, ratio * self.cost.load_s(other), _ALIKE)
            self._solve()
            return
        self._far.append(ratio)
        if len(self._far) == _NUM_FAR:
            change = sorted(self._far)[_NUM_FAR // 2]
            self._sums[2] *= change
            self._sums[4] *= change
            self._far.clear()
            self._solve()

    def load_s(self, num_bytes: int) -> float:
        """Seconds until so many bytes more have come, behind those that are queued."""
        return self.cost.load_s(self.queued_bytes + num_bytes) if num_bytes else 0.0

    def late_s(self, num_bytes: int) -> float:
        """Seconds after which they are late."""
        return self._late_s(self.load_s(num_bytes)) if num_bytes else 0.0

    def _late_s(self, expected_s: float) -> float:
        return expected_s * (1 + _ERRORS * self.error) + _AT_LEAST_S

    def _add(self, num_bytes: int, seconds: float, weight: float) -> None:
        parts = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
        sums = zip(self._sums, parts, strict=True)
        self._sums = [total + weight * part for total, part in sums]

    def _solve(self) -> None:
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        per_byte_s = (weight * xy - x * y) / spread if spread > _SINGULAR * x * x else 0.0
        per_byte_s = min(max(per_byte_s, y / x * _SINGULAR), y / x)  # nor a latency below 0
        self.cost = TierCost((y - per_byte_s * x) / weight, 1 / per_byte_s)


@dataclass(slots=True)
class Costs:
    """What an engine's steps and its tiers' reads cost at present; the tiers as in KVCache.
    `step` is None before anything is known of it."""

    block_size: int  # tokens
    block_bytes: int
    chunk_tokens: int  # that a step prefills at most
    tiers: Sequence[TierFit] = ()
    step: StepCost | None = None

    @classmethod
    def known(
        cls, step: StepCost, reads: Sequence[TierCost], block_size: int, block_bytes: int
    ) -> "Costs":
        """What is known without measuring, each tier read a block at a time."""
        fits = [TierFit(read, block_bytes) for read in reads]
        return cls(block_size, block_bytes, sys.maxsize, fits, step)

    def break_even_bytes_per_s(self, start: int, stop: int) -> float:
        """How fast their blocks must be read for loading tokens `start` to `stop` of a prompt to
        take no longer than to prefill them, for which the cost must be known."""
        num_bytes = (stop - start) * self.block_bytes / self.block_size
        return num_bytes / self.compute_s(start, stop)

    def compute_s(self, start: int, stop: int) -> float:
        """Seconds to prefill tokens `start` to `stop` of a prompt, a chunk in each step."""
        step, num_tokens, chunk = self.step, stop - start, self.chunk_tokens
        if num_tokens <= 0 or step is None:
            return 0.0
        num_whole = (num_tokens - 1) // chunk  # steps before the last
        early = min(num_tokens - num_whole * chunk, EARLY_TOKENS)
        if num_whole:
            early += num_whole * min(chunk, EARLY_TOKENS)
        return (
            num_tokens * step.per_token_s
            + num_tokens * (start + stop + 1) / 2 * step.per_pair_s  # as num_pairs says
            + (num_whole + 1) * step.per_step_s
            + early * step.per_early_token_s
        )

    def block_s(self, at: int) -> float:
        """Seconds to compute block `at` of a prompt, in a step that is run anyway."""
        if self.step is None:
            return 0.0
        pairs = num_pairs(self.block_size, at * self.block_size)
        return self.block_size * self.step.per_token_s + pairs * self.step.per_pair_s
