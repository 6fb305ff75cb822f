"""OuterCache: what another engine hands to it is a miss where its place fails."""

import os
import time
from dataclasses import replace

import pytest

from foreword.plugins import outer, place
from foreword.plugins.outer import Block
from foreword.store.faults import Fault
from outers import MIB, SIZE, blocks_of, content, faulty, found, kept, loaded, targets


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
