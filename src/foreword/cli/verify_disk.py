"""Processes that write one disk folder are killed at random moments, round after round.

Writers put, read and delete records as a cache would (a child only where its parent is, leaves
first) and log what they did. All the time the folder must not take more than its budget and one
record per writer. After each round other stores are opened on it: what was stored and not deleted
is found, all of it; no wrong byte passes the record's check; and what a store knows is what its
table says, read here by other code.
"""

import mmap
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from foreword.core.block import BlockHash, Chain, token_key
from foreword.store.codec import BadRecord, RecordKey, check, kv_offset, record_bytes, seal
from foreword.store.disk import DiskStore

BLOCK_SIZE = 4
ROOT = BlockHash(b"\x11" * 32)
_WRITE = "from foreword.cli.verify_disk import write; write()"
_CHAINS, _LONGEST, _BATCH = 400, 12, 8
_KV_START = kv_offset(BLOCK_SIZE)

Place = tuple[int, int]  # chain and position of a block


@dataclass
class KillReport:
    """What all rounds came to; `faults` says what must not be."""

    rounds: int = 0
    kills: int = 0
    stored: int = 0  # what writers said that they stored, or found when they started
    expected: int = 0  # of that, not deleted when a round ended; summed over rounds
    found: int = 0  # read back after a round and right; may be more: stored, and killed before
    read: int = 0  # right while others wrote
    missed: int = 0  # known beforehand, and overwritten while it was read
    parts_dropped: int = 0
    samples: int = 0  # of what the folder takes
    largest_bytes: int = 0
    faults: list[str] = field(default_factory=list)


class QuickStore(DiskStore):
    """Sees others come and go within a round."""

    recount_s = 0.05
    grace_s = 0.2


@dataclass(frozen=True)
class Load:
    """What the writers work on. `kv_bytes` is that of one record."""

    folder: Path
    budget_bytes: int
    kv_bytes: int

    def open(self) -> DiskStore:
        return QuickStore(self.folder, self.budget_bytes, self.record_bytes)

    @property
    def record_bytes(self) -> int:
        return record_bytes(BLOCK_SIZE, self.kv_bytes)


def _keys(chain: int) -> list[RecordKey]:
    tokens = [chain, *range(1, _LONGEST * BLOCK_SIZE)]
    hashes = Chain(ROOT, BLOCK_SIZE, tokens).hashes
    parts = [
        token_key(tokens[start : start + BLOCK_SIZE]) for start in range(0, len(tokens), BLOCK_SIZE)
    ]
    return [
        RecordKey(ROOT, parent, block_hash, position, part)
        for position, (parent, block_hash, part) in enumerate(
            zip([ROOT, *hashes], hashes, parts, strict=False)
        )
    ]


KEYS = {(chain, key.position): key for chain in range(_CHAINS) for key in _keys(chain)}
PLACES = {key.block_hash: place for place, key in KEYS.items()}


def buffers(store: DiskStore, count: int) -> list[memoryview]:
    size = store.slot_bytes
    arena = memoryview(mmap.mmap(-1, count * size))
    return [arena[index * size : (index + 1) * size] for index in range(count)]


def fill(record: memoryview, key: RecordKey) -> None:
    """KV that its key alone decides, sealed."""
    record[_KV_START:] = _kv(len(record), key)
    seal(record, key)


def verdict(record: memoryview, key: RecordKey) -> str:
    """right, wrong or torn: what came of reading `key`."""
    try:
        check(record, key)
    except BadRecord:
        return "torn"
    return "right" if record[_KV_START:] == _kv(len(record), key) else "wrong"


def _kv(num_bytes: int, key: RecordKey) -> bytes:
    return (key.block_hash * (num_bytes // 32 + 1))[: num_bytes - _KV_START]


class Writer:
    """One process's cache: how much of each chain it holds. It logs what part it writes, `* part`;
    each block that it found there or stored, afterwards, `+ chain position`; each that it deletes,
    before, `- chain position`; of reads how many were known and right, `= known right`; and what
    must not be, `! chain position`."""

    def __init__(self, load: Load, seed: int) -> None:
        self.random = random.Random(seed)
        self.load = load
        self.store = load.open()
        self.arena = buffers(self.store, _BATCH)
        self.lengths = [0] * _CHAINS
        held: set[Place] = {PLACES[entry.block_hash] for entry in self.store.entries()}
        say("*", self.store.part)
        for chain, position in sorted(held):
            say("+", chain, position)
            if position != self.lengths[chain]:
                say("!", chain, position)  # It came back without its parent.
            self.lengths[chain] += 1

    def step(self) -> None:
        over = sum(self.lengths) + _BATCH - self.store.capacity
        for _ in range(min(over, 4 * _BATCH)):
            self._delete_leaf(self.random.randrange(_CHAINS))
        chain = self.random.randrange(_CHAINS)
        draw = self.random.random()
        if draw < 0.6:
            self._put(chain)
        elif draw < 0.7:
            self._delete_leaf(chain)
        else:
            self._get(chain)

    def _put(self, chain: int) -> None:
        start = self.lengths[chain]
        places = [(chain, at) for at in range(start, min(_LONGEST, start + _BATCH))]
        keys = [KEYS[place] for place in places]
        records = [self.arena[i][: self.load.record_bytes] for i in range(len(places))]
        for key, record in zip(keys, records, strict=True):
            fill(record, key)
        for place, stored in zip(places, self.store.put(keys, records), strict=True):
            if stored:
                say("+", *place)
                self.lengths[chain] += 1

    def _delete_leaf(self, chain: int) -> None:
        if self.lengths[chain]:
            self.lengths[chain] -= 1
            say("-", chain, self.lengths[chain])
            self.store.delete([KEYS[chain, self.lengths[chain]].block_hash])

    def _get(self, chain: int) -> None:
        keys = [KEYS[chain, at] for at in range(_BATCH)]
        hashes = [key.block_hash for key in keys]
        known = self.store.contains(hashes).count(True)
        lengths = self.store.get(hashes, self.arena)
        found = [verdict(self.arena[i][:n], keys[i]) for i, n in enumerate(lengths)]
        own = found[: self.lengths[chain]]
        if "wrong" in found or own.count("right") != len(own):
            say("!", chain, self.lengths[chain])
        say("=", known, found.count("right"))


def say(what: str, *words: object) -> None:
    sys.stdout.write(" ".join([what, *map(str, words)]) + "\n")
    sys.stdout.flush()


def write() -> None:
    """A writer process, until it is killed."""
    folder, budget, kv, seed = sys.argv[1:]
    writer = Writer(Load(Path(folder), int(budget), int(kv)), int(seed))
    while True:
        writer.step()


class Rounds:
    """Runs the rounds. `held` is by part: what its writers logged and did not delete."""

    def __init__(self, load: Load, seed: int, logs: Path) -> None:
        self.load, self.logs = load, logs
        self.random = random.Random(seed)
        self.report = KillReport()
        self.held: dict[str, set[Place]] = {}

    def run(self, num_rounds: int) -> KillReport:
        for _ in range(num_rounds):
            writers = [self._start(), self._start()]
            self._watch(writers, self.random.uniform(0.0, 0.5), until_open=True)
            self._kill(writers.pop(self.random.randrange(2)))
            if self.random.random() < 0.5:
                writers.append(self._start())
            self._watch(writers, self.random.uniform(0.0, 0.5), until_open=False)
            for writer in writers:
                self._kill(writer)
            self._audit()
            self.report.rounds += 1
        return self.report

    def _start(self) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.logs / f"{self.report.kills}-{self.random.getrandbits(60)}.log"
        words = (self.load.folder, self.load.budget_bytes, self.load.kv_bytes)
        command = [sys.executable, "-c", _WRITE, *map(str, words), str(self.random.getrandbits(60))]
        with log.open("wb") as output:
            return subprocess.Popen(command, stdout=output), log

    def _watch(
        self, writers: list[tuple[subprocess.Popen[bytes], Path]], seconds: float, until_open: bool
    ) -> None:
        """Measure the folder for so long, after the writers have opened their stores."""
        deadline = time.monotonic() + 60.0
        while until_open and time.monotonic() < deadline:
            self._sample(len(writers))
            until_open = not all(log.stat().st_size for _, log in writers)
            time.sleep(0.002)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._sample(len(writers))
            time.sleep(0.002)

    def _sample(self, num_writers: int) -> None:
        taken = taken_bytes(self.load.folder)
        self.report.samples += 1
        self.report.largest_bytes = max(self.report.largest_bytes, taken)
        if taken > self.load.budget_bytes + num_writers * self.load.record_bytes:
            self.report.faults.append(f"{taken} bytes with {num_writers} writers")

    def _kill(self, writer: tuple[subprocess.Popen[bytes], Path]) -> None:
        process, log = writer
        if process.poll() is not None:
            self.report.faults.append(f"a writer ended by itself: {process.returncode}")
        process.kill()
        process.wait()
        self.report.kills += 1
        held: set[Place] = set()
        for line in log.read_text().split("\n")[:-1]:
            what, *words = line.split()
            if what == "*":
                held = self.held.setdefault(words[0], set())
            elif what == "+":
                held.add((int(words[0]), int(words[1])))
                self.report.stored += 1
            elif what == "-":
                held.discard((int(words[0]), int(words[1])))
            elif what == "=":
                self.report.read += int(words[1])
                self.report.missed += int(words[0]) - int(words[1])
            else:
                self.report.faults.append(f"a writer found {line}")
        log.unlink()

    def _audit(self) -> None:
        self._sample(0)
        stores = [self.load.open() for _ in range(len(list(self.load.folder.glob("*.table"))))]
        for part in [name for name in self.held if not self._table(name).exists()]:
            self.report.parts_dropped += 1
            del self.held[part]
        for store in stores:
            self._audit_part(store)
        self._sample(len(stores))
        for store in stores:
            store.close()

    def _audit_part(self, store: DiskStore) -> None:
        expected = self.held.get(store.part, set())
        known = {PLACES[entry.block_hash] for entry in store.entries()}
        rows = rows_on_disk(self._table(store.part))
        if {PLACES[block_hash] for block_hash in rows} != known:
            self.report.faults.append(f"{store.part}: its table says otherwise")
        if expected - known:
            self.report.faults.append(f"{store.part}: lost {sorted(expected - known)}")
        if len(known - expected) > _BATCH:  # A put may have been killed before it was logged.
            self.report.faults.append(f"{store.part}: deleted blocks came back")
        buffer = buffers(store, 1)
        for place in sorted(known):
            key = KEYS[place]
            length = store.get([key.block_hash], buffer)[0]
            if verdict(buffer[0][:length], key) == "right":
                self.report.found += 1
            else:
                self.report.faults.append(f"{store.part}: {place} is damaged")
        self.report.expected += len(expected)
        self.held[store.part] = known

    def _table(self, part: str) -> Path:
        return self.load.folder / f"{part}.table"


def taken_bytes(folder: Path) -> int:
    """What the folder and its files take of the disk."""
    total = 0
    for path in (folder, *folder.iterdir()):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def rows_on_disk(table: Path) -> dict[BlockHash, int]:
    """A table's good rows, by the format's description alone: block hash to slot."""
    raw = table.read_bytes()[4096:]
    slots: dict[BlockHash, int] = {}
    for slot in range(len(raw) // 128):
        row = raw[slot * 128 : slot * 128 + 128]
        if xxh3_64_intdigest(row[:104], seed=slot) == int.from_bytes(row[104:112], "little"):
            slots.setdefault(BlockHash(row[:32]), slot)
    return slots


def run(load: Load, num_rounds: int, seed: int) -> KillReport:
    """Both folders of `load` and of the logs are the caller's to remove; that of the logs is made
    beside it."""
    logs = load.folder.with_name(load.folder.name + "-logs")
    logs.mkdir(exist_ok=True)
    return Rounds(load, seed, logs).run(num_rounds)
