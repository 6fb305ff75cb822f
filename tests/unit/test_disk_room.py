"""The disk store's budget, how writers share it, and what happens when the disk is full."""

import errno
import mmap
import os
import shutil
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from disks import (
    MIB,
    RECORD_BYTES,
    SLOT_BYTES,
    QuickStore,
    Stores,
    found,
    hashes_of,
    keys_of,
    put,
    readable,
    taken,
)
from foreword.cli.verify_store import OURS
from foreword.store import disk
from foreword.store.disk import DiskStore
from foreword.store.folder import Folder, num_slots_within, part_bytes
from foreword.store.part import OwnPart
from foreword.store.sharers import leave_identity
from foreword.store.table import Table


@pytest.mark.parametrize("budget", [100_000, MIB, 3 * MIB + 12345])
def test_the_budget_holds_when_full(stores: Stores, budget: int) -> None:
    store = stores(budget)
    keys = keys_of(1, store.capacity + 5)
    stored = [put(store, [key])[0] for key in keys]
    assert stored == [True] * store.capacity + [False] * 5
    assert taken(stores.folder) <= budget
    # No more than a page per file, and what a map of the file may take, is given away.
    assert store.capacity >= (budget * 255 // 256 - 8 * 4096) // (SLOT_BYTES + 128)
    assert store.num_bytes <= taken(stores.folder)
    store.delete(hashes_of(keys[-7:]))
    assert put(store, keys_of(2, 3)) == [True, True, False]
    assert taken(stores.folder) <= budget


def test_what_is_in_no_part_takes_room_from_the_shares(stores: Stores) -> None:
    """The sharers' files lie there too: what a store says that it holds it can hold."""
    for number in range(5):
        leave_identity(stores.folder, replace(OURS, weights=str(number)))
    first, second = stores(), stores()
    for store, name in ((first, 1), (second, 2)):
        keys = keys_of(name, store.capacity)
        assert all(put(store, [key])[0] for key in keys)
        assert all(readable(store, keys))
    assert taken(stores.folder) <= MIB


def test_a_part_never_takes_more_than_it_counts() -> None:
    for slot_bytes in (4096, SLOT_BYTES, 737_280, 4 * MIB):
        for budget in (0, 5000, 12_289, MIB, 10 * MIB + 1, 7 << 30):
            num_slots = num_slots_within(budget, slot_bytes)
            assert num_slots == 0 or part_bytes(num_slots, slot_bytes) <= budget


def test_a_file_grows_by_steps(stores: Stores) -> None:
    store = stores()
    sizes = set()
    for key in keys_of(1, store.capacity):
        put(store, [key])
        sizes.add(store._own.num_slots)
    lengths = sorted(sizes)
    assert lengths[-1] == store.capacity
    assert {after - before for before, after in pairwise(lengths[:-1])} == {lengths[0]}
    assert 16 <= len(lengths) <= 20


def test_a_second_writer_gets_its_share_as_the_first_shrinks(stores: Stores) -> None:
    first = stores()
    alone = first.capacity
    chains = [keys_of(name, 4) for name in range(alone // 4)]
    for keys in chains:
        assert all(put(first, keys))
    second = stores()
    assert first.capacity == second.capacity
    assert alone // 2 - 4 <= first.capacity <= alone // 2
    assert put(second, keys_of(900, 4)) == [False] * 4
    while len(first._own.table.slot_of) > first.capacity:  # every other chain first
        keys = chains.pop(-2 if len(chains) > 1 else 0)
        first.delete(hashes_of(keys))
        assert taken(stores.folder) <= MIB + RECORD_BYTES
    for _ in range(alone):
        first.delete([])
    assert first._own.num_slots == first.capacity
    for keys in chains:
        assert second.contains(hashes_of(keys)) == [True] * 4
        assert all(readable(first, keys))
        assert all(readable(second, keys))
    assert sum(put(second, [key])[0] for key in keys_of(900, second.capacity)) == second.capacity
    assert taken(stores.folder) <= MIB + RECORD_BYTES
    stores.close(second)
    assert first.capacity == alone
    second = stores()
    assert found(second) == hashes_of(keys_of(900, second.capacity))


def test_parts_that_nobody_writes_make_room_oldest_first(stores: Stores) -> None:
    old, new = stores(), stores()
    put(old, keys_of(1, 20))
    put(new, keys_of(2, 20))
    for store, age_s in ((old, 10), (new, 20)):
        stores.close(store)
        os.utime(stores.table(store), (0, time.time() - age_s))
    larger = stores(record_bytes=20_000)
    assert larger.part not in (old.part, new.part), "its slots are of another size"
    parts = [{path.name.partition(".")[0] for path in stores.folder.glob("part-*")}]
    for key in keys_of(3, larger.capacity):
        buffer = memoryview(mmap.mmap(-1, larger.slot_bytes))[:20_000]
        assert larger.put([key], [buffer]) == [True]
        parts.append({path.name.partition(".")[0] for path in stores.folder.glob("part-*")})
        assert taken(stores.folder) <= MIB
    left = [now for index, now in enumerate(parts) if not index or now != parts[index - 1]]
    everything = {old.part, new.part, larger.part}
    assert left[:2] == [everything, everything - {new.part}]


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"missing cannot keep blocks: No such file"):
        DiskStore(tmp_path / "missing", MIB, RECORD_BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="cannot keep blocks"):
        DiskStore(tmp_path / "file", MIB, RECORD_BYTES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_after_a_failed_write_reads_go_on_and_writes_pause(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    now = [1000.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    store = stores()
    keys = keys_of(1, 4)
    put(store, keys)
    attempts = []

    def fail(_self: OwnPart, slot: int, _records: object) -> None:
        attempts.append(slot)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(OwnPart, "_write", fail)
        for seconds in (5, 10, 20, 40, 60, 60):
            assert put(store, keys_of(2, 2)) == [False, False]
            now[0] += seconds - 0.1
            assert put(store, keys_of(2, 2)) == [False, False]
            now[0] += 0.2
        assert attempts == [4] * 6, "the slots stay free"
        assert all(readable(store, keys))
    assert put(store, keys_of(2, 2)) == [True, True]
    assert all(readable(store, keys_of(2, 2)))


def test_a_row_that_could_not_be_written_leaves_its_slot_alone(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    keys = keys_of(1, 4)
    put(store, keys)

    def fail(_self: Table, _slots: object, _raw: bytes) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as broken:
        broken.setattr(Table, "write", fail)
        store.delete(hashes_of(keys[2:]))
        assert readable(store, keys) == [True, True, False, False]
    store._paused_until = 0.0
    assert put(store, keys_of(2, 1)) == [True]
    assert store._own.table.slot_of[keys_of(2, 1)[0].block_hash] == 4, "the old rows are there yet"
    store.delete([])
    assert put(store, keys_of(3, 1)) == [True]
    assert store._own.table.slot_of[keys_of(3, 1)[0].block_hash] == 2


def test_a_full_file_system_is_a_refusal(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a small file system")
    try:
        store = DiskStore(tmp_path, 16 * MIB, RECORD_BYTES)
        try:
            keys = keys_of(1, 80)
            stored = [put(store, [key])[0] for key in keys]
            num_stored = stored.count(True)
            assert 40 < num_stored < 64
            assert stored == [True] * num_stored + [False] * (80 - num_stored)
            assert all(readable(store, keys[:num_stored]))
            store.delete(hashes_of(keys[num_stored - 3 : num_stored]))
            store._paused_until = 0.0
            assert put(store, keys_of(2, 3)) == [True] * 3, "what a slot has it keeps"
            again = [*keys[: num_stored - 3], *keys_of(2, 3)]
        finally:
            store.close()
        store = DiskStore(tmp_path, 16 * MIB, RECORD_BYTES)
        assert sorted(found(store)) == sorted(hashes_of(again))
        assert all(readable(store, again))
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_folder_is_locked_once(stores: Stores) -> None:
    one, other = Folder(stores.folder, MIB, 0.0), Folder(stores.folder, MIB, 0.0)
    with one.locked(0) as held:
        assert held
        with other.locked(0.01) as too:
            assert not too
        with one.locked(0.01) as again:
            assert not again
    with other.locked(0) as held:
        assert held
    one.close()
    other.close()


def test_a_writer_that_ended_lately_may_come_back_to_its_part(tmp_path: Path) -> None:
    class Patient(QuickStore):
        grace_s = DiskStore.grace_s

    first, second = (Patient(tmp_path, MIB, RECORD_BYTES) for _ in range(2))
    keys = keys_of(1, 20)
    put(second, keys)
    second.close()
    shared = first.capacity
    assert sum(put(first, [key])[0] for key in keys_of(2, 2 * shared)) >= shared - 2
    assert len(found(first)) <= shared
    with closing(Patient(tmp_path, MIB, RECORD_BYTES)) as second:
        assert found(second) == hashes_of(keys)
        table = tmp_path / f"{second.part}.table"
    second.close()
    os.utime(table, (0, time.time() - 61))
    assert first.capacity > 2 * shared - 4, "nobody came"
    first.close()


def test_links_are_not_followed_and_odd_entries_are_not_ours(tmp_path: Path) -> None:
    folder, precious = tmp_path / "kv", tmp_path / "precious"
    folder.mkdir()
    precious.write_bytes(b"x" * 10_000)
    (folder / "part-00000001.table").symlink_to(precious)
    (folder / "part-00000002.slots").symlink_to(precious)
    (folder / "part-00000003.table").symlink_to(tmp_path / "nowhere")
    (folder / "part-00000004.table").mkdir()
    (folder / "part-00000005.slots").mkdir()
    os.mkfifo(folder / "part-00000006.table")
    (folder / "part-00000007.table").write_bytes(b"no table")
    with closing(QuickStore(folder, MIB, RECORD_BYTES)) as store:
        keys = keys_of(1, store.capacity)
        assert store.capacity > MIB // SLOT_BYTES - 12, "nobody else writes, but they take some"
        assert all(put(store, [key])[0] for key in keys)
    assert precious.read_bytes() == b"x" * 10_000
    assert (folder / "part-00000004.table").is_dir()


def test_who_removes_the_files_ends_the_writing(stores: Stores) -> None:
    store = stores()
    keys = keys_of(1, 4)
    assert all(put(store, keys[:2]))
    for path in stores.folder.glob("part-*"):
        path.unlink()
    with pytest.raises(OSError, match="was removed: restart"):
        put(store, keys[2:])
    assert readable(store, keys) == [True, True, False, False]
