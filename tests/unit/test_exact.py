"""Exact mode: one token's logits and KV have the same bits, however they are computed.

Where the self-test of this machine says no, the tests hold it to that: it must name what differed.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreword.engine import exact, verdict
from foreword.engine.attention import AttentionRules
from foreword.engine.exact import ExactRules, Tiling, in_tiles, in_whole_vectors
from foreword.engine.model import load_model
from foreword.engine.runner import Part, Runner
from foreword.engine.settings import KINDS
from tiny import VOCAB_SIZE, make_tiny

NUM_TOKENS = 830
BLOCK = 8
PER_TABLE = -(-NUM_TOKENS // BLOCK)


class Exact:
    """A runner, a prompt, and what one prefill of all of it gave."""

    def __init__(self, folder: Path, numbers: str) -> None:
        choice = {"quantise": numbers} if numbers in KINDS else {"dtype": numbers}
        self.runner = Runner(load_model(str(folder), **choice), 12 * PER_TABLE, BLOCK, True)
        claims, reason = self.runner.exactness
        if not claims:
            assert "the self-test found other bits in" in reason
            pytest.skip(reason)
        self.ids = random.Random(1).choices(range(3, VOCAB_SIZE), k=NUM_TOKENS)
        self.whole = self.table(0)
        self.logits = self.runner.step([Part(self.whole, 0, self.ids, True)])

    @staticmethod
    def table(number: int, scatter: bool = False) -> list[int]:
        blocks = list(range(number * PER_TABLE, (number + 1) * PER_TABLE))
        if scatter:
            random.Random(number).shuffle(blocks)
        return blocks

    def compute(self, table: list[int], start: int, stop: int) -> torch.Tensor:
        return self.runner.step([Part(table, start, self.ids[start:stop], True)])

    def assert_same_kv(self, table: list[int], start: int = 0, stop: int = NUM_TOKENS) -> None:
        at = torch.arange(start, stop)
        here, there = (
            torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK for blocks in (self.whole, table)
        )
        kv = self.runner.kv
        for pool in (*kv.keys, *kv.values):
            assert torch.equal(pool[here], pool[there])

    def resumed(self, number: int, position: int) -> Part:
        """One known token of the prompt after its prefix, in a last block of its own."""
        at, inside = divmod(position, BLOCK)
        own = self.table(number)[0]
        if inside:
            self.runner.copy(self.whole[at], own, inside)
        return Part([*self.whole[:at], own], position, self.ids[position : position + 1], True)


@pytest.fixture(
    scope="module",
    params=[
        (kind, numbers)
        for kind in ("llama", "qwen3", "mistral", "olmo2")
        for numbers in ("bfloat16", "float32", *KINDS)
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    kind, numbers = request.param
    return Exact(make_tiny(tmp_path_factory.mktemp(kind), kind), numbers)


@pytest.mark.parametrize("chunk", [511, 256, 193, 65, 33, 7])
def test_chunks(case: Exact, chunk: int) -> None:
    table = case.table(1, scatter=True)
    for start in range(0, NUM_TOKENS, chunk):
        logits = case.compute(table, start, min(start + chunk, NUM_TOKENS))
    assert torch.equal(logits, case.logits)
    case.assert_same_kv(table)


@pytest.mark.parametrize("start", [1, 5, 47, 48, 255, 511, 512, 513, 769, NUM_TOKENS - 3])
def test_resume_anywhere(case: Exact, start: int) -> None:
    at, inside = divmod(start, BLOCK)
    table = [*case.whole[:at], *case.table(2)[at:]]
    if inside:
        case.runner.copy(case.whole[at], table[at], inside)
    assert torch.equal(case.compute(table, start, NUM_TOKENS), case.logits)
    case.assert_same_kv(table)


def test_batches_alone_and_beside_prefill(case: Exact) -> None:
    positions = [NUM_TOKENS - 1, 511, 512, 100, 0, 333, 640, 767]
    parts = [case.resumed(3 + i, position) for i, position in enumerate(positions)]
    alone = torch.cat([case.runner.step([part]) for part in parts])
    assert torch.equal(alone[:1], case.logits)
    for count in range(2, len(parts) + 1):
        assert torch.equal(case.runner.step(parts[:count]), alone[:count]), count
    prefill = case.table(11, scatter=True)
    for count in range(1, len(parts) + 1):
        start = 101 * (count - 1)
        beside = Part(prefill, start, case.ids[start : start + 101], False)
        assert torch.equal(case.runner.step([beside, *parts[:count]]), alone[:count]), count
    case.assert_same_kv(prefill, 0, 808)
    for part, position in zip(parts, positions, strict=True):
        case.assert_same_kv(list(part.block_ids), position, position + 1)


def test_an_ordinary_runner_beside_an_exact_one(case: Exact) -> None:
    model = case.runner.model
    ordinary = Runner(model, PER_TABLE, BLOCK, exact=False)
    assert ordinary.exactness == (False, "turned off by a setting")
    assert ordinary.numerics == ""
    ordinary.step([Part(case.whole, 0, case.ids, True)])
    case.compute(case.table(1), 0, NUM_TOKENS)
    case.assert_same_kv(case.table(1))


def test_a_chunk_that_wants_no_logits(case: Exact) -> None:
    part = Part(case.table(1), 0, case.ids[:100], False)
    assert case.runner.step([part]).shape == (0, VOCAB_SIZE)
    case.assert_same_kv(case.table(1), 0, 100)


def test_numerics_name_the_rules(case: Exact) -> None:
    rules = verdict.find_rules(case.runner.model, lambda _rules: pytest.fail("remembered")).rules
    assert rules is not None
    assert case.runner.numerics.endswith(rules.fingerprint)
    assert f"torch {torch.__version__};" in case.runner.numerics
    other = ExactRules(rules.tilings, AttentionRules((512,), not rules.attention.fold))
    assert other.fingerprint != rules.fingerprint


def test_a_self_test_that_fails_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(exact, "self_test", lambda *_: "in a batch of 2")
    runner = Runner(load_model(str(make_tiny(tmp_path / "model"))), 4, BLOCK, exact=True)
    assert runner.exactness == (False, "the self-test found other bits in a batch of 2")
    assert runner.numerics == ""


def test_the_self_test_sees_rows_that_depend_on_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = exact.in_tiles

    def depends(rows: torch.Tensor, layer: nn.Linear, plan: tuple[int, ...]) -> torch.Tensor:
        out = tiles(rows, layer, plan)
        return out * 1.01 if len(rows) == 5 else out

    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(exact, "in_tiles", depends)
    runner = Runner(load_model(str(make_tiny(tmp_path / "model"))), 4, BLOCK, exact=True)
    assert runner.exactness == (False, "the self-test found other bits in a batch of 5")


def test_plans_cover_the_rows_with_allowed_counts() -> None:
    tiling = Tiling((4, 8, 32, 512))
    for rows in range(1, 1200):
        plan = tiling.plan(rows)
        assert set(plan) <= {4, 8, 32, 512}
        assert 0 <= sum(plan) - rows < plan[-1], "only the last call is padded"
    assert tiling.plan(0) == ()
    assert tiling.plan(8) == (8,)
    assert tiling.plan(520) == (512, 8)


@pytest.mark.parametrize("bias", [False, True])
def test_tiles_compute_the_linear_layer(bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    rows = torch.randn(21, 24)
    for plan in ((21,), (8, 8, 8), (16, 4, 4), (64,)):
        torch.testing.assert_close(in_tiles(rows, layer, plan), layer(rows))


def test_rows_of_no_length_and_whole_vectors() -> None:
    layer = nn.Linear(24, 40).requires_grad_(False)
    assert in_tiles(torch.empty(0, 24), layer, ()).shape == (0, 40)
    seen: list[int] = []

    def activation(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.numel())
        return functional.silu(values)

    for shape in ((1, 3, 160), (1, 769, 160), (1, 64, 64)):
        rows = torch.randn(shape)
        torch.testing.assert_close(in_whole_vectors(activation, rows), functional.silu(rows))
    assert all(num % 64 == 0 for num in seen)
