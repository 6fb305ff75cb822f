"""`foreword verify`: with --exact, does reuse change any answer (`foreword.cli.verify`); with
--store URL, what is read from a store whose place fails, and with --kills what is left on disk when
its writers are killed; with --sharing, who has stored in a folder.

Blocks of random bytes are put under a random root, on disk in a scratch folder below the one that
is named. A fault befalls them, and what is read then, through the check that every reader makes,
is compared with what was put.
"""

import argparse
import resource
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

from foreword.cli import verify_disk
from foreword.cli.failure import Failure
from foreword.cli.scratch import BLOCK_SIZE, Blocks, Tally
from foreword.cli.settings import count
from foreword.cli.verify_files import DAMAGES, Damage, kill_while_putting
from foreword.cli.verify_sharing import print_sharing, sharing
from foreword.core.block import BlockHash
from foreword.core.identity import Identity
from foreword.store.disk import DiskStore
from foreword.store.faults import Fault, FaultyStore
from foreword.store.files import cache_folder, kv_folder
from foreword.store.host import HostStore
from foreword.store.store import KVStore

NUM_BLOCKS = 16
KV_BYTES = 90_000  # no whole number of pages
BUDGET_BYTES = 3 << 20  # twice what they take
DEADLINE_S = 0.1  # after which a reader goes on without
NUM_KILLS = 3
KILL_LOAD = (30_000_000, 128 << 10)  # budget and KV of one record, in bytes
# Whose blocks are put; other fields' values are other identities.
OURS = Identity(
    weights="a",
    dtype="a",
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    attention="a",
    layout="a",
    parallel="a",
    lora="a",
    block_size=BLOCK_SIZE,
    tokenizer="a",
    chat_template="a",
    numerics="a",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exact", action="store_true", help="does reuse change a bit of an answer")
    parser.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="what is served when this store fails: host: or file:///FOLDER; may be given several"
        " times (host: and the cache folder, unless --exact or --kills is given)",
    )
    parser.add_argument(
        "--kills",
        type=count,
        metavar="ROUNDS",
        help="kill two writers of a disk folder at random moments, so often (3 seconds each)",
    )
    parser.add_argument(
        "--sharing",
        type=Path,
        nargs="?",
        const=kv_folder(),
        metavar="FOLDER",
        help="which engines have stored blocks there, and why they share or do not"
        " (the folder that `foreword cache path` prints)",
    )
    exact = parser.add_argument_group("for --exact")
    exact.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    exact.add_argument("--threads", type=count, default=2, help="torch threads")
    exact.add_argument("--prompts", type=count, default=50)
    exact.add_argument("--longest", type=count, default=900, help="tokens of the longest prompt")
    exact.add_argument("--new-tokens", type=count, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and faults")


def run(args: argparse.Namespace) -> Mapping[str, Any] | int:
    """With --store: `silent`, the number of wrong bytes that were accepted, and `results`; with
    --kills `kills`: what all rounds came to. `ok`: no wrong byte, no fault, and exact if that was
    asked for. The lines of a scorecard where JSON is not asked for."""
    if args.sharing:
        if args.store or args.exact or args.kills:
            raise Failure("--sharing goes alone: name the folder after it", "usage")
        who = sharing(args.sharing)
        return who if args.json else print_sharing(who)
    result: dict[str, Any] = {"ok": True}
    if args.exact:
        # Takes torch, which a store does not need.
        from foreword.cli.verify import run as verify_exact

        result = verify_exact(args)
    urls = args.store or ([] if args.exact or args.kills else ["host:", default_url()])
    if args.kills:
        kills = kill_writers(args.store or [default_url()], args.kills, args.seed)
        result = {**result, "ok": result["ok"] and not kills["faults"], "kills": kills}
    if not urls:
        return result
    results = [row for url in urls for row in try_store(url, args.seed)]
    silent = sum(row.pop("silent") for row in results)
    result = {**result, "ok": result["ok"] and silent == 0, "silent": silent, "results": results}
    if args.json:
        return result
    print_scorecard(results, silent)
    return {name: value for name, value in result.items() if name != "results"}


def default_url() -> str:
    return cache_folder().absolute().as_uri()


def kill_writers(urls: list[str], num_rounds: int, seed: int) -> dict[str, Any]:
    """On the first folder that is named."""
    parents = [_folder_of(url) for url in urls if url != "host:"]
    if not parents:
        raise Failure("--kills needs a folder: --store file:///PATH", "usage")
    with scratch_folder(parents[0]) as scratch:
        folder = scratch / "kv"
        folder.mkdir()
        report = verify_disk.run(verify_disk.Load(folder, *KILL_LOAD), num_rounds, seed)
    return asdict(report)


def _folder_of(url: str) -> Path:
    if not url.startswith("file:///"):
        raise Failure(f"--store {url} is no store: host: or file:///PATH", "usage")
    return Path(unquote(urlsplit(url).path))


def print_scorecard(results: list[dict[str, Any]], silent: int) -> None:
    print(f"{'store':6}{'what befalls it':44}{'worst':11}what came of the blocks")
    for row in results:
        counts = ", ".join(f"{number} {name}" for name, number in row["blocks"].items())
        print(f"{row['store']:6}{row['fault']:44}{row['outcome']:11}{counts}")
    wrong = f"{silent:,} wrong bytes were" if silent else "no wrong byte was"
    print(f"\n{wrong} served in {len(results)} kinds of faults\n")


def try_store(url: str, seed: int) -> list[dict[str, Any]]:
    """A row for each fault. Raises Failure for a URL that names no store."""
    if url == "host:":
        return [row("host", *tried) for tried in _faults(None, seed)]
    with scratch_folder(_folder_of(url)) as folder:
        tried_all = (*_faults(folder, seed), *_damages(folder, seed))
        return [row("disk", *tried) for tried in tried_all]


def row(store: str, fault: str, tally: Tally) -> dict[str, Any]:
    """`outcome` is the worst of any block; `blocks` how many had which."""
    return {
        "store": store,
        "fault": fault,
        "outcome": tally.worst,
        "blocks": dict(+tally.counts),
        "silent": tally.num_silent_bytes,
    }


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Gone afterwards. Raises Failure where there can be none."""
    try:
        if parent == cache_folder().absolute():
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verify-", dir=parent))
    except OSError as error:
        raise Failure(f"{parent} cannot be written: {error.strerror}", "failed") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _blocks(num_blocks: int = NUM_BLOCKS) -> Blocks:
    return Blocks(BlockHash(secrets.token_bytes(32)), num_blocks, KV_BYTES)


def _open(folder: Path | None, blocks: Blocks) -> KVStore:
    if folder is None:
        return HostStore(BUDGET_BYTES, blocks.record_bytes)
    return DiskStore(folder, BUDGET_BYTES, blocks.record_bytes)


def _faults(folder: Path | None, seed: int) -> Iterator[tuple[str, Tally]]:
    """In one store, faults that its surroundings inject."""
    with closing(_open(folder, _blocks(1))) as store:
        for fault in Fault:
            blocks = _blocks()
            yield fault.value, _injected(store, FaultyStore(store, fault, seed), fault, blocks)
            store.delete(blocks.hashes)
        yield "another identity", _other_identities(store)
        blocks, tally = _blocks(store.capacity + 3), Tally()
        tally.put(store, blocks)
        tally.read(store, blocks)
        yield "over its budget", tally


def _injected(store: KVStore, faulty: FaultyStore, fault: Fault, blocks: Blocks) -> Tally:
    tally = Tally()
    if fault in (Fault.HANG, Fault.ERROR):  # at each call, so nothing would be there to read
        tally.put(store, blocks)
    else:
        tally.put(faulty, blocks)
    if fault is Fault.HANG:
        # What a reader does who waits only so long; what comes late is wrong or right as well.
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(tally.read, faulty, blocks)
            in_time, _ = wait([late], DEADLINE_S)
            faulty.release()
        tally.counts["miss"] += not in_time
    else:
        # After a crash the store is another one: what is there is read as after a restart.
        tally.read(store if fault is Fault.CRASH else faulty, blocks)
    return tally


def _other_identities(store: KVStore) -> Tally:
    """Our blocks under one identity, read by the hashes of those that differ in one field each."""
    ours = Blocks(OURS.root_hash(secrets.token_hex()), NUM_BLOCKS, KV_BYTES)
    tally = Tally()
    tally.put(store, ours)
    for field in fields(OURS):
        value = getattr(OURS, field.name)
        changed: Any = value + 1 if isinstance(value, int) else value + "b"
        other = replace(OURS, **{field.name: changed})
        tally.read(store, Blocks(other.root_hash(), NUM_BLOCKS, KV_BYTES))
    store.delete(ours.hashes)
    return tally


def _damages(folder: Path, seed: int) -> Iterator[tuple[str, Tally]]:
    """What happens to files, each time to those of a new store, open or closed meanwhile."""
    for name, damage in DAMAGES.items():
        for state in ("open", "closed"):
            own = folder / f"{name} {state}"
            own.mkdir()
            draw = Random(f"{name} {state} {seed}")
            yield f"{name}, {state}", _damaged(own, damage, state == "open", draw)
    own = folder / "full"
    own.mkdir()
    yield "a disk that fills", _filled(own)
    own = folder / "killed"
    own.mkdir()
    blocks, tally, draw = _blocks(), Tally(), Random(seed)
    for _ in range(NUM_KILLS):
        kill_while_putting(own, BUDGET_BYTES, blocks, draw.uniform(0.0, 0.1))
        with closing(_open(own, blocks)) as store:
            tally.read(store, blocks)
    yield "a process killed while it puts", tally


def _damaged(folder: Path, damage: Damage, is_open: bool, draw: Random) -> Tally:
    blocks, tally = _blocks(), Tally()
    store = _open(folder, blocks)
    tally.put(store, blocks)
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    if is_open:
        damage(files, draw)
    else:
        store.close()
        damage(files, draw)
        try:
            store = _open(folder, blocks)
        except OSError:
            tally.counts["error"] += NUM_BLOCKS
            return tally
    with closing(store):
        tally.read(store, blocks)
        # What was lost is computed and put again.
        store.delete(blocks.hashes)
        again = Tally()
        again.put(store, blocks)
        again.read(store, blocks)
        tally.counts["SILENT"] += again.counts["SILENT"]
        tally.num_silent_bytes += again.num_silent_bytes
    return tally


def _filled(folder: Path) -> Tally:
    """The system refuses to make files longer than half of what the blocks take: to a program
    that is what a full disk is."""
    blocks, tally = _blocks(), Tally()
    with closing(_open(folder, blocks)) as store:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (NUM_BLOCKS * blocks.record_bytes // 2, before[1])
        )
        try:
            tally.put(store, blocks)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tally.read(store, blocks)
    return tally
