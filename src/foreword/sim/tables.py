"""What a replay found as rows: one flat mapping for each setting, for JSON, CSV and a table alike.

Shares run from 0 to 1. `regret`: the share of tokens that OPT has more. OPT and an endless cache
are held to full blocks: where the core, which reuses parts of blocks too, has more, it has all.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foreword.sim.replay import Finding, Findings
from foreword.sim.trial import ENDLESS, TIERS, UNLIMITED, Tally

Row = dict[str, str | int | float]
SIZES = ("blocks", *(f"{tier}_blocks" for tier in TIERS[1:]))


def rows(findings: Findings, block_bytes: int | None = None) -> list[Row]:
    """`block_bytes`: of a block's KV, where bytes are wanted too."""
    return [_row(finding, findings.ceiling, block_bytes) for finding in findings.rows]


def group_rows(findings: Findings, num_rows: int) -> list[Row]:
    """Sessions or tenants, those with the most tokens first: by setting, the share of tokens that
    were reused."""
    outcomes = [finding.outcome for finding in findings.rows]
    groups = sorted(outcomes[0].groups.items(), key=lambda group: -group[1].num_tokens)
    return [
        {
            "name": name,
            "requests": tally.num_requests,
            "tokens": tally.num_tokens,
            **{str(outcome.setting): outcome.groups[name].token_share for outcome in outcomes},
        }
        for name, tally in groups[:num_rows]
    ]


def write_csv(found: Sequence[Row], path: Path) -> None:
    """A line of names, then one for each row. Raises OSError."""
    names = list(dict.fromkeys(name for row in found for name in row))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(found)


def table(found: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Lines of text. `columns`: heading by name; shares are in percent."""
    cells = [list(columns.values())]
    cells += [[_cell(row.get(name, "")) for name in columns] for row in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return [
        "  ".join(fit(cell, width) for fit, cell, width in zip(align, line, widths, strict=True))
        for line in cells
    ]


def _row(finding: Finding, ceiling: Tally, block_bytes: int | None) -> Row:
    outcome, total = finding.outcome, finding.outcome.total
    row: Row = {
        "policy": outcome.setting.policy,
        "store": outcome.setting.store if len(outcome.tiers) > 1 else "",
        **{
            name: ENDLESS if size is UNLIMITED else size
            for name, size in zip(SIZES, outcome.setting.blocks, strict=False)
        },
        "hit_tokens": total.token_share,
        "hit_blocks": total.block_share,
        "opt_share": finding.opt_share,
        "regret": max(0.0, finding.bound.token_share - total.token_share),
        "ceiling_share": min(1.0, _share(total.num_hit_tokens, ceiling.num_hit_tokens)),
        "refused_requests": outcome.num_refused,
        "evicted_blocks": outcome.tiers[0].num_evicted_blocks,
    }
    if len(outcome.tiers) > 1:
        for name, tally in zip(TIERS, outcome.tiers, strict=False):
            row[f"{name}_hit_tokens"] = _share(tally.num_hit_tokens, total.num_tokens)
        for name, tally in zip(TIERS[1:], outcome.tiers[1:], strict=False):
            row[f"{name}_evicted_blocks"] = tally.num_evicted_blocks
            moved = {"loaded": tally.num_loaded_blocks, "stored": tally.num_stored_blocks}
            for verb, num_blocks in moved.items():
                row[f"{name}_{verb}_blocks"] = num_blocks
                if block_bytes is not None:
                    row[f"{name}_{verb}_bytes"] = num_blocks * block_bytes
    return row


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _cell(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{100 * value:.2f}"
    return f"{value:,}" if isinstance(value, int) else value
