"""Public traces, replayed: the figures that kvcache-simulator 0.1.3 gives, to its last digit.

Shares of prompt tokens that are reused in the last half of the requests, in percent.
tools/kvcache_simulator.py runs it beside us.
"""

import re
import shlex
from pathlib import Path

import pytest

from foreword.cli import main as cli
from foreword.sim.importer import read_trace
from foreword.sim.replay import Findings, Rules, replay
from foreword.sim.trial import UNLIMITED, Setting
from traces import shared

GOLDENS = {
    "conversation": {
        "lru": {1_409: 4.890, 5_637: 13.147, 11_275: 23.336},
        "fifo": {1_409: 4.806, 5_637: 12.223, 11_275: 19.556},
        "opt": {1_409: 22.991, 5_637: 37.283, 11_275: 39.811},
    },
    "synthetic": {
        "lru": {1_409: 17.444, 5_637: 44.286, 11_275: 63.178, UNLIMITED: 86.275},
        "fifo": {1_409: 16.221, 5_637: 43.571, 11_275: 59.287},
        "opt": {1_409: 42.630, 5_637: 71.351, 11_275: 84.374},
    },
}
TOLERANCE = 0.1  # points
CEILINGS = {"conversation": 39.811, "synthetic": 86.275}


def replayed(
    name: str, *, keep_partial: bool, most_blocks: int = 50_000
) -> tuple[Findings, list[float]]:
    """What was found, and the goldens in its rows' order."""
    wanted = {
        Setting(policy, (size,)): golden
        for policy, goldens in GOLDENS[name].items()
        for size, golden in goldens.items()
        if size is UNLIMITED or size <= most_blocks
    }
    with read_trace(shared(f"mooncake_fast25_{name}.jsonl.gz")) as trace:
        rules = Rules(keep_partial=keep_partial, warmup=0.5)
        return replay(trace, list(wanted), rules), list(wanted.values())


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_figures_of_another_simulator(name: str) -> None:
    findings, goldens = replayed(name, keep_partial=True)
    for row, golden in zip(findings.rows, goldens, strict=True):
        found = 100 * row.outcome.total.token_share
        assert found == pytest.approx(golden, abs=0.0005), row.outcome.setting
        assert row.outcome.num_refused == 0
    assert 100 * findings.ceiling.token_share == pytest.approx(CEILINGS[name], abs=0.0005)


def test_what_full_blocks_alone_change() -> None:
    """An unfinished block that is never found again costs little."""
    findings, goldens = replayed("conversation", keep_partial=False, most_blocks=5_637)
    for row, golden in zip(findings.rows, goldens, strict=True):
        found = 100 * row.outcome.total.token_share
        assert found == pytest.approx(golden, abs=TOLERANCE), row.outcome.setting


def test_the_guide_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    path = shared("mooncake_fast25_conversation.jsonl.gz")
    page = (Path(__file__).parents[2] / "docs" / "guide" / "replay.md").read_text()
    found = re.search(r"```\nforeword (replay conversation\S+ .*)\n```\n\n```\n([^`]*)```", page)
    assert found
    assert cli.main(shlex.split(found[1].replace("conversation.jsonl.gz", str(path)))) == 0
    assert capsys.readouterr().out.startswith(found[2])
