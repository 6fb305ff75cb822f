"""This machine as hardware for `foreword plan`: its CPU as the device, measured for a second or so.

What a prefill reaches depends on the engine; the matrix product of numpy's BLAS in float32 is a
rate that any engine here can be held against. `foreword bench ttft` measures the real one.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from foreword.cli.settings import physical_memory_bytes
from foreword.sim.catalogue import Hardware
from foreword.store.files import cache_folder
from foreword.store.pages import arena

_SIDE = 1024  # of the matrices
_COPY_BYTES = 64 << 20  # more than a processor's cache holds, as a rule
_READ_BYTES = 1 << 20
_NUM_READS = 64
_ROUNDS = 5


def measured_hardware() -> Hardware:
    """The best of a few rounds each: what else runs here only slows them."""
    folder = _existing(cache_folder())
    copy_s = _best(_copying())
    memory_bytes = physical_memory_bytes()
    # Where the device is the CPU, device and host memory are the same; a copy is what a load is.
    bytes_per_s = _COPY_BYTES / copy_s
    return Hardware(
        name="here",
        flops_per_s=2 * _SIDE**3 / _best(_multiplying()),
        hbm_bytes=memory_bytes,
        hbm_bytes_per_s=2 * bytes_per_s,  # a copy reads and writes
        host_bytes_per_s=bytes_per_s,
        disk_bytes_per_s=_READ_BYTES * _NUM_READS / _reading_s(folder),
        network_bytes_per_s=0,
        machine_host_bytes=memory_bytes,
        machine_disk_bytes=shutil.disk_usage(folder).free,
        source=f"measured now: numpy in float32, one thread's memcpy, reads of 1 MiB in {folder}",
    )


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def _multiplying() -> Callable[[], object]:
    left = np.ones((_SIDE, _SIDE), np.float32)
    into = np.empty_like(left)
    return lambda: np.matmul(left, left, out=into)


def _copying() -> Callable[[], object]:
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    return lambda: np.copyto(target, source)


def _reading_s(folder: Path) -> float:
    """Seconds of reading a scratch file once, past the page cache where the system can."""
    page = memoryview(arena(_READ_BYTES))
    with tempfile.NamedTemporaryFile(dir=folder, prefix="foreword-plan-") as file:
        for number in range(_NUM_READS):
            file.write(np.random.default_rng(number).bytes(_READ_BYTES))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system without direct reads
            descriptor = os.open(file.name, os.O_RDONLY)
        try:
            begin_s = time.perf_counter()
            for number in range(_NUM_READS):
                os.preadv(descriptor, [page], number * _READ_BYTES)
            return time.perf_counter() - begin_s
        finally:
            os.close(descriptor)


def _existing(folder: Path) -> Path:
    """It, or the nearest of its parents that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())
