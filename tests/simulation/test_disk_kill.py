"""Writers of one disk folder, killed at random moments: the short form of what can run for long."""

from pathlib import Path

import pytest

from foreword.cli.verify_disk import Load, run


@pytest.mark.parametrize(("budget_bytes", "kv_bytes"), [(2_000_000, 3800), (12_000_000, 100_000)])
def test_no_kill_loses_or_damages_a_record_or_breaks_the_budget(
    tmp_path: Path, budget_bytes: int, kv_bytes: int
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    report = run(Load(folder, budget_bytes, kv_bytes), num_rounds=2, seed=kv_bytes)
    assert report.faults == []
    assert report.kills >= 4
    assert report.stored > 0
    assert report.found >= report.expected > 0
