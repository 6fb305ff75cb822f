"""SGLang 0.5.23's own storage factory and host pools with our store below, as
its documentation has them called: `make test-engines`."""

import json
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("sglang"):
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import torch
from prometheus_client import REGISTRY

from sglang_parts import (
    NO_KEYS,
    PAGE,
    can_make_keys,
    cut,
    damage,
    device_pool,
    disk,
    extra_config,
    fill,
    flip,
    host_pool,
    ours,
    page_keys,
    patient,
    storage,
    without_kernels,
    write_model,
    written,
)

with without_kernels():
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageExtraInfo,
        HiCacheStorageFailureInjector,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

if not can_make_keys():
    pytest.skip(NO_KEYS, allow_module_level=True)

TOKENS = list(range(12 * PAGE))
KEYS = page_keys(TOKENS)
SLOTS = torch.arange(len(TOKENS))
CHAIN = HiCacheStorageExtraInfo(prefix_keys=[])
Make = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder: nothing here reads the weights but to tell them from others."""
    return write_model(tmp_path / "model")


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(pool, **config): a backend over a host pool, opened, on this test's folder."""
    patient(monkeypatch)
    made = []

    def start(pool: Any, model: Path = model, **config: Any) -> Any:
        extra = extra_config(tmp_path / "kv", **config.pop("extra", {}))
        backend = storage(pool, model, extra, **config)
        made.append(backend)
        assert all(pages.cache.wait_open(10) for pages in ours(backend)._pages.values())
        return backend

    yield start
    for backend in made:
        backend.close()


def same(pool: Any, other: Any, num_pages: int) -> bool:
    pages = range(0, num_pages * PAGE, PAGE)
    return all(raw(pool, start) == raw(other, start) for start in pages)


def raw(pool: Any, start: int) -> bytes:
    page: torch.Tensor = pool.get_data_page(start)
    return page.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_come_back_as_they_were(make: Make, layout: str) -> None:
    pool, other = host_pool(layout=layout), host_pool(layout=layout)
    fill(pool, 1)
    first = make(pool)
    assert first.batch_exists(KEYS, CHAIN) == 0
    assert first.batch_set_v1(KEYS, SLOTS, CHAIN) == [True] * 12
    written(first)
    first.close()
    second = make(other)
    assert second.batch_exists([*KEYS, "more"], CHAIN) == 12
    assert second.batch_get_v1(KEYS, SLOTS, CHAIN) == [True] * 12
    assert same(pool, other, 12)
    assert disk(second).num_loaded_blocks == 12
    (pages,), (speed,) = (lambda s: (s.prefetch_pgs, s.prefetch_bandwidth))(second.get_stats())
    assert pages == 12
    assert speed > 0
    assert second.get_stats().prefetch_pgs == []


def test_a_later_turn_goes_on_below_an_earlier_one(make: Make) -> None:
    pool = host_pool()
    fill(pool, 2)
    backend = make(pool)
    assert all(backend.batch_set_v1(KEYS[:5], SLOTS[: 5 * PAGE], CHAIN))
    after = HiCacheStorageExtraInfo(prefix_keys=KEYS[:5])
    assert all(backend.batch_set_v1(KEYS[5:], SLOTS[5 * PAGE :], after))
    written(backend)
    assert backend.batch_exists(KEYS[5:], after) == 7
    fresh = host_pool()
    backend.register_mem_pool_host(fresh)
    assert backend._pages["kv"].cache.wait_open(10)
    assert backend.batch_get_v1(KEYS, SLOTS, CHAIN) == [True] * 12
    assert same(pool, fresh, 12)


def test_the_calls_without_indices(make: Make) -> None:
    pool = host_pool()
    fill(pool, 3)
    backend = make(pool, extra={"interface_v1": 0})
    pages = [pool.get_data_page(at * PAGE) for at in range(12)]
    targets = [pool.get_dummy_flat_data_page() for _ in KEYS]
    assert backend.get(KEYS[0], targets[0]) is None
    assert backend.set(KEYS[0], pages[0])
    assert backend.batch_set(KEYS, pages)
    written(backend)
    assert backend.exists(KEYS[0])
    assert not backend.exists("other")
    assert backend.batch_exists(KEYS, CHAIN) == 12
    found = backend.batch_get(KEYS, targets)
    assert [page is target for page, target in zip(found, targets, strict=True)] == [True] * 12
    assert [page.view(torch.uint8).tolist() for page in found] == [
        page.view(torch.uint8).tolist() for page in pages
    ]
    assert backend.get(KEYS[3]).view(torch.uint8).tolist() == pages[3].view(torch.uint8).tolist()
    assert backend.get(KEYS[3], targets[0][1:]) is None  # not a page's size
    assert not backend.set("odd", pages[0][1:])


def test_the_same_size_page_of_another_dtype_is_a_miss(make: Make, tmp_path: Path) -> None:
    half, quarter = host_pool(torch.bfloat16), host_pool(torch.float8_e4m3fn)
    pages = half.get_dummy_flat_data_page(), quarter.get_dummy_flat_data_page()
    assert pages[0].nbytes == pages[1].nbytes
    fill(half, 4)
    first = make(half)
    assert all(first.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(first)
    first.close()
    second = make(quarter)
    assert second.batch_exists(KEYS, CHAIN) == 0
    assert second.batch_get_v1(KEYS, SLOTS, CHAIN) == [False] * 12
    records = (tmp_path / "kv").glob("identity-*.json")
    assert {json.loads(path.read_text())["dtype"] for path in records} == {"bfloat16", "uint8"}
    # SGLang's own file backend, given the same two pools.
    files = {"file_storage_path": str(tmp_path / "file")}
    theirs = storage(half, tmp_path / "model", files, backend="file")
    assert theirs.set(KEYS[0], half.get_data_page(0))
    theirs = storage(quarter, tmp_path / "model", files, backend="file")
    wrong = theirs.get(KEYS[0], quarter.get_dummy_flat_data_page())
    assert wrong.view(torch.uint8).numpy().tobytes() == raw(half, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "page_first"},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2},
        {"weights": b"others"},
        {"config": "{}"},
    ],
    ids=str,
)
def test_what_else_makes_other_pages(make: Make, model: Path, change: dict[str, Any]) -> None:
    pool = host_pool()
    fill(pool, 5)
    first = make(pool)
    assert all(first.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(first)
    first.close()
    layout = change.pop("layout", "layer_first")
    if "weights" in change:  # under the same name
        (model / "model.safetensors").write_bytes(change.pop("weights"))
    if "config" in change:
        (model / "config.json").write_text(change.pop("config"))
    second = make(host_pool(layout=layout), **change)
    assert second.batch_exists(KEYS, CHAIN) == 0
    assert not any(second.batch_get_v1(KEYS, SLOTS, CHAIN))


def test_ranks_share_the_latents_of_mla(make: Make) -> None:
    """SGLang lets the first rank alone store them. What kind of pool it is, is all that counts."""
    from foreword.plugins.sglang.model import _parallel

    first, second = (
        make(host_pool(), tp_size=2, tp_rank=rank, is_mla_model=True)._config for rank in (0, 1)
    )
    latents = device_pool()  # no pool of heads
    assert _parallel(first, "kv", latents) == _parallel(second, "kv", latents)
    assert _parallel(first, "mamba", latents) != _parallel(second, "mamba", latents)
    assert _parallel(first, "draft", host_pool()) != _parallel(second, "draft", host_pool())


@pytest.mark.parametrize("fault", [cut, flip])
def test_a_damaged_page_is_a_miss_and_heals_at_the_next_set(
    make: Make, tmp_path: Path, fault: Callable[[bytearray, int], None]
) -> None:
    pool, other = host_pool(), host_pool()
    fill(pool, 6)
    backend = make(pool)
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    damage(tmp_path / "kv", raw(pool, 11 * PAGE), fault)
    fill(other, 7)
    before = raw(other, 11 * PAGE)
    ours(backend)._pages["kv"].pool = other
    assert backend.batch_get_v1(KEYS, SLOTS, CHAIN) == [True] * 11 + [False]
    assert same(pool, other, 11)
    assert raw(other, 11 * PAGE) == before  # nothing unverified went into the pool
    assert disk(backend).lost == {"damaged": 1}
    written(backend)
    assert backend.batch_exists(KEYS, CHAIN) == 11
    ours(backend)._pages["kv"].pool = pool
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    ours(backend)._pages["kv"].pool = other
    assert backend.batch_exists(KEYS, CHAIN) == 12
    assert all(backend.batch_get_v1(KEYS, SLOTS, CHAIN))
    assert same(pool, other, 12)


def test_two_pages_swapped_on_disk_are_two_misses(make: Make, tmp_path: Path) -> None:
    pool = host_pool()
    fill(pool, 9)
    backend = make(pool)
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    one, two = raw(pool, 3 * PAGE), raw(pool, 4 * PAGE)

    def swap(content: bytearray, at: int) -> None:
        there = content.find(two)
        first, second = slice(at - 192, at + len(one)), slice(there - 192, there + len(two))
        content[first], content[second] = content[second], content[first]

    damage(tmp_path / "kv", one, swap)
    assert backend.batch_get_v1(KEYS, SLOTS, CHAIN) == [True] * 3 + [False] * 9
    assert backend.batch_exists(KEYS, CHAIN) == 3


def test_sglangs_delay_and_failure_injector(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool, other = host_pool(), host_pool()
    fill(pool, 10)
    backend = make(pool)
    assert isinstance(backend, HiCacheStorageFailureInjector)
    num_calls = num_whole = 0
    for at in range(12):
        after = HiCacheStorageExtraInfo(prefix_keys=KEYS[:at])
        slots = SLOTS[at * PAGE : (at + 1) * PAGE]
        while backend.batch_set_v1(KEYS[at : at + 1], slots, after) != [True]:
            num_calls += 1
    written(backend)
    ours(backend)._pages["kv"].pool = other
    for _ in range(40):
        found = backend.batch_exists(KEYS, CHAIN)
        loaded = backend.batch_get_v1(KEYS, SLOTS, CHAIN)
        assert found in (0, 12)
        assert loaded in ([False] * 12, [True] * 12)
        num_calls += 1
        if all(loaded):
            num_whole += 1
            assert same(pool, other, 12)
    assert 0 < num_whole < 40


def test_side_pools_by_sglangs_two_rules(make: Make) -> None:
    """A pool of every page, and one that keeps a window of two pages where nodes end."""
    kv, index, window = host_pool(), host_pool(), host_pool()
    for seed, pool in enumerate((kv, index, window)):
        fill(pool, 20 + seed)
    backend = make(kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    backend.register_mem_host_pool_v2(index, PoolName.INDEXER)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    for pages in backend._pages.values():
        assert pages.cache.wait_open(10)
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    every = PoolTransfer(name=PoolName.INDEXER, host_indices=SLOTS[: 10 * PAGE], keys=KEYS[:10])
    moved = backend.batch_set_v2([every], CHAIN)
    assert moved == {PoolName.INDEXER: [True] * 10}
    trailing = PoolHitPolicy.TRAILING_PAGES
    for end in (6, 9, 12):
        tail = PoolTransfer(
            name=PoolName.SWA,
            host_indices=SLOTS[(end - 2) * PAGE : end * PAGE],
            keys=KEYS[end - 2 : end],
            hit_policy=trailing,
        )
        before = HiCacheStorageExtraInfo(prefix_keys=KEYS[: end - 2])
        assert backend.batch_set_v2([tail], before) == {PoolName.SWA: [True, True]}
    written(backend)
    asked = [
        PoolTransfer(name=PoolName.INDEXER, keys=KEYS),
        PoolTransfer(name=PoolName.SWA, keys=KEYS[-2:], hit_policy=trailing),
    ]
    result = backend.batch_exists_v2(KEYS, asked, CHAIN)
    assert result.kv_hit_pages == 9
    assert result.restorable_prefix_pages == [6, 9]
    assert result.extra_pool_hit_pages == {"kv": 12, "indexer": 10, "swa": 12}
    fresh = host_pool()
    backend._pages["swa"].pool = fresh
    asked[1].keys, asked[1].host_indices = KEYS[7:9], SLOTS[7 * PAGE : 9 * PAGE]
    assert backend.batch_get_v2(asked[1:], CHAIN) == {PoolName.SWA: [True, True]}
    assert raw(fresh, 8 * PAGE) == raw(window, 8 * PAGE)
    missing = PoolTransfer(name=PoolName.MAMBA, host_indices=SLOTS[:PAGE], keys=KEYS[:1])
    assert backend.batch_get_v2([missing], CHAIN) == {PoolName.MAMBA: [False]}


def test_a_place_that_hangs_is_a_miss_in_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = host_pool()
    backend = make(pool)
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    (place,) = backend._pages["kv"].cache._places
    monkeypatch.setattr(place.store, "get", lambda *_: time.sleep(3))
    monkeypatch.setattr("foreword.plugins.outer.LOAD_S", 0.25)
    begin_s = time.monotonic()
    assert backend.batch_get_v1(KEYS, SLOTS, CHAIN) == [False] * 12
    assert time.monotonic() - begin_s < 2
    begin_s = time.monotonic()
    assert backend.batch_exists(KEYS, CHAIN) == 0  # left alone now
    assert time.monotonic() - begin_s < 1


def test_clear(make: Make) -> None:
    backend = make(host_pool())
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    backend.clear()
    written(backend)
    assert backend.batch_exists(KEYS, CHAIN) == 0


def test_a_budget_that_is_none_is_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(host_pool(), extra={"disk_byte": 1})
    assert "unknown in the extra config: disk_byte" in caplog.text
    with pytest.raises(ValueError, match="disk_bytes is to be a number of bytes"):
        make(host_pool(), extra={"disk_bytes": "10GiB"})


def test_two_servers_at_once_share_a_folder(make: Make) -> None:
    pool, other = host_pool(), host_pool()
    fill(pool, 11)
    first, second = make(pool), make(other)
    assert second.batch_exists(KEYS, CHAIN) == 0
    assert all(first.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(first)
    assert second.batch_exists(KEYS, CHAIN) == 12
    assert all(second.batch_get_v1(KEYS, SLOTS, CHAIN))
    assert same(pool, other, 12)


def test_counters_in_the_process_s_registry(make: Make) -> None:
    def shown(name: str) -> float:
        labels = {"pool": "kv", "tier": "disk"}
        name = f"foreword_kv_cache_offload_blocks_{name}_total"
        return REGISTRY.get_sample_value(name, labels) or 0.0

    backend = make(host_pool())
    backend.get_stats()
    before = shown("stored"), shown("loaded")
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    assert all(backend.batch_get_v1(KEYS, SLOTS, CHAIN))
    backend.get_stats()
    backend.get_stats()
    assert (shown("stored"), shown("loaded")) == (before[0] + 12, before[1] + 12)


def test_the_logical_pool_of_compressed_models(make: Make) -> None:
    """It has slots and no bytes: what counts is which pages there were."""
    backend = make(LogicalHostPool(64 * PAGE, PAGE))
    assert all(backend.batch_set_v1(KEYS, SLOTS, CHAIN))
    written(backend)
    assert backend.batch_exists([*KEYS, "more"], CHAIN) == 12
    assert all(backend.batch_get_v1(KEYS, SLOTS, CHAIN))
