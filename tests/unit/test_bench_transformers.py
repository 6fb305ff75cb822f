"""`foreword bench transformers` on a tiny model: what it reports, and what its decodes read."""

import argparse
from pathlib import Path

import pytest
import torch

from foreword.cli.bench_transformers import Ours, run
from foreword.cli.main import command_parser
from foreword.engine.runner import Part
from tiny import make_tiny


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    words = f"--model {make_tiny(tmp_path / 'model')} --threads 1 --prompt 40 --pairs 1 --batch 3"
    return command_parser("bench transformers").parse_args(words.split())


def test_it_reports_tokens_per_cpu_second(args: argparse.Namespace) -> None:
    torch_threads = torch.get_num_threads()
    try:
        report = run(args)
    finally:
        torch.set_num_threads(torch_threads)
    assert "decode_batch_8" not in report
    for name, num_tokens in (("prefill", 40), ("decode_batch_1", 4), ("decode_batch_3", 12)):
        figure = report[name]
        assert set(figure["cpu_s"]) == set(figure["tokens_per_cpu_s"]) == {"plain", "off", "on"}
        for side, seconds in figure["cpu_s"].items():
            assert figure["tokens_per_cpu_s"][side] == pytest.approx(num_tokens / seconds)


def test_every_sequence_of_the_batch_has_the_prompt(args: argparse.Namespace) -> None:
    ours = Ours(args, exact=False, batch=args.batch)
    token_ids = list(range(100, 140))
    ours.prefill_batch(token_ids)
    ours.prefill(token_ids)  # the row after the batch, computed
    rows = [
        ours.runner.step([Part(ours.blocks(row), 40, [7], 1)])[0] for row in range(args.batch + 1)
    ]
    for row in rows:
        torch.testing.assert_close(row, rows[-1])
