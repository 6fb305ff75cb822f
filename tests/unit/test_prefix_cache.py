"""PrefixCache: transformers' generate with reuse gives what it gives without."""

import threading
from collections import Counter

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from foreword.plugins.transformers.prefix import PrefixCache
from prefixes import BLOCK_BYTES, MIB, load, patient, plain, prompt, reused, small
from tiny import make_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = ("llama", "qwen3")
    return {kind: make_tiny(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    patient(monkeypatch)


@pytest.fixture
def model(folders):
    return load(folders["llama"])


@pytest.fixture
def cache(model, tmp_path):
    with small(model, tmp_path / "kv") as made:
        yield made


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("places", [{"host_bytes": 4 * MIB, "disk_bytes": 0}, {"host_bytes": 0}])
def test_the_same_answer_with_reuse(folders, kind, places, tmp_path):
    model = load(folders[kind])
    token_ids = prompt(300)
    expected = plain(model, token_ids)
    with PrefixCache(model, disk_folder=tmp_path, **places) as cache:
        for num_known in (0, 288, 288):
            output, num_reused = reused(cache, token_ids)
            assert output.tolist() == expected.tolist()
            assert num_reused == num_known


def test_only_what_begins_alike_is_reused(model, cache):
    reused(cache, prompt(300))
    other = torch.cat([prompt(100), prompt(200, seed=1)], 1)
    output, num_reused = reused(cache, other)
    assert output.tolist() == plain(model, other).tolist()
    assert num_reused == 96


def test_generated_tokens_are_kept(model, cache):
    output, _ = reused(cache, prompt(40), max_new_tokens=40, min_new_tokens=40)
    question = torch.cat([output, prompt(10, seed=2)], 1)
    _, num_reused = reused(cache, question)
    assert num_reused == 64  # of 79 whose KV was computed, and 80 in all


def test_the_last_token_is_always_computed(model, cache):
    reused(cache, prompt(49))
    for num_tokens, num_known in ((1, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
        token_ids = prompt(49)[:, :num_tokens]
        output, num_reused = reused(cache, token_ids)
        assert (num_reused, output.tolist()) == (num_known, plain(model, token_ids).tolist())


def test_logits_differ_by_rounding_only(model, cache):
    options = {"output_logits": True, "return_dict_in_generate": True}
    expected = plain(model, prompt(300), **options)
    for _ in range(2):
        output, _ = reused(cache, prompt(300), **options)
        assert output.sequences.tolist() == expected.sequences.tolist()
        for logits, wanted in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_sampling_draws_the_same(model, cache):
    answers = []
    for generate in (model.generate, cache.generate, cache.generate):
        torch.manual_seed(5)
        answers.append(generate(prompt(80), max_new_tokens=12, do_sample=True).tolist())
    assert cache.stats.num_reused_tokens == 64
    assert answers[0] == answers[1] == answers[2]


class Seen(StoppingCriteria):
    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.num_tokens)


def test_arguments_of_generate_mean_what_they_mean(model, cache):
    streamed = []

    class Streamer:
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append(None)

    for options in (
        {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False)},
        {"stopping_criteria": StoppingCriteriaList([Seen(55)]), "max_new_tokens": 12},
        {"streamer": Streamer(), "max_new_tokens": 4, "do_sample": False},
        {"repetition_penalty": 1.5, "max_new_tokens": 12, "do_sample": False},
    ):
        streamed.clear()
        expected, told = model.generate(input_ids=prompt(50), **options).tolist(), list(streamed)
        for _ in range(2):
            streamed.clear()
            assert cache.generate(input_ids=prompt(50), **options).tolist() == expected
            assert streamed == told
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    assert cache.generate(prompt(50), config).shape == (1, 53)
    assert not cache.stats.passed_through


def padded(rows, side="left"):
    width = max(row.shape[1] for row in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for at, row in enumerate(rows):
        where = slice(width - row.shape[1], width) if side == "left" else slice(row.shape[1])
        token_ids[at, where], mask[at, where] = row, 1
    return token_ids, mask


def test_each_row_of_a_batch_has_its_own_prefix(model, cache):
    rows = [prompt(100), prompt(75, seed=1), prompt(90, seed=2)]
    token_ids, mask = padded(rows)
    expected = plain(model, token_ids, attention_mask=mask)
    assert plain(model, token_ids).tolist() == expected.tolist()  # the mask is inferred
    # Rows go on from one place: 25 of padding and 64 known tokens are the least.
    for num_known in (0, 89 + (89 - 25) + (89 - 10)):
        output, num_reused = reused(cache, token_ids, attention_mask=mask)
        assert (output.tolist(), num_reused) == (expected.tolist(), num_known)
    assert reused(cache, token_ids)[1] == num_known
    for row in rows:
        output, num_reused = reused(cache, row)
        assert output.tolist() == plain(model, row).tolist()
        assert num_reused == (row.shape[1] - 1) // 16 * 16


def test_a_batch_starts_where_its_least_known_row_does(model, cache):
    reused(cache, prompt(100))
    token_ids = torch.cat([prompt(100), prompt(100, seed=1)])
    output, num_reused = reused(cache, token_ids)
    assert (output.tolist(), num_reused) == (plain(model, token_ids).tolist(), 0)


def test_several_samples_of_one_prompt(model, cache):
    for _ in range(2):
        torch.manual_seed(1)
        options = {"do_sample": True, "num_return_sequences": 3}
        expected = plain(model, prompt(60, rows=2), **options)
        torch.manual_seed(1)
        output, num_reused = reused(cache, prompt(60, rows=2), **options)
        assert output.tolist() == expected.tolist()
    assert num_reused == 2 * 48
    for row in output:
        assert reused(cache, row[None])[1] == (row.shape[0] - 1) // 16 * 16


def passed_through(cache, options):
    """An answer, and why nothing was reused for it."""
    before = cache.stats.passed_through
    output = cache.generate(**options)
    (reason,) = cache.stats.passed_through - before
    return output, reason


def test_what_cannot_be_reused_is_passed_through(folders, model, cache):
    ids, mask = padded([prompt(60), prompt(50)], side="right")
    two = {"max_new_tokens": 4, "do_sample": False}
    one = {"input_ids": prompt(60), **two}
    embeds = model.get_input_embeddings()(prompt(60)).detach()
    positions = torch.arange(60)[None] + 1
    cases = {
        "beam_search": {**one, "num_beams": 3},
        "assisted_generation": {**one, "prompt_lookup_num_tokens": 3},
        "argument assistant_model": {**one, "assistant_model": load(folders["llama"])},
        "argument inputs_embeds": {"inputs_embeds": embeds, **two},
        "argument position_ids": {**one, "position_ids": positions},
        "argument cache": {**one, "cache": DynamicCache(config=model.config)},
        "argument output_hidden_states": {
            **one,
            "output_hidden_states": True,
            "return_dict_in_generate": True,
        },
        "another cache": {**one, "cache_implementation": "static"},
        "no cache": {**one, "use_cache": False},
        "prefill_chunk_size": {**one, "prefill_chunk_size": 16},
        "padding that is not to the left": {"input_ids": ids, "attention_mask": mask, **two},
        "an attention mask not of 0 and 1": {**one, "attention_mask": 2 * torch.ones(1, 60).long()},
        "no token ids": two,
    }
    cache.generate(**one)
    num_reused = cache.stats.num_reused_tokens
    for expected, options in cases.items():
        output, reason = passed_through(cache, options)
        assert reason == expected
        if "cache" in options:
            options["cache"] = DynamicCache(config=model.config)
        wanted = model.generate(**options)
        sequences = getattr(output, "sequences", output)
        assert sequences.tolist() == getattr(wanted, "sequences", wanted).tolist(), expected
    assert cache.stats.num_reused_tokens == num_reused
    with pytest.raises(ValueError, match="not used by the model"):
        cache.generate(**one, no_such_argument=1)


def damage(folder):
    """Turn a bit of each block that lies there."""
    num_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > BLOCK_BYTES:
            octets = bytearray(path.read_bytes())
            for at in range(2048, len(octets), 4096):
                octets[at] ^= 4
            path.write_bytes(octets)
            num_bytes += len(octets)
    assert num_bytes


def test_what_is_damaged_is_computed(model, tmp_path):
    expected = plain(model, prompt(200)).tolist()
    with PrefixCache(model, host_bytes=0, disk_folder=tmp_path) as cache:
        reused(cache, prompt(200))
        assert cache.flush()
        damage(tmp_path)
        output, num_reused = reused(cache, prompt(200))
        assert (output.tolist(), num_reused) == (expected, 0)
        assert cache.stats.tiers[0].lost["damaged"]
        assert reused(cache, prompt(200)) != (expected, 0)


def test_a_folder_that_cannot_be_used_costs_the_reuse_only(model, tmp_path):
    (tmp_path / "file").write_text("")
    with PrefixCache(model, disk_folder=tmp_path / "file") as cache:
        for _ in range(2):
            assert reused(cache, prompt(70))[0].tolist() == plain(model, prompt(70)).tolist()


def test_budgets_hold(model, tmp_path):
    budget = 40 * 2 * BLOCK_BYTES
    with PrefixCache(model, host_bytes=budget, disk_bytes=budget, disk_folder=tmp_path) as cache:
        for seed in range(12):
            reused(cache, prompt(200, seed=seed))
            assert cache.flush()
            files = [path for path in tmp_path.rglob("*") if path.is_file()]
            assert sum(path.stat().st_blocks * 512 for path in files) <= budget
        host, disk = cache.stats.tiers
        assert host.num_bytes <= budget
        assert disk.num_stored_blocks > 40
        assert reused(cache, prompt(200, seed=11))[1]


def test_threads_share_a_cache(model, cache):
    token_ids = [torch.cat([prompt(100), prompt(40, seed=seed)], 1) for seed in range(1, 5)]
    expected = [plain(model, ids).tolist() for ids in token_ids]
    answers = Counter()

    def ask():
        for _ in range(3):
            for ids, wanted in zip(token_ids, expected, strict=True):
                answers[plain(cache, ids).tolist() == wanted] += 1

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {True: 24}
    assert cache.stats.num_reused_tokens
    assert cache.stats.num_prompt_tokens == 24 * 140


def test_after_close_all_is_computed(model, cache):
    reused(cache, prompt(70))
    cache.close()
    cache.close()
    output, num_reused = reused(cache, prompt(70))
    assert (output.tolist(), num_reused) == (plain(model, prompt(70)).tolist(), 0)
