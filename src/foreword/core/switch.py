"""Switch: whether requests may wait for a tier. It is off while the tier loses, and on again when
it would win.

A request wins what computing the blocks that came would have taken, and loses what it waited for
the tier. One that found blocks there and was planned without them wins nothing.
"""

from collections import deque
from math import inf

from foreword.core.stats import Ledger

WINDOW = 12  # requests that a tier is judged by
PAUSE_S = (4.0, 32.0)  # it is off that long after it lost; twice as long if it soon loses again
SOON_S = 120.0


class Switch:
    """`why` says in words why it was last turned."""

    def __init__(self) -> None:
        self.enabled = True
        self.why = ""
        self.ledger = Ledger()
        self._gains_s: deque[float] = deque(maxlen=WINDOW)
        self._on_s = -inf
        self._until_s = 0.0
        self._pause_s = PAUSE_S[0]
        self._num_reads = 0

    def judge(self, now_s: float, gain_s: float, num_reads: int) -> None:
        """A request had the tier to win from, and won so much. `num_reads` came from it so far."""
        if not self.enabled:
            return  # it was admitted before
        self._gains_s.append(gain_s)
        lost_s = -sum(self._gains_s)
        if len(self._gains_s) < WINDOW or lost_s < 0:
            return
        self.enabled, self._num_reads = False, num_reads
        if not lost_s:
            self._num_reads, self._until_s = -1, now_s
            self.why = f"none of the last {WINDOW} requests would have been quicker with it"
            return
        soon = now_s < self._on_s + SOON_S
        self._pause_s = min(2 * self._pause_s, PAUSE_S[1]) if soon else PAUSE_S[0]
        self._until_s = now_s + self._pause_s
        self.why = f"the last {WINDOW} requests lost {lost_s:.3g} s by it"

    def retry(self, now_s: float, gain_s: float, num_reads: int) -> None:
        """While it is off: a request would win so much, by what reads take that nobody waits for.
        After a loss it takes such reads to be believed."""
        tried = num_reads > self._num_reads and now_s >= self._until_s
        if self.enabled or gain_s <= 0 or not tried:
            return
        self.enabled, self._on_s = True, now_s
        self._gains_s.clear()
        self.why = f"a request would be {gain_s:.3g} s quicker with it, as it reads now"
