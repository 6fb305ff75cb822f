"""Load: blocks that an engine wants in its own memory, some of which may come too late."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.store.codec import RecordKey


class Load:
    """Into `targets`, one for each of `keys`. `done` is called, by some thread, when nothing more
    will come; not if it was given up before."""

    def __init__(
        self,
        keys: Sequence[RecordKey],
        targets: Sequence[memoryview],
        deadline_s: float,
        done: Callable[[], None],
    ) -> None:
        """`deadline_s` by the monotonic clock."""
        self.keys = keys
        self.deadline_s = deadline_s
        # By block: None when it is there, verified; else why not.
        self.lost: list[str | None] = ["late"] * len(keys)
        self.given_up = False
        self._targets = targets
        self._num_open = len(keys)
        self._lock = threading.Lock()
        self._done = done
        self._finished = threading.Event()

    def take(self, at: int, payload: memoryview, kept: Callable[[], bool]) -> bool:
        """Copy a block, if it is wanted still; it counts if it was `kept` until then, and whether
        it was is returned. Who gives up waits for one such copy at most."""
        with self._lock:
            if self.given_up:
                return True
            # Without the GIL.
            np.frombuffer(self._targets[at], np.uint8)[:] = np.frombuffer(payload, np.uint8)
            if not kept():
                return False
            self.lost[at] = None
            return True

    def lose(self, blocks: Sequence[int], reason: str) -> None:
        """One place does not have them; the first reason counts."""
        with self._lock:
            for at in blocks:
                if self.lost[at] == "late" and not self.given_up:
                    self.lost[at] = reason

    def settle(self, num_blocks: int) -> None:
        """No more is tried for so many blocks."""
        with self._lock:
            self._num_open -= num_blocks
            if self._num_open or self.given_up:
                return
            self._targets = ()
        self._finished.set()
        self._done()

    def give_up(self) -> bool:
        """Nothing is written to a target from now on. False: it had come to its end before."""
        with self._lock:
            if not self._num_open:
                return False
            self.given_up, self._targets = True, ()
            return True

    @property
    def has_ended(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> bool:
        """Whether it came to its end before its deadline."""
        return self._finished.wait(max(0.0, self.deadline_s - time.monotonic()))


@dataclass(slots=True, eq=False)
class Piece:
    """Some blocks of a load, as one place is asked for them."""

    load: Load
    blocks: list[int]
