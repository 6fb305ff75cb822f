"""What a server says its cache is worth: the figures are those of its own counts, and nobody reads
there what others asked."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import jsonschema_rs
import pytest

from echo import EchoEngine
from foreword.cli.main import main
from foreword.cli.measure import ask
from foreword.core.ghost import Outlook
from foreword.core.request import Hints, Request, SamplingParams
from foreword.core.worth import Balance, Supposed, WhatIf, Worth
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import EngineSettings
from foreword.server.openapi import page
from foreword.server.tenants import tenant_of
from serving import serving
from tiny import make_tiny

GREEDY = SamplingParams(4, temperature=0, ignore_eos=True)
NUM_BLOCKS = 16
PROMPTS = [[(7 * i + 31 * k) % 500 for i in range(201)] for k in range(3)]  # 12 blocks each


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("worth") / "model", "llama")
    plain = EngineSettings(str(folder), num_threads=2, max_model_len=256)
    block_bytes = TorchEngine.load(plain).model.block_bytes(16)
    return replace(plain, kv_bytes=NUM_BLOCKS * block_bytes)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("foreword.engine.transfer.LOAD_S", 30.0)
    monkeypatch.setattr("foreword.engine.transfer.PROBE_S", 30.0)


async def written(engine):
    for lane in engine.transfer.lanes:
        while lane.outbound.num_free < lane.outbound.num_cells or lane.done:
            await asyncio.sleep(0.001)


@contextmanager
def asked(settings, work):
    """An engine, on a loop of its own, of which `work` was asked before."""
    engine = TorchEngine.load(settings)
    engine.start()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(work(engine), loop).result(120)
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(5.0), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def shaped(name, body):
    """It is as the API's page says, and has nothing that the page does not name."""
    shapes = page(EchoEngine().card, asks_for_key=True)["components"]["schemas"]
    jsonschema_rs.validator_for({**shapes[name], "components": {"schemas": shapes}}).validate(body)
    assert body.keys() == shapes[name]["properties"].keys()


def test_what_is_said_is_what_was_found(settings, tmp_path, capsys):
    """Three prompts in turn, in a device that has room for one and a disk for all."""
    on_disk = replace(settings, disk_bytes=1 << 24, disk_folder=tmp_path / "kv")

    async def work(engine):
        for prompt in PROMPTS * 4:
            await ask(engine, prompt, GREEDY)
            await written(engine)

    with asked(on_disk, work) as engine, serving(engine) as url:
        found = httpx.get(f"{url}/cache/whatif", trust_env=False).json()
        shaped("WhatIf", found)
        stats, now = engine.stats, found["now"]
        (disk,) = stats.tiers
        assert found["asked_blocks"] == pytest.approx(12 * 12, rel=1e-2)
        assert found["sampled_1_in"] == 1
        from_disk = disk.num_hit_tokens / (12 * 12 * 16)
        assert now["by_place"]["disk"] == pytest.approx(from_disk, abs=0.01)
        assert now["hit_rate"] == pytest.approx(9 / 12, abs=0.01)  # all but the first time
        assert now["saved_s_per_day"] is not None
        assert found["load_block_s"]["disk"] > 0
        rows = {(row["place"], row["times"]): row for row in found["rows"]}
        assert rows["disk", 1.0]["hit_rate"] == pytest.approx(now["hit_rate"])
        assert rows["disk", 0.0]["hit_rate"] < 0.3
        assert rows["device", 4.0]["by_place"]["disk"] == pytest.approx(0.0, abs=0.01)
        assert rows["device", 1.0]["blocks"] == NUM_BLOCKS
        assert main(["whatif", "--url", url]) == 0
        said = capsys.readouterr().out
        assert "Without the disk you would " in said
        assert "more on the device the hit rate would be 75.0 % (75.0 % now)" in said
        assert main(["whatif", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out).keys() == found.keys()


def test_nothing_was_asked_yet(settings, capsys):
    async def nothing(engine):
        pass

    with asked(settings, nothing) as engine, serving(engine) as url:
        for command in (["whatif"], ["cache", "worth"]):
            assert main([*command, "--url", url]) == 0
            assert capsys.readouterr().out == "No request has ended since the server's start.\n"


def test_whom_the_cache_serves(settings, capsys):
    system = PROMPTS[0][:64]

    async def work(engine):
        for number in range(6):
            salt, document = ("", "guest")[number % 3 == 2], ("", "report")[number % 2]
            prompt = (*system, *PROMPTS[1][number : number + 33])
            request = Request(f"{number}", prompt, GREEDY, 1, salt, Hints(document))
            async for _output in engine.generate(request):
                pass

    roomy = replace(settings, kv_bytes=64 * settings.kv_bytes)
    with asked(roomy, work) as engine, serving(engine) as url:
        found = httpx.get(f"{url}/cache/worth", trust_env=False).json()
        shaped("Balance", found)
        everybody, guest = found["tenants"]
        assert (everybody["tenant"], guest["tenant"][0]) == ("", ":")
        assert [round(row["requests"]) for row in (everybody, guest)] == [4, 2]
        documents = {row["document"]: round(row["requests"]) for row in found["documents"]}
        assert documents["report"] == 2
        (segment,) = found["segments"]
        assert (segment["start"], segment["stop"]) == (0, 64)
        assert segment["text"] == engine.decode(system[:32])
        assert segment["reuse_count"] == pytest.approx(3, abs=0.01)
        assert segment["held_bytes"]["device"] == 4 * engine.model.block_bytes(16)
        assert segment["worth_it"] is True
        assert main(["cache", "worth", "--url", url]) == 0
        said = capsys.readouterr().out
        assert "(no key, no salt)" in said
        assert "0-64 " in said


def test_a_cleared_cache_holds_nothing(settings):
    async def work(engine):
        await ask(engine, PROMPTS[0], GREEDY)
        assert await engine.clear_cache()

    with asked(settings, work) as engine:
        (row,) = engine.value.balance("").tenants
        assert row.held_bytes == (0,)


def test_without_reuse_nothing_is_counted(settings):
    async def work(engine):
        await ask(engine, PROMPTS[0], GREEDY)

    with asked(replace(settings, prefix_caching=False), work) as engine:
        assert engine.value.what_if().num_asked == 0


def row(salt, document="", token_ids=(104, 105)):
    return Worth(
        (salt, document), 0, 64, token_ids, 3.0, 0.0, 64.0, 2.0, 1e-3, 0.0, None, 0.5, (9,)
    )


def test_with_keys_each_sees_its_own_and_no_salted_text():
    engine = EchoEngine()
    one, two = (tenant_of(key) for key in ("one", "two"))
    own, salted = row(f"{one}:", "report"), row(f"{one}:secret", "report")
    tenants = (own, salted, row(f"{two}:"))
    engine.value.balances[one] = Balance(9.0, ("device",), tenants, (own, salted), (own, salted))
    with (
        serving(engine, api_keys=["one", "two"]) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        for path in ("/cache/whatif", "/cache/worth"):
            assert http.get(path).status_code == 401
        headers = {"Authorization": "Bearer one"}
        assert http.get("/cache/whatif", headers=headers).status_code == 200
        found = http.get("/cache/worth", headers=headers).json()
        headers = {"Authorization": "Bearer two"}
        others = http.get("/cache/worth", headers=headers).json()
    shaped("Balance", found)
    assert [row["tenant"][:8] for row in found["tenants"]] == [one[:8], one[:8], two[:8]]
    assert [row["text"] for row in found["segments"]] == ["hi", None]
    assert [row["document"] == "report" for row in found["documents"]] == [True, False]
    assert "secret" not in json.dumps(found)
    assert found["tenants"][0]["saved_s"] == pytest.approx(64 * 2 * 1e-3)
    assert found["tenants"][0]["worth_it"] is False  # less than the penalty
    assert others["segments"] == []


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (0.0, "Without the disk you would lose nothing."),
        (50.0, "Without the disk you would lose 50 s of computing a day."),
        (-50.0, "Without the disk you would gain 50 s a day: loading from it takes longer"),
    ],
)
def test_sentences(saved, says, capsys):
    engine = EchoEngine()
    now, without = Outlook((0.25, 0.25), 100.0 + saved), Outlook((0.25, 0.0), 100.0)
    more = Outlook((0.25, 0.5), 200.0 + saved)
    rows = [
        Supposed(place, times, int(times * 4), int(times * 4096), outlook)
        for place in ("device", "disk")
        for times, outlook in ((0.0, without), (1.0, now), (2.0, more))
    ]
    found = WhatIf(7200.0, 1000.0, 8, 16, ("device", "disk"), (0.0, None), now, tuple(rows))
    engine.value.if_what = found
    with serving(engine) as url:
        assert main(["whatif", "--url", url]) == 0
    said = capsys.readouterr().out
    assert says in said
    assert (
        "With 4 KiB more on the disk the hit rate would be 75.0 % (50.0 % now), saving 100 s of "
        "computing a day more." in said
    )
    assert "In the last 2 hours: " in said
    assert "One in 8 is followed." in said
    assert "Loading from the disk was not measured yet" in said
