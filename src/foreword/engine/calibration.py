"""Calibration: what steps and reads cost on this machine, measured in some seconds.

Steps run through the engine's own Runner on its own pool, which holds nothing yet. Reads are timed
as `transfer` does it: from when they are asked for until their records are verified, with all that
is under way counted.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from foreword.core.block import BlockHash
from foreword.core.cost import StepCost, StepFit, StepWork, TierFit
from foreword.engine.lane import NUM_READERS
from foreword.engine.runner import Part, Runner
from foreword.engine.settings import BLOCK_SIZE
from foreword.engine.staging import CELL_BYTES
from foreword.store.codec import RecordKey, seal
from foreword.store.pages import arena, whole_pages
from foreword.store.store import KVStore, Loan, why_lost

SCRATCH_BYTES = 128 << 20  # that are written at most, to be read
_SCRATCH = "calibration-"
_AT_ONCE = (1, 2, 4, 8)  # reads
_ROUNDS = 3  # of all steps, of which the quickest count: what else the machine does is not the cost


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: `count` sequences with as many new tokens each; one token is a decode."""

    num_tokens: int
    context: int
    count: int = 1

    @property
    def work(self) -> StepWork:
        work = StepWork()
        for _ in range(self.count):
            work.add(self.num_tokens, self.context, is_decoding=self.num_tokens == 1)
        return work


# Those that tell the costs apart first, then those that say it better.
SHAPES = (
    Shape(16, 0),
    Shape(128, 0),
    Shape(512, 0),
    Shape(1, 128),
    Shape(16, 1024),
    Shape(1, 512, 8),
    Shape(512, 1024),
    Shape(1, 2048),
    Shape(128, 2048),
    Shape(2048, 0),
    Shape(1, 1024, 8),
    Shape(1, 4096),
    Shape(512, 4096),
)


@dataclass(frozen=True, slots=True)
class Steps:
    """What steps took, in seconds, and the fit of that."""

    fit: StepFit
    seconds: dict[Shape, float]

    @property
    def cost(self) -> StepCost | None:
        return self.fit.solve()

    @property
    def are_enough(self) -> bool:
        """Whether prefills of some lengths and a decode are among them."""
        prefills = [shape for shape in self.seconds if shape.num_tokens > 1]
        return len(prefills) > 1 and len(prefills) < len(self.seconds)

    @property
    def error(self) -> float:
        """How far off the fit is, as a share of a step's seconds, on average."""
        cost = self.cost
        if cost is None:
            return 0.0
        off = [abs(cost.step_s(shape.work) / took_s - 1) for shape, took_s in self.seconds.items()]
        return sum(off) / len(off)


def time_steps(runner: Runner, budget_s: float, shapes: Sequence[Shape] = SHAPES) -> Steps:
    """Run steps for so many seconds at most, as far as can be foreseen. What does not fit in the
    pool or the model's context is left out, and so is what would take too long."""
    block_size, room = runner.kv.block_size, runner.kv.num_blocks
    longest = min(runner.model.max_model_len, room * block_size)
    fit_in = [
        shape
        for shape in shapes
        if shape.context + shape.num_tokens <= longest
        and shape.count * _num_blocks(shape, block_size) <= room
    ]
    seconds: dict[Shape, float] = {}
    if not fit_in:
        return Steps(StepFit(), seconds)
    end_s = time.perf_counter() + budget_s
    _run(runner, fit_in[0])  # libraries prepare themselves at first
    per_token_s = _run(runner, fit_in[0]) / fit_in[0].num_tokens
    for _ in range(_ROUNDS):
        for shape in fit_in:
            # Of more tokens each costs less, and a decode no more than some of a prefill.
            guess_s = per_token_s * max(16, shape.num_tokens) * (1 + shape.context / 4096)
            if time.perf_counter() + seconds.get(shape, guess_s) > end_s:
                continue
            took_s = _run(runner, shape)
            seconds[shape] = min(took_s, seconds.get(shape, took_s))
            if shape.num_tokens > 1:
                per_token_s = min(per_token_s, seconds[shape] / shape.num_tokens)
    fit = StepFit()
    for shape, least_s in seconds.items():
        fit.add(shape.work, least_s)
    return Steps(fit, seconds)


def time_reads(
    store: KVStore, record_bytes: int, fit: TierFit, budget_s: float, *, lends: bool = True
) -> bool:
    """Write records to an empty store for half of so many seconds, and read them for as long, once
    at least; the fit learns what that takes. Without `lends` records are copied also where the
    store lends them. False: nothing was read, for there is no room, or it does not work."""
    cells = list(_written(store, record_bytes, time.perf_counter() + budget_s / 2))
    end_s = time.perf_counter() + budget_s / 2
    size = whole_pages(record_bytes)
    space = memoryview(arena(max(_AT_ONCE) * max(CELL_BYTES, size)))
    buffers = [space[at : at + size] for at in range(0, len(space) - size + 1, size)]
    turn = num_read = 0
    with ThreadPoolExecutor(NUM_READERS) as readers:
        while cells and not (num_read and time.perf_counter() > end_s):
            for at_once in _AT_ONCE:
                asked_s = time.perf_counter()
                reads = []
                for number in range(at_once):
                    keys = cells[(turn + number) % len(cells)]
                    own = buffers[number * len(cells[0]) :][: len(keys)]
                    reads.append((keys, readers.submit(_read, store, keys, own, lends=lends)))
                under_way = 0
                for keys, read in reads:
                    under_way += len(keys) * record_bytes
                    fit.add(under_way, read.result() - asked_s)
                turn += at_once
                num_read += at_once
    return num_read > 0


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Below `parent`, and gone afterwards. Removes what a crash has left. Raises OSError."""
    for old in parent.glob(f"{_SCRATCH}*"):
        if time.time() - old.stat().st_mtime > 600:
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _num_blocks(shape: Shape, block_size: int) -> int:
    return -(-(shape.context + shape.num_tokens) // block_size)


def _run(runner: Runner, shape: Shape) -> float:
    """Seconds of one step, over whatever the pool holds: what it says takes no time."""
    width = _num_blocks(shape, runner.kv.block_size)
    vocab_size = runner.model.vocab_size
    parts = [
        Part(
            range(at * width, (at + 1) * width),
            shape.context,
            [(7919 * (at + i)) % vocab_size for i in range(shape.num_tokens)],
            1,
        )
        for at in range(shape.count)
    ]
    begin_s = time.perf_counter()
    logits = runner.step(parts)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return time.perf_counter() - begin_s


def _written(store: KVStore, record_bytes: int, until_s: float) -> Iterator[list[RecordKey]]:
    """Keys of records that the store took, as many together as are read at once."""
    size = whole_pages(record_bytes)
    num_records = max(1, CELL_BYTES // size)
    space = memoryview(arena(num_records * size))
    space[:] = os.urandom(len(space))
    records = [space[at * size :][:record_bytes] for at in range(num_records)]
    root = BlockHash(os.urandom(32))
    for cell in range(max(1, SCRATCH_BYTES // len(space))):
        keys = [
            RecordKey(root, root, BlockHash(sha256(root + b"%d %d" % (cell, at)).digest()), 0, _IDS)
            for at in range(num_records)
        ]
        for key, record in zip(keys, records, strict=True):
            seal(record, key)
        if not all(store.put(keys, records)):
            return
        yield keys
        if time.perf_counter() > until_s:
            return


_IDS = bytes(4 * BLOCK_SIZE)


def _read(
    store: KVStore, keys: Sequence[RecordKey], buffers: Sequence[memoryview], *, lends: bool
) -> float:
    """When they were there and verified. Raises OSError where one was not."""
    hashes = [key.block_hash for key in keys]
    lend: Callable[[Sequence[BlockHash]], list[Loan | None]] | None = store.lend if lends else None
    if lend is not None:
        loans = lend(hashes)
    else:
        lengths = store.get(hashes, buffers)
        loans = [Loan(view[:n]) if n else None for view, n in zip(buffers, lengths, strict=True)]
    for key, loan in zip(keys, loans, strict=True):
        if why_lost(loan, key) is not None:
            raise OSError(f"a record of the {store.name} tier was lost")
    return time.perf_counter()
