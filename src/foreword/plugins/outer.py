"""OuterCache: another engine's blocks in our stores, by that engine's own keys.

Each call to a place is made on a thread of the place's own. Whoever asks waits until a deadline at
most, then goes on as if nothing had been there; what comes later touches nothing of theirs.
"""

import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from foreword.core.block import BlockHash
from foreword.core.identity import Identity
from foreword.core.stats import TierStats
from foreword.plugins.load import Load
from foreword.plugins.place import Place
from foreword.store.codec import UNPLACED, RecordKey, record_bytes
from foreword.store.disk import DiskStore
from foreword.store.files import kv_folder
from foreword.store.host import HostStore
from foreword.store.patience import LOAD_BYTES_PER_S, LOAD_S, PROBE_S
from foreword.store.sharers import leave_identity
from foreword.store.store import KVStore
from foreword.store.workers import Workers

log = logging.getLogger("foreword.plugins")


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each place may take; 0: none there."""

    host_bytes: int = 0
    disk_bytes: int = 10 << 30
    disk_folder: Path = field(default_factory=kv_folder)

    def __post_init__(self) -> None:
        """Raises ValueError for what is no number of bytes, so that a mistake shows at start."""
        for name in ("host_bytes", "disk_bytes"):
            num_bytes = getattr(self, name)
            if type(num_bytes) is not int or num_bytes < 0:
                raise ValueError(f"{name} is to be a number of bytes, not {num_bytes!r}")


@dataclass(frozen=True, slots=True)
class Block:
    """A full block, as an engine knows it. Equal keys mean equal tokens from the start on."""

    engine_key: bytes
    parent: bytes | None = None  # engine key of the block before it; None: it is the first
    position: int = UNPLACED  # blocks before it; UNPLACED: not known, nor the parent: only to load


class OuterCache:
    """Verified, within its budgets, leaf first. A place that hangs or fails is a miss, never an
    error. For any thread."""

    def __init__(
        self, identify: Callable[[], Identity], payload_bytes: int, budgets: Budgets
    ) -> None:
        """`identify` runs on a thread, for digests take long: until it has returned all is a miss
        and nothing is stored; if it raises, for good. Blocks are `payload_bytes` long."""
        self._payload_bytes = payload_bytes
        self._places: tuple[Place, ...] = ()
        self._identity: Identity | None = None
        self.renewal = ""  # which of them is the latest
        self._root: BlockHash | None = None
        self._opened = threading.Event()
        self._closed = False
        self._gate = threading.Lock()  # nothing is put for the copier after its end, or a renewal
        self._copier = Workers("foreword-copy", 1)
        self._opener = Workers("foreword-open", 1)
        self._opener.put(partial(self._open, identify, budgets))

    @property
    def stats(self) -> tuple[TierStats, ...]:
        """Counts by place, the fastest first; empty until it is open."""
        return tuple(place.stats for place in self._places)

    def wait_open(self, timeout_s: float) -> bool:
        """Whether it was opened, or will not be, within so many seconds."""
        return self._opened.wait(timeout_s)

    def num_ready(self, blocks: Sequence[Block]) -> int:
        """How many, from the first on, this process has stored, or found at its start. From
        memory."""
        hashes = [self._hash(block.engine_key) for block in blocks] if self._places else []
        at = -1
        start = 0
        while at < start < len(hashes):
            at = start
            for place in self._places:
                start += place.num_ready(hashes[start:])
        return start

    def num_everywhere(self, blocks: Sequence[Block]) -> int:
        """How many, from the first on, each place has, or will have. From memory."""
        hashes = [self._hash(block.engine_key) for block in blocks] if self._places else []
        kept = (all(place.keeps(h) for place in self._places) for h in hashes)
        return next((at for at, ok in enumerate(kept) if not ok), len(hashes))

    def probe(self, blocks: Sequence[Block]) -> "Future[list[bool]]":
        """Which there are, with those that others have stored. The answer may never come: wait
        PROBE_S for it."""
        answer: Future[list[bool]] = Future()
        hashes = [self._hash(block.engine_key) for block in blocks] if self._places else []
        own = [any(place.holds(h) for place in self._places) for h in hashes] or [False] * len(
            blocks
        )
        place = next((p for p in self._places if p.store.shared and p.reads), None)
        if place is None or all(own):
            answer.set_result(own)
        else:
            place.ask(
                hashes,
                lambda there: answer.set_result(list(map(operator.or_, own, there))),
            )
        return answer

    def num_found(self, blocks: Sequence[Block]) -> int:
        """How many of those, from the first on, waited for; those that this process knows where no
        answer comes."""
        try:
            there = self.probe(blocks).result(PROBE_S)
        except TimeoutError:
            return self.num_ready(blocks)
        return there.index(False) if False in there else len(there)

    def begin_load(
        self,
        blocks: Sequence[Block],
        targets: Sequence[memoryview],
        done: Callable[[], None] = lambda: None,
    ) -> Load:
        """Bring blocks into buffers that are `payload_bytes` long. Whoever began it gives it up
        (`give_up`) when its deadline has passed."""
        places = self._places
        size = self._payload_bytes * (len(blocks) + sum(place.num_awaited for place in places))
        deadline_s = time.monotonic() + LOAD_S + size / LOAD_BYTES_PER_S
        keys = [self._key(block) for block in blocks] if places else []
        load = Load(keys, targets, deadline_s, done)
        step = places[0].cell_blocks if places else 1
        for start in range(0, len(keys), step):
            self._go_on(load, 0, list(range(start, min(start + step, len(keys)))))
        if not keys:
            load.lost = ["missing"] * len(blocks)
            load.settle(0)
        return load

    def give_up(self, load: Load) -> None:
        """A load's deadline has passed. What has arrived counts; its places are left alone for a
        while."""
        if load.give_up():
            for place in self._places:
                place.give_up(load)

    def load(self, blocks: Sequence[Block], targets: Sequence[memoryview]) -> list[str | None]:
        """Bring blocks, until the deadline. By block None when it is there, verified; else why
        not: missing, damaged, late, failed."""
        load = self.begin_load(blocks, targets)
        if not load.wait():
            self.give_up(load)
        return load.lost

    def begin_store(
        self,
        blocks: Sequence[Block],
        sources: Sequence[memoryview],
        done: Callable[[list[bool]], None] = lambda taken: None,
        renewal: str | None = None,
    ) -> None:
        """Have blocks kept, parents first. `done` is called by another thread when the sources are
        free, with what was taken: the rest is dropped, for too much waits or a place fails. With
        `renewal`, nothing is taken if another one has come since."""
        with self._gate:
            if not self._closed and renewal in (None, self.renewal):
                # Not when they are copied: a renewal may have come by then.
                keys = [self._key(block) for block in blocks] if self._places else []
                self._copier.put(partial(self._copy, keys, sources, done))
                return
        done([False] * len(blocks))

    def store(
        self, blocks: Sequence[Block], sources: Sequence[memoryview], renewal: str | None = None
    ) -> list[bool]:
        """The same, waited for. They are written after it has returned."""
        answer: Future[list[bool]] = Future()
        self.begin_store(blocks, sources, answer.set_result, renewal)
        return answer.result()

    def touch(self, blocks: Sequence[Block]) -> None:
        """A request uses these, from the first of its prompt on."""
        if self._places:
            hashes = [self._hash(block.engine_key) for block in blocks]
            for place in self._places:
                place.touch(hashes)

    def renew(self) -> None:
        """What was kept before is found no more by this process: the engine's keys may mean
        something else from now on."""
        with self._gate:
            self.renewal = token_hex(16)
            self._take_root()

    def clear(self) -> None:
        """Forget all that this process keeps, and what waits to be; others' records stay. Not
        waited for."""
        for place in self._places:
            self._copier.put(partial(place.writer.put, place.clear))  # after what is being copied

    def flush(self, timeout_s: float) -> bool:
        """Whether all that was to be stored before is written or dropped within that time."""
        end_s = time.monotonic() + timeout_s
        copied = threading.Event()
        self._copier.put(copied.set)
        marks = [copied]
        if copied.wait(timeout_s):
            for place in self._places:
                marks.append(threading.Event())
                place.writer.put(marks[-1].set)
        return all(mark.wait(max(0.0, end_s - time.monotonic())) for mark in marks)

    def close(self, timeout_s: float) -> None:
        """Write what waits and close the stores, in that time; what hangs is left to the end of
        the process."""
        with self._gate:
            self._closed = True
        end_s = time.monotonic() + timeout_s
        for workers in (self._opener, self._copier):
            workers.close(max(0.0, end_s - time.monotonic()))
        places, self._places = self._places, ()
        for place in places:
            if place.readers.close(max(0.0, end_s - time.monotonic())):
                place.writer.put(place.close)
            place.writer.close(max(0.0, end_s - time.monotonic()))

    def _open(self, identify: Callable[[], Identity], budgets: Budgets) -> None:
        try:
            self._identity = identify()
            with self._gate:
                self._take_root()
            if self._closed or self._root is None:
                return
            stores = self._stores(budgets)
            self._places = tuple(Place(store, self._payload_bytes) for store in stores)
            for place in self._places:
                what = (place.store.name, place.tier.num_blocks, place.store.capacity)
                log.info("%s: %d blocks found, room for %d", *what)
            if budgets.disk_bytes:
                log.info("%s, identity %s", budgets.disk_folder, self._root.hex()[:16])
                leave_identity(budgets.disk_folder, self._identity)
        except Exception as error:  # noqa: BLE001 - the engine goes on without us
            log.warning("blocks are not kept: %s", error)
        finally:
            self._opened.set()

    def _take_root(self) -> None:
        """Under the gate: a renewal may come before it is open."""
        if self._identity is not None:
            self._root = self._identity.root_hash(self.renewal)

    def _stores(self, budgets: Budgets) -> list[KVStore]:
        size = record_bytes(0, self._payload_bytes)
        stores: list[KVStore] = []
        if budgets.host_bytes:
            stores.append(HostStore(budgets.host_bytes, size))
        if budgets.disk_bytes:
            budgets.disk_folder.mkdir(parents=True, exist_ok=True)
            stores.append(DiskStore(budgets.disk_folder, budgets.disk_bytes, size))
        for store in stores:
            if not store.capacity:
                log.warning("there is no room on %s: a block takes %d bytes", store.name, size)
        return stores

    def _hash(self, engine_key: bytes) -> BlockHash:
        assert self._root is not None
        return _hash_below(self._root, engine_key)

    def _key(self, block: Block) -> RecordKey:
        root = self._root  # once: another thread may renew it
        assert root is not None
        parent = root if block.parent is None else _hash_below(root, block.parent)
        return RecordKey(root, parent, _hash_below(root, block.engine_key), block.position, b"")

    def _go_on(self, load: Load, number: int, blocks: list[int]) -> None:
        """Ask the places from `number` on for blocks of a load; nothing more is tried for those
        that none has."""
        while blocks and number < len(self._places) and not load.given_up:
            place = self._places[number]
            number += 1
            if not place.reads:
                load.lose(blocks, "failed")
                continue
            wanted = [
                at for at in blocks if place.store.shared or place.keeps(load.keys[at].block_hash)
            ]
            if wanted:
                self._go_on(load, number, sorted(set(blocks).difference(wanted)))
                place.read(load, wanted, partial(self._went_on, load, number, len(wanted)))
                return
        if blocks:
            load.lose(blocks, "missing")
            load.settle(len(blocks))

    def _went_on(self, load: Load, number: int, num_asked: int, missing: list[int]) -> None:
        load.settle(num_asked - len(missing))
        if missing:
            self._go_on(load, number, missing)

    def _copy(
        self,
        keys: Sequence[RecordKey],
        sources: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> None:
        """On the copying thread: each place gets what it lacks. No keys: nothing is taken."""
        taken = [False] * len(sources)
        try:
            for place in self._places:
                lacking = []
                for at, key in enumerate(keys):
                    if place.keeps(key.block_hash):
                        taken[at] = True
                    else:
                        lacking.append(at)
                if lacking and place.writes:
                    num_staged = place.stage(
                        [keys[at] for at in lacking], [sources[at] for at in lacking]
                    )
                    for at in lacking[:num_staged]:
                        taken[at] = True
        except Exception as error:  # noqa: BLE001 - not kept; the engine goes on
            log.warning("blocks are not kept: %s", error)
        done(taken)


def _hash_below(root: BlockHash, engine_key: bytes) -> BlockHash:
    """Engines' keys know nothing of weights or dtype; ours do."""
    return BlockHash(sha256(root + engine_key).digest())
