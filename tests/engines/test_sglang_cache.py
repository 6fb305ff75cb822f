"""SGLang 0.5.23's own radix cache and cache controller, with their threads, over our store: backup,
evict, prefetch and load back on the CPU, without kernels and without a model. And what SGLang does
without us, where the difference is claimed."""

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("sglang"):
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import torch

from foreword.cli.engines import sglang_flags
from foreword.plugins.outer import Block
from sglang_parts import (
    NO_KEYS,
    PAGE,
    Server,
    can_make_keys,
    damage,
    disk,
    extra_config,
    fill,
    flip,
    host_pool,
    page_keys,
    patient,
    storage,
    without_kernels,
    write_model,
)

with without_kernels():
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.server_args import prepare_server_args

if not can_make_keys():
    pytest.skip(NO_KEYS, allow_module_level=True)

TOKENS = list(range(12 * PAGE))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    patient(monkeypatch)
    return write_model(tmp_path / "model")


def started(model: Path, extra: dict[str, Any], **sizes: Any) -> Server:
    server = Server(model, extra, **sizes)
    assert server.storage._pages["kv"].cache.wait_open(10)
    return server


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_through_sglangs_radix_cache_and_a_restart(model: Path, tmp_path: Path) -> None:
    """Backup, evict, prefetch, load back: SGLang's own controller and threads on both sides."""
    extra = extra_config(tmp_path / "kv")
    first = started(model, extra)
    kv = first.prefill(TOKENS, seed=1)
    turn = [*TOKENS[: 8 * PAGE], *range(5000, 5000 + 8 * PAGE)]
    assert first.until(lambda: disk(first.storage).num_stored_blocks == 12)
    after = first.prefill(turn, seed=2)
    longer = [torch.cat((a[: 8 * PAGE], b[8 * PAGE :])) for a, b in zip(kv, after, strict=True)]
    assert first.until(lambda: disk(first.storage).num_stored_blocks == 20)
    first.stop()

    second = started(model, extra)
    restored = second.restore(TOKENS)
    assert equal(restored, kv)
    assert disk(second.storage).num_loaded_blocks == 12
    restored = second.restore(turn)  # its first eight pages are on the device by now
    assert equal(restored, longer)
    assert disk(second.storage).num_loaded_blocks == 20
    second.stop()


def test_a_damaged_page_through_sglangs_radix_cache(model: Path, tmp_path: Path) -> None:
    """The prefix before it is restored; what is computed again is stored again, whole."""
    extra = extra_config(tmp_path / "kv")
    first = started(model, extra)
    kv = first.prefill(TOKENS, seed=3)
    assert first.until(lambda: disk(first.storage).num_stored_blocks == 12)
    first.stop()
    stored = torch.stack([layer[7 * PAGE : 8 * PAGE] for layer in kv])
    damage(tmp_path / "kv", stored.view(torch.uint8).numpy().tobytes(), flip)

    second = started(model, extra)
    restored = second.restore(TOKENS)
    assert [len(layer) for layer in restored] == [7 * PAGE] * 4
    assert all(torch.equal(a[: 7 * PAGE], b) for a, b in zip(kv, restored, strict=True))
    again = second.prefill(TOKENS, seed=4)
    assert second.until(lambda: disk(second.storage).num_stored_blocks >= 1)
    second.stop()
    third = started(model, extra)
    healed = third.restore(TOKENS)
    assert [len(layer) for layer in healed] == [12 * PAGE] * 4
    assert torch.equal(healed[0][7 * PAGE : 8 * PAGE], again[0][7 * PAGE : 8 * PAGE])
    third.stop()


@pytest.mark.parametrize(
    "more", [{}, {"interface_v1": 0}, {"hicache_storage_pass_prefix_keys": False}]
)
def test_what_is_evicted_comes_back(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """Room for 32 pages on the device, 65 in host memory; 120 are asked for, then asked for again,
    in each of the ways in which SGLang can be told to call a storage."""
    server = started(model, extra_config(tmp_path / "kv", **more), num_tokens=32 * PAGE)
    prompts = [list(range(1000 * at, 1000 * at + 12 * PAGE)) for at in range(10)]
    kv = []
    for at, prompt in enumerate(prompts):
        kv.append(server.prefill(prompt, seed=at))
        assert server.until(lambda at=at: disk(server.storage).num_stored_blocks == 12 * (at + 1))
    for prompt, expected in zip(prompts, kv, strict=True):
        assert equal(server.restore(prompt), expected)
    assert disk(server.storage).num_loaded_blocks >= 55
    assert disk(server.storage).lost == {}
    server.stop()


def test_requests_with_another_salt_or_adapter_find_nothing(model: Path, tmp_path: Path) -> None:
    """SGLang seeds its keys with both."""
    server = started(model, extra_config(tmp_path / "kv"))
    server.prefill(TOKENS, seed=1, cache_salt="one")
    assert server.until(lambda: disk(server.storage).num_stored_blocks == 12)
    server.stop()
    server = started(model, extra_config(tmp_path / "kv"))
    assert len(server.restore(TOKENS)[0]) == 0
    assert len(server.restore(TOKENS, cache_salt="two")[0]) == 0
    assert len(server.restore(TOKENS, cache_salt="one", extra_key="adapter")[0]) == 0
    assert len(server.restore(TOKENS, cache_salt="one")[0]) == 12 * PAGE
    server.stop()


def test_two_kinds_of_fp8_are_two_dtypes(model: Path, tmp_path: Path) -> None:
    """Nothing else differs: SGLang's pools call both uint8."""
    server = started(model, extra_config(tmp_path / "kv"), dtype=torch.float8_e4m3fn)
    server.prefill(TOKENS, seed=1)
    assert server.until(lambda: disk(server.storage).num_stored_blocks == 12)
    server.stop()
    server = started(model, extra_config(tmp_path / "kv"), dtype=torch.float8_e5m2)
    assert len(server.restore(TOKENS)[0]) == 0
    server.stop()
    one, two = (
        {**json.loads(path.read_text()), "attention": ""}
        for path in (tmp_path / "kv").glob("identity-*.json")
    )
    assert {one.pop("dtype"), two.pop("dtype")} == {"uint8 fp8_e4m3", "uint8 fp8_e5m2"}
    assert one == two


def test_other_weights_told_at_run_time_find_nothing(model: Path, tmp_path: Path) -> None:
    server = started(model, extra_config(tmp_path / "kv"))
    kv = server.prefill(TOKENS, seed=1)
    assert server.until(lambda: disk(server.storage).num_stored_blocks == 12)
    server.cache.reset()
    server.allocator.clear()
    assert equal(server.restore(TOKENS), kv)
    server.cache.reset()
    server.allocator.clear()
    server.name_weights("another version")
    assert len(server.restore(TOKENS)[0]) == 0
    server.stop()


def test_pages_of_the_weights_before_are_not_kept_as_those_after(
    model: Path, tmp_path: Path
) -> None:
    """SGLang names the weights first and flushes its caches then."""
    server = started(model, extra_config(tmp_path / "kv"))
    others = [token + 1 for token in TOKENS]
    server.prefill(TOKENS, seed=1)
    assert server.until(lambda: disk(server.storage).num_stored_blocks == 12)
    server.name_weights("another version")
    server.prefill(others, seed=2)
    server.cache.reset()
    server.allocator.clear()
    assert len(server.restore(others)[0]) == 0
    kv = server.prefill(TOKENS, seed=3)
    assert server.until(lambda: disk(server.storage).num_stored_blocks == 24)
    server.cache.reset()
    server.allocator.clear()
    assert equal(server.restore(TOKENS), kv)
    server.stop()


def test_sglangs_own_file_backend_keeps_the_truncated_page(model: Path, tmp_path: Path) -> None:
    """What the row of the README's table says of it: never served, and never mended."""
    pool = host_pool()
    fill(pool, 8)
    folder = tmp_path / "file"
    theirs = storage(pool, model, {"file_storage_path": str(folder)}, backend="file")
    assert theirs.set("page", pool.get_data_page(0))
    (path,) = folder.glob("*.bin")
    path.write_bytes(path.read_bytes()[:100])
    target = pool.get_dummy_flat_data_page()
    with pytest.raises(OSError, match="Short read"):
        theirs.get("page", target)
    assert theirs.set("page", pool.get_data_page(0))  # answers True
    with pytest.raises(OSError, match="Short read"):
        theirs.get("page", target)


def test_a_page_leaves_after_those_that_follow_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two calls, each of several steps, with room for less than what is stored."""
    monkeypatch.setattr("foreword.plugins.sglang.pages._STEP_BYTES", 40_000)  # four pages
    pool, other = host_pool(), host_pool()
    fill(pool, 30)
    backend = storage(pool, model, extra_config(tmp_path / "kv", disk_bytes=1 << 20))
    cache = backend._pages["kv"].cache
    assert cache.wait_open(10)
    for first in range(0, 12_000, 1000):
        keys = page_keys(range(first, first + 12 * PAGE))
        for start, stop in ((0, 5), (5, 12)):
            before = HiCacheStorageExtraInfo(prefix_keys=keys[:start])
            slots = torch.arange(start * PAGE, stop * PAGE)
            assert all(backend.batch_set_v1(keys[start:stop], slots, before))
            assert cache.flush(10)
        here = [cache.num_ready([Block(key.encode())]) for key in page_keys(range(12 * PAGE))]
        assert here == sorted(here, reverse=True)
    assert sum(here) < 12
    backend._pages["kv"].pool = other
    assert backend.batch_get_v1(keys, torch.arange(12 * PAGE)) == [True] * 12
    assert torch.equal(
        pool.kv_buffer[:, :, : 12 * PAGE].view(torch.uint8),
        other.kv_buffer[:, :, : 12 * PAGE].view(torch.uint8),
    )
    num_asked = sum(disk(backend).lost.values())
    assert not any(
        backend.batch_get_v1(page_keys(range(50_000, 50_000 + 12 * PAGE)), torch.arange(12 * PAGE))
    )
    assert sum(disk(backend).lost.values()) - num_asked <= 4  # the first step, no more
    backend.close()


def documented() -> list[str]:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "sglang.md"
    (command,) = re.findall(
        r"^python -m sglang\.launch_server (.*?)^```", guide.read_text(), re.M | re.S
    )
    return shlex.split(command.replace("\\\n", ""))


def printed() -> list[str]:
    return ["--model-path", "MODEL", *sglang_flags(None, 1 << 30, Path("~/kv"))]


@pytest.mark.parametrize("command", [documented, printed])
def test_flags_as_we_tell_them_load_the_backend(
    model: Path, command: Callable[[], list[str]]
) -> None:
    flags = command()
    flags[flags.index("MODEL")] = str(model)
    with without_kernels():
        args = prepare_server_args([*flags, "--device", "cpu"])
    assert args.enable_hierarchical_cache
    assert args.hicache_storage_backend == "dynamic"
    parse = HybridCacheController.parse_storage_backend_extra_config
    extra, *_, tells_prefixes = parse(args.hicache_storage_backend_extra_config)
    assert tells_prefixes
    assert extra["interface_v1"]
    del extra["disk_folder"]
    backend = storage(host_pool(), model, extra | {"disk_bytes": 0})
    assert type(backend).__name__ == "ForewordStorage"
    backend.close()
