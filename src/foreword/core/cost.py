"""What computing and loading KV cost, in seconds.

A token's prefill has a part of its own (the weights) and one for each token before it (attention).
"""

from dataclasses import dataclass


def num_pairs(num_tokens: int, context: int) -> int:
    """How many (token, token that it attends to) pairs `num_tokens` tokens after `context` others
    have: each attends to those before it and to itself."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step of an engine. `per_step_s` is paid once; decoding sequences have a token
    each, and attend to all of their context."""

    per_token_s: float
    per_pair_s: float = 0.0
    per_step_s: float = 0.0
    per_decode_s: float = 0.0  # for each decoding sequence
    per_decode_pair_s: float = 0.0

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        """Seconds to compute `num_tokens` tokens after `context` others, in one step."""
        if not num_tokens:
            return 0.0
        pairs_s = num_pairs(num_tokens, context) * self.per_pair_s
        return self.per_step_s + num_tokens * self.per_token_s + pairs_s


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
