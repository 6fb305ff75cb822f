"""What the engine thread counts, and the measured price of a prefill."""

import json
import logging
from collections.abc import Mapping

from foreword.core.cost import Costs, StepFit, StepWork
from foreword.core.request import Request
from foreword.core.stats import EngineStats

log = logging.getLogger("foreword.engine")

_OLDER = 1 / 512  # of the weight of steps, that they lose with each that comes after
_ENOUGH = 4096  # tokens prefilled, before what they cost is relied on
_SOLVE_EVERY = 16  # steps
_LONG = 256  # tokens; a shorter step's seconds are mostly not its tokens'


class Counts:
    """Written by the engine thread alone; `totals` has no gauges, which its owner adds."""

    def __init__(self, costs: Costs | None, known: StepFit | None = None) -> None:
        """What steps take is put in `costs`, once enough is known of it; `known` is enough."""
        self.totals = EngineStats()
        self.fit = StepFit()
        self.recent = known.copy() if known else StepFit()
        self.recent.older = _OLDER
        self._is_known = known is not None
        self._costs = costs
        self._work = StepWork()
        self._prefill_step_s = 0.0
        self._prefill_step_tokens = 0

    def add_step(self, work: StepWork, seconds: float) -> None:
        """One step, and how long its forward took."""
        self.totals.num_prefilled_tokens += work.num_tokens
        self.totals.num_decoded_tokens += work.num_decoding
        if work.num_tokens >= _LONG and not work.num_decoding:
            self._prefill_step_s += seconds
            self._prefill_step_tokens += work.num_tokens
        self._work = work

    def learn(self, seconds: float) -> None:
        """How long the last step took with all that the engine does around it."""
        self.fit.add(self._work, seconds)
        self.recent.add(self._work, seconds)
        enough = self.totals.num_prefilled_tokens >= _ENOUGH and self._prefill_step_tokens
        if self._costs and (enough or self._is_known) and self.recent.num_steps % _SOLVE_EVERY == 0:
            self._costs.step = self.recent.solve()

    def add_first_token(
        self, request: Request, num_reused: int, restored: Mapping[str, int], ttft_s: float
    ) -> None:
        """A request's, in the log too; how many tokens of its prompt were not computed for it, and
        of these how many came from tiers, by name."""
        num_prompt = len(request.prompt)
        self.totals.num_queries += 1
        self.totals.num_hits += num_reused > 0
        self.totals.num_hit_tokens += num_reused
        self.totals.num_miss_tokens += num_prompt - num_reused
        self.totals.ttft_s.add(ttft_s)
        saved_s = self.prefill_s(num_reused)
        log.info(
            "request %s: %d tokens reused%s, %d computed, TTFT %.0f ms%s",
            json.dumps(request.request_id),
            num_reused,
            "".join(f" ({num:,} from {name})" for name, num in restored.items()),
            num_prompt - num_reused,
            ttft_s * 1e3,
            f", without cache about {(ttft_s + saved_s) * 1e3:.0f} ms" if saved_s else "",
        )

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that prefilling `num_tokens` would have taken at the average so far. 0 before
        anything was measured. Short steps are left out."""
        if not self._prefill_step_tokens:
            return 0.0
        return num_tokens * self._prefill_step_s / self._prefill_step_tokens
