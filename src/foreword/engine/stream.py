"""A request's way back: outputs of the engine thread to the event loop that awaits them."""

import asyncio
import logging
import time
from collections.abc import Sequence as Items
from concurrent.futures import Future

from foreword.core.errors import EngineStopped, RequestFailed
from foreword.core.request import Output, Request
from foreword.engine.sample import Sample

log = logging.getLogger("foreword.engine")


class Stream:
    """One request's way back: outputs of the engine thread to the loop that awaits them."""

    def __init__(self, request: Request, num_open: int) -> None:
        self.request = request
        self.num_open = num_open
        self.num_unended = num_open  # as the engine's thread knows it
        self.num_computed_tokens = 0  # of the prompt, where it ended before its first token
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Output | EngineStopped | RequestFailed] = asyncio.Queue()
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.ended_s = 0.0
        self.samples: list[Sample] = []

    def end(self, sample: Sample) -> bool:
        """One of its samples ends, for whatever reason. Whether it was the last."""
        if sample.lease is not None and not sample.num_sampled:
            self.num_computed_tokens = sample.lease.num_computed_tokens
        self.num_unended -= 1
        self.ended_s = time.monotonic()
        return not self.num_unended


Letter = tuple[Stream, Output | EngineStopped | RequestFailed]


def put(loop: asyncio.AbstractEventLoop, letters: Items[Letter]) -> None:
    def enqueue() -> None:
        for stream, output in letters:
            stream.queue.put_nowait(output)

    try:
        loop.call_soon_threadsafe(enqueue)
    except RuntimeError:
        log.debug("an event loop closed before its outputs came")


def settle(future: Future[bool], result: bool) -> None:
    if not future.done():  # its client may have gone
        future.set_result(result)
