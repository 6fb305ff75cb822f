"""OuterCache: what another engine hands to it comes back as it was, or is a miss."""

import os
import threading
import time
from dataclasses import replace
from random import Random

import pytest

from foreword.core.identity import Identity
from foreword.plugins import outer, place
from foreword.plugins.outer import Block, Budgets, OuterCache
from foreword.store.disk import DiskStore
from foreword.store.faults import Fault, FaultyStore

SIZE = 10_000  # bytes of a block
MIB = 1 << 20
IDENTITY = Identity(
    weights="w", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_size=8, attention="{}",
    layout="test", parallel="", lora="", block_size=16, tokenizer="", chat_template="", numerics="",
)  # fmt: skip


def blocks_of(name: str, count: int) -> list[Block]:
    keys = [f"{name}-{at}".encode() for at in range(count)]
    return [Block(key, keys[at - 1] if at else None, at) for at, key in enumerate(keys)]


def content(block: Block) -> memoryview:
    return memoryview(Random(block.engine_key).randbytes(SIZE))


def targets(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


@pytest.fixture
def opened(tmp_path):
    """Makes caches over one folder, open, and closes them at the end."""
    caches = []

    def make(identity=IDENTITY, disk=4 * MIB, host=0):
        budgets = Budgets(host, disk, tmp_path / "kv")
        cache = OuterCache(lambda: identity, SIZE, budgets)
        assert cache.wait_open(10)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close(1)


def kept(cache: OuterCache, blocks: list[Block]) -> None:
    assert all(cache.store(blocks, [content(block) for block in blocks]))
    assert cache.flush(10)


def loaded(cache: OuterCache, blocks: list[Block]) -> list[str | None]:
    """Why each is not there; what is there is right."""
    into = targets(len(blocks))
    lost = cache.load(blocks, into)
    for block, target, reason in zip(blocks, into, lost, strict=True):
        if reason is None:
            assert target == content(block)
    return lost


def found(cache: OuterCache, blocks: list[Block]) -> int:
    """As `num_found`, however slow the machine is."""
    return cache.probe(blocks).result(10).count(True)


def faulty(monkeypatch, fault: Fault) -> list[FaultyStore]:
    """From now on disk stores fail that way; the last one is the one opened last."""
    stores: list[FaultyStore] = []

    def make(*args) -> FaultyStore:
        stores.append(FaultyStore(DiskStore(*args), fault))
        return stores[-1]

    monkeypatch.setattr(outer, "DiskStore", make)
    return stores


@pytest.mark.parametrize(("disk", "host"), [(4 * MIB, 0), (0, 4 * MIB), (4 * MIB, 4 * MIB)])
def test_what_was_stored_comes_back(opened, disk, host):
    cache = opened(disk=disk, host=host)
    blocks = blocks_of("a", 30)
    assert loaded(cache, blocks) == ["missing"] * 30
    kept(cache, blocks)
    assert cache.num_ready(blocks) == cache.num_found(blocks) == 30
    assert loaded(cache, blocks) == [None] * 30
    assert cache.stats[0].num_loaded_blocks == cache.stats[0].num_stored_blocks == 30


def test_what_was_stored_outlives_the_process(opened):
    first = opened()
    blocks = blocks_of("a", 30)
    kept(first, blocks)
    first.close(5)
    again = opened()
    assert again.num_ready(blocks) == 30
    assert loaded(again, blocks) == [None] * 30


def test_a_block_is_found_by_its_key_alone(opened):
    """Where an engine does not say what comes before."""
    cache = opened()
    blocks = blocks_of("a", 5)
    kept(cache, blocks)
    assert loaded(cache, [Block(b.engine_key) for b in blocks]) == [None] * 5
    assert loaded(cache, [Block(blocks[1].engine_key, None, 0)]) == ["damaged"]


@pytest.mark.parametrize(("disk", "host"), [(4 * MIB, 0), (0, 4 * MIB)])
def test_what_is_cleared_is_gone_and_can_be_stored_again(opened, disk, host):
    cache = opened(disk=disk, host=host)
    blocks = blocks_of("a", 5)
    cache.store(blocks, [content(block) for block in blocks])  # waits to be written
    cache.clear()
    assert cache.flush(10)
    assert cache.num_ready(blocks) == found(cache, blocks) == 0
    assert loaded(cache, blocks) == ["missing"] * 5
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 5


def test_two_processes_share_one_folder(opened):
    writer, reader = opened(disk=8 * MIB), opened(disk=8 * MIB)
    blocks = blocks_of("a", 20)
    kept(writer, blocks[:15])
    assert reader.num_ready(blocks) == 0
    assert found(reader, blocks) == 15
    assert loaded(reader, blocks) == [None] * 15 + ["missing"] * 5
    kept(reader, blocks)
    assert reader.stats[0].num_stored_blocks == 5, "what is there already is not stored again"
    assert found(writer, blocks) == 20


@pytest.mark.parametrize("field", ["weights", "dtype", "layout", "lora", "parallel"])
def test_another_identity_finds_nothing(opened, field):
    blocks = blocks_of("a", 5)
    kept(opened(disk=8 * MIB), blocks)
    other = opened(replace(IDENTITY, **{field: "another"}), disk=8 * MIB)
    assert found(other, blocks) == 0
    assert loaded(other, blocks) == ["missing"] * 5


def test_a_child_without_its_parent_is_not_stored(opened):
    cache = opened()
    blocks = blocks_of("a", 3)
    cache.store(blocks[1:], [content(block) for block in blocks[1:]])
    assert cache.flush(10)
    assert cache.num_ready(blocks[1:]) == 0
    assert cache.stats[0].num_dropped_blocks == 2


def test_budget_holds_and_what_is_left_is_usable(opened, tmp_path):
    cache = opened(disk=MIB)
    for round_ in range(20):
        cache.store(blocks_of(f"{round_}", 20), [content(b) for b in blocks_of(f"{round_}", 20)])
        assert cache.flush(10)
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").iterdir())
    assert taken <= MIB
    resident = usable = 0
    for round_ in range(20):
        there = [cache.num_ready([block]) for block in blocks_of(f"{round_}", 20)]
        resident += sum(there)
        usable += cache.num_ready(blocks_of(f"{round_}", 20))
    assert resident == usable > 40


def test_touched_blocks_stay(opened):
    cache = opened(disk=MIB)
    first = blocks_of("first", 10)
    kept(cache, first)
    for round_ in range(20):
        cache.touch(first)
        cache.store(blocks_of(f"{round_}", 10), [content(b) for b in blocks_of(f"{round_}", 10)])
        assert cache.flush(10)
    assert loaded(cache, first) == [None] * 10


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.SWAP, Fault.TRUNCATE])
def test_damage_is_a_miss_and_heals(opened, monkeypatch, fault):
    stores = faulty(monkeypatch, fault)
    cache = opened()
    blocks = blocks_of("a", 8)
    kept(cache, blocks)
    assert "damaged" in loaded(cache, blocks)
    assert cache.flush(10)
    assert cache.num_ready(blocks) < 8
    stores[-1]._rate = 0.0  # the place is sound again
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 8


def test_a_damaged_record_of_another_process_is_stored_anew(opened, monkeypatch):
    writer = opened(disk=8 * MIB)
    blocks = blocks_of("a", 4)
    kept(writer, blocks)
    stores = faulty(monkeypatch, Fault.FLIP)
    reader = opened(disk=8 * MIB)
    assert set(loaded(reader, blocks)) == {"damaged"}
    assert found(reader, blocks) == 0, "not offered again"
    stores[-1]._rate = 0.0
    kept(reader, blocks)
    assert reader.stats[0].num_stored_blocks == 4
    assert loaded(reader, blocks) == [None] * 4


@pytest.mark.parametrize("whose", ["own", "others"])
def test_what_a_shorter_file_lost_is_stored_anew(opened, tmp_path, whose):
    writer = opened(disk=8 * MIB)
    blocks = blocks_of("a", 8)
    kept(writer, blocks)
    (path,) = (tmp_path / "kv").glob("*.slots")
    os.truncate(path, 0)
    cache = writer if whose == "own" else opened(disk=8 * MIB)
    assert loaded(cache, blocks) == ["damaged"] * 8
    assert cache.flush(10)
    assert found(cache, blocks) == 0
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 8


def test_a_place_that_hangs_is_late_and_writes_to_nothing(opened, monkeypatch):
    monkeypatch.setattr(outer, "LOAD_S", 0.1)
    cache = opened()
    blocks = blocks_of("a", 8)
    kept(cache, blocks)
    cache.close(5)
    stores = faulty(monkeypatch, Fault.HANG)
    cache = opened()
    into = targets(8)
    begin = time.monotonic()
    assert cache.load(blocks, into) == ["late"] * 8
    assert cache.num_found(blocks) == 0, "left alone"
    assert cache.load(blocks, into) == ["failed"] * 8
    assert time.monotonic() - begin < 2
    cache.store(blocks_of("b", 4), targets(4))  # returns
    stores[-1].release()
    assert cache.flush(10)
    assert all(target == bytes(SIZE) for target in into)
    assert cache.stats[0].lost == {"late": 8}


def test_a_place_that_hangs_is_not_asked_ever_more(opened, monkeypatch):
    monkeypatch.setattr(place, "LOAD_S", 0.1)
    stores = faulty(monkeypatch, Fault.HANG)
    cache = opened()
    first = cache.probe(blocks_of("a", 4))
    time.sleep(0.2)
    later = [cache.probe(blocks_of(f"{at}", 4)) for at in range(50)]
    assert all(answer.result(0) == [False] * 4 for answer in later)
    assert not first.done()
    stores[-1].release()
    assert first.result(10) == [False] * 4
    assert set(cache.probe(blocks_of("a", 4)).result(10)) == {False}
    kept(cache, blocks_of("a", 4))
    other = opened()
    stores[-1].release()
    assert other.probe(blocks_of("a", 4)).result(10) == [True] * 4


def test_what_does_not_come_leaves_no_record_that_nobody_counts(opened, monkeypatch):
    cache = opened()
    blocks = blocks_of("a", 4)
    kept(cache, blocks)
    store = cache._places[0].store
    with monkeypatch.context() as patch:
        patch.setattr(store, "get", lambda hashes, buffers: [0] * len(hashes))
        assert loaded(cache, blocks) == ["damaged"] * 4
    assert cache.flush(10)
    assert not any(store.contains([cache._hash(block.engine_key) for block in blocks]))
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 4


def test_a_place_that_fails_is_left_alone_for_a_while(opened, monkeypatch):
    monkeypatch.setattr("foreword.store.patience.PAUSE_S", (0.2, 0.2))
    cache = opened()
    blocks = blocks_of("a", 4)
    kept(cache, blocks)
    cache.close(5)
    stores = faulty(monkeypatch, Fault.ERROR)
    cache = opened()
    assert loaded(cache, blocks) == ["failed"] * 4
    stores[-1]._rate = 0.0
    time.sleep(0.3)
    assert loaded(cache, blocks) == [None] * 4


def test_when_too_much_waits_the_rest_is_dropped(opened, monkeypatch):
    monkeypatch.setattr(place, "STAGING_BYTES", 1)
    monkeypatch.setattr(place, "CELL_BYTES", 1)
    stores = faulty(monkeypatch, Fault.HANG)
    cache = opened()
    blocks = blocks_of("a", 10)
    assert cache.store(blocks, [content(block) for block in blocks]) == [True] * 4 + [False] * 6
    stores[-1].release()
    assert cache.flush(10)
    assert cache.stats[0].num_dropped_blocks == 6
    assert loaded(cache, blocks) == [None] * 4 + ["missing"] * 6


def test_what_host_memory_overwrites_while_it_is_read_is_a_miss(opened, monkeypatch):
    """A record that is lent counts only if it was kept until it was copied."""
    cache = opened(disk=0, host=4 * MIB)
    blocks = blocks_of("a", 4)
    kept(cache, blocks)
    store = cache._places[0].store
    lend = type(store).lend

    def overwritten(hashes):
        return [replace(loan, kept=lambda: False) for loan in lend(store, hashes)]

    monkeypatch.setattr(store, "lend", overwritten)
    assert loaded(cache, blocks) == ["missing"] * 4


def test_what_cannot_be_sealed_is_not_kept_and_takes_no_room(opened, monkeypatch):
    monkeypatch.setattr(place, "STAGING_BYTES", 1)
    monkeypatch.setattr(place, "CELL_BYTES", 1)
    cache = opened()
    blocks = blocks_of("a", 1)
    for _ in range(10):
        assert cache.store(blocks, [memoryview(bytes(SIZE + 1))]) == [False]
    for _ in range(10):
        assert cache.store([Block(b"nowhere")], targets(1)) == [False]
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None]


def test_after_its_end_all_is_a_miss(opened):
    cache = opened()
    blocks = blocks_of("a", 2)
    kept(cache, blocks)
    cache.close(5)
    assert cache.store(blocks, targets(2)) == [False] * 2
    assert loaded(cache, blocks) == ["missing"] * 2


def test_until_the_identity_is_known_all_is_a_miss(tmp_path):
    known = threading.Event()
    cache = OuterCache(lambda: known.wait(10) and IDENTITY, SIZE, Budgets(0, MIB, tmp_path / "kv"))
    blocks = blocks_of("a", 3)
    assert cache.store(blocks, [content(block) for block in blocks]) == [False] * 3
    assert cache.num_found(blocks) == 0
    assert loaded(cache, blocks) == ["missing"] * 3
    known.set()
    assert cache.wait_open(10)
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 3
    cache.close(5)


@pytest.mark.parametrize("early", [True, False])
def test_what_is_kept_before_a_renewal_is_not_found_after_it(opened, tmp_path, early):
    blocks = blocks_of("a", 3)
    kept(opened(disk=8 * MIB), blocks)
    known = threading.Event()
    cache = OuterCache(
        lambda: known.wait(10) and IDENTITY, SIZE, Budgets(0, 8 * MIB, tmp_path / "kv")
    )
    if early:
        cache.renew()
    known.set()
    assert cache.wait_open(10)
    if not early:
        assert found(cache, blocks) == 3
        cache.renew()
    assert found(cache, blocks) == 0
    kept(cache, blocks)
    assert loaded(cache, blocks) == [None] * 3
    cache.close(5)
    assert found(opened(disk=8 * MIB), blocks) == 3, "others' are as they were"


@pytest.mark.parametrize("forget", [OuterCache.renew, OuterCache.clear])
def test_what_waits_to_be_copied_is_forgotten_too(opened, forget):
    """It was computed before: it must not have a key from after."""
    cache = opened()
    blocks = blocks_of("a", 3)
    goes_on = threading.Event()
    cache._copier.put(lambda: goes_on.wait(10))
    cache.begin_store(blocks, [content(block) for block in blocks])
    forget(cache)
    goes_on.set()
    assert cache.flush(10)
    assert cache.stats[0].num_stored_blocks == 3
    assert loaded(cache, blocks) == ["missing"] * 3


def test_what_is_closed_before_it_is_open_opens_nothing(tmp_path):
    known = threading.Event()
    cache = OuterCache(lambda: known.wait(10) and IDENTITY, SIZE, Budgets(0, MIB, tmp_path / "kv"))
    cache.close(0)
    known.set()
    assert cache.wait_open(10)
    assert not cache.stats
    assert not (tmp_path / "kv").exists()


def test_an_engine_goes_on_where_nothing_can_be_kept(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = OuterCache(lambda: IDENTITY, SIZE, Budgets(0, MIB, tmp_path / "file"))
    assert cache.wait_open(10)
    blocks = blocks_of("a", 3)
    assert cache.store(blocks, targets(3)) == [False] * 3
    assert loaded(cache, blocks) == ["missing"] * 3
    cache.close(1)
    assert "blocks are not kept" in caplog.text
