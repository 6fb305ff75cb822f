"""Percentiles as all reports have them: a value that occurred, nothing between two of them."""

from collections.abc import Sequence
from math import ceil


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, at least one: the least that so large a share of them does not
    exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
