"""`foreword bench restore`: how fast blocks come back from host memory and from disk, checked.

Beside each, in interleaved pairs with a pause before every run, what the machine can do at most:
for host memory a memcpy of the same bytes, on one thread; for the disk fio, reading the store's own
file at random, past the page cache, as much in one read and as many reads at once.
"""

import argparse
import ctypes
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreword.cli.failure import Failure
from foreword.cli.measure import mean_interval
from foreword.cli.scratch import BLOCK_SIZE, Blocks
from foreword.cli.settings import count, size
from foreword.cli.verify_store import scratch_folder
from foreword.core.block import BlockHash
from foreword.engine.kv import LayerShape, PagedKV
from foreword.store.codec import check, kv_offset
from foreword.store.disk import DiskStore
from foreword.store.files import cache_folder
from foreword.store.host import HostStore
from foreword.store.pages import arena, whole_pages
from foreword.store.store import KVStore, Loan

NO_FIO = "fio is not installed (apt install fio): beside bare reads of the same kind instead"
BUFFERS = 8  # of each thread, in turns
LAYERS = 30  # of the default model: a block goes to as many places for keys and for values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="on the disk to measure (FOREWORD_CACHE_DIR)")
    parser.add_argument("--bytes", type=size, default="512MiB", help="of blocks, each read once")
    parser.add_argument("--kv-bytes", type=size, default="360KiB", help="of one block")
    parser.add_argument("--pairs", type=count, default=15)
    parser.add_argument("--threads", type=count, default=2, help="that verify in host memory")
    parser.add_argument("--depth", type=count, default=4, help="reads of the disk at once")
    parser.add_argument("--run", type=count, default=4, help="neighbours in one read")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each run")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for one record, from the start of a page on."""

    view: memoryview
    address: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one run, in GB (10^9 bytes)."""

    gb_per_s: float
    gb_per_cpu_s: float


Read = Callable[[range, Sequence[Buffer]], None]  # of neighbouring blocks by their numbers


def run(args: argparse.Namespace) -> dict[str, Any]:
    """`tiers`: for each the medians of all runs and `share`, ours over the limit, of wall time and
    of CPU time, with 95 % intervals."""
    num_blocks = max(args.depth * args.run, args.bytes // args.kv_bytes)
    blocks = Blocks(BlockHash(random.randbytes(32)), num_blocks, args.kv_bytes)
    tiers = [host_tier(blocks, threads, args) for threads in sorted({1, args.threads})]
    with scratch_folder(args.folder or cache_folder()) as folder:
        tiers.append(disk_tier(blocks, folder, args))
    return {"record_bytes": blocks.record_bytes, "pairs": args.pairs, "tiers": tiers}


def host_tier(blocks: Blocks, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """As the engine does it: `threads` verify records where they lie, one more copies their KV into
    the pool and confirms. The limit is what that one could do at most: memcpy of the same KV to the
    same memory in the same order, each block to one place instead of to one in each layer."""
    num_blocks, kv_bytes = len(blocks.keys), blocks.kv_bytes
    kv, kv_start = pool_for(num_blocks, kv_bytes), kv_offset(BLOCK_SIZE)
    with closing(HostStore(2 * num_blocks * blocks.record_bytes, blocks.record_bytes)) as store:
        store.put(blocks.keys, blocks.records)

        def verified(numbers: range) -> list[Loan]:
            loans = [loan for loan in store.lend([blocks.hashes[i] for i in numbers]) if loan]
            for number, loan in zip(numbers, loans, strict=True):
                check(loan.record, blocks.keys[number])
            return loans

        def restore(order: Sequence[range]) -> None:
            with ThreadPoolExecutor(threads) as pool:
                for turn, loans in enumerate(pool.map(verified, order)):
                    places = range(turn * args.run, (turn + 1) * args.run)
                    kv.write_blocks(places, [loan.record[kv_start:] for loan in loans])
                    assert all(loan.kept() for loan in loans)

        records = [loan.record for loan in verified(range(num_blocks))]
        sources = [np.frombuffer(record, np.uint8).ctypes.data + kv_start for record in records]
        start = kv.keys[0].data_ptr()

        def memcpy(order: Sequence[range]) -> None:
            numbers = (number for run in order for number in run)
            for at, number in enumerate(numbers):
                ctypes.memmove(start + at * kv_bytes, sources[number], kv_bytes)

        def speed(work: Callable[[Sequence[range]], None]) -> Speed:
            order = shuffled(num_blocks, args.run)
            return clocked(lambda: work(order), len(order) * args.run * kv_bytes)

        pairs = interleaved(lambda: speed(restore), lambda: speed(memcpy), args)
    return {"tier": "host", "threads": threads, "limit": "memcpy", **compared(pairs)}


def pool_for(num_blocks: int, kv_bytes: int) -> PagedKV:
    """A device pool in which a block has as many bytes."""
    unit = LAYERS * 2 * BLOCK_SIZE * torch.bfloat16.itemsize
    size, rest = divmod(kv_bytes, unit)
    if rest:
        raise Failure(f"--kv-bytes {kv_bytes} is not a multiple of {unit:,}", "usage")
    layers = [LayerShape(1, size, size, None)] * LAYERS
    return PagedKV(layers, num_blocks, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))


def disk_tier(blocks: Blocks, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    slot_bytes = len(buffers(1, blocks.record_bytes)[0].view)
    budget_bytes = (len(blocks.keys) + 1) * slot_bytes * 21 // 20
    with closing(DiskStore(folder, budget_bytes, blocks.record_bytes)) as store:
        if not all(store.put(blocks.keys, blocks.records)):
            raise Failure(
                f"there is no room for {args.bytes} bytes below {folder.parent}", "failed"
            )
        (file,) = folder.glob("*.slots")
        restore = restorer(store, blocks)
        with_fio = shutil.which("fio") is not None
        if not with_fio:
            print(NO_FIO, file=sys.stderr)
        fd = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))

        def read(numbers: range, targets: Sequence[Buffer]) -> None:
            os.preadv(fd, [target.view for target in targets], numbers.start * slot_bytes)

        try:
            pairs = interleaved(
                lambda: timed(restore, blocks, args.run, args.depth),
                (lambda: fio(file, len(blocks.keys) // args.run, args.run * slot_bytes, args.depth))
                if with_fio
                else (lambda: timed(read, blocks, args.run, args.depth)),
                args,
            )
        finally:
            os.close(fd)
    limit = "fio" if with_fio else "bare reads"
    return {"tier": "disk", "threads": args.depth, "limit": limit, **compared(pairs)}


def restorer(store: KVStore, blocks: Blocks) -> Read:
    """As a restore does it: checked right after, while it is in the processor's cache."""

    def restore(numbers: range, targets: Sequence[Buffer]) -> None:
        hashes = [blocks.hashes[number] for number in numbers]
        lengths = store.get(hashes, [target.view for target in targets])
        for number, target, length in zip(numbers, targets, lengths, strict=True):
            check(target.view[:length], blocks.keys[number])

    return restore


def buffers(number: int, record_bytes: int) -> list[Buffer]:
    """As a pool of staging buffers: in huge pages where the system has them, all touched."""
    slot_bytes = whole_pages(record_bytes)
    memory = arena(number * slot_bytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(start, 1, number * slot_bytes)
    view = memoryview(memory)
    return [
        Buffer(view[at : at + slot_bytes], start + at)
        for at in range(0, number * slot_bytes, slot_bytes)
    ]


def timed(read: Read, blocks: Blocks, run: int, threads: int) -> Speed:
    """Read each block once, `run` neighbours in one call, in random order, from `threads`."""
    order = shuffled(len(blocks.keys), run)
    lanes = [buffers(max(run, BUFFERS), blocks.record_bytes) for _ in range(threads)]

    def lane(first: int) -> None:
        for turn, numbers in enumerate(order[first::threads]):
            at = turn * run % (len(lanes[first]) - run + 1)
            read(numbers, lanes[first][at : at + run])

    with ThreadPoolExecutor(threads) as pool:
        return clocked(
            lambda: list(pool.map(lane, range(threads))), len(order) * run * blocks.record_bytes
        )


def shuffled(num_blocks: int, run: int) -> list[range]:
    """Blocks by their numbers, `run` neighbours together, each run once."""
    runs = [range(start, start + run) for start in range(0, num_blocks - run + 1, run)]
    return random.sample(runs, len(runs))


def clocked(work: Callable[[], object], num_bytes: int) -> Speed:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    return Speed(num_bytes / 1e9 / seconds, num_bytes / 1e9 / cpu_s)


def fio(file: Path, num_reads: int, read_bytes: int, depth: int) -> Speed:
    """As many reads of a file's first bytes, at random, by `depth` processes with one at once."""
    options = {
        "name": "restore",
        "filename": file,
        "readonly": None,
        "rw": "randread",
        "direct": 1,
        "ioengine": "psync",
        "bs": read_bytes,
        "size": num_reads * read_bytes,
        "numjobs": depth,
        "io_size": num_reads // depth * read_bytes,
        "randrepeat": 0,
        "output-format": "json",
    }
    words = [
        f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()
    ]
    done = subprocess.run(["fio", *words], capture_output=True, check=True, text=True)
    jobs = json.loads(done.stdout)["jobs"]
    gigabytes = sum(job["read"]["io_bytes"] for job in jobs) / 1e9
    seconds = max(job["read"]["runtime"] for job in jobs) / 1e3
    cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    return Speed(gigabytes / seconds, gigabytes / cpu_s)


def interleaved(
    ours: Callable[[], Speed], limit: Callable[[], Speed], args: argparse.Namespace
) -> list[tuple[Speed, Speed]]:
    """Pairs of runs, each first in every second one; the first pair is not counted."""
    pairs = []
    for number in range(args.pairs + 1):
        pair = {}
        for one in (ours, limit) if number % 2 else (limit, ours):
            time.sleep(args.pause)
            pair[one] = one()
        pairs.append((pair[ours], pair[limit]))
    return pairs[1:]


def compared(pairs: Sequence[tuple[Speed, Speed]]) -> dict[str, Any]:
    """Medians, and geometric means of the ratios with the intervals of these."""
    figures: dict[str, Any] = {}
    for share, unit in (("share", "gb_per_s"), ("share_per_cpu_s", "gb_per_cpu_s")):
        speeds = [(getattr(ours, unit), getattr(limit, unit)) for ours, limit in pairs]
        logs = [math.log(ours / limit) for ours, limit in speeds]
        figures[unit] = statistics.median(ours for ours, _ in speeds)
        figures[f"limit_{unit}"] = statistics.median(limit for _, limit in speeds)
        figures[share] = math.exp(statistics.fmean(logs))
        figures[f"{share}_interval"] = [math.exp(bound) for bound in mean_interval(logs)]
    return figures
