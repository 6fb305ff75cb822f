"""What may befall the files of a disk store, for `foreword verify --store file:///PATH`."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

from foreword.cli.scratch import Blocks
from foreword.core.block import BlockHash
from foreword.store.codec import MAGIC
from foreword.store.disk import DiskStore
from foreword.store.pages import PAGE_BYTES

Damage = Callable[[Sequence[Path], Random], None]


def flip(files: Sequence[Path], draw: Random) -> None:
    """One bit in each 4 KiB, at a random place."""
    for path in files:
        content = bytearray(path.read_bytes())
        for start in range(0, len(content), PAGE_BYTES):
            at = draw.randrange(start, min(start + PAGE_BYTES, len(content)))
            content[at] ^= 1 << draw.randrange(8)
        _overwrite(path, content)


def flip_one(files: Sequence[Path], draw: Random) -> None:
    """One bit of each file."""
    for path in files:
        content = bytearray(path.read_bytes())
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            _overwrite(path, content)


def tear(files: Sequence[Path], draw: Random) -> None:
    """Half of all pages are zeros."""
    for path in files:
        content = bytearray(path.read_bytes())
        for start in range(0, len(content), PAGE_BYTES):
            if draw.random() < 0.5:
                end = min(start + PAGE_BYTES, len(content))
                content[start:end] = bytes(end - start)
        _overwrite(path, content)


def truncate(files: Sequence[Path], draw: Random) -> None:
    for path in files:
        os.truncate(path, draw.randint(0, path.stat().st_size))


def swap(files: Sequence[Path], draw: Random) -> None:
    """Records change places, whole."""
    for path in files:
        content = path.read_bytes()
        at_pages = range(0, len(content), PAGE_BYTES)
        starts = [at for at in at_pages if content.startswith(MAGIC, at)]
        records = [content[start:end] for start, end in pairwise([*starts, len(content)])]
        draw.shuffle(records)
        first = starts[0] if starts else len(content)
        _overwrite(path, bytearray(content[:first] + b"".join(records)))


def delete(files: Sequence[Path], draw: Random) -> None:
    """A random half of the files, one at least."""
    for path in draw.sample(list(files), max(1, len(files) // 2)):
        path.unlink()


def forbid(files: Sequence[Path], _draw: Random) -> None:
    """No permission for anybody (which does not hold up root)."""
    for path in files:
        path.chmod(0)


DAMAGES: dict[str, Damage] = {
    "a bit flipped in each file": flip_one,
    "a bit flipped in each page": flip,
    "pages zeroed": tear,
    "files truncated": truncate,
    "records swapped": swap,
    "files deleted": delete,
    "no permission": forbid,
}


def _overwrite(path: Path, content: bytearray) -> None:
    """In place: another file of the same name would not be the one that is open."""
    with path.open("r+b") as file:
        file.write(content)


def kill_while_putting(folder: Path, budget_bytes: int, blocks: Blocks, wait_s: float) -> None:
    """Let a process put and delete these blocks over and over, and kill it."""
    root, kv_bytes = blocks.keys[0].root, blocks.kv_bytes
    program = "from foreword.cli.verify_files import put_for_ever; put_for_ever()"
    words = [str(folder), str(budget_bytes), root.hex(), str(len(blocks.keys)), str(kv_bytes)]
    with subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            child.kill()


def put_for_ever() -> None:
    """The process that is killed."""
    folder, budget_bytes, root, num_blocks, kv_bytes = sys.argv[1:]
    blocks = Blocks(BlockHash(bytes.fromhex(root)), int(num_blocks), int(kv_bytes))
    store = DiskStore(Path(folder), int(budget_bytes), blocks.record_bytes)
    print("ready", flush=True)
    while True:
        for key, record in blocks.each():
            store.put([key], [record])
        store.delete(blocks.hashes)
