"""ForewordTier inside vLLM's own offloading manager, with memory in place of a model's KV.

Whatever befalls the store: what is hit has the bytes that were stored, nothing waits for long, and
vLLM's bookkeeping comes to rest.
"""

import time
import warnings
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

from foreword.plugins import outer
from foreword.store import patience
from foreword.store.disk import DiskStore
from foreword.store.faults import Fault, FaultyStore
from vllm_tiering import CHUNK, Engine, counted, engine_of, evict, keys_of

MIB = 1 << 20


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def start(tmp_path, weights, monkeypatch):
    """start(num_chunks, **settings): an engine; `engine` another one's configuration."""
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    engines = []

    def make(num_chunks=32, engine=None, dtype="bfloat16", groups=1, **settings):
        budget = {"disk_bytes": 16 * MIB, "disk_folder": str(tmp_path / "kv")}
        vllm_config = engine or engine_of(weights)
        engines.append(Engine(vllm_config, num_chunks, budget | settings, dtype, groups))
        return engines[-1]

    yield make
    for engine in engines:
        with suppress(ValueError):  # closed by the test
            engine.close()


def test_evicted_chunks_are_promoted(start):
    engine = start()
    keys = keys_of("a", 20)
    engine.store(keys)
    assert engine.restore(keys) == (20, {CacheHitSource.HOST})
    evict(engine)
    assert engine.restore(keys) == (20, {CacheHitSource.DISK})


def test_chunks_outlive_the_engine(start):
    keys = keys_of("a", 20)
    first = start()
    first.store(keys)
    first.close()
    assert start().restore(keys) == (20, {CacheHitSource.DISK})


def test_two_engines_share_one_folder(start):
    first, second = start(), start()
    keys = keys_of("a", 20)
    first.store(keys)
    assert second.tier._cache.probe([]).result(5) == []
    assert second.restore(keys)[0] == 20
    second.store(keys + keys_of("b", 4))
    assert counted(second) == {"loaded": 20, "stored": 4}


def test_groups_are_chains_of_their_own(start):
    engine = start(groups=2)
    keys = [key for at in range(8) for key in (keys_of("a", 8)[at], keys_of("a", 8, 1)[at])]
    engine.store(keys)
    evict(engine)
    assert engine.restore(keys)[0] == 16


@pytest.mark.parametrize(
    "other", ["weights", "dtype", "revision of quantisation", "lora", "layout"]
)
def test_what_differs_is_not_shared(start, weights, tmp_path, other):
    keys = keys_of("a", 8)
    first = start()
    first.store(keys)
    first.close()
    engine, settings, dtype = engine_of(weights), {}, "bfloat16"
    if other == "weights":
        (weights / "model.safetensors").write_bytes(b"others")
    elif other == "dtype":
        dtype = "fp8_e4m3"
    elif other == "lora":
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
        engine = engine_of(weights, lora=object())
        settings = {"lora_folders": [str(tmp_path / "adapter")]}
    elif other == "layout":
        engine.model_config.get_head_size = lambda: 16
    else:
        engine.model_config.quantization = "fp8"
    second = start(engine=engine, dtype=dtype, **settings)
    assert second.restore(keys)[0] == 0
    second.store(keys)
    second.close()
    again = start(engine=engine, dtype=dtype, **settings)
    assert again.restore(keys)[0] == 8, "with the same, they are found"


def test_adapters_that_nobody_named_are_for_one_process(start, weights):
    keys = keys_of("a", 8)
    first = start(engine=engine_of(weights, lora=object()))
    first.store(keys)
    evict(first)
    assert first.restore(keys)[0] == 8
    first.close()
    assert start(engine=engine_of(weights, lora=object())).restore(keys)[0] == 0


def test_an_adapter_is_known_by_its_configuration_too(start, weights, tmp_path):
    """Which says how much its weights count."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    keys, folders = keys_of("a", 8), [str(adapter)]
    for alpha, num_found in ((16, 0), (16, 8), (32, 0)):
        (adapter / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
        engine = start(engine=engine_of(weights, lora=object()), lora_folders=folders)
        assert engine.restore(keys)[0] == num_found
        engine.store(keys)
        engine.close()


def test_a_chunk_is_found_whatever_is_known_of_those_before_it(start):
    engine = start()
    keys = keys_of("a", 8)
    engine.store(keys)
    evict(engine)
    assert engine.restore(keys[4:])[0] == 4
    assert counted(engine)["loaded"] == 4
    assert "lost" not in counted(engine)


def test_after_a_reset_nothing_older_is_used(start):
    """vLLM resets its caches when weights were changed in memory."""
    engine = start()
    keys = keys_of("a", 8)
    engine.store(keys)
    engine.manager.reset_cache()
    assert engine.restore(keys)[0] == 0
    engine.store(keys)
    evict(engine)
    assert engine.restore(keys)[0] == 8


def test_a_prompt_says_how_much_of_it_is_kept(start):
    engine = start()
    keys = keys_of("a", 8)
    engine.store(keys, {"foreword_keep_tokens": 5 * CHUNK + 3})
    evict(engine)
    assert engine.restore(keys)[0] == 5


def test_a_prompt_longer_than_the_cpu_tier(start):
    keys = keys_of("a", 30)
    first = start(num_chunks=64)
    first.store(keys)
    first.close()
    second = start(num_chunks=8)
    assert second.restore(keys)[0] == 8
    assert counted(second) == {"loaded": 8}


@contextmanager
def faulty(monkeypatch, fault, rate=1.0):
    stores = []

    def make(*args):
        stores.append(FaultyStore(DiskStore(*args), fault, rate=rate, delay_s=0.02))
        return stores[-1]

    with monkeypatch.context() as patch:
        patch.setattr(outer, "DiskStore", make)
        yield stores
    for store in stores:
        store.release()


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.HANG])
def test_a_fault_is_a_miss(start, monkeypatch, fault, rate):
    monkeypatch.setattr(patience, "PAUSE_S", (0.05, 0.05))
    with faulty(monkeypatch, fault, rate) as stores:
        engine = start()
        for name in ("a", "b", "c"):
            keys = keys_of(name, 20)
            engine.store(keys)
            evict(engine)
            hits, _ = engine.restore(keys)
            assert hits <= 20
            engine.store(keys)
        assert stores[0].num_faults
        if fault is Fault.CRASH:
            return  # for good
        stores[0]._rate = 0.0  # sound again
        time.sleep(0.1)
        for _ in range(3):  # damage shows when it is read, and is mended when it is computed
            engine.store(keys)
            evict(engine)
            engine.restore(keys)
        assert engine.restore(keys)[0] == 20


def test_a_store_that_hangs_delays_nothing_for_long(start, monkeypatch):
    monkeypatch.setattr(outer, "LOAD_S", 0.1)
    monkeypatch.setattr(patience, "PAUSE_S", (0.05, 0.05))
    keys = keys_of("a", 20)
    first = start()
    first.store(keys)
    first.close()
    with faulty(monkeypatch, Fault.HANG) as stores:
        engine = start()
        begin = time.monotonic()
        assert engine.restore(keys)[0] == 0
        assert time.monotonic() - begin < 1
        for at in range(20):  # what cannot be written is dropped, and pins nothing
            context = engine.request(keys_of(f"{at}", 30))
            assert engine.manager.prepare_store(keys_of(f"{at}", 30), context) is not None
            engine.manager.complete_store(keys_of(f"{at}", 30), context)
            engine.manager.on_request_finished(context)
            engine.rest()
        assert time.monotonic() - begin < 5
        stores[0].release()
        assert engine.tier._cache.flush(10)
    time.sleep(0.1)
    engine.store(keys)
    evict(engine)
    assert engine.restore(keys)[0] == 20


def test_without_a_configuration_to_read_nothing_is_started(weights):
    from foreword.plugins.vllm import ForewordTier

    with pytest.raises(LookupError):
        ForewordTier(
            SimpleNamespace(config=SimpleNamespace(groups=(), cache=None), tokens_per_block=()),
            memoryview(bytearray(8192)).cast("B", (1, 8192)),
            "ForewordTier",
        )


@pytest.mark.parametrize(
    "settings", [{"disk": "10GiB"}, {"disk_bytes": "10GiB"}, {"host_bytes": -1}]
)
def test_a_wrong_setting_is_said_at_the_start(start, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        start(**settings)


def test_random_weights_are_refused_and_vllm_goes_on(start, weights, caplog):
    engine = engine_of(weights)
    engine.load_config.load_format = "dummy"
    keys = keys_of("a", 8)
    running = start(engine=engine)
    running.store(keys)
    evict(running)
    assert running.restore(keys)[0] == 0
