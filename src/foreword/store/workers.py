"""Workers: a few threads for calls that may hang. Unlike an executor's, they never keep the
process from ending."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Workers:
    """`num_threads` daemon threads that make the calls put here, in order, and `idle` whenever
    nothing came for `idle_s` seconds."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        idle: Callable[[], None] = lambda: None,
        idle_s: float | None = None,
    ) -> None:
        self._idle, self._idle_s = idle, idle_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._name = name
        self._threads: list[threading.Thread] = []
        self.grow(num_threads)

    def grow(self, num_threads: int) -> None:
        """Have at least so many threads from now on."""
        for _ in range(num_threads - len(self._threads)):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """`call` must not raise, nor `idle`."""
        self._calls.put(call)

    def close(self, timeout_s: float) -> bool:
        """End after what was put before, or let it go on alone after `timeout_s` seconds. Whether
        all threads ended."""
        for _ in self._threads:
            self._calls.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s)
            except Empty:
                call = self._idle
            if call is None:
                return
            call()
            del call  # it may hold memory that its owner wants back
