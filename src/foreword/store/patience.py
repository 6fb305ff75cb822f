"""Patience: how long a place may take, and when to leave it alone."""

import logging

log = logging.getLogger("foreword.store")

PROBE_S = 0.05  # a request waits that long for what a shared place has
LOAD_S = 0.25  # and for blocks that long
LOAD_BYTES_PER_S = 100e6  # and at this rate, with all that the place was asked before
USUALLY = 4.0  # or so many times as long as it took of late, if that is more
TEND_S = 1.0  # how often a store may do what it put off
PAUSE_S = (1.0, 30.0)  # a place that fails is left alone that long, then twice as long


class Breaker:
    """Whether to leave a failing place alone. Each failure after a pause makes the next longer."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._pause_s = PAUSE_S[0]

    def allows(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def failed(self, now_s: float, what: str) -> None:
        if self.allows(now_s):
            log.warning("%s; left alone for %.0f s", what, self._pause_s)
            self._until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])

    def succeeded(self) -> None:
        self._pause_s = PAUSE_S[0]
