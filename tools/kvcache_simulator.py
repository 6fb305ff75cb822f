"""`foreword replay` beside kvcache-simulator: the same trace, policies and capacities.

Do they agree, and what does each cost? kvcache-simulator (C++) goes into an environment of its own:

    python -m venv /tmp/kvs && /tmp/kvs/bin/pip install kvcache-simulator==0.1.3
    python tools/kvcache_simulator.py TRACE --simulator /tmp/kvs/bin/kvcache-simulator

Both leave the first half of the requests out, and let equal unfinished blocks match. Exits with 1
where a share of tokens differs by more than 0.1 point. Costs are CPU seconds of whole commands,
reading the trace included; ours has an OPT beside each capacity anyway.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = {"lru": "lru", "fifo": "fifo", "opt": "optimal"}  # theirs by ours
# A model of theirs whose tokens all have the same size: capacities are asked for in GiB.
MODEL, TOKEN_BYTES = "qwen3-8b", 147_456
TOLERANCE = 0.001

Shares = dict[tuple[str, int], float]  # of tokens, by policy and blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("trace", type=Path, help="a Mooncake trace")
    parser.add_argument("--blocks", default="704,1409,5637,11275")
    parser.add_argument("--block-size", type=int, default=512, help="tokens of a block")
    parser.add_argument("--simulator", default="kvcache-simulator")
    args = parser.parse_args()
    blocks = [int(size) for size in args.blocks.split(",")]
    theirs(args, blocks[:1], ["lru"])  # compiles itself the first time
    found, their_s = theirs(args, blocks, list(NAMES))
    our_found, our_s = ours(args, blocks, list(NAMES))
    print(f"{'policy':8}{'blocks':>8}{'theirs %':>10}{'ours %':>10}")
    for (policy, size), share in found.items():
        print(f"{policy:8}{size:8,}{100 * share:10.3f}{100 * our_found[policy, size]:10.3f}")
    worst = max(abs(share - our_found[key]) for key, share in found.items())
    print(f"largest difference: {100 * worst:.3f} points")
    one_s = theirs(args, blocks[:1], ["lru"])[1], ours(args, blocks[:1], ["lru"])[1]
    for what, (their_one_s, our_one_s) in (("all", (their_s, our_s)), ("one, LRU", one_s)):
        ratio = our_one_s / their_one_s
        print(f"{what}: theirs {their_one_s:.2f} s, ours {our_one_s:.2f} s, {ratio:.1f} times")
    return int(worst > TOLERANCE)


def theirs(
    args: argparse.Namespace, blocks: list[int], policies: list[str]
) -> tuple[Shares, float]:
    """Their shares, and CPU seconds."""
    block_bytes = TOKEN_BYTES * args.block_size
    budgets = ",".join(str((size + 0.5) * block_bytes / 2**30) for size in blocks)
    words = ["run", "--trace", str(args.trace), "--model", MODEL, "--no-progress"]
    words += ["--block-size", str(args.block_size), "--budgets-gib", budgets]
    words += ["--policies", ",".join(NAMES[name] for name in policies), "--format", "json"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        seconds = timed([args.simulator, *words, "--output", str(result)])
        points = json.loads(result.read_text())["points"]
    shares = {
        (name, point["cacheBlocks"]): point["results"][NAMES[name]]["hitRate"]
        for name in policies
        for point in points
    }
    if {size for _, size in shares} != set(blocks):
        sys.exit("kvcache-simulator leaves out what half of the trace does not fill: less --blocks")
    return shares, seconds


def ours(args: argparse.Namespace, blocks: list[int], policies: list[str]) -> tuple[Shares, float]:
    """The same of `foreword replay`."""
    words = ["replay", str(args.trace), "--blocks", ",".join(map(str, blocks)), "--json"]
    words += ["--policy", ",".join(policies), "--partial", "shared", "--warmup", "0.5"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        seconds = timed([sys.executable, "-m", "foreword.cli.main", *words], result)
        rows = json.loads(result.read_text())["rows"]
    return {(row["policy"], row["blocks"]): row["hit_tokens"] for row in rows}, seconds


def timed(command: list[str], output: Path | None = None) -> float:
    """Runs a command; its CPU seconds and those of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    if output is not None:
        output.write_text(done.stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
