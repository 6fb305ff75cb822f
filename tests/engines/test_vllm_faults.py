"""Faults of the disk below a real vLLM: late by a second at most, never wrong, and then healed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults_in_vllm import (
    DAMAGE,
    can_mount,
    try_damage,
    try_full,
    try_hang,
    try_kill,
    try_unverified,
)
from vllm_server import VllmServer
from vllm_trial import NUM_PROMPTS, Score, Tier, foreword, serving

LATE_S = 5.0  # on a busy machine; far below what hangs

Running = tuple[VllmServer, Tier]


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all faults but those that end it."""
    root = tmp_path_factory.mktemp("faults")
    tier = foreword(root, switched=True)
    with serving(tier, tiny_model, root / "vllm.log") as server:
        yield server, tier


def assert_right(score: Score) -> None:
    assert (score.wrong, score.failed, score.hung) == (0, 0, 0), score
    assert score.slowest_s < score.cold_s + LATE_S, score
    assert score.healed, score


def test_wrong_bytes_would_show(running: Running) -> None:
    """Where nobody verifies, each of these answers is another one."""
    score = try_unverified(*running)
    assert score.wrong == NUM_PROMPTS
    assert score.num_restored > 0
    assert score.healed, score


@pytest.mark.parametrize("fault", DAMAGE)
def test_what_is_damaged_is_computed_again(running: Running, fault: str) -> None:
    score = try_damage(*running, fault)
    assert_right(score)
    assert score.num_restored < score.num_kept, "the damage was met"


def test_a_disk_that_hangs_delays_an_answer_only(running: Running) -> None:
    assert_right(try_hang(*running))


@pytest.mark.skipif(not can_mount(), reason="no file system of our own to be had here")
def test_a_full_disk_is_not_written_and_later_is(tiny_model: Path, tmp_path: Path) -> None:
    vllm = str(Path(sys.executable).with_name("vllm"))
    score = try_full(foreword(tmp_path), tiny_model, tmp_path / "vllm.log", vllm)
    assert_right(score)
    assert score.num_restored < score.num_kept, "there was no room"


def test_a_server_killed_while_it_writes_leaves_nothing_wrong(
    running: Running, tiny_model: Path, tmp_path: Path
) -> None:
    """The last test of this file: it ends the server of the others."""
    score = try_kill(*running, tiny_model, tmp_path / "vllm.log")
    assert_right(score)
    assert score.num_restored == score.num_kept, "what was written before is there"
