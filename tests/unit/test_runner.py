"""The paged, packed forward against plain transformers: same tokens, logits within rounding.

In bfloat16 rounding is judged against the same weights in float32: no row of logits may be further
off than 1.5 times the row that transformers itself in bfloat16 gets worst.
"""

import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreword.engine.attention import ANY_RULES, AttentionRules, Packed
from foreword.engine.kv import TILE, LayerShape, PagedKV
from foreword.engine.model import load_model
from foreword.engine.runner import Part, Runner
from tiny import VOCAB_SIZE, make_tiny

NUM_TOKENS = 700  # more than one key tile of 512
BLOCK = 16


class Case:
    """A model, a prompt, and its logits at every position by plain transformers in float32."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model = load_model(str(folder), dtype=dtype)
        self.token_ids = random.Random(0).choices(range(3, VOCAB_SIZE), k=NUM_TOKENS)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        ids = torch.tensor([self.token_ids])
        with torch.inference_mode():
            own = plain(ids).logits[0].float()
            self.logits = plain.float()(ids).logits[0]
        self.allowed = 1e-5 if dtype == "float32" else 1.5 * float(self._errors(own, ...).max())

    def _errors(self, logits: torch.Tensor, positions: Any) -> torch.Tensor:
        return (logits - self.logits[positions]).square().mean(1).sqrt()

    def check(self, logits: torch.Tensor, positions: list[int]) -> None:
        assert logits.shape == (len(positions), VOCAB_SIZE)
        assert float(self._errors(logits, positions).max()) <= self.allowed


@pytest.fixture(
    scope="module",
    params=[
        (kind, dtype)
        for kind in (
            *("llama", "qwen2", "qwen3", "mistral", "olmo2", "phi3", "gemma3", "qwen3_moe"),
        )
        for dtype in ("float32", "bfloat16")
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, dtype = request.param
    return Case(make_tiny(tmp_path_factory.mktemp(kind), kind), dtype)


def tables(count: int) -> list[list[int]]:
    """Block tables of NUM_TOKENS tokens: in turn consecutive and scattered, never shared."""
    size = -(-NUM_TOKENS // BLOCK)
    runs = [list(range(i * size, (i + 1) * size)) for i in range(count)]
    for run in runs[1::2]:
        random.Random(0).shuffle(run)
    return runs


@pytest.mark.parametrize("scattered", [0, 1])
@pytest.mark.parametrize("chunk", [NUM_TOKENS, 512, 100, 33])
def test_prefill_in_chunks(case: Case, chunk: int, scattered: int) -> None:
    model, token_ids = case.model, case.token_ids
    runner = Runner(model, 2 * len(tables(1)[0]), BLOCK, exact=False)
    table = tables(2)[scattered]
    for start in range(0, NUM_TOKENS, chunk):
        got = runner.step([Part(table, start, token_ids[start : start + chunk], True)])
        end = min(start + chunk, NUM_TOKENS)
        case.check(got, [end - 1])


def test_mixed_batches_keep_the_order_of_their_parts(
    case: Case,
) -> None:
    model, token_ids = case.model, case.token_ids
    lengths = [100, 333, 512, 640, 17, 47, 48, 49, 1]
    blocks = tables(len(lengths))
    runner = Runner(model, len(blocks) * len(blocks[0]), BLOCK, exact=False)
    fill = [Part(t, 0, token_ids[:n], n % 2 == 0) for t, n in zip(blocks, lengths, strict=True)]
    got = runner.step(fill)
    wanted = [n - 1 for n in lengths if n % 2 == 0]
    case.check(got, wanted)

    news = [1, 1, 30, 1, 1, 3, 1, 1, 64]
    parts = [
        Part(table, start, token_ids[start : start + new], True)
        for table, start, new in zip(blocks, lengths, news, strict=True)
    ]
    ends = [start + new - 1 for start, new in zip(lengths, news, strict=True)]
    case.check(runner.step(parts), ends)


def test_no_logits_when_nobody_wants_them(
    case: Case,
) -> None:
    model, token_ids = case.model, case.token_ids
    runner = Runner(model, 4, BLOCK, exact=False)
    assert runner.step([Part([0, 1], 0, token_ids[:20], False)]).shape == (0, VOCAB_SIZE)


def test_a_copied_part_of_a_block_continues_like_the_original(
    case: Case,
) -> None:
    model, token_ids = case.model, case.token_ids
    runner = Runner(model, 8, BLOCK, exact=False)
    runner.step([Part([0, 1, 2], 0, token_ids[:40], False)])
    before = [pool[5 * BLOCK : 6 * BLOCK].clone() for pool in runner.kv.keys]
    runner.copy(2, 5, 7)
    for pool, old in zip(runner.kv.keys, before, strict=True):
        assert torch.equal(pool[5 * BLOCK : 5 * BLOCK + 7], pool[2 * BLOCK : 2 * BLOCK + 7])
        assert torch.equal(pool[5 * BLOCK + 7 : 6 * BLOCK], old[7:])
    got = runner.step([Part([0, 1, 5], 39, token_ids[39:48], True)])
    case.check(got, [47])


def test_a_short_block_table_is_refused(
    case: Case,
) -> None:
    model, token_ids = case.model, case.token_ids
    with pytest.raises(AssertionError, match="too short"):
        Runner(model, 4, BLOCK, exact=False).step([Part([0], 0, token_ids[:17], True)])


def test_decodes_of_unlike_lengths_at_the_end_of_the_pool() -> None:
    """A batch reads as many keys for each as for the longest: past the pool's end for the last."""
    layers = (LayerShape(1, 8, 8, None),)
    for rules in (ANY_RULES, AttentionRules((TILE,), False), AttentionRules((192, TILE), False)):
        ends = (705, 1217, 705)
        sizes = [-(-end // BLOCK) for end in ends]
        apart = max(sizes)
        num_blocks = 2 * apart + sizes[2]
        kv = PagedKV(layers, num_blocks, BLOCK, torch.float32, torch.device("cpu"))
        parts = [
            Part(range(i * apart, i * apart + size), end - 1, [1], True)
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        step = Packed(kv, parts, rules)
        out = step.attend(0, torch.ones(1, 1, 3, 8), None)
        assert torch.equal(out, torch.zeros(3, 1, 8))


def test_a_pool_takes_memory_only_as_it_fills() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system has no /proc")

    def resident_bytes() -> int:
        return int(statm.read_text().split()[1]) * resource.getpagesize()

    before, cpu = resident_bytes(), torch.device("cpu")
    kv = PagedKV((LayerShape(4, 64, 64, None),) * 4, 1 << 16, 16, torch.bfloat16, cpu)
    assert sum(pool.nbytes for pool in (*kv.keys, *kv.values)) > 4 << 30
    assert resident_bytes() - before < 64 << 20
    assert not kv.keys[3][-1].any()
