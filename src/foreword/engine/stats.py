"""How much the engine prefilled, and the measured price of it."""

from dataclasses import dataclass

_LONG = 256  # tokens; a shorter step's seconds are mostly not its tokens'


@dataclass(slots=True)
class Stats:
    """Since start. Tokens are counted when computed; reused ones never are."""

    num_prefilled_tokens: int = 0
    _prefill_step_s: float = 0.0
    _prefill_step_tokens: int = 0

    def add_step(self, num_prefilled: int, num_decoding: int, seconds: float) -> None:
        """One step: prompt tokens computed, sequences that decoded beside them, seconds in all."""
        self.num_prefilled_tokens += num_prefilled
        if num_prefilled >= _LONG and not num_decoding:
            self._prefill_step_s += seconds
            self._prefill_step_tokens += num_prefilled

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that prefilling `num_tokens` would have taken at the average so far. 0 before
        anything was measured. Short steps are left out."""
        if not self._prefill_step_tokens:
            return 0.0
        return num_tokens * self._prefill_step_s / self._prefill_step_tokens
