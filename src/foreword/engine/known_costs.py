"""What steps and reads cost on this machine with this model, remembered from one start to the next.

It is remembered as exact mode's verdicts are, under a digest of what it can depend on. A server
begins with it, goes on learning, and writes at its end what it knows then.
"""

import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch

from foreword.core.cost import NUM_COSTS, StepFit, TierCost, TierFit
from foreword.engine.calibration import SCRATCH_BYTES, scratch_folder, time_reads, time_steps
from foreword.engine.runner import Runner
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.tiers import EXPECTED, costs_of, fit_of
from foreword.engine.verdict import kernel_settings, machine
from foreword.store.codec import record_bytes
from foreword.store.disk import DiskStore
from foreword.store.files import cache_folder, write_whole
from foreword.store.host import HostStore
from foreword.store.store import KVStore

log = logging.getLogger("foreword.engine")

FORMAT = 1
STEPS_S, READS_S = 5.0, 1.0  # that a server's first start may take for steps, and for each tier


@dataclass(frozen=True, slots=True)
class Reads:
    """What a tier's reads cost; `place` tells one folder from another."""

    place: str
    latency_s: float
    bytes_per_s: float
    error: float
    late_share: float

    @classmethod
    def of(cls, place: str, fit: TierFit) -> Self:
        cost = fit.cost
        return cls(place, cost.latency_s, cost.bytes_per_s, fit.error, fit.late_share)

    def fit(self, record_size: int) -> TierFit:
        fit = fit_of(TierCost(self.latency_s, self.bytes_per_s), record_size)
        fit.error, fit.late_share = self.error, self.late_share
        return fit

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.2g} GB/s after {self.latency_s * 1e3:.2g} ms"


@dataclass(slots=True)
class Memo:
    """A file of costs: the sums of StepFit over steps, and by tier what its reads cost."""

    path: Path
    steps: StepFit | None = None
    reads: dict[str, Reads] = field(default_factory=dict)

    @classmethod
    def recall(cls, path: Path) -> Self:
        """As it was written; empty where it was not, or cannot be used."""
        memo = cls(path)
        try:
            found = json.loads(path.read_text())
            if (found["format"], found["key"]) != (FORMAT, path.stem):
                raise ValueError("it is of another format, machine or model")
            steps = _steps_of(found["steps"]) if found["steps"] else None
            memo.reads = {str(name): _reads_of(reads) for name, reads in found["tiers"].items()}
            memo.steps = steps
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is not used: %s: %s", path, type(error).__name__, error)
        return memo

    def save(self) -> None:
        """All of it or nothing; what cannot be written is measured again."""
        reads = {name: asdict(reads) for name, reads in self.reads.items()}
        steps = asdict(self.steps) if self.steps else None
        body = {"format": FORMAT, "key": self.path.stem, "steps": steps, "tiers": reads}
        try:
            write_whole(self.path, json.dumps(body, indent=1))
        except OSError as error:
            log.warning("the costs are not remembered: %s", error)

    def __str__(self) -> str:
        cost = self.steps.solve() if self.steps else None
        parts = [f"{cost.per_token_s * 1e3:.3g} s for 1,000 tokens' prefill"] if cost else []
        return ", ".join([*parts, *(f"{name} {reads}" for name, reads in self.reads.items())])


class KnownCosts:
    """`costs` are the engine's, and `steps` what is known of steps; None: nothing yet."""

    def __init__(self, runner: Runner, stores: Sequence[KVStore], settings: EngineSettings) -> None:
        """With `settings.calibrate` they begin as they are remembered, and what is not is measured
        in some seconds."""
        self.costs = costs_of(stores, runner.model.block_bytes(BLOCK_SIZE), settings)
        self._places = {store.name: place_of(store.name, settings) for store in stores}
        self._memo: Memo | None = None
        if settings.calibrate and settings.prefix_caching:
            self._memo = Memo.recall(memo_path(runner))
            self._complete(runner, settings)
            steps, reads, size = self._memo.steps, self._memo.reads, self.costs.block_bytes
            self.costs.step = steps.solve() if steps else None
            self.costs.tiers = [
                reads[name].fit(size) if name in reads else fit
                for name, fit in zip(self._places, self.costs.tiers, strict=True)
            ]

    @property
    def steps(self) -> StepFit | None:
        return self._memo.steps if self._memo else None

    def write(self, steps: StepFit) -> None:
        """Remember what was learned of steps, once that is enough, and of this engine's tiers."""
        memo = self._memo
        if memo is None:
            return
        if self.costs.step is not None:
            memo.steps = steps
        for (name, place), fit in zip(self._places.items(), self.costs.tiers, strict=True):
            if fit.num_reads:
                memo.reads[name] = Reads.of(place, fit)
        memo.save()

    def _complete(self, runner: Runner, settings: EngineSettings) -> None:
        """Measure what is not known, and say so."""
        memo, begin_s = self._memo, time.perf_counter()
        assert memo is not None
        for name, place in self._places.items():
            if name in memo.reads and memo.reads[name].place != place:
                del memo.reads[name]
        missing = [name for name in self._places if name not in memo.reads]
        if memo.steps is not None and not missing:
            log.info("costs, as remembered: %s", memo)
            return
        log.info("calibrating: steps and reads are timed, once for this model and machine")
        if memo.steps is None:
            steps = time_steps(runner, STEPS_S)
            memo.steps = steps.fit if steps.are_enough else None
            if memo.steps is None:
                log.info("steps take too long here: what they cost is learned from requests")
        for name in missing:
            reads = measure_reads(name, runner, settings, READS_S)
            if reads is not None:
                memo.reads[name] = reads
        log.info("costs, calibrated in %.1f s: %s", time.perf_counter() - begin_s, memo)
        memo.save()


def measure_reads(
    name: str, runner: Runner, settings: EngineSettings, budget_s: float
) -> Reads | None:
    """What a scratch store of this kind takes to read. None, and a line in the log, where it does
    not work."""
    size = record_bytes(BLOCK_SIZE, runner.model.block_bytes(BLOCK_SIZE))
    fit, room = fit_of(EXPECTED[name], size), SCRATCH_BYTES * 9 // 8
    lends = runner.model.module.device.type == "cpu"
    try:
        if name == "host":
            with closing(HostStore(room, size)) as store:
                works = time_reads(store, size, fit, budget_s, lends=lends)
        else:
            settings.disk_folder.mkdir(parents=True, exist_ok=True)
            with (
                scratch_folder(settings.disk_folder) as folder,
                closing(DiskStore(folder, room, size)) as store,
            ):
                works = time_reads(store, size, fit, budget_s)
    except OSError as error:
        log.warning("reads of the %s tier are not calibrated: %s", name, error)
        return None
    return Reads.of(place_of(name, settings), fit) if works else None


def place_of(name: str, settings: EngineSettings) -> str:
    return str(settings.disk_folder.resolve()) if name == "disk" else ""


def memo_path(runner: Runner) -> Path:
    """Where the costs of this model on this machine are kept: by its identity with its numerics,
    the processor or device, the number of threads, and the libraries."""
    model = runner.model
    parts = [
        model.identity(1, runner.numerics).root_hash("").hex(),
        machine(model.module.device),
        str(torch.get_num_threads()),
        torch.__version__,
        kernel_settings(),
    ]
    digest = sha256(json.dumps(parts).encode()).hexdigest()
    return cache_folder() / "costs" / f"{digest}.json"


def _steps_of(found: dict[str, Any]) -> StepFit:
    """Raises ValueError, KeyError or TypeError where it is none."""
    products = [[_number(part) for part in row] for row in found["products"]]
    moments = [_number(part) for part in found["moments"]]
    if [len(row) for row in (*products, moments)] != [NUM_COSTS] * (NUM_COSTS + 1):
        raise ValueError("it has sums of other costs")
    weight = _number(found["weight"])
    fit = StepFit(_number(found["older"]), int(found["num_steps"]), weight, products, moments)
    if fit.solve() is None or weight <= 0:
        raise ValueError("its sums are of no steps")
    return fit


def _reads_of(found: dict[str, Any]) -> Reads:
    numbers = {name: _number(value) for name, value in found.items() if name != "place"}
    reads = Reads(place=str(found["place"]), **numbers)
    if reads.bytes_per_s <= 0:
        raise ValueError("a tier reads nothing")
    return reads


def _number(value: object) -> float:
    """Raises ValueError for what is none, or infinite, or below 0."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no cost")
    return float(value)
