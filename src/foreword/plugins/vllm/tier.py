"""ForewordTier: our store as a secondary tier of vLLM's offloading.

All calls come from vLLM's scheduler, one at a time, and none waits: what a store does, threads of
its own do. A block that does not come back whole and in time is that block's miss.
"""

import logging
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from foreword.plugins.load import Load
from foreword.plugins.outer import Block, Budgets, OuterCache
from foreword.plugins.vllm.identity import engine_config, identify
from foreword.plugins.vllm.lineage import GROUP_BYTES, Lineage
from foreword.store.files import kv_folder
from foreword.store.patience import PROBE_S

log = logging.getLogger("foreword.plugins")

# As in docs/reference/metrics.md; vLLM's are blocks of its own, chunks.
BLOCKS = "foreword_kv_cache_offload_blocks_"
BYTES = "foreword_kv_cache_disk_usage_bytes"
FLUSH_S = 10.0  # for what waits to be written when the engine ends
HEAL_S = 60.0  # after a block was dropped or lost, requests offer all of theirs again
KEEP_HINT = "foreword_keep_tokens"  # in kv_transfer_params: keep no more of this prompt than that


@dataclass(slots=True)
class _Prompt:
    """What is known of one request's chunks."""

    most_tokens: int | None = None
    promoted: set[bytes] = field(default_factory=set)  # vLLM was told that they are here
    lost: set[bytes] = field(default_factory=set)  # a load did not bring them: not asked again
    there: dict[bytes, bool] = field(default_factory=dict)  # as a shared place has answered
    asked: Future[list[bool]] | None = None
    asked_for: list[bytes] = field(default_factory=list)
    until_s: float = 0.0


@dataclass(slots=True)
class _Promotion:
    job: TransferJob
    load: Load
    begin_s: float


class ForewordTier(SecondaryTierManager):
    """Settings, beside vLLM's own `type` and `module_path`: `disk_bytes`, `disk_folder`,
    `host_bytes` (besides vLLM's CPU tier, so 0 as a rule), `lora_folders`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        budgets, lora_folders = _settings(settings)
        config = offloading_spec.config
        self._rows = memoryview(primary_kv_view).cast("B")
        self._num_chunks = len(primary_kv_view)
        engine = engine_config()
        chunk_tokens = min(offloading_spec.tokens_per_block) * config.cache.blocks_per_chunk
        room = self._num_chunks // len(config.groups) * chunk_tokens
        if room < engine.model_config.max_model_len:
            log.warning(
                "host memory (cpu_bytes_to_use) has room for %d tokens: of a longer prompt no more"
                " than that comes back, and a prompt of more new tokens is not kept",
                room,
            )
        who = partial(identify, engine, config, lora_folders)
        self._cache = OuterCache(who, self.block_size_bytes, budgets)
        self._promotions: dict[int, _Promotion] = {}
        self._stores: dict[int, Future[list[bool]]] = {}
        self._told: dict[tuple[str, ...], int] = {}
        self._heal_until_s = 0.0

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """While there are gaps in what is kept, all blocks of a prompt are offered, not only those
        that are new to vLLM's CPU tier."""
        params = req_context.kv_transfer_params or {}
        most = params.get(KEEP_HINT)
        if most is not None and (type(most) is not int or most < 0):
            log.warning("%s is to be a number of tokens, not %r: ignored", KEEP_HINT, most)
            most = None
        req_context.set_state(_Prompt(most))
        heals = time.monotonic() < self._heal_until_s
        policy = OffloadPolicy.REQUEST_LEVEL if heals else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        prompt = _prompt(req_context)
        if key in prompt.lost:
            return LookupResult.MISS
        if not self._cache.num_ready([Block(key)]):
            if key not in prompt.there and not self._answered(prompt, key, req_context):
                return LookupResult.RETRY
            if not prompt.there[key]:
                return LookupResult.MISS
        # More than vLLM's CPU tier has room for would push out what was promoted before it.
        if key not in prompt.promoted and len(prompt.promoted) >= self._num_chunks:
            return LookupResult.MISS
        prompt.promoted.add(key)
        return LookupResult.HIT

    def submit_load(self, job_metadata: TransferJob) -> None:
        blocks = [Block(key) for key in job_metadata.keys]
        load = self._cache.begin_load(blocks, self._chunks(job_metadata))
        begin_s = time.monotonic()
        self._promotions[job_metadata.job_id] = _Promotion(job_metadata, load, begin_s)

    def submit_store(self, job_metadata: TransferJob) -> None:
        most_tokens = _prompt(job_metadata.req_context).most_tokens
        end_of = job_metadata.req_context.get_offload_key_position
        pairs = [
            (block, chunk)
            for block, chunk in zip(
                _blocks(job_metadata.keys, job_metadata.req_context),
                self._chunks(job_metadata),
                strict=True,
            )
            if most_tokens is None or end_of(block.engine_key) <= most_tokens
        ]
        pairs.sort(key=lambda pair: pair[0].position)  # parents first
        taken: Future[list[bool]] = Future()
        self._stores[job_metadata.job_id] = taken
        blocks, chunks = [block for block, _ in pairs], [chunk for _, chunk in pairs]
        self._cache.begin_store(blocks, chunks, taken.set_result)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job_id, taken in list(self._stores.items()):
            if taken.done():
                del self._stores[job_id]
                if not all(taken.result()):
                    self._heal_until_s = time.monotonic() + HEAL_S
                results.append(JobResult(job_id, success=all(taken.result())))
        now_s = time.monotonic()
        for job_id, promotion in list(self._promotions.items()):
            load = promotion.load
            if not load.has_ended and now_s < load.deadline_s:
                continue
            self._cache.give_up(load)
            del self._promotions[job_id]
            results.append(self._result(promotion, now_s))
        return results

    def on_request_finished(self, req_context: Any) -> None:
        """Its blocks were used: the last that is kept counts, and with it all above."""
        lineage = Lineage.of(req_context)
        for group in lineage.groups:
            self._cache.touch([Block(key) for key in lineage.keys(group)])

    def drain_jobs(self) -> None:
        """vLLM forgets its caches, perhaps since the weights were changed: what was kept before is
        not used again by this process."""
        for promotion in self._promotions.values():
            if not promotion.load.wait():
                self._cache.give_up(promotion.load)
        wait(self._stores.values())
        self._cache.renew()

    def shutdown(self) -> None:
        self._cache.close(FLUSH_S)
        self._rows.release()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        texts = {
            "stored": "Blocks written to a tier.",
            "loaded": "Blocks that came back from a tier, verified.",
            "dropped": "Blocks not written: too many waited, or no parent was kept.",
        }
        return {
            **{
                BLOCKS + event: OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
                for event, text in texts.items()
            },
            BLOCKS + "lost": OffloadingCounterMetadata(
                documentation="Blocks that did not come back and were computed.",
                labelnames=("tier", "reason"),
            ),
            BYTES: OffloadingGaugeMetadata(
                documentation="What this engine's part of the disk takes."
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        stats = OffloadingConnectorStats()
        for tier in self._cache.stats:
            counts: dict[tuple[str, ...], int] = {
                ("stored", tier.name): tier.num_stored_blocks,
                ("loaded", tier.name): tier.num_loaded_blocks,
                ("dropped", tier.name): tier.num_dropped_blocks,
                **{("lost", tier.name, reason): num for reason, num in tier.lost.copy().items()},
            }
            for labels, count in counts.items():
                if count > self._told.get(labels, 0):
                    event, *values = labels
                    more = count - self._told.get(labels, 0)
                    stats.increase_counter(BLOCKS + event, more, tuple(values))
                    self._told[labels] = count
            if tier.name == "disk":
                stats.set_gauge(BYTES, tier.num_bytes)
        return stats

    def _answered(self, prompt: _Prompt, key: bytes, req_context: Any) -> bool:
        """Whether it is known if others have a block: all of its group from there on are asked for
        at once. No answer in time is a no."""
        if prompt.asked is None:
            keys = Lineage.of(req_context).keys(key[-GROUP_BYTES:])
            prompt.asked_for = keys[keys.index(key) :] if key in keys else [key]
            prompt.asked = self._cache.probe([Block(each) for each in prompt.asked_for])
            prompt.until_s = time.monotonic() + PROBE_S
        if prompt.asked.done():
            there = prompt.asked.result()
        elif time.monotonic() < prompt.until_s:
            return False
        else:
            there = [False] * len(prompt.asked_for)
        prompt.there.update(zip(prompt.asked_for, there, strict=True))
        prompt.asked = None
        return key in prompt.there

    def _chunks(self, job: TransferJob) -> list[memoryview]:
        """Their bytes in vLLM's CPU tier."""
        size = self.block_size_bytes
        return [self._rows[at * size : (at + 1) * size] for at in job.chunk_ids.tolist()]

    def _result(self, promotion: _Promotion, now_s: float) -> JobResult:
        job, lost = promotion.job, promotion.load.lost
        good = [key for key, reason in zip(job.keys, lost, strict=True) if reason is None]
        if len(good) < len(lost):
            _prompt(job.req_context).lost.update(set(job.keys).difference(good))
            self._heal_until_s = now_s + HEAL_S
        return JobResult(
            job.job_id,
            success=len(good) == len(lost),
            successful_keys=good,
            transfer_time=now_s - promotion.begin_s,
            transfer_bytes=len(good) * self.block_size_bytes,
        )


def _prompt(req_context: Any) -> _Prompt:
    prompt: _Prompt | None = req_context.get_state(_Prompt)
    if prompt is None:
        prompt = _Prompt()
        req_context.set_state(prompt)
    return prompt


def _blocks(keys: Collection[bytes], req_context: Any) -> list[Block]:
    lineage = Lineage.of(req_context)
    ends = [(key, req_context.get_offload_key_position(key)) for key in keys]
    return [Block(key, lineage.parent(key, end), lineage.position(key, end)) for key, end in ends]


def _settings(settings: dict[str, Any]) -> tuple[Budgets, list[str]]:
    """Raises ValueError for those that are not there, or cannot be, so that a mistake shows at
    start."""
    known = {
        "disk_bytes": 10 << 30,
        "disk_folder": kv_folder(),
        "host_bytes": 0,
        "lora_folders": [],
    }
    if unknown := settings.keys() - known.keys() - {"locality"}:
        raise ValueError(
            f"ForewordTier has no setting {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(known))}"
        )
    chosen: dict[str, Any] = known | settings
    adapters = chosen["lora_folders"]
    if not isinstance(adapters, list) or not all(isinstance(at, str) for at in adapters):
        raise ValueError(f"lora_folders is to be a list of folders, not {adapters!r}")
    folder = Path(chosen["disk_folder"]).expanduser()
    return Budgets(chosen["host_bytes"], chosen["disk_bytes"], folder), adapters
