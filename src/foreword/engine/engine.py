"""TorchEngine: the step loop on its own thread, and the asyncio side of `generate`.

The thread runs schedule, run, settle. Results of a step reach each event loop in one wake.
"""

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from foreword.core.block import Chain
from foreword.core.errors import EngineBusy, EngineStopped, RequestFailed
from foreword.core.events import Publish
from foreword.core.identity import Identity
from foreword.core.request import ModelCard, Output, Request, check_request
from foreword.core.scheduler import Scheduler, Step
from foreword.core.stats import EngineStats
from foreword.engine.facts import banner, card_of, for_replay
from foreword.engine.grammar import Grammars
from foreword.engine.known_costs import KnownCosts
from foreword.engine.model import LoadedModel, load_model
from foreword.engine.request_log import RequestLog
from foreword.engine.runner import Runner
from foreword.engine.sample import Sample, samples_of
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.stats import Counts
from foreword.engine.stream import Letter, Stream, put, settle
from foreword.engine.text import Text
from foreword.engine.tiers import open_cache, open_stores
from foreword.engine.transfer import Transfer
from foreword.engine.value import Value

log = logging.getLogger("foreword.engine")

CLEAR_S = 10.0  # how long the tiers may take to forget
IDLE_S = 5.0  # how often the tiers are seen to while nothing else happens
FLUSH_S = 5.0  # how long what is being written below the device may take at the end


class TorchEngine:
    """A served model. `start` before `generate`; `stop` at the end."""

    stores_of = staticmethod(open_stores)

    def __init__(self, model: LoadedModel, runner: Runner, settings: EngineSettings) -> None:
        self.model = model
        self.runner = runner
        self.settings = settings
        self.exact, self.exact_reason = runner.exactness
        self.identity: Identity = model.identity(BLOCK_SIZE, runner.numerics)
        num_blocks = runner.kv.num_blocks
        self._wake = threading.Condition()
        stores = self.stores_of(settings, model.block_bytes(BLOCK_SIZE), self.identity)
        self._known = KnownCosts(runner, stores, settings)
        self.cache = open_cache(settings, num_blocks, stores, self._known.costs)
        step_blocks = settings.max_prefill_tokens // BLOCK_SIZE
        self.transfer = Transfer(self.cache, runner.kv, stores, step_blocks, self._notify)
        for number, store in enumerate(stores):
            self.cache.lower.resize(number, store.capacity)  # it may have found more than that
        self.scheduler: Scheduler[Sample] = Scheduler(
            self.cache,
            settings.max_num_seqs,
            settings.max_batch_tokens,
            settings.max_prefill_tokens,
            settings.order,
        )
        self._counts = Counts(self._known.costs, self._known.steps)
        self.value = Value(self.cache, model.block_bytes(BLOCK_SIZE), self.transfer, self._counts)
        self._card = card_of(model, settings, num_blocks * BLOCK_SIZE)
        self._text = Text(model, self._card.max_model_len)
        self._grammars = Grammars(model.tokenizer, model.vocab_size, model.end_token_id)
        self._streams: dict[Sample, Stream] = {}
        self._inbox: deque[tuple[bool, Stream]] = deque()  # (True: start, False: cancel)
        self._clearing: list[Future[bool]] = []
        self._log: RequestLog | None = None
        self._ended: list[Stream] = []
        self._draining = self._stopping = False
        self._refusal = "The server is shutting down."
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)

    @classmethod
    def load(cls, settings: EngineSettings) -> Self:
        """Load the model and reserve the KV memory. Raises what `load_model` raises, and
        ValueError when the memory holds fewer than two blocks."""
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        model = load_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_model_len=settings.max_model_len,
            quantise=settings.quantise,
        )
        num_blocks = settings.kv_bytes // model.block_bytes(BLOCK_SIZE)
        if num_blocks < 2:
            raise ValueError(
                f"{settings.kv_bytes} bytes of KV memory hold {num_blocks} blocks of "
                f"{model.block_bytes(BLOCK_SIZE)} bytes; at least 2 are needed"
            )
        return cls(model, Runner(model, num_blocks, BLOCK_SIZE, settings.exact), settings)

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def stats(self) -> EngineStats:
        pool, block_bytes = self.cache.pool, self.model.block_bytes(BLOCK_SIZE)
        return replace(
            self._counts.totals,
            num_preemptions=self.scheduler.num_preemptions,
            num_evicted_blocks=self.cache.num_evicted_blocks,
            num_waiting=self._num_waiting,
            num_running=len(self.scheduler.running),
            num_unlogged=self._log.num_dropped if self._log is not None else 0,
            device_bytes=(pool.num_blocks - pool.num_blank) * block_bytes,
            leased_bytes=pool.num_leased * block_bytes,
            tiers=self.transfer.stats,
        )

    @property
    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._inbox)

    @property
    def is_serving(self) -> bool:
        return not self._draining

    @property
    def banner_facts(self) -> dict[str, str]:
        """What the server says of itself at start, in order."""
        exactness, tiers = self.runner.exactness, self.transfer.facts
        return banner(self._card, self.settings, self.model, self.cache, exactness, tiers)

    def start(self, publish: Publish | None = None, log: RequestLog | None = None) -> None:
        """`publish` is told of the cache's events by the engine's thread: it must not wait. `log`
        gets a line for each request that ends."""
        self._publish, self.cache.record_events = publish, publish is not None
        self._log = log
        if log is not None:
            size, tiers = self.model.block_bytes(BLOCK_SIZE), self.transfer.stats
            facts = for_replay(self._card.name, self.settings, self.cache, size, tiers)
            log.begin(facts, lambda: (self._counts.fit.copy(), self.transfer.stats))
        self._thread.start()

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, then end."""
        self._draining = True
        self._notify()
        await asyncio.to_thread(self._idle.wait, drain_s)
        self._stopping = True
        self._notify()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.transfer.close, FLUSH_S)
        await asyncio.to_thread(self._known.write, self._counts.recent)

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def encode_chat(
        self, messages: Items[Mapping[str, Any]], tools: Items[Mapping[str, Any]] = ()
    ) -> list[int]:
        return self._text.encode_chat(messages, tools)

    def decode(self, token_ids: Items[int]) -> str:
        return self._text.decode(token_ids)

    def check_grammar(self, grammar: str) -> None:
        self._grammars.matcher(grammar)

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        check_request(request, self._card)
        stream = Stream(request, request.n)
        self._post(True, stream)
        try:
            while stream.num_open:
                output = await stream.queue.get()
                if isinstance(output, Exception):
                    raise output
                stream.num_open -= output.finish_reason is not None
                yield output
        finally:
            if stream.num_open:
                self._post(False, stream)

    async def clear_cache(self) -> bool:
        cleared: Future[bool] = Future()
        with self._wake:
            if self._draining:
                raise EngineStopped(self._refusal)
            self._clearing.append(cleared)
            self._wake.notify()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(cleared), CLEAR_S)
        except TimeoutError as error:
            raise EngineBusy("The cache is not cleared: a tier does not answer.") from error

    def _post(self, starts: bool, stream: Stream) -> None:
        with self._wake:
            if starts and self._draining:
                raise EngineStopped(self._refusal)
            num_free = max(0, self.settings.max_num_seqs - len(self.scheduler.running))
            if starts and self._num_waiting >= self.settings.max_queue + num_free:
                raise EngineBusy(
                    f"The queue is full: {self._num_waiting} sequences wait for their turn."
                )
            self._inbox.append((starts, stream))
            self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        busy_s = 0.0
        try:
            while not self._stopping:
                self._receive()
                busy_s = self._turn(busy_s)
        except Exception:
            log.exception("the engine failed and serves no more")
            self._refusal = "The engine failed and serves no more; its log says why."
        finally:
            with self._wake:  # from here on nothing is posted, so that nobody waits for ever
                self._draining = True
                posted = {stream for starts, stream in self._inbox if starts}
            for cleared in self._clearing:
                if cleared.set_running_or_notify_cancel():
                    cleared.set_exception(EngineStopped(self._refusal))
            self._idle.set()
            for stream in set(self._streams.values()) | posted:
                stopped = EngineStopped("The engine stopped before this request was done.")
                put(stream.loop, [(stream, stopped)])

    def _turn(self, busy_s: float) -> float:
        """Schedule, run, settle. Returns for how long it computed, as the turn before did."""
        begin_s = time.monotonic()
        self.cache.tick(begin_s)
        self._log_ended(begin_s)
        for probe, num_blocks in self.transfer.settle(busy_s):
            self.scheduler.found(probe, num_blocks)
        step = self.scheduler.schedule()
        self.transfer.perform(self.cache.lower.take_effects())  # before what it evicted is written
        self.transfer.perform(step.loads)
        if step.work:
            self._deliver(self._step(step))
            busy_s = time.monotonic() - begin_s
            self._counts.learn(busy_s)
        if self._publish and (events := self.cache.take_events()):
            self._publish(events)
        if step.work:
            self._log_ended(begin_s + busy_s)
            return busy_s
        self._await_tiers()
        return 0.0

    def _log_ended(self, turn_end_s: float) -> None:
        for stream in self._ended:
            self.value.add(stream)
            if self._log is not None:
                self._log.add(stream, turn_end_s - stream.ended_s)
        self._ended.clear()

    def _cleared(self) -> None:
        self.value.clear()
        if self._log is not None:
            self._log.cleared()

    def _receive(self) -> None:
        """Take new and cancelled requests; sleep while there is nothing to do."""
        with self._wake:
            while not (self._inbox or self._clearing or self._streams or self._stopping):
                if self._draining:
                    self._idle.set()
                if self.transfer.has_news or not self._wake.wait(IDLE_S):
                    break
            letters, clearing, self._clearing = list(self._inbox), self._clearing, []
            self._inbox.clear()
        for cleared in clearing:
            if cleared.set_running_or_notify_cancel():  # False: who asked has gone
                done = self.cache.clear()
                if done:
                    self._cleared()
                self.transfer.perform(self.cache.lower.take_effects())
                self.transfer.when_written(partial(settle, cleared, done))
        for starts, stream in letters:
            if not starts:
                self._forget([s for s in stream.samples if s in self._streams])
                continue
            try:
                self._begin(stream)
            except Exception:  # noqa: BLE001 - one request's fault, and logged
                put(stream.loop, [(stream, self._failed(stream))])

    def _await_tiers(self) -> None:
        """Nothing can be computed: sleep until a tier answers, or is given up, or others come."""
        begin_s, until_s = time.monotonic(), self.transfer.next_deadline_s
        if until_s is None:
            return  # what was preempted takes its turn in the next step
        wait_s = max(0.0, min(until_s, self.scheduler.next_late_s) - begin_s)
        with self._wake:
            if not (self._inbox or self._clearing or self._stopping or self.transfer.has_news):
                self._wake.wait(wait_s)
        if self.scheduler.running:
            self._counts.totals.restore_stall_s += time.monotonic() - begin_s

    def _begin(self, stream: Stream) -> None:
        root = self.identity.root_hash(stream.request.cache_salt)
        chain = Chain(root, BLOCK_SIZE, stream.request.prompt)
        tokenizer = self.model.tokenizer.backend_tokenizer
        stream.samples = samples_of(stream.request, chain, tokenizer, self._grammars)
        self._streams.update(dict.fromkeys(stream.samples, stream))
        self.transfer.perform(self.scheduler.add(stream.samples))

    def _failed(self, stream: Stream) -> RequestFailed:
        """One request met a fault that need not end the others: log it and forget the request."""
        request_id = json.dumps(stream.request.request_id)
        log.exception("request %s failed", request_id)
        self._forget([s for s in stream.samples if s in self._streams])
        return RequestFailed(f"The server failed at request {request_id}; its log says why.")

    def _forget(self, sequences: Items[Sample]) -> None:
        if not sequences:
            return
        for sequence in sequences:
            stream = self._streams.pop(sequence)
            if stream.end(sequence):
                self._ended.append(stream)
        self.scheduler.finish(sequences)

    def _step(self, step: Step[Sample]) -> list[tuple[Stream, Output | RequestFailed]]:
        """Run one step and tell the cache; returns what each stream gained."""
        measured, begin_s = step.measure(), time.perf_counter()
        for sequence, copy in step.copies:
            assert sequence.lease is not None
            self.runner.copy(copy.source, copy.target, copy.num_tokens)
            self.cache.filled(sequence.lease, copy.num_tokens)
        parts = [sequence.part(start, num) for sequence, start, num in step.work]
        logits = self.runner.step(parts)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or the clock would stop before the step
        self._counts.add_step(measured, time.perf_counter() - begin_s)
        self.cache.tick(time.monotonic())
        rows = torch.split(logits, [part.num_logits for part in parts])
        settled = [self.scheduler.settle(one, num) for one, _start, num in step.work]
        self.transfer.perform(self.cache.lower.take_effects())
        ready: list[Sample] = []
        outputs: list[tuple[Stream, Output | RequestFailed]] = []
        for work, part, own, is_ready in zip(step.work, parts, rows, settled, strict=True):
            sequence = work[0]
            stream = self._streams.get(sequence)
            if stream is None:
                continue  # another sample of its request failed just now
            try:
                if sequence.reports_prompt:
                    sequence.take_prompt(own, part.start)
                if is_ready:
                    ready.append(sequence)
                    outputs.append((stream, self._sample(sequence, own[-1])))
            except Exception:  # noqa: BLE001 - as in _receive
                outputs.append((stream, self._failed(stream)))
        ready = [sequence for sequence in ready if sequence in self._streams]
        for sequence in ready:
            self.scheduler.start_siblings(sequence)
        self._forget([sequence for sequence in ready if sequence.finish_reason is not None])
        return outputs

    def _sample(self, sequence: Sample, logits: torch.Tensor) -> Output:
        return sequence.advance(logits, self.model.eos_token_ids)

    def _deliver(self, outputs: Items[tuple[Stream, Output | RequestFailed]]) -> None:
        """One wake per event loop and step, and a line in the log for each first token."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Letter]] = {}
        for stream, output in outputs:
            if stream.first_token_s is None and isinstance(output, Output):
                stream.first_token_s = time.monotonic()
                ttft_s = stream.first_token_s - stream.submitted_s
                restored = self.transfer.count_hits(stream.samples[output.index].restored)
                self._counts.add_first_token(
                    stream.request, output.num_cached_tokens, restored, ttft_s
                )
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, letters in by_loop.items():
            put(loop, letters)
