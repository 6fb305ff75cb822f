"""What the device evicts comes back from the tiers, exactly; a fault of theirs is a miss."""

import asyncio
import shutil
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import randbytes

import pytest
import torch

from foreword.cli.measure import ask
from foreword.cli.verify import RecordingEngine
from foreword.core.block import BlockHash
from foreword.core.errors import EngineBusy
from foreword.core.place import PLACEMENTS
from foreword.core.request import Hints, Request, SamplingParams
from foreword.engine import engine as engine_module
from foreword.engine import tiers as tiers_module
from foreword.engine.settings import EngineSettings
from foreword.store.codec import check
from foreword.store.faults import Fault, FaultyStore
from tiny import make_tiny

SAMPLING = SamplingParams(6, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i + 31 * k) % 500 for i in range(200)] for k in range(3)]
ROOM = 1 << 24  # bytes: for all of them


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def settings(request, tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiers") / "model", "llama")
    plain = EngineSettings(str(folder), dtype=request.param, num_threads=2, max_model_len=256)
    return replace(plain, kv_bytes=_bytes_for(plain, 16))


def _bytes_for(settings, num_blocks):
    engine = RecordingEngine.load(settings)
    return num_blocks * engine.model.block_bytes(16)


@asynccontextmanager
async def serving(settings):
    engine = RecordingEngine.load(settings)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(5.0)
        assert engine.cache.pool.num_leased == 0


def logits(engine):
    return torch.stack([row for rows in engine.logits.values() for row in rows])


async def answers(engine, prompts):
    """Texts and logits; the tiers have time to write between."""
    texts = []
    for prompt in prompts:
        texts.append((await ask(engine, prompt, SAMPLING)).token_ids)
        await written(engine)
    return texts


async def written(engine):
    """Wait until all cells that wait to be written are."""
    for lane in engine.transfer.lanes:
        while lane.outbound.num_free < lane.outbound.num_cells:
            await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def truth(settings):
    async def work():
        async with serving(replace(settings, prefix_caching=False)) as engine:
            return await answers(engine, PROMPTS * 2), logits(engine), engine.exact

    return asyncio.run(work())


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is, nothing is late where a test is not about that."""
    monkeypatch.setattr("foreword.engine.transfer.LOAD_S", 30.0)
    monkeypatch.setattr("foreword.engine.transfer.PROBE_S", 30.0)


def check_counts(engine, num_prompts):
    stats = engine.stats
    restored = sum(tier.num_hit_tokens for tier in stats.tiers)
    assert 0 < restored <= stats.num_hit_tokens
    assert stats.num_hit_tokens + stats.num_miss_tokens == 200 * num_prompts
    assert stats.num_prefilled_tokens == stats.num_miss_tokens


def same_bits(engine, truth):
    expected, exact = truth[1:]
    assert not exact or torch.equal(logits(engine), expected)


@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")])
def test_what_the_device_evicts_comes_back(settings, truth, tmp_path, tiers):
    sizes = {f"{name}_bytes": ROOM for name in tiers}

    async def work():
        async with serving(replace(settings, disk_folder=tmp_path / "kv", **sizes)) as engine:
            assert await answers(engine, PROMPTS * 2) == truth[0]
            check_counts(engine, 6)
            by_tier = {tier.name: tier.num_hit_tokens for tier in engine.stats.tiers}
            assert by_tier[tiers[0]] >= 300, "the fastest that has them gives them"
            same_bits(engine, truth)

    asyncio.run(work())


@pytest.mark.parametrize("store", [name for name in PLACEMENTS if name != "gain"])
def test_whatever_goes_below_the_answers_are_the_same(settings, truth, tmp_path, store):
    """`gain` is the default of all other tests. On the second round all are stored; the third has
    to find them."""
    more = replace(settings, store=store, disk_bytes=ROOM, disk_folder=tmp_path / "kv")

    async def work():
        async with serving(more) as engine:
            texts = await answers(engine, PROMPTS * 2)
            assert texts == truth[0]
            same_bits(engine, truth)
            assert await answers(engine, PROMPTS) == texts[:3]
            [disk] = engine.stats.tiers
            # What is used again before it is evicted is nothing here, so nothing is a second use.
            assert (disk.num_hit_tokens > 0) == (store != "on-second-use")

    asyncio.run(work())


def test_hints_change_where_kv_is_kept_and_no_answer(settings, truth, tmp_path):
    on_disk = replace(settings, disk_bytes=ROOM, disk_folder=tmp_path / "kv")
    prompt = PROMPTS[0]

    async def asked(engine, **hints):
        request = Request("hinted", tuple(prompt), SAMPLING, hints=Hints(**hints))
        outputs = [output async for output in engine.generate(request)]
        await written(engine)
        assert tuple(t for o in outputs for t in o.token_ids) == tuple(truth[0][0])
        return outputs[0].num_cached_tokens

    async def work():
        async with serving(on_disk) as engine:
            assert await asked(engine, cacheable=False) == 0
            assert await asked(engine, cacheable=False) == 0, "nobody reuses it"
            assert await asked(engine, max_offload_tokens=70) == 0
            assert await asked(engine, cacheable=False) == 199, "it may reuse what others left"
            [disk] = engine.stats.tiers
            assert disk.num_stored_blocks == 70 // 16
        async with serving(on_disk) as engine:
            assert await asked(engine, prompt_cache_key="a", ttl_s=5.0, num_stable_tokens=99) == 64

    asyncio.run(work())


def test_a_restart_finds_what_the_disk_has(settings, truth, tmp_path):
    on_disk = replace(settings, disk_bytes=ROOM, disk_folder=tmp_path / "kv")

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, PROMPTS)
        async with serving(on_disk) as engine:
            assert await answers(engine, PROMPTS * 2) == truth[0]
            assert engine.stats.num_prefilled_tokens <= 6 * 16
            check_counts(engine, 6)
            same_bits(engine, truth)
        async with serving(replace(on_disk, max_model_len=200)) as engine:
            salted = await ask(engine, PROMPTS[0][:190], SAMPLING, salt="another tenant")
            assert salted.num_cached_tokens == 0

    asyncio.run(work())


def test_a_cleared_cache_is_cleared_below(settings, tmp_path):
    on_disk = replace(settings, disk_bytes=ROOM, host_bytes=ROOM, disk_folder=tmp_path / "kv")

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, PROMPTS)
            assert await engine.clear_cache()
            again = await ask(engine, PROMPTS[0], SAMPLING)
            assert again.num_cached_tokens == 0

    asyncio.run(work())


@pytest.fixture
def faulty(monkeypatch):
    """Lets a fault befall the tiers of engines that are loaded from now on."""
    stores = []

    def install(fault, rate):
        def open_stores(*args):
            opened = tiers_module.open_stores(*args)
            stores[:] = [FaultyStore(store, fault, rate=rate) for store in opened]
            return list(stores)

        monkeypatch.setattr(RecordingEngine, "stores_of", staticmethod(open_stores))
        return stores

    return install


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.HANG])
def test_a_fault_is_a_miss(settings, truth, faulty, tmp_path, fault, tier):
    sizes = {f"{tier}_bytes": ROOM}
    stores = faulty(fault, rate=0.3)

    async def work():
        async with serving(replace(settings, disk_folder=tmp_path / "kv", **sizes)) as engine:
            assert await answers(engine, PROMPTS * 2) == truth[0]
            assert stores[0].num_faults
            same_bits(engine, truth)
            lost = engine.stats.tiers[0].lost
            if fault in (Fault.FLIP, Fault.SWAP, Fault.TEAR, Fault.STALE, Fault.TRUNCATE):
                assert lost.get("damaged") or lost.get("missing")

    asyncio.run(work())


def test_what_is_overwritten_while_it_is_lent_is_a_miss(settings, truth, faulty, monkeypatch):
    """Verified where it lies; then, before the engine copies it, another record takes its slot."""
    stores = faulty(Fault.DELAY, rate=0.0)
    num_overwritten = 0

    def check_and_overwrite(record, key):
        nonlocal num_overwritten
        check(record, key)
        if key.position in (2, 7):
            stores[0].delete([key.block_hash])
            other = replace(key, block_hash=BlockHash(randbytes(32)))
            stores[0].put([other], [memoryview(b"\x7f" * len(record))])
            num_overwritten += 1

    monkeypatch.setattr("foreword.store.store.check", check_and_overwrite)

    async def work():
        async with serving(replace(settings, host_bytes=ROOM)) as engine:
            assert await answers(engine, PROMPTS * 2) == truth[0]
            assert 0 < num_overwritten == engine.stats.tiers[0].lost["missing"]
            check_counts(engine, 6)
            same_bits(engine, truth)

    asyncio.run(work())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_hangs_delays_nobody_beyond_its_deadline(
    settings, truth, faulty, tmp_path, tier, monkeypatch
):
    monkeypatch.setattr("foreword.engine.transfer.LOAD_S", 0.3)
    stores = faulty(Fault.DELAY, rate=0.0)
    on_tier = replace(settings, disk_folder=tmp_path / "kv", **{f"{tier}_bytes": ROOM})

    async def work():
        async with serving(on_tier) as engine:
            await answers(engine, PROMPTS)
            stores[0]._fault, stores[0]._rate = Fault.HANG, 1.0
            begin_s = time.monotonic()
            other = asyncio.create_task(ask(engine, PROMPTS[0], SAMPLING))
            await asyncio.sleep(0.05)
            left = asyncio.create_task(one(engine, PROMPTS[1]))
            await asyncio.sleep(0.05)
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
            reply = await other
            assert reply.token_ids == truth[0][0]
            assert time.monotonic() - begin_s < 8.0, "the read hangs for ever"
            # The next one is not delayed: the tier is left alone.
            lane, late = engine.transfer.lanes[0], engine.stats.tiers[0].lost["late"]
            await ask(engine, PROMPTS[2][:150], SAMPLING)
            assert engine.stats.tiers[0].lost["late"] == late > 0
            assert not list(lane.reads)
            stores[0].release()
            for _ in range(200):
                await asyncio.sleep(0.01)
                await ask(engine, PROMPTS[2][:20], SAMPLING)
                if engine.cache.lower.tiers[0].reads:
                    break
            assert lane.inbound.num_free == lane.inbound.num_cells, "all staging came back"
            await answers(engine, PROMPTS)
            again = await ask(engine, PROMPTS[0], SAMPLING)
            assert again.num_cached_tokens >= 180
            assert again.token_ids == truth[0][0]

    asyncio.run(work())


async def one(engine, prompt):
    async for _ in engine.generate(Request("left", tuple(prompt), SAMPLING)):
        pass


def test_a_hung_load_does_not_wait_for_who_decodes(settings, truth, faulty, tmp_path, monkeypatch):
    monkeypatch.setattr("foreword.engine.transfer.LOAD_S", 0.2)
    stores = faulty(Fault.DELAY, rate=0.0)
    on_disk = replace(
        settings, disk_folder=tmp_path / "kv", disk_bytes=ROOM, kv_bytes=2 * settings.kv_bytes
    )

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, [*PROMPTS, [3] * 200, [4] * 200, [5] * 200])
            stores[0]._fault, stores[0]._rate = Fault.HANG, 1.0
            long = Request("long", (9, 8, 7), SamplingParams(200, temperature=0, ignore_eos=True))
            decoding = asyncio.create_task(all_of(engine, long))
            await asyncio.sleep(0.05)
            reply = await ask(engine, PROMPTS[0], SAMPLING)
            assert not decoding.done(), "the other one decodes still"
            assert reply.token_ids == truth[0][0]
            assert engine.stats.tiers[0].lost["late"] > 0
            stores[0].release()
            await decoding

    asyncio.run(work())


async def all_of(engine, request):
    return [output async for output in engine.generate(request)]


def test_a_folder_that_goes_away_costs_its_blocks_and_no_request(settings, truth, tmp_path):
    on_disk = replace(settings, disk_folder=tmp_path / "kv", disk_bytes=ROOM)

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, PROMPTS)
            shutil.rmtree(tmp_path / "kv")
            engine.transfer.lanes[0].store.recount_s = 0.0
            for _ in range(3):
                assert await answers(engine, PROMPTS) == truth[0][:3]
                engine.transfer.lanes[0].next_tend_s = 0.0
            assert engine.is_serving

    asyncio.run(work())


def test_a_clear_is_done_when_the_tiers_have_forgotten(settings, faulty, tmp_path):
    stores = faulty(Fault.DELAY, rate=0.0)
    on_disk = replace(settings, disk_bytes=ROOM, disk_folder=tmp_path / "kv")

    async def work():
        async with serving(on_disk) as engine:
            stores[0]._rate, stores[0]._delay_s = 1.0, 0.05
            for _ in range(4):
                await ask(engine, PROMPTS[0], SAMPLING)
                assert await engine.clear_cache()
                assert (await ask(engine, PROMPTS[0], SAMPLING)).num_cached_tokens == 0
                assert await engine.clear_cache()

    asyncio.run(work())


def test_a_clear_that_a_tier_does_not_answer_says_so(settings, faulty, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "CLEAR_S", 0.2)
    stores = faulty(Fault.DELAY, rate=0.0)
    on_disk = replace(settings, disk_bytes=ROOM, disk_folder=tmp_path / "kv")

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, PROMPTS)
            stores[0]._fault, stores[0]._rate = Fault.HANG, 1.0
            with pytest.raises(EngineBusy, match="a tier does not answer"):
                await engine.clear_cache()
            stores[0].release()

    asyncio.run(work())


def test_a_smaller_budget_holds_from_the_start(settings, tmp_path):
    on_disk = replace(settings, disk_folder=tmp_path / "kv", disk_bytes=ROOM)

    async def work():
        async with serving(on_disk) as engine:
            await answers(engine, PROMPTS)
            num_blocks = engine.cache.lower.tiers[0].num_blocks
        async with serving(replace(on_disk, disk_bytes=ROOM // 64)) as engine:
            [tier] = engine.cache.lower.tiers
            assert tier.num_blocks <= tier.capacity < num_blocks
            for _ in range(100):
                await asyncio.sleep(0.02)
                engine.transfer.lanes[0].next_tend_s = 0.0
                await ask(engine, [1, 2, 3], SamplingParams(1))
                size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").iterdir())
                if size <= ROOM // 64:
                    break
            assert size <= ROOM // 64

    asyncio.run(work())
