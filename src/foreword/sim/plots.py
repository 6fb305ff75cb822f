"""Plots of what a simulation found, as PNG or SVG. They need matplotlib: the extra `plot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_SIZE_INCHES = (7.0, 4.5)


def plot_hit_rates(
    curves: Mapping[str, Mapping[float, float]], ceiling: float, unit: str, path: Path
) -> None:
    """Shares of prompt tokens that were reused, by capacity in `unit`, a curve for each policy.
    `ceiling`: the share without a limit."""
    axes = _axes()
    for name, points in curves.items():
        capacities = sorted(points)
        axes.plot(capacities, [points[x] for x in capacities], marker="o", label=name)
    axes.axhline(ceiling, color="grey", linestyle=":", label="unlimited")
    axes.set(xscale="log", xlabel=unit, ylabel="share of prompt tokens reused")
    axes.set_ylim(bottom=0)
    _save(axes, path)


def plot_ttfts(ttfts_s: Mapping[str, Sequence[float]], path: Path) -> None:
    """How many of the requests had their first token within so many seconds, a curve for each
    setting."""
    axes = _axes()
    for name, seconds in ttfts_s.items():
        shares = [(at + 1) / len(seconds) for at in range(len(seconds))]
        axes.step(sorted(seconds), shares, where="post", label=name)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of requests")
    axes.set_ylim(0, 1)
    _save(axes, path)


def _axes() -> "Axes":
    from matplotlib.figure import Figure  # an extra

    axes = Figure(figsize=_SIZE_INCHES, layout="constrained").subplots()
    axes.grid(alpha=0.3)
    return axes


def _save(axes: "Axes", path: Path) -> None:
    """The same plot gives the same bytes. Raises OSError."""
    from matplotlib import rc_context

    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.legend()
    svg = path.suffix == ".svg"
    with rc_context({"svg.hashsalt": "foreword"}):
        figure.savefig(path, metadata={"Date": None} if svg else None)
