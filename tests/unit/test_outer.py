"""OuterCache: what another engine hands to it comes back as it was, or is a miss."""

import threading
from dataclasses import replace

import pytest

from foreword.plugins.outer import Block, Budgets, OuterCache
from outers import IDENTITY, MIB, SIZE, blocks_of, content, found, kept, loaded, targets


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


def test_what_belongs_before_a_renewal_is_not_taken_after_it(opened):
    cache = opened()
    blocks = blocks_of("a", 3)
    before = cache.renewal
    cache.renew()
    assert cache.store(blocks, [content(block) for block in blocks], before) == [False] * 3
    assert cache.store(blocks, [content(block) for block in blocks], cache.renewal) == [True] * 3


def test_what_is_closed_before_it_is_open_opens_nothing(tmp_path):
    known = threading.Event()
    cache = OuterCache(lambda: known.wait(10) and IDENTITY, SIZE, Budgets(0, MIB, tmp_path / "kv"))
    cache.close(0)
    known.set()
    assert cache.wait_open(10)
    assert not cache.stats
    assert not (tmp_path / "kv").exists()


def test_the_last_place_has_but_some(opened):
    cache = opened(disk=0, host=MIB)
    blocks = blocks_of("a", 3)
    kept(cache, blocks[:1])
    assert loaded(cache, blocks) == [None, "missing", "missing"]


@pytest.mark.parametrize("wrong", [-1, 1.5e9, "1GiB", True])
@pytest.mark.parametrize("name", ["host_bytes", "disk_bytes"])
def test_what_is_no_number_of_bytes_is_refused(name, wrong):
    with pytest.raises(ValueError, match=f"{name} is to be a number of bytes"):
        Budgets(**{name: wrong})


def test_an_engine_goes_on_where_nothing_can_be_kept(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = OuterCache(lambda: IDENTITY, SIZE, Budgets(0, MIB, tmp_path / "file"))
    assert cache.wait_open(10)
    blocks = blocks_of("a", 3)
    assert cache.store(blocks, targets(3)) == [False] * 3
    assert loaded(cache, blocks) == ["missing"] * 3
    cache.close(1)
    assert "blocks are not kept" in caplog.text
