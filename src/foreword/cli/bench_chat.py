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

from foreword.cli.measure import Answer, add_model_arguments, ask, engine_settings, forced
from foreword.engine.engine import BLOCK_SIZE, TorchEngine
from foreword.engine.runner import Part

WORDS = [
    *("ocean", "river", "mountain", "system", "engine", "memory", "block", "cache", "token"),
    *("request", "server", "model", "layer", "weight", "policy", "tenant", "prefix", "router"),
    *("storage", "disk", "network", "packet", "field", "forest", "animal", "city", "history"),
    *("science", "music", "light", "energy", "water", "stone", "metal", "paper", "garden"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--system", type=int, default=4000, help="tokens of the system prompt")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--user", type=int, default=100, help="tokens of a user message")
    parser.add_argument("--reply", type=int, default=300, help="tokens of a reply")
    parser.add_argument("--time-turns", type=int, default=5, help="turns timed without reuse")
    parser.add_argument("--chats", type=int, default=100, help="open at once, one system prompt")


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
    sizes = {"max_model_len": args.max_model_len, "kv_bytes": longest * 100_000}
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
        return torch.zeros(sum(part.wants_logits for part in parts), vocab_size)

    for number, prompt in enumerate(chat["prompts"], start=1):
        off.runner.step = compute if number in timed else count_only  # type: ignore[method-assign]
        answer = await ask(off, prompt, forced(off, 1))
        if number in timed:
            timed_s[number] = answer.ttft_s
    num_off = off.stats.num_prefilled_tokens - before
    await off.stop(1.0)
    await on.stop(1.0)
    later_s = chat["ttft_s"][1:]
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
        "open_chats": await _open_chats(args),
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
        answer: Answer = await ask(engine, prompt, forced(engine, args.reply))
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


async def _open_chats(args: argparse.Namespace) -> dict[str, Any]:
    """Many chats over one system prompt, all running: how many blocks, and how many at once, in an
    empty cache and in one that is full of other prompts."""
    engine = TorchEngine.load(engine_settings(args, max_num_seqs=args.chats))
    shared = args.system // BLOCK_SIZE
    own = 8
    num_blocks = shared + own * args.chats
    settings = engine_settings(
        args,
        max_num_seqs=args.chats,
        kv_bytes=num_blocks * engine.model.block_bytes(BLOCK_SIZE),
    )
    result: dict[str, Any] = {}
    for filled in (False, True):
        engine = TorchEngine.load(settings)
        engine.start()
        system = random.Random(1).choices(range(100, 400), k=shared * BLOCK_SIZE)
        if filled:
            limit = (engine.card.max_model_len // BLOCK_SIZE - 1) * BLOCK_SIZE
            other = 0
            while engine.cache.pool.num_blank:
                size = min(limit, engine.cache.pool.num_blank * BLOCK_SIZE)
                prompt = random.Random(100 + other).choices(range(100, 400), k=size)
                await ask(engine, prompt, forced(engine, 1))
                other += 1
        await ask(engine, system, forced(engine, 1))
        most = {"running": 0, "leased": 0}
        compute = engine.runner.step

        def watch(
            parts: Any,
            engine: TorchEngine = engine,
            compute: Any = compute,
            most: dict[str, int] = most,
        ) -> Any:
            most["running"] = max(most["running"], len(engine.scheduler.running))
            most["leased"] = max(most["leased"], engine.cache.pool.num_leased)
            return compute(parts)

        engine.runner.step = watch  # type: ignore[method-assign]
        tails = [random.Random(200 + i).choices(range(100, 400), k=20) for i in range(args.chats)]
        await asyncio.gather(*(ask(engine, [*system, *tail], forced(engine, 4)) for tail in tails))
        name = "full_cache" if filled else "empty_cache"
        result[name] = {"running": most["running"], "leased_blocks": most["leased"]}
        await engine.stop(1.0)
    block_bytes = engine.model.block_bytes(BLOCK_SIZE)
    return {
        **result,
        "shared_blocks": shared,
        "system_prompt_bytes": {
            "held_once": shared * block_bytes,
            "private_copies": shared * block_bytes * args.chats,
        },
    }
