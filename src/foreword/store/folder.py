"""The folder of a disk store: whose parts are in it, what they take, and who may take more.

All that changes the files' number or makes one longer happens under the lock of `LOCK`, and only
while what all files take, or may come to take, fits the budget. So no crash, and no number of
writers, gets beyond it.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from foreword.store.pages import PAGE_BYTES, whole_pages
from foreword.store.part import (
    OwnPart,
    Part,
    lock_table,
    open_slots,
    read_slot_bytes,
    slots_path,
    table_path,
)
from foreword.store.table import ROW_BYTES, TABLE_HEADER_BYTES, new_header

_NAME = re.compile(r"(part-[0-9a-f]{8})\.(table|slots)")
# What a file system may add to a file's length for its map of where the file lies: ext4 takes 12
# bytes and XFS 16 per extent, which is 4,096 bytes long at least.
_MAP = 256
_POLL_S = 0.001


def num_slots_within(num_bytes: int, slot_bytes: int) -> int:
    """How many slots a part may have that takes no more than `num_bytes`."""
    pages = num_bytes * _MAP // (_MAP + 1) // PAGE_BYTES * PAGE_BYTES
    return max(0, (pages - TABLE_HEADER_BYTES - 3 * PAGE_BYTES) // (slot_bytes + ROW_BYTES))


def part_bytes(num_slots: int, slot_bytes: int) -> int:
    """The most that the two files of a part with so many slots take."""
    return _most(TABLE_HEADER_BYTES + num_slots * ROW_BYTES) + _most(num_slots * slot_bytes)


def _most(length: int) -> int:
    num_bytes = length + -(-length // _MAP)
    return whole_pages(num_bytes)


class Folder:
    """Raises OSError where the folder is missing or cannot be written."""

    def __init__(self, path: Path, budget_bytes: int, grace_s: float) -> None:
        """A part that nobody has written for less than `grace_s` seconds counts as written: its
        writer may begin anew."""
        self.path = path
        self.grace_s = grace_s
        self.budget_bytes = budget_bytes
        try:
            self._fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            reason = f"{path} cannot keep blocks: {os.strerror(error.errno or 0)}"
            raise OSError(error.errno, reason) from error
        self._thread_lock = threading.Lock()  # The file's lock does not part threads.

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @contextmanager
    def locked(self, wait_s: float) -> Iterator[bool]:
        """Whether nobody else changes the folder until the end of the block."""
        if not self._thread_lock.acquire(timeout=wait_s):
            yield False
            return
        try:
            held = self._lock(wait_s)
            try:
                yield held
            finally:
                if held:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _lock(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)

    def names(self) -> list[str]:
        """Parts that have a table or slots. What is no plain file, a link too, is not ours."""
        found: set[str] = set()
        odd: set[str] = set()
        with os.scandir(self.path) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    plain = entry.is_file(follow_symlinks=False)
                    (found if plain else odd).add(match[1])
        return sorted(found - odd)

    def num_bytes(self, without: Container[str] = ()) -> int:
        """What everything in the folder takes, or may take without asking again; of the parts those
        that are not `without`."""
        total = os.stat(self.path).st_blocks * 512
        for entry in os.scandir(self.path):
            match = _NAME.fullmatch(entry.name)
            if match and match[1] in without:
                continue
            with suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                total += max(_most(stat.st_size), stat.st_blocks * 512)
        return total

    def share_bytes(self, num_writers: int) -> int:
        """What one of so many writers may take, beside what is in no part: the sharers' files and
        whatever else lies there."""
        return (self.budget_bytes - self.num_bytes(without=self.names())) // num_writers

    def inode(self, name: str) -> int:
        """The number of a part's table; 0 where there is none."""
        try:
            return os.stat(table_path(self.path, name)).st_ino
        except FileNotFoundError:
            return 0

    def open_other(self, name: str, slot_bytes: int) -> Part | None:
        """A part to read, if it has slots of this size and is in this format."""
        try:
            table_fd = os.open(table_path(self.path, name), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if read_slot_bytes(table_fd) == slot_bytes:
                slots_fd = open_slots(slots_path(self.path, name), os.O_RDONLY)
                return Part(table_fd, slots_fd, slot_bytes)
        except OSError:
            pass  # Removed meanwhile, or not for us to read.
        os.close(table_fd)
        return None

    # What follows needs the lock.

    def open_own(self, slot_bytes: int) -> tuple[str, OwnPart]:
        """A part to write with slots of this size: of those that nobody writes the one with the
        most in it, or a new one."""
        self._clean()
        free: list[tuple[int, str, int]] = []
        for name in self.names():
            table_fd = lock_table(table_path(self.path, name))
            if table_fd is None:
                continue
            if read_slot_bytes(table_fd) == slot_bytes:
                taken = os.stat(slots_path(self.path, name)).st_blocks
                free.append((taken, name, table_fd))
            else:
                os.close(table_fd)
        free.sort()
        name, table_fd = free.pop()[1:] if free else self._create(slot_bytes)
        for _, _, other_fd in free:
            os.close(other_fd)
        try:
            slots_fd = open_slots(slots_path(self.path, name), os.O_RDWR)
        except OSError:
            os.close(table_fd)
            raise
        self.make_room(0)
        return name, OwnPart(table_fd, slots_fd, slot_bytes)

    def num_writers(self) -> int:
        """How many parts are being written, our own among them, or were until lately."""
        writers = 0
        for name in self.names():
            table_fd = lock_table(table_path(self.path, name))
            writers += table_fd is None or self._left_lately(table_fd)
            if table_fd is not None:
                os.close(table_fd)
        return max(1, writers)

    def _left_lately(self, table_fd: int) -> bool:
        return time.time() - os.fstat(table_fd).st_mtime < self.grace_s

    def make_room(self, more_bytes: int) -> int:
        """Delete parts that nobody writes, nor did until lately, the one first that was used the
        longest ago, until there is room for so much more; how much there is, below zero if over
        budget."""
        room = self.budget_bytes - self.num_bytes()
        if room >= more_bytes:
            return room
        for name in sorted(self.names(), key=self._last_used):
            table_fd = lock_table(table_path(self.path, name))
            if table_fd is not None:
                if not self._left_lately(table_fd):
                    self._remove(name)
                os.close(table_fd)
                room = self.budget_bytes - self.num_bytes()
                if room >= more_bytes:
                    break
        return room

    def _last_used(self, name: str) -> int:
        try:
            return os.stat(table_path(self.path, name)).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _clean(self) -> None:
        """Remove what a crash left half made or half removed."""
        for name in self.names():
            table, slots = table_path(self.path, name), slots_path(self.path, name)
            if not table.exists():
                slots.unlink(missing_ok=True)
                continue
            table_fd = lock_table(table)
            if table_fd is None:
                continue
            header = os.pread(table_fd, TABLE_HEADER_BYTES, 0)
            made = len(header) == TABLE_HEADER_BYTES and any(header) and slots.exists()
            # Removing starts with the slots, so that their bytes are free at once.
            removed = made and not slots.stat().st_size and os.fstat(table_fd).st_size > len(header)
            if removed or not made:
                self._remove(name)
            os.close(table_fd)

    def _create(self, slot_bytes: int) -> tuple[str, int]:
        self.make_room(part_bytes(0, slot_bytes))
        name = (
            f"part-{token_hex(4)}"  # Never one that was here before: who knew that is not misled.
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        table_fd = os.open(table_path(self.path, name), flags, 0o600)
        try:
            fcntl.flock(table_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(table_fd, new_header(slot_bytes), 0)
            os.close(open_slots(slots_path(self.path, name), flags))
        except OSError:
            os.close(table_fd)
            self._remove(name)
            raise
        return name, table_fd

    def _remove(self, name: str) -> None:
        """Its bytes are given back even while somebody has it open."""
        for path in (slots_path(self.path, name), table_path(self.path, name)):
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                os.ftruncate(fd, 0)
                os.close(fd)
                path.unlink()
