"""`--policy`: which rules decide about the cache, each by its name."""

import argparse
from collections.abc import Mapping

from foreword.core.place import PLACEMENTS
from foreword.core.policies import POLICIES
from foreword.core.waiting import ORDERS

SWITCH = ("on", "off")
# What there is to choose, the default first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "evict": tuple(POLICIES),
    "store": tuple(PLACEMENTS),
    "order": ORDERS,
    "reuse": SWITCH,
}


def add_policy_flag(parser: argparse.ArgumentParser) -> None:
    said = "; ".join(f"{rule}={'|'.join(names)}" for rule, names in CHOICES.items())
    parser.add_argument(
        "--policy",
        type=policies,
        default="",
        metavar="RULE=NAME,...",
        help=f"which block leaves first, what goes to host memory and disk, who is next, and "
        f"whether anything is reused: {said} (the first of each)",
    )


def policies(text: str) -> dict[str, str]:
    """The name of each rule, of "evict=lru,reuse=off"; the default where none is given."""
    chosen: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        rule, _, name = (word.strip() for word in part.partition("="))
        if rule not in CHOICES:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no rule: write it as {_example()}; rules are {', '.join(CHOICES)}"
            )
        if name not in CHOICES[rule]:
            raise argparse.ArgumentTypeError(
                f"there is no {rule}={name}; it may be {', '.join(CHOICES[rule])}"
            )
        if chosen.setdefault(rule, name) != name:
            raise argparse.ArgumentTypeError(f"{rule} is given twice: as {chosen[rule]} and {name}")
    return {rule: chosen.get(rule, names[0]) for rule, names in CHOICES.items()}


def _example() -> str:
    return ",".join(f"{rule}={names[0]}" for rule, names in CHOICES.items())
