"""DiskStore: records in a folder, shared by the processes of one machine, within one budget.

docs/decisions/0008-disk-layout.md says why it is laid out this way; `table` and `part` say how.
A restart finds what was stored. Each writer has a part of its own and may use an equal share of
the budget; everybody reads all parts.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey
from foreword.store.folder import Folder, num_slots_within, part_bytes
from foreword.store.pages import whole_pages
from foreword.store.part import Part
from foreword.store.store import Entry
from foreword.store.table import hashes_of

_STEP_BYTES = 64 << 20  # A file grows by so much, or by a sixteenth of its share.
_MOVE_BYTES = 8 << 20  # What one call moves when the share has become smaller.
_LOCK_WAIT_S = 0.05
_OPENING_WAIT_S = 30.0
_PAUSE_S = (5.0, 60.0)  # After a write that failed; doubles from the first to the last.
_CLOCK_TICK_NS = 100_000_000  # A folder that changed so lately may change again unseen.


class DiskStore:
    """A KVStore for records that are all `record_bytes` long. `put` and `delete` are for one
    thread, everything else for any. What a crowd of writers must give back to a newcomer, it gives
    in small steps: each `put`, `delete` and `tend` goes on with it, and writes down what was used.
    """

    name = "disk"
    lend = None  # a record is in memory once it was read
    shared = True
    recount_s = 1.0  # How often to look who else is writing.
    grace_s = 60.0  # How long the part of a writer that ended is left to it.

    def __init__(self, folder: Path, budget_bytes: int, record_bytes: int) -> None:
        """The folder must exist. Raises OSError where it cannot be used."""
        self.record_bytes = record_bytes
        self.slot_bytes = whole_pages(record_bytes)
        self._folder = Folder(folder, budget_bytes, self.grace_s)
        self._others: tuple[tuple[str, Part], ...] = ()
        self._refreshing = threading.Lock()
        self._seen_ns = 0
        self._pause_s, self._paused_until = 0.0, 0.0
        try:
            with self._folder.locked(_OPENING_WAIT_S) as held:
                if not held:
                    raise TimeoutError(f"{folder} is locked by another process")
                self._own_name, self._own = self._folder.open_own(self.slot_bytes)
                self._recount()
        except OSError:
            self._folder.close()
            raise
        try:
            self._refresh()
            self._own.load(self._is_elsewhere)
        except OSError:
            self.close()
            raise

    @property
    def part(self) -> str:
        """Which part of the folder this store writes."""
        return self._own_name

    @property
    def capacity(self) -> int:
        """Records that this writer may hold: its share of the budget."""
        return self._capacity

    @property
    def has_others(self) -> bool:
        """Whether there are parts that others write or have left, with records as long as ours."""
        return bool(self._others)

    def entries(self) -> Iterator[Entry]:
        self._own.note_uses()
        rows = self._own.table.rows[self._own.by_last_use()]
        for block_hash, parent in zip(hashes_of(rows), hashes_of(rows, "parent"), strict=True):
            yield Entry(block_hash, parent)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        self._refresh()
        own = self._own.table.slot_of
        return [key in own or self._is_elsewhere(key) for key in hashes]

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        lengths = [0] * len(hashes)
        # Twice, since a record may be moved while it is read.
        for part in (self._own, self._own, *(part for _, part in self._others)):
            missing = [
                index
                for index, key in enumerate(hashes)
                if not lengths[index] and key in part.table.slot_of
            ]
            if not missing:
                continue
            wanted = [(hashes[index], buffers[index]) for index in missing]
            if part is self._own:
                found = part.get(wanted)
                self._own.used([key for (key, _), n in zip(wanted, found, strict=True) if n])
            else:
                found = [0] * len(wanted)
                with suppress(OSError):  # Not our place: a miss.
                    found = part.get(wanted)
            for index, length in zip(missing, found, strict=True):
                lengths[index] = length
        return lengths

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        assert all(len(record) == self.record_bytes for record in records)
        own = self._own.table.slot_of
        new = {key.block_hash: index for index, key in enumerate(keys) if key.block_hash not in own}
        picks = sorted(new.values())
        if self._own.is_removed:
            raise OSError(f"{self._own_name} was removed: restart to keep blocks on disk again")
        try:
            self._settle()
            if time.monotonic() >= self._paused_until:
                self._put([keys[index] for index in picks], [records[index] for index in picks])
        except OSError:
            self._pause()
        return [key.block_hash in own for key in keys]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        try:
            self._own.delete(hashes)
            self._settle()
        except OSError:
            self._pause()

    def tend(self) -> None:
        """Come nearer to the share, if it has become smaller; note what was used; see what others
        have written, so that who asks next need not wait for it."""
        try:
            self._settle()
            self._refresh()
        except OSError:
            self._pause()

    def close(self) -> None:
        """No other call may be in progress, and none but this may come."""
        self._own.release()
        for _, part in self._others:
            part.close()
        self._folder.close()

    def _put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> None:
        own = self._own
        num_records = max(0, min(len(keys), self._capacity - len(own.table.slot_of)))
        planned = own.plan(num_records, self._capacity)
        missing = num_records - sum(len(slots) for slots in planned)
        if missing > 0 and self._grow(missing):
            planned = own.plan(num_records, self._capacity)
        start = 0
        for slots in planned:
            end = start + len(slots)
            own.put(slots, keys[start:end], records[start:end])
            self._pause_s = 0.0
            start = end

    def _grow(self, num_slots: int) -> bool:
        """Whether the file has become longer: by a step, if there is room, or by what there is."""
        own = self._own
        with self._folder.locked(_LOCK_WAIT_S) as held:
            if not held:
                return False
            self._recount()
            longest = min(own.num_slots + max(num_slots, self._step), self._capacity)
            if longest <= own.num_slots:
                return False
            now = part_bytes(own.num_slots, self.slot_bytes)
            room = self._folder.make_room(part_bytes(longest, self.slot_bytes) - now)
            longest = min(longest, num_slots_within(now + room, self.slot_bytes))
            if longest <= own.num_slots:
                return False
            own.grow(longest)
            return True

    def _settle(self) -> None:
        self._own.note_uses()
        if time.monotonic() >= self._recount_at:
            with self._folder.locked(0) as held:
                if held:
                    self._recount()
        capacity = self._capacity
        if self._own.num_slots > capacity and time.monotonic() >= self._paused_until:
            self._own.shrink(capacity, max(1, _MOVE_BYTES // self.slot_bytes), self._step)

    def _recount(self) -> None:
        """Under the folder's lock."""
        share = self._folder.share_bytes(self._folder.num_writers())
        self._capacity = num_slots_within(share, self.slot_bytes)
        self._step = max(1, min(_STEP_BYTES, share // 16) // self.slot_bytes)
        self._recount_at = time.monotonic() + self.recount_s
        self.num_bytes = self._own.num_bytes

    def _pause(self) -> None:
        """Nothing is written for a while; reads go on."""
        shortest, longest = _PAUSE_S
        self._pause_s = min(longest, self._pause_s * 2 or shortest)
        self._paused_until = time.monotonic() + self._pause_s

    def _is_elsewhere(self, block_hash: BlockHash) -> bool:
        return any(block_hash in part.table.slot_of for _, part in self._others)

    def _refresh(self) -> None:
        """See what others have written since; one thread at a time, the others go on."""
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            changed_ns = os.stat(self._folder.path).st_mtime_ns
            if changed_ns != self._seen_ns:
                self._find_others()
                settled = time.time_ns() - changed_ns > _CLOCK_TICK_NS
                self._seen_ns = changed_ns if settled else 0
            for _, part in self._others:
                with suppress(OSError):  # Not our place: what it has may not be seen.
                    part.table.refresh()
        finally:
            self._refreshing.release()

    def _find_others(self) -> None:
        known = dict(self._others)
        found: list[tuple[str, Part]] = []
        for name in self._folder.names():
            if name == self._own_name:
                continue
            part = known.get(name)
            if part is None or part.inode != self._folder.inode(name):
                part = self._folder.open_other(name, self.slot_bytes)
            if part is not None:
                found.append((name, part))
        self._others = tuple(found)
