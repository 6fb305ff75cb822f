"""What the benches share: an engine in this process, prompts, statistics."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.cli.settings import count
from foreword.core.request import Request, SamplingParams
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import EngineSettings


@dataclass(slots=True)
class Reply:
    """One sample's whole output, with its times in seconds."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    ttft_s: float = 0.0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=count, default=2, help="torch threads")


def engine_settings(args: argparse.Namespace, **changes: object) -> EngineSettings:
    chosen = {"model": args.model, "dtype": args.dtype, "num_threads": args.threads}
    return EngineSettings(**{**chosen, **changes})


async def ask(
    engine: TorchEngine, prompt: Sequence[int], sampling: SamplingParams, salt: str = ""
) -> Reply:
    """Generate one sample and gather it."""
    answer = Reply()
    begin_s = time.perf_counter()
    request = Request(f"bench-{random.getrandbits(32):08x}", tuple(prompt), sampling, 1, salt)
    async for output in engine.generate(request):
        if not answer.token_ids:
            answer.ttft_s = time.perf_counter() - begin_s
            answer.num_cached_tokens = output.num_cached_tokens
        answer.text += output.text
        answer.token_ids += output.token_ids
    return answer


def random_tokens(seed: int, num_tokens: int, engine: TorchEngine) -> list[int]:
    """Ordinary tokens of the model, each as likely as any."""
    draw = random.Random(seed)
    special = engine.model.special_token_ids
    ids = [i for i in range(engine.card.vocab_size) if i not in special]
    return draw.choices(ids, k=num_tokens)


def forced(engine: TorchEngine, num_tokens: int, seed: int = 0) -> SamplingParams:
    """Greedy, exactly `num_tokens` tokens: no special token can be chosen."""
    bias = dict.fromkeys(sorted(engine.model.special_token_ids), -1e9)
    return SamplingParams(num_tokens, temperature=0.0, seed=seed, logit_bias=bias)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean by the bootstrap (percentiles of 4,000 seeded resamples)."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(4000))
    return means[100], means[3899]
