"""The disk store: its format, and what it finds again."""

import os
import struct
import threading

import pytest
from xxhash import xxh3_64_intdigest

from disks import (
    MIB,
    RECORD_BYTES,
    ROOT,
    SLOT_BYTES,
    Stores,
    buffers,
    found,
    hashes_of,
    keys_of,
    put,
    readable,
    sealed,
    taken,
)
from foreword.store.disk import DiskStore
from foreword.store.part import OwnPart
from foreword.store.table import NUM_RECENT, Table


def test_golden_layout(stores: Stores) -> None:
    store = stores()
    keys = keys_of(7, 2)
    records = sealed(keys)
    assert store.put(keys, records) == [True, True]
    raw = stores.table(store).read_bytes()
    # A new part tells readers once that any row may be another.
    assert (
        raw[:32].hex()
        == (b"FOREPART" + struct.pack("<H6xQQ", 1, SLOT_BYTES, NUM_RECENT + 1 + 2)).hex()
    )
    assert raw[64 + 4 : 64 + 12] == struct.pack("<II", 0, 1)
    for slot, key in enumerate(keys):
        row = raw[4096 + slot * 128 : 4096 + (slot + 1) * 128]
        start = key.block_hash + key.parent + ROOT + struct.pack("<II", slot, RECORD_BYTES)
        assert row[:104] == start
        assert row[104:112] == struct.pack("<Q", xxh3_64_intdigest(start, seed=slot))
        assert row[120:] == bytes(8)
    assert raw[4096 + 104 : 4096 + 112].hex() == "c30b8876da840968"
    assert not any(raw[4096 + 2 * 128 :])
    slots = stores.table(store).with_suffix(".slots").read_bytes()
    assert slots[:RECORD_BYTES] == records[0]
    assert slots[SLOT_BYTES : SLOT_BYTES + RECORD_BYTES] == records[1]


def test_what_was_put_comes_back_also_after_a_restart(stores: Stores) -> None:
    store = stores()
    keys = keys_of(1, 20)
    assert put(store, keys) == [True] * 20
    assert put(store, keys) == [True] * 20, "it is here already"
    assert store.contains([*hashes_of(keys), ROOT]) == [True] * 20 + [False]
    assert all(readable(store, keys[::-1]))
    assert store.get([ROOT], buffers(1)) == [0]
    store.delete([*hashes_of(keys[15:]), ROOT])
    assert readable(store, keys) == [True] * 15 + [False] * 5
    stores.close(store)
    again = stores()
    assert again.part == store.part
    assert found(again) == hashes_of(keys[:15])
    assert all(readable(again, keys[:15]))


def test_entries_come_in_the_order_of_their_last_use(stores: Stores) -> None:
    store = stores()
    one, two, three = keys_of(1, 2), keys_of(2, 2), keys_of(3, 2)
    for keys in (one, two, three):
        put(store, keys)
    readable(store, one)
    stores.close(store)
    assert found(stores()) == hashes_of([*two, *three, *one])


def test_neighbours_get_neighbouring_slots(stores: Stores) -> None:
    store = stores()
    keys = keys_of(1, 16)
    put(store, keys)
    store.delete(hashes_of([keys[2], *keys[8:12]]))
    put(store, keys_of(2, 4))
    assert [store._own.table.slot_of[key] for key in hashes_of(keys_of(2, 4))] == [8, 9, 10, 11]
    put(store, keys_of(3, 1))
    assert store._own.table.slot_of[keys_of(3, 1)[0].block_hash] == 2


def test_others_see_what_is_put_and_deleted(stores: Stores) -> None:
    first, second = stores(), stores()
    assert first.part != second.part
    keys = keys_of(1, 5)
    put(first, keys)
    assert second.contains(hashes_of(keys)) == [True] * 5
    assert all(readable(second, keys))
    first.delete(hashes_of(keys[3:]))
    assert readable(second, keys) == [True] * 3 + [False] * 2, "though it still knows five"
    assert second.contains(hashes_of(keys)) == [True] * 3 + [False] * 2
    second.delete(hashes_of(keys))
    assert all(readable(first, keys[:3])), "nobody deletes what is another's"
    assert found(second) == []


def test_others_see_more_changes_than_a_table_announces(stores: Stores) -> None:
    first, second = stores(), stores()
    kept, brief = keys_of(1, 3), keys_of(2, 1)
    assert second.contains(hashes_of(kept)) == [False] * 3
    put(first, kept)
    for _ in range(NUM_RECENT // 2 + 1):
        put(first, brief)
        first.delete(hashes_of(brief))
    assert second.contains(hashes_of([*kept, *brief])) == [True] * 3 + [False]


def test_a_table_reads_only_what_was_announced(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stores(), stores()
    put(first, keys_of(1, 8))
    second.contains([ROOT])
    monkeypatch.setattr(Table, "_all_changed", None)
    put(first, keys_of(2, 4))
    first.delete(hashes_of(keys_of(1, 8)[6:]))
    expected = [True] * 6 + [False] * 2 + [True] * 4
    assert second.contains(hashes_of([*keys_of(1, 8), *keys_of(2, 4)])) == expected


def test_a_part_that_nobody_writes_is_read_then_adopted_by_size(stores: Stores) -> None:
    first, second = stores(), stores()
    put(first, keys_of(1, 10))
    put(second, keys_of(2, 3))
    stores.close(first)
    stores.close(second)
    third = stores()
    assert third.part == first.part
    assert found(third) == hashes_of(keys_of(1, 10))
    assert all(readable(third, keys_of(2, 3)))
    fourth = stores()
    assert fourth.part == second.part


def test_bad_rows_are_free_slots(stores: Stores) -> None:
    store = stores()
    keys = keys_of(1, 6)
    put(store, keys)
    stores.close(store)
    path = stores.table(store)
    raw = bytearray(path.read_bytes())
    raw[4096 + 5 * 128 + 100] ^= 1
    raw[4096 + 4 * 128 : 4096 + 5 * 128] = raw[4096 + 3 * 128 : 4096 + 4 * 128]  # another's place
    raw[4096 + 2 * 128 + 112 : 4096 + 2 * 128 + 120] = b"\xff" * 8  # only disturbs an order
    path.write_bytes(raw)
    again = stores()
    assert sorted(found(again)) == sorted(hashes_of(keys[:4]))
    assert put(again, keys_of(2, 2)) == [True, True]
    assert again._own.table.slot_of[keys_of(2, 1)[0].block_hash] == 4


def test_orphans_go(stores: Stores) -> None:
    store = stores()
    keys, whole = keys_of(1, 6), keys_of(2, 2)
    put(store, keys)
    put(store, whole)
    store.delete([keys[2].block_hash])
    stores.close(store)
    again = stores()
    assert found(again) == hashes_of([*keys[:2], *whole])
    stores.close(again)
    raw = stores.table(again).read_bytes()
    assert not any(raw[4096 + 2 * 128 : 4096 + 6 * 128]), "nor do they come back with their parent"


def test_a_parent_in_another_part_is_a_parent(stores: Stores) -> None:
    first, second = stores(), stores()
    keys = keys_of(1, 3)
    put(first, keys[:2])
    put(second, keys[2:])
    stores.close(second)
    assert found(stores()) == hashes_of(keys[2:])


def test_a_record_that_was_being_moved_is_here_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    keys = keys_of(1, 8)
    put(store, keys_of(2, 1))
    put(store, keys)
    store.delete(hashes_of(keys_of(2, 1)))
    with monkeypatch.context() as crash:
        crash.setattr(OwnPart, "_zero", lambda *_: None)
        store._own._move(8, 0)
    stores.close(store)
    again = stores()
    assert found(again) == hashes_of(keys)
    assert all(readable(again, keys))
    assert again._own.table.slot_of[keys[7].block_hash] == 0
    assert not any(stores.table(again).read_bytes()[4096 + 8 * 128 : 4096 + 9 * 128])


@pytest.mark.parametrize("start", [b"FOREPART\x02\x00", b"SOMEBODY"])
def test_another_format_is_left_alone_until_room_is_needed(stores: Stores, start: bytes) -> None:
    store = stores()
    put(store, keys_of(1, 30))
    stores.close(store)
    path = stores.table(store)
    path.write_bytes(start + path.read_bytes()[len(start) :])
    other = stores()
    assert other.part != store.part
    assert found(other) == []
    assert other.contains(hashes_of(keys_of(1, 30))) == [False] * 30
    assert path.exists()
    for key in keys_of(2, other.capacity):
        assert put(other, [key]) == [True]
    assert not path.exists()
    assert taken(stores.folder) <= MIB


def test_half_made_files_are_cleaned(stores: Stores) -> None:
    names = ["part-0000000a.slots", "part-0000000b.table", "part-0000000c.table", "NOTES"]
    for name in names:
        (stores.folder / name).write_bytes(b"")
    (stores.folder / "part-0000000c.table").write_bytes(bytes(4096))
    (stores.folder / "part-0000000c.slots").write_bytes(b"")
    store = stores()
    assert {path.name for path in stores.folder.iterdir()} == {
        *("LOCK", "NOTES", f"{store.part}.table", f"{store.part}.slots")
    }


def test_a_part_that_was_being_removed_goes(stores: Stores) -> None:
    store = stores()
    put(store, keys_of(1, 3))
    stores.close(store)
    os.truncate(stores.table(store).with_suffix(".slots"), 0)
    assert stores().part != store.part
    assert not stores.table(store).exists()


def test_what_lies_past_the_end_of_the_slots_is_no_record(stores: Stores) -> None:
    store = stores()
    keys = keys_of(1, 6)
    put(store, keys)
    stores.close(store)
    os.truncate(stores.table(store).with_suffix(".slots"), 4 * SLOT_BYTES)
    again = stores()
    assert found(again) == hashes_of(keys[:4])
    assert all(put(again, keys)), "and its slots can be used"
    assert all(readable(again, keys))


def test_readers_and_the_writer_work_at_once(stores: Stores) -> None:
    store = stores()
    fixed = keys_of(1, 8)
    put(store, fixed)
    other = stores()
    stop = threading.Event()
    faults: list[str] = []

    def read(reader: DiskStore) -> None:
        while not stop.is_set():
            if not all(readable(reader, fixed)):
                faults.append("a record that nobody deleted was not found")
            readable(reader, keys_of(2, 8))

    def guarded(reader: DiskStore) -> None:
        try:
            read(reader)
        except ValueError as error:  # BadRecord
            faults.append(str(error))

    threads = [threading.Thread(target=guarded, args=(s,)) for s in (store, store, store, other)]
    other.contains(hashes_of(fixed))
    for thread in threads:
        thread.start()
    for round_ in range(60):
        put(store, keys_of(2, 8))
        put(store, keys_of(3 + round_, 3))
        store.delete(hashes_of(keys_of(2, 8)))
        store.delete(hashes_of(keys_of(3 + round_, 3)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
