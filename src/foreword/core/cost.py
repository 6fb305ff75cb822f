"""What computing and loading KV cost, in seconds; and how to learn it from steps that were run.

A token's prefill has a part of its own (the weights) and one for each token before it (attention).
"""

from dataclasses import dataclass, field

EARLY_TOKENS = 128  # of a step's prefill
_CLEARLY = 1 + 1e-9  # among sets of costs that explain as much the first one counts
_SINGULAR = 1e-9  # of a pivot of equations whose diagonal is 1


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


_NUM_COSTS = 6  # of StepCost's fields


@dataclass(slots=True)
class StepFit:
    """The StepCost that explains best how long steps took: least squares, no cost below 0. Of the
    steps only sums are kept: of products of what each cost is paid for, in StepCost's order, and
    of products of that and the seconds."""

    num_steps: int = 0
    products: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _NUM_COSTS for _ in range(_NUM_COSTS)]
    )
    moments: list[float] = field(default_factory=lambda: [0.0] * _NUM_COSTS)

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
                row = self.products[at]
                for column, other in enumerate(paid):
                    row[column] += one * other
                self.moments[at] += one * seconds

    def copy(self) -> "StepFit":
        """These sums as they are now, for another thread to solve."""
        return StepFit(self.num_steps, [row.copy() for row in self.products], self.moments.copy())

    def solve(self) -> StepCost | None:
        """None before any step. Some milliseconds: all sets of costs that are not 0 are tried."""
        best, most = None, 0.0
        for bits in range(1, 1 << _NUM_COSTS):
            chosen = [at for at in range(_NUM_COSTS) if bits >> at & 1]
            costs = self._solve(chosen)
            if costs is None or min(costs) < 0:
                continue
            # At a minimum, what the errors' squares sum up to is the less the greater this is.
            explained = sum(c * self.moments[i] for c, i in zip(costs, chosen, strict=True))
            if explained > most * _CLEARLY:
                best, most = dict(zip(chosen, costs, strict=True)), explained
        if best is None:
            return None
        return StepCost(*(best.get(at, 0.0) for at in range(_NUM_COSTS)))

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
