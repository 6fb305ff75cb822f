"""Prompts whose KV a tier of a real vLLM keeps, asked again and again while something befalls it.

An answer is wrong when a token is another than in the answer that was computed before, or when its
log probability is off by more than CLOSE_ENOUGH: all is float32, where what was cached and what was
computed agree to the last bit.
"""

import contextlib
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from vllm_server import TINY_FLAGS, VllmServer, cached_tokens, vllm_server

BLOCK_BYTES = 32 * 1024  # a block of 32 tokens of the tiny model
NUM_PROMPTS = 5  # more than the device's 24 blocks and the CPU tier's 16 have room for
PROMPT_TOKENS, ANSWER_TOKENS = 400, 32
PROMPT_BLOCKS = PROMPT_TOKENS // 32
CLOSE_ENOUGH = 1e-3
ANSWER_S = 20.0  # then it hangs
HEAL_S = 45.0
DISK_BYTES = 64 << 20
SETTLED_S = 0.3

_numbers = count()  # of prompts: no two faults see the same ones


@dataclass
class Score:
    """What befell the answers to prompts whose KV was kept before a fault."""

    fault: str
    tier: str
    asked: int = 0
    wrong: int = 0
    failed: int = 0
    hung: int = 0
    cold_s: float = 0.0  # the slowest answer that was computed, before the fault
    slowest_s: float = 0.0  # the slowest after it
    num_kept: int = NUM_PROMPTS * PROMPT_BLOCKS * 32  # tokens that can come from below
    num_restored: int = 0  # tokens of the first round after it that were not computed
    healed: bool = False  # at the end all came from disk again
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        bad = [
            f"{number} of {self.asked} {what}"
            for number, what in (
                (self.wrong, "WRONG TOKENS"),
                (self.failed, "failed"),
                (self.hung, f"hung {ANSWER_S:.0f} s"),
            )
            if number
        ]
        healed = "healed" if self.healed else "not healed"
        seconds = f"slowest {self.slowest_s:.2f} s (cold {self.cold_s:.2f} s)"
        told = [*(bad or [f"right, {self.asked} of {self.asked}"]), seconds, healed]
        return f"{self.fault}, {self.tier}: {'; '.join(told)}"


@dataclass
class Tier:
    """One that is tried: what vLLM is told, and where its blocks lie."""

    name: str
    setting: dict[str, Any]
    folder: Path
    switches: Path

    def flags(self) -> tuple[str, ...]:
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "ForewordCPUSpec",
                "spec_module_path": "foreword.plugins.vllm",
                "cpu_bytes_to_use": 16 * BLOCK_BYTES,
                "secondary_tiers": [self.setting],
            },
        }
        return (*TINY_FLAGS, "--kv-transfer-config", json.dumps(config))

    def files(self) -> list[Path]:
        """Those with blocks in them."""
        ends = ".slots" if self.name == "foreword" else ".bin"
        return sorted(path for path in self.folder.rglob(f"*{ends}") if path.is_file())

    def state(self) -> list[tuple[str, int, int]]:
        stats = [(str(path), path.stat()) for path in self.files()]
        return [(path, stat.st_blocks, stat.st_mtime_ns) for path, stat in stats]


def foreword(root: Path, disk_bytes: int = DISK_BYTES, switched: bool = False) -> Tier:
    """Ours; `switched`: one that the files `hang` and `unverified` in `switches` can spoil."""
    kind = (
        ("SwitchedTier", "switched_tier") if switched else ("ForewordTier", "foreword.plugins.vllm")
    )
    setting = {"type": kind[0], "module_path": kind[1], "disk_bytes": disk_bytes}
    setting["disk_folder"] = str(root / "kv")
    return Tier("foreword", setting, root / "kv", root / "switches")


def fs(root: Path) -> Tier:
    return Tier("fs", {"type": "fs", "root_dir": str(root / "kv")}, root / "kv", root / "switches")


@contextlib.contextmanager
def serving(
    tier: Tier, model: Path, log: Path, command: Sequence[str] = ()
) -> Iterator[VllmServer]:
    """vLLM above that tier, which keeps blocks from then on. `command`: as for vllm_server, but in
    mounts of its own, where the folder of the tier is found from now on."""
    tier.folder.mkdir(parents=True, exist_ok=True)
    tier.switches.mkdir(exist_ok=True)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent / "src"), str(here)])
    # To compile what log probabilities need takes half a minute, and saves none here.
    environment = {"PYTHONPATH": path, "SWITCHES": str(tier.switches), "TORCHDYNAMO_DISABLE": "1"}
    with vllm_server(model, log, tier.flags(), command, **environment) as server:
        if command:
            tier.folder = Path(f"/proc/{server.process.pid}/root{tier.folder}")
        before = tier.state()
        for _ in range(100):  # ours first reads the weights to know whose KV it is
            server.complete(new_prompt(), 1)
            if tier.state() != before:
                break
        settle(server, tier)
        yield server


def new_prompt() -> list[int]:
    draw = Random(f"prompt {next(_numbers)}")
    return [draw.randrange(3, 503) for _ in range(PROMPT_TOKENS)]


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int
    seconds: float

    def differs(self, other: "Answer") -> bool:
        if self.tokens != other.tokens:
            return True
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return any(not abs(one - two) < CLOSE_ENOUGH for one, two in pairs)


def ask(server: VllmServer, prompt: list[int]) -> Answer:
    """Raises TimeoutError for one that hangs, OSError for one that fails."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer = json.load(response)
    choice = answer["choices"][0]
    return Answer(
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        cached_tokens(answer),
        time.monotonic() - begin,
    )


def settle(server: VllmServer, tier: Tier) -> None:
    """Until nothing more is written. vLLM's tiers go on with each step of its engine."""
    state, since = None, time.monotonic()
    for _ in range(200):
        server.complete([5, 6, 7], 1)
        now = tier.state()
        if now != state:
            state, since = now, time.monotonic()
        if time.monotonic() - since > SETTLED_S:
            return
        time.sleep(0.02)
    raise AssertionError("writing does not end")


class Trial:
    """Prompts whose KV a tier keeps, asked again and again while something befalls it."""

    def __init__(self, server: VllmServer, tier: Tier, fault: str) -> None:
        self.server, self.tier = server, tier
        self.score = Score(fault, tier.name)
        self.prompts = [new_prompt() for _ in range(NUM_PROMPTS)]
        self.cold: list[Answer] = []

    def begin(self) -> None:
        self.cold = [ask(self.server, prompt) for prompt in self.prompts]
        assert [answer.cached for answer in self.cold] == [0] * NUM_PROMPTS
        self.score.cold_s = max(answer.seconds for answer in self.cold)
        settle(self.server, self.tier)

    def round(self, prompts: int = NUM_PROMPTS) -> int:
        """Ask all, each of which the others have driven out; tokens that came from below."""
        cached = 0
        for prompt, cold in list(zip(self.prompts, self.cold, strict=True))[:prompts]:
            self.score.asked += 1
            begin = time.monotonic()
            try:
                answer = ask(self.server, prompt)
            except TimeoutError:
                self.score.hung += 1
            except (OSError, ValueError) as error:
                self.score.failed += 1
                self.score.errors.append(str(error))
            else:
                self.score.wrong += answer.differs(cold)
                cached += answer.cached
            self.score.slowest_s = max(self.score.slowest_s, time.monotonic() - begin)
        return cached

    def first_round(self, prompts: int = NUM_PROMPTS) -> None:
        self.score.num_restored = self.round(prompts)

    def heal(self) -> None:
        """Ask until everything comes from disk, and right."""
        begin, rounds = time.monotonic(), 0
        while not self.score.healed and time.monotonic() - begin < HEAL_S:
            with contextlib.suppress(AssertionError):
                settle(self.server, self.tier)
            bad = self.score.wrong + self.score.failed + self.score.hung
            whole = self.round() == NUM_PROMPTS * PROMPT_BLOCKS * 32
            bad_now = self.score.wrong + self.score.failed + self.score.hung - bad
            self.score.healed = whole and not bad_now
            rounds += 1
            if bad_now and rounds == 3:
                return  # it stays wrong
            if not self.score.healed and rounds > 2:
                time.sleep(1)
