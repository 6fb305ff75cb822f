"""What came of the self-test is remembered, and only where nothing that it depends on changed."""

import json
from pathlib import Path

import pytest
import torch

from foreword.engine import verdict
from foreword.engine.attention import AttentionRules
from foreword.engine.exact import Exactness, ExactRules, Tiling, linear_shapes
from foreword.engine.model import LoadedModel, load_model
from foreword.engine.verdict import circumstances, find_rules
from tiny import make_tiny

NO = Exactness(False, "the self-test found other bits in a batch of 2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    return make_tiny(tmp_path / "model")


def yes(model: LoadedModel) -> Exactness:
    tilings = {shape: Tiling((1, 2, 4), 2) for shape in linear_shapes(model.module)}
    return Exactness(True, "it is", ExactRules(tilings, AttentionRules((16, 512), False)))


def found(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, measured: Exactness | None
) -> Exactness:
    """What a new process finds. With None it must not measure."""
    monkeypatch.setattr(verdict, "_found", {})

    def measure(*_arguments: object) -> Exactness:
        assert measured is not None, "it measured"
        return measured

    monkeypatch.setattr(verdict, "measure", measure)
    return find_rules(model, lambda _rules: pytest.fail("not used"))


@pytest.mark.parametrize("exact", [True, False])
def test_a_verdict_is_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    model = load_model(str(folder))
    measured = yes(model) if exact else NO
    assert found(model, monkeypatch, measured) == measured
    again = found(model, monkeypatch, None)
    assert again.exact == measured.exact
    assert again.reason.startswith(measured.reason)
    if measured.rules is not None:
        assert again.rules is not None
        assert again.rules.fingerprint == measured.rules.fingerprint
        assert again.rules.attention == measured.rules.attention
        for shape, tiling in measured.rules.tilings.items():
            plans = [tiling.plan(rows) for rows in range(20)]
            assert [again.rules.tilings[shape].plan(rows) for rows in range(20)] == plans
        assert again.reason == "it is (remembered)"


def test_other_circumstances_are_tested_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(folder))
    digests = {
        "here": circumstances(model),
        "dtype": circumstances(load_model(str(folder), dtype="float32")),
        "model": circumstances(load_model(str(make_tiny(tmp_path / "other", num_layers=3)))),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    digests["threads"] = circumstances(model)
    torch.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr(verdict, "_processor", lambda: "another")
        digests["processor"] = circumstances(model)
    with monkeypatch.context() as patch:
        patch.setattr(verdict.transformers, "__version__", "0")
        digests["library"] = circumstances(model)
    with monkeypatch.context() as patch:
        patch.setattr(verdict.torch, "__version__", "0")
        digests["torch"] = circumstances(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.__config__, "show", lambda: "another build")
        digests["build"] = circumstances(model)
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        digests["kernels"] = circumstances(model)
    with monkeypatch.context() as patch:
        code = tmp_path / "code" / "verdict.py"
        code.parent.mkdir()
        code.write_text("other code")
        patch.setattr(verdict, "__file__", str(code))
        digests["code"] = circumstances(model)
    assert len(set(digests.values())) == len(digests), digests
    assert circumstances(load_model(str(folder))) == digests["here"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"exact": true}', '{"exact": true, "reason": "", "counts": 3}']
)
def test_a_broken_memory_is_no_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    model = load_model(str(folder))
    memo = tmp_path / "cache" / "exactness" / f"{circumstances(model)}.json"
    memo.parent.mkdir(parents=True)
    memo.write_text(text)
    assert found(model, monkeypatch, NO) == NO
    assert json.loads(memo.read_text())["exact"] is False


def test_a_cache_folder_that_cannot_be_written_costs_no_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(folder))
    monkeypatch.setenv("FOREWORD_CACHE_DIR", "/dev/null/x")
    measured = yes(model)
    assert found(model, monkeypatch, measured) == measured


def test_a_memory_of_other_layers_is_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(folder))
    found(model, monkeypatch, yes(model))
    known = circumstances(model)
    monkeypatch.setattr(verdict, "circumstances", lambda _model: known)
    monkeypatch.setattr(verdict, "linear_shapes", lambda _module: {"8x8 other": []})
    assert found(model, monkeypatch, NO) == NO
