"""`foreword bench chat`: the reference chat. A system prompt of 4,000 tokens, 20 turns of 100 user
and 300 reply tokens; each turn sends back the text that came.

With reuse, every turn runs for real. Without, every turn's prompt goes through an engine that
reuses nothing: the chosen turns are computed and timed, the others only scheduled and counted.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from foreword.cli.measure import Reply, add_model_arguments, ask, engine_settings, forced
from foreword.cli.settings import count
from foreword.core.errors import RequestFailed
from foreword.core.request import Output
from foreword.core.scheduler import Step
from foreword.engine.engine import TorchEngine
from foreword.engine.model import load_model
from foreword.engine.runner import Part
from foreword.engine.sample import Sample
from foreword.engine.settings import BLOCK_SIZE
from foreword.engine.stream import Stream

WORDS = [
    *("ocean", "river", "mountain", "system", "engine", "memory", "block", "cache", "token"),
    *("request", "server", "model", "layer", "weight", "policy", "tenant", "prefix", "router"),
    *("storage", "disk", "network", "packet", "field", "forest", "animal", "city", "history"),
    *("science", "music", "light", "energy", "water", "stone", "metal", "paper", "garden"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--max-model-len", type=count, default=16384)
    parser.add_argument("--system", type=count, default=4000, help="tokens of the system prompt")
    parser.add_argument("--turns", type=count, default=20)
    parser.add_argument("--user", type=count, default=100, help="tokens of a user message")
    parser.add_argument("--reply", type=count, default=300, help="tokens of a reply")
    parser.add_argument("--time-turns", type=count, default=5, help="turns timed without reuse")
    parser.add_argument("--chats", type=count, default=100, help="open at once, one system prompt")


def words(engine: TorchEngine, seed: int, num_tokens: int) -> str:
    """Text of exactly `num_tokens` tokens, alone as in a message."""
    draw = random.Random(seed)
    text = draw.choice(WORDS)
    while (missing := num_tokens - len(engine.encode(text))) > 0:
        text += "".join(f" {word}" for word in draw.choices(WORDS, k=max(1, missing // 2)))
    while len(engine.encode(text)) > num_tokens:
        text = text.rsplit(" ", 1)[0]
    return text + " a" * (num_tokens - len(engine.encode(text)))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `prefilled_tokens`, `template_tokens`, `retokenised_tokens`, `ttft_s`, and more."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.system + args.turns * (args.user + args.reply) + 2000
    block_bytes = load_model(args.model, dtype=args.dtype).block_bytes(BLOCK_SIZE)
    sizes = {
        "max_model_len": args.max_model_len,
        "kv_bytes": -(-longest // BLOCK_SIZE) * block_bytes,
    }
    on = TorchEngine.load(engine_settings(args, **sizes))
    off = TorchEngine.load(engine_settings(args, prefix_caching=False, **sizes))
    on.start()
    off.start()
    chat = await _chat(on, args)
    timed = {
        round(1 + i * (args.turns - 1) / max(1, args.time_turns - 1))
        for i in range(args.time_turns)
    }
    timed_s, before = {}, off.stats.num_prefilled_tokens
    compute = off.runner.step
    vocab_size = off.card.vocab_size

    def count_only(parts: Sequence[Part]) -> torch.Tensor:
        return torch.zeros(sum(part.num_logits for part in parts), vocab_size)

    for number, prompt in enumerate(chat["prompts"], start=1):
        off.runner.step = compute if number in timed else count_only  # type: ignore[method-assign]
        answer = await ask(off, prompt, forced(off, 1))
        if number in timed:
            timed_s[number] = answer.ttft_s
    num_off = off.stats.num_prefilled_tokens - before
    await off.stop(1.0)
    await on.stop(1.0)
    later_s = chat["ttft_s"][1:] or chat["ttft_s"]
    return {
        "prefilled_tokens": {"off": num_off, "on": chat["prefilled"]},
        "template_tokens": chat["template"],
        "template_tokens_once": chat["template_once"],
        "retokenised_tokens": chat["retokenised"],
        "reply_tokens_as_sent_back": chat["reply_tokens"],
        "ttft_s": {
            "on": {str(n): chat["ttft_s"][n - 1] for n in sorted(timed)},
            "off": {str(n): timed_s[n] for n in sorted(timed_s)},
        },
        "ttft_later_turns_s": {
            "median": statistics.median(later_s),
            "max_over_median": max(later_s) / statistics.median(later_s),
        },
        "open_chats": await _open_chats(args, block_bytes),
    }


async def _chat(engine: TorchEngine, args: argparse.Namespace) -> dict[str, Any]:
    messages = [{"role": "system", "content": words(engine, 0, args.system)}]
    contents = args.system
    held: list[int] = []  # tokens whose KV the engine has after a turn
    out: dict[str, Any] = {
        "prompts": [],
        "ttft_s": [],
        "prefilled": 0,
        "template": 0,
        "retokenised": 0,
        "reply_tokens": 0,
        "template_once": 0,
    }
    for turn in range(args.turns):
        messages.append({"role": "user", "content": words(engine, turn + 1, args.user)})
        contents += args.user
        prompt = engine.encode_chat(messages)
        before = engine.stats.num_prefilled_tokens
        answer: Reply = await ask(engine, prompt, forced(engine, args.reply))
        assert len(answer.token_ids) == args.reply
        out["prefilled"] += engine.stats.num_prefilled_tokens - before
        out["template"] += len(prompt) - contents
        out["template_once"] = len(prompt) - contents
        common = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b),
            min(len(held), len(prompt)),
        )
        out["retokenised"] += len(held) - common
        held = [*prompt, *answer.token_ids[:-1]]
        messages.append({"role": "assistant", "content": answer.text})
        reply_tokens = len(engine.encode(answer.text))
        contents += reply_tokens
        out["reply_tokens"] += reply_tokens
        out["prompts"].append(prompt)
        out["ttft_s"].append(answer.ttft_s)
    return out


class WatchedEngine(TorchEngine):
    """Remembers the largest batch it ran, and the most blocks that were leased at once."""

    most_running = most_leased = 0

    def _step(self, step: Step[Sample]) -> list[tuple[Stream, Output | RequestFailed]]:
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_leased = max(self.most_leased, self.cache.pool.num_leased)
        return super()._step(step)


async def _open_chats(args: argparse.Namespace, block_bytes: int) -> dict[str, Any]:
    """Many chats over one system prompt, all running: how many blocks, and how many at once, in an
    empty cache and then in one that is full of other prompts."""
    shared = args.system // BLOCK_SIZE
    num_blocks = shared + 8 * args.chats
    settings = engine_settings(args, max_num_seqs=args.chats, kv_bytes=num_blocks * block_bytes)
    engine = WatchedEngine.load(settings)
    engine.start()
    longest = (engine.card.max_model_len // BLOCK_SIZE - 1) * BLOCK_SIZE
    system = random.Random(1).choices(range(100, 400), k=shared * BLOCK_SIZE)
    result: dict[str, Any] = {}
    for name in ("empty_cache", "full_cache"):
        engine.most_running = engine.most_leased = 0
        await ask(engine, system, forced(engine, 1))
        tails = [
            random.Random(f"{name} {i}").choices(range(100, 400), k=20) for i in range(args.chats)
        ]
        await asyncio.gather(*(ask(engine, [*system, *tail], forced(engine, 4)) for tail in tails))
        result[name] = {"running": engine.most_running, "leased_blocks": engine.most_leased}
        while blank := engine.cache.pool.num_blank:
            other = random.Random(blank).choices(range(100, 400), k=blank * BLOCK_SIZE)
            await ask(engine, other[:longest], forced(engine, 1))
    await engine.stop(1.0)
    return {
        **result,
        "shared_blocks": shared,
        "system_prompt_bytes": {
            "held_once": shared * block_bytes,
            "private_copies": shared * block_bytes * args.chats,
        },
    }
