"""Plots: what is asked for is drawn, and the same plot has the same bytes."""

import re
from pathlib import Path

import pytest

from foreword.sim.plots import plot_hit_rates, plot_ttfts

pytest.importorskip("matplotlib", reason="plots need the extra `plot`")


def words(path: Path) -> set[str]:
    """What an SVG says: matplotlib keeps each text beside its outlines."""
    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_hit_rates_have_a_curve_for_each_policy(tmp_path: Path) -> None:
    curves = {"lru": {10.0: 0.1, 100.0: 0.2}, "opt": {10.0: 0.3, 100.0: 0.4}}
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        plot_hit_rates(curves, 0.5, "blocks of 512 tokens", path)
    assert words(paths[0]) >= {"lru", "opt", "unlimited", "blocks of 512 tokens"}
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_ttfts_have_a_curve_for_each_setting(tmp_path: Path) -> None:
    path = tmp_path / "ttfts.svg"
    plot_ttfts({"lru@1000": [0.5, 0.1, 2.0], "lru@9000": [0.1, 0.1, 0.2]}, path)
    assert words(path) >= {"lru@1000", "lru@9000", "share of requests"}
