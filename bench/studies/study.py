"""What the studies share: their options, a cache that is served one request after another, tables,
and the page of results that is checked in beside each script."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from foreword.core.cache import KVCache, Refusal
from foreword.core.lease import Copy
from foreword.core.policy import LRU, Policy
from foreword.sim.catalogue import HARDWARE, MODELS
from foreword.sim.formats.reading import ReadOptions
from foreword.sim.importer import read_trace
from foreword.sim.percentile import percentile
from foreword.sim.plan import Deployment, deployment
from foreword.sim.prompt import Visit, visit
from foreword.sim.trace import Record, Trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CONVERSATION = "mooncake_fast25_conversation.jsonl.gz"
SYNTHETIC = "mooncake_fast25_synthetic.jsonl.gz"
SESSIONS = "claude_code_sessions.rle.jsonl.gz"
BLOCK_SIZE = 16  # tokens, of traces of token ids
REFERENCE = "Llama 3.1 8B in 16 bits on one H100 at the peak of its data sheet"

Cell = str | float | int | None


def main(script: str, page: Callable[[argparse.Namespace], str]) -> None:
    """Run a study and write its page beside its script; with `--quick` only try it out, on a
    cut-down input, and print the page."""
    path = Path(script)
    parser = argparse.ArgumentParser(prog=path.name)
    parser.add_argument("--trace", type=Path, help="in place of the one in ../shared/traces")
    parser.add_argument("--quick", action="store_true", help="a cut-down input, nothing written")
    args = parser.parse_args()
    text = page(args).strip() + "\n"
    if not args.quick:
        path.with_suffix(".md").write_text(text)
    sys.stdout.write(text)


def trace_named(args: argparse.Namespace, name: str, options: ReadOptions | None = None) -> Trace:
    """The trace that was asked for, or this one of ../shared/traces. Ends the program where it is
    not there."""
    path = args.trace or TRACES / name
    if not path.exists():
        sys.exit(f"{path} is not there: name a trace with --trace")
    return read_trace(path, options)


def reference(mfu: float = 1.0) -> Deployment:
    return deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], mfu=mfu)


def visits(trace: Trace, most: int | None = None) -> Iterator[tuple[Record, Visit]]:
    """Each request, as the core sees it; the first `most`."""
    for record in itertools.islice(trace, most):
        yield record, visit(record, BLOCK_SIZE)


class Cache:
    """A production KVCache with room for so many blocks, served one request after another."""

    def __init__(self, num_blocks: int, id_tokens: int, policy: Policy = LRU) -> None:
        """`id_tokens` is that of the trace: ids of blocks are blocks of one id, and the mark at
        the end of each needs a slot."""
        self._id_tokens = id_tokens
        of_blocks = id_tokens > 1
        self.core = KVCache(num_blocks + of_blocks, 1 if of_blocks else BLOCK_SIZE, policy=policy)

    def serve(self, seen: Visit) -> int:
        """Returns how many tokens of the prompt were reused. One that is longer than the cache
        passes it by."""
        if seen.num_slots > self.core.pool.num_blocks:
            return 0
        admitted = self.core.admit(seen.prompt, match=seen.reuses)
        assert not isinstance(admitted, Refusal), "it fits, and nothing else runs"
        lease, effects = admitted
        for effect in effects:
            assert isinstance(effect, Copy), "there are no tiers"
            self.core.filled(lease, effect.num_tokens)
        num_reused = lease.num_reused_tokens * self._id_tokens
        num_prompt = min(seen.num_filled, len(seen.prompt))
        self.core.filled(lease, num_prompt - lease.num_computed_tokens)
        lease.chain = seen.whole  # the prompt, and what its answer adds, block by block
        for end in seen.answer_ends:
            grown = self.core.extend(lease, end)
            assert grown, "it fits, and nothing else runs"
            self.core.filled(lease, end - lease.num_computed_tokens)
        self.core.release(lease)
        return num_reused

    def known(self, seen: Visit) -> int:
        """How many blocks of the prompt are there."""
        index, prompt = self.core.index, seen.prompt
        return len(index.walk(index.root(prompt.root), prompt.hashes, 0, seen.num_reusable)[1])


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """In Markdown, columns of numbers to the right."""
    cells = [list(map(shown, row)) for row in rows]
    right = [any(line[at][:1].isdigit() for line in cells) for at in range(len(columns))]
    lines = [columns, ["--:" if numbers else "---" for numbers in right], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.3g}" if cell < 100 else f"{cell:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return percentile(sorted(values), share)
