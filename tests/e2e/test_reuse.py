"""The promise to users: with reuse the answer is the one without it, on real (tiny) models."""

import argparse
import asyncio
from dataclasses import replace

import pytest
import torch

from foreword.cli.measure import Reply, ask
from foreword.cli.verify import compare
from foreword.core.errors import EngineStopped, RequestError, RequestFailed
from foreword.core.request import Request, SamplingParams
from foreword.engine import engine as engine_module
from foreword.engine import sample as sample_module
from foreword.engine.engine import TorchEngine
from foreword.engine.runner import Part, Runner
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.stream import Stream
from tiny import make_tiny


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp(request.param) / "model", request.param))


@pytest.fixture(scope="module")
def settings(folder):
    return EngineSettings(folder, dtype="float32", num_threads=2, exact=False, kv_bytes=1 << 22)


def run(settings, work):
    """Start an engine, await work(engine), stop it."""

    async def whole():
        engine = TorchEngine.load(settings)
        engine.start()
        try:
            return await work(engine)
        finally:
            await engine.stop(5.0)
            assert engine.cache.pool.num_leased == 0

    return asyncio.run(whole())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_changes_no_bit(folder, dtype):
    """Full and partial blocks, after preemption, in batches of 2 to 8 mixed with prefill. Where
    this machine cannot promise it, the engine must have said so."""
    args = argparse.Namespace(
        model=folder, dtype=dtype, threads=2, prompts=24, longest=560, new_tokens=6, seed=1
    )
    result = asyncio.run(compare(args))
    assert result["reused_tokens"] > 500
    assert result["preemptions"] > 0
    assert result["restored_tokens"] > 500
    assert result["logits_compared"] == 4 * 24 * 6
    if result["exact"]:
        assert (result["different_prompts"], result["largest_difference"]) == (0, 0)
    else:
        assert result["reason"]


def test_the_second_time_only_the_last_token_is_computed(settings):
    async def work(engine):
        message = {"role": "user", "content": "The system prompt is long. " * 9}
        prompt = engine.encode_chat([message])
        sampling = SamplingParams(8, temperature=0, ignore_eos=True)
        first = await ask(engine, prompt, sampling)
        before = engine.stats.num_prefilled_tokens
        second = await ask(engine, prompt, sampling)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) - 1)
        assert engine.stats.num_prefilled_tokens - before == 1
        assert first.token_ids == second.token_ids
        salted = await ask(engine, prompt, sampling, salt="another tenant")
        assert (salted.num_cached_tokens, salted.token_ids) == (0, first.token_ids)

    run(settings, work)

    async def longer(engine):
        sampling = SamplingParams(8, temperature=0, ignore_eos=True)
        answer = await ask(engine, list(range(10, 60)), sampling)
        follow_up = [*range(10, 60), *answer.token_ids, 77]
        return (await ask(engine, follow_up, sampling)).num_cached_tokens

    # All of the first turn but its last token, which was sampled and never computed.
    assert run(settings, longer) == 50 + 7


def test_samples_share_the_prompt_and_seeds_repeat(settings):
    async def work(engine):
        async def samples(seed):
            request = Request("r", tuple(range(10, 50)), SamplingParams(6, seed=seed), n=3)
            texts = {}
            async for output in engine.generate(request):
                texts.setdefault(output.index, []).extend(output.token_ids)
            return texts

        before = engine.stats.num_prefilled_tokens
        first = await samples(5)
        assert engine.stats.num_prefilled_tokens - before == 40 + 2
        assert first[0] != first[1]
        assert await samples(5) == first
        assert await samples(6) != first

    run(settings, work)


def test_samples_that_wait_share_one_chain(settings):
    """Of a request with many samples, only those that run hold their tokens for themselves."""

    async def begin(engine):
        stream = Stream(Request("r", tuple(range(10, 300)), SamplingParams(2), 100), 100)
        engine._begin(stream)
        assert len({id(sample.chain) for sample in stream.samples}) == 2
        engine._forget(stream.samples)

    asyncio.run(begin(TorchEngine.load(settings)))


def test_a_cancelled_request_gives_its_blocks_back(settings):
    async def work(engine):
        request = Request("r", tuple(range(10, 300)), SamplingParams(500, ignore_eos=True))
        outputs = engine.generate(request)
        await anext(outputs)
        assert engine.cache.pool.num_leased > 0
        await outputs.aclose()
        for _ in range(200):
            if not engine.cache.pool.num_leased:
                break
            await asyncio.sleep(0.02)
        assert engine.cache.pool.num_leased == 0
        assert (await ask(engine, list(range(10, 300)), SamplingParams(1))).num_cached_tokens == 289

    run(settings, work)


def test_stop_strings_and_lengths(settings):
    async def work(engine):
        prompt = engine.encode("A foreword is the opening")
        free = await ask(engine, prompt, SamplingParams(24, temperature=0, ignore_eos=True))
        assert len(free.token_ids) == 24
        middle = free.text[len(free.text) // 2 :][:3]
        stopped = await ask(
            engine, prompt, SamplingParams(24, temperature=0, ignore_eos=True, stop=(middle,))
        )
        assert stopped.text == free.text[: free.text.index(middle)]

    run(settings, work)


def test_what_cannot_fit_is_refused_with_the_numbers(settings):
    async def work(engine):
        for prompt, num_new, field in (
            ([], 1, "prompt"),
            ([10**6], 1, "prompt"),
            ([-1], 1, "prompt"),
            (list(range(10, 60)), 10**6, "max_tokens"),
        ):
            with pytest.raises(RequestError) as caught:
                await ask(engine, prompt, SamplingParams(num_new))
            assert caught.value.param == field

    run(settings, work)


def test_prompt_logprobs_compute_all_and_let_others_reuse(settings):
    """Over several chunks, with another request beside it, and after a preemption as without."""

    async def reported(engine, prompt, n=1):
        sampling = SamplingParams(3, temperature=0, ignore_eos=True, prompt_logprobs=1)
        request = Request("id", tuple(prompt), sampling, n)
        outputs = [output async for output in engine.generate(request)]
        found = [output for output in outputs if output.prompt_logprobs]
        assert [output.index for output in found] == [0]
        assert outputs[0].num_cached_tokens == 0
        return found[0].prompt_logprobs

    async def work(engine):
        prompt = [10 + i * i % 400 for i in range(700)]
        first = await reported(engine, prompt)
        assert [logprob.token_id for logprob in first] == prompt[1:]
        assert all(logprob.top[0][1] >= logprob.logprob for logprob in first)
        again, _ = await asyncio.gather(
            reported(engine, prompt, n=2), ask(engine, [5, 6, 7], SamplingParams(30))
        )
        plain = await ask(engine, prompt, SamplingParams(3, temperature=0, ignore_eos=True))
        assert plain.num_cached_tokens == len(prompt) - 1
        # In one go, as tests/unit/test_runner.py compares with plain transformers.
        with torch.inference_mode():
            whole = Runner(engine.model, 64, BLOCK_SIZE, exact=False).step(
                [Part(list(range(64)), 0, prompt, len(prompt))]
            )
        expected = whole.log_softmax(-1)[range(699), prompt[1:]]
        for got in (first, again):
            values = torch.tensor([logprob.logprob for logprob in got])
            torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)

    run(settings, work)


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_prompt_logprobs_survive_preemption(settings, num_tokens):
    """Two prompts that fit one at a time: the younger is preempted while it computes or writes."""
    small = replace(settings, kv_bytes=1 << 18)

    async def work(engine):
        room = engine.cache.pool.num_blocks * BLOCK_SIZE
        prompts = [[7 + i] * (room // 2 - 8) for i in range(2)]
        sampling = SamplingParams(
            min(num_tokens, room // 2 - 8), temperature=0, ignore_eos=True, prompt_logprobs=0
        )
        requests = [Request(str(i), tuple(p), sampling) for i, p in enumerate(prompts)]

        async def reported(request):
            return [
                output.prompt_logprobs
                async for output in engine.generate(request)
                if output.prompt_logprobs
            ]

        answers = await asyncio.gather(*map(reported, requests))
        assert [[len(found) for found in answer] for answer in answers] == [
            [len(prompt) - 1] for prompt in prompts
        ]

    run(small, work)


def test_clearing_forgets_what_nobody_holds(settings):
    async def work(engine):
        prompt = list(range(10, 60))
        await ask(engine, prompt, SamplingParams(1))
        assert await engine.clear_cache()
        assert (await ask(engine, prompt, SamplingParams(1))).num_cached_tokens == 0
        running = asyncio.create_task(ask(engine, prompt, SamplingParams(500, ignore_eos=True)))
        await asyncio.sleep(0.05)
        assert not await engine.clear_cache()
        for _ in range(5):  # who asks and leaves does no harm
            leaving = asyncio.create_task(engine.clear_cache())
            await asyncio.sleep(0)
            leaving.cancel()
        assert (await running).num_cached_tokens == len(prompt) - 1
        await engine.stop(0)
        with pytest.raises(EngineStopped):
            await engine.clear_cache()

    run(settings, work)


def test_a_stopped_engine_says_so(settings):
    async def work(engine):
        running = asyncio.create_task(
            ask(engine, list(range(10, 60)), SamplingParams(900, ignore_eos=True))
        )
        await asyncio.sleep(0.1)
        await engine.stop(0.0)
        with pytest.raises(EngineStopped):
            await running
        with pytest.raises(EngineStopped):
            await ask(engine, [10, 11], SamplingParams(1))

    async def whole():
        engine = TorchEngine.load(settings)
        engine.start()
        await work(engine)

    asyncio.run(whole())


def test_a_fault_ends_one_request_and_not_its_neighbours(settings, monkeypatch, caplog):
    choose = sample_module.sample

    def sample(logits, params, draw):
        if params.top_k == 7:
            raise ZeroDivisionError("a fault")
        return choose(logits, params, draw)

    monkeypatch.setattr(sample_module, "sample", sample)

    async def work(engine):
        good = SamplingParams(30, temperature=0.0, ignore_eos=True)
        bad = SamplingParams(30, top_k=7, ignore_eos=True)
        prompt = list(range(10, 60))
        answers = await asyncio.gather(
            ask(engine, prompt, good),
            ask(engine, prompt[:20], bad),
            ask(engine, prompt[:33], good),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [Reply, RequestFailed, Reply]
        samples = Request("bad-n", tuple(prompt), bad, 3)
        with pytest.raises(RequestFailed, match="bad-n"):
            _ = [output async for output in engine.generate(samples)]
        monkeypatch.setattr(engine_module, "Chain", None)
        with pytest.raises(RequestFailed):
            await ask(engine, prompt, good)
        monkeypatch.undo()
        assert len((await ask(engine, prompt, good)).token_ids) == 30

    run(settings, work)
    assert "a fault" in caplog.text


def test_an_engine_that_fails_tells_everyone(settings, monkeypatch, caplog):
    async def work(engine):
        def step(parts):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine.runner, "step", step)
        asked = [
            asyncio.create_task(ask(engine, [10 + i, 11, 12], SamplingParams(5))) for i in range(4)
        ]
        for done in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(done, EngineStopped)
        with pytest.raises(EngineStopped, match="failed"):
            await ask(engine, [10, 11], SamplingParams(1))

    async def whole():
        engine = TorchEngine.load(settings)
        engine.start()
        await work(engine)
        await engine.stop(1.0)

    asyncio.run(whole())
    assert "the device is gone" in caplog.text


def test_a_known_prompt_of_whole_blocks_is_computed_by_nobody_twice(settings):
    """16 samples start together, though the prompt ends with a block: its last token is computed
    by each, and none waits for another to do so."""

    async def work(engine):
        prompt = list(range(10, 10 + 4 * BLOCK_SIZE))
        steps = []
        schedule = engine.scheduler.schedule

        def counted():
            step = schedule()
            steps.append(len(step.work))
            return step

        engine.scheduler.schedule = counted
        await ask(engine, prompt, SamplingParams(1))
        request = Request("many", tuple(prompt), SamplingParams(4, ignore_eos=True), 16)
        outputs = [output async for output in engine.generate(request)]
        assert len(outputs) == 64
        assert max(steps) >= 15
        assert sum(steps) <= 2 + 16 * 4

    run(settings, work)


def test_a_model_without_a_chat_template_says_so(settings):
    async def work(engine):
        engine.model.tokenizer.chat_template = None
        with pytest.raises(RequestError, match="/v1/completions"):
            engine.encode_chat([{"role": "user", "content": "Hello"}])

    run(settings, work)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(settings):
    async def work(engine):
        longest = engine.model.longest_token
        text = "a" * (engine.card.max_model_len * longest + 1)
        tokenizer = engine.model.tokenizer
        object.__setattr__(engine.model, "tokenizer", None)
        try:
            with pytest.raises(RequestError) as caught:
                engine.encode(text)
        finally:
            object.__setattr__(engine.model, "tokenizer", tokenizer)
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError):
            engine.encode_chat([{"role": "user", "content": text}])

    run(settings, work)
