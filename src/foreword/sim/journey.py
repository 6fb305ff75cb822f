"""Journey: a request on its way through a worker in virtual time, and the samples of its answer."""

from collections import deque
from dataclasses import dataclass, field

from foreword.core.block import Chain
from foreword.core.cost import StepWork
from foreword.core.sequence import Sequence
from foreword.sim.prompt import MARK
from foreword.sim.trace import Record


@dataclass(slots=True, eq=False)
class Journey:
    """One request on its way through a worker. Times are in seconds from the first arrival; -1
    where it did not get so far."""

    place: int  # in the trace
    worker: int
    num_tokens: int  # of its prompt
    sent_s: float
    num_open: int  # samples
    num_missing: int = 0  # tokens of its prompt that its worker did not have when it was sent
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    turn: int = -1  # how many its worker admitted before it
    num_hit_tokens: int = 0
    restored: dict[int, int] = field(default_factory=dict)  # of these, tokens by tier


class Sample(Sequence):
    """A sample as a trace tells of it. In a trace of blocks' ids it ends with its prompt, of which
    the mark stays uncomputed."""

    def __init__(self, journey: Journey, record: Record, chain: Chain, index: int = 0) -> None:
        super().__init__(chain, index, wants_prompt=record.wants_prompt)
        self.journey = journey
        self.id_tokens = record.id_tokens
        self.cancelled_at = record.cancelled_at
        answer = record.answers[index]
        num_answer = len(answer) if record.sample_lengths else record.num_output_tokens
        # What the trace does not tell is nobody's answer but this one's.
        rest = max(1, num_answer) - len(answer)
        self._left = deque([*answer, *(MARK - 1 - journey.place % (1 << 20) for _ in range(rest))])

    @property
    def num_unsampled(self) -> int:
        return len(self._left)

    def sample(self, num_tokens: int) -> None:
        """The next tokens of the answer are there."""
        self.chain.extend(self._left.popleft() for _ in range(num_tokens))

    def chunk(self, budget: int, num_left: int) -> int:
        if self.id_tokens > 1:
            num_left = min(num_left, self.num_uncomputed - 1)
        return super().chunk(budget, num_left)

    def charge(self, work: StepWork, start: int, num: int) -> None:
        """Add the tokens of `num` ids of blocks, from id `start` on, to what a step computes."""
        stop = (start + num) * self.id_tokens
        if start + num == len(self.chain) - 1:  # with what is left of the prompt, or its last token
            stop = self.journey.num_tokens
            num = max(1, stop - start * self.id_tokens)
        else:
            num *= self.id_tokens
        work.add(num, stop - num)
