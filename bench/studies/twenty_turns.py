"""The reference chat of 20 turns: tokens prefilled, seconds, and a provider's bill, by formula and
through the production cache.

    python bench/studies/twenty_turns.py
"""

import argparse

from foreword.sim.workload import Chat, trace_of
from study import BLOCK_SIZE, REFERENCE, Cache, main, percent, reference, table, visits

WRITE = 1.25  # of the price of plain input
READS = (0.1, 0.05)


def page(args: argparse.Namespace) -> str:
    chat = Chat(turns=3 if args.quick else 20, sessions=1)
    return f"""
# A chat of {chat.turns} turns

`python bench/studies/twenty_turns.py`. A system prompt of {chat.system:,} tokens, each turn
{chat.user} tokens of the user and {chat.reply} of the reply.

**Run:** the prompts and replies of one chat through the production cache, blocks of {BLOCK_SIZE}
tokens. **By formula:** the other rows of the first table, and the bill. **Modelled:** seconds, of
{REFERENCE}, nothing else running.
**Published:** the project's reference figures, the last column.

{tokens(chat)}

The cache computes {excess(chat)} tokens more than the formula: at the end of each reply the last
token, which has no KV, and in the first turn nothing else.

{seconds(chat)}

{bill(chat)}

Prices are in tokens of plain input: {WRITE} for a token that is written to the provider's cache,
and for one that is read what the row says. A hundred chats that keep private copies of the system
prompt hold {100 * chat.system * reference().kv_bytes / 1e9:.0f} GB for it, sharing one
{chat.system * reference().kv_bytes / 2**20:.0f} MiB.
"""


def tokens(chat: Chat) -> str:
    everything = chat.num_prompt_tokens()
    rows = [
        ("nothing kept", everything, 158_000),
        ("kept, each reply prefilled once", chat.num_new_tokens(replies_kept=False), 11_700),
        ("kept, replies too", chat.num_new_tokens(replies_kept=True), 6_000),
        ("through the production cache", computed(chat), None),
    ]
    return table(
        ["tokens prefilled", "ours", "of all", "times fewer", "published"],
        [
            (name, num, percent(num / everything), everything / num, published)
            for name, num, published in rows
        ],
    )


def computed(chat: Chat) -> int:
    """Tokens that the production cache leaves to compute."""
    cache = Cache(10_000, 1)
    with trace_of(chat) as trace:
        return sum(record.num_tokens - cache.serve(seen) for record, seen in visits(trace))


def excess(chat: Chat) -> int:
    return computed(chat) - chat.num_new_tokens(replies_kept=True)


def seconds(chat: Chat) -> str:
    step, turns = reference().step, range(1, chat.turns + 1)
    new = chat.user + chat.reply
    prompts = [chat.prompt_tokens(turn) for turn in turns]
    cold = [step.prefill_s(prompt) for prompt in prompts]
    once = [cold[0], *(step.prefill_s(new, prompt - new) for prompt in prompts[1:])]
    kept = [cold[0], *(step.prefill_s(chat.user, prompt - chat.user) for prompt in prompts[1:])]
    rows = [("nothing kept", cold, 226), ("kept, each reply prefilled once", once, 9)]
    rows.append(("kept, replies too", kept, 0))
    return table(
        ["prefill", "all turns, ms", "last turn, ms", "published, last turn, ms"],
        [
            (name, 1e3 * sum(times), 1e3 * times[-1], published or None)
            for name, times, published in rows
        ],
    )


def bill(chat: Chat) -> str:
    everything = chat.num_prompt_tokens()
    published = {0.1: "29,255 (81 % off)", 0.05: "86 % off"}
    rows = []
    for read in READS:
        billed = chat.num_billed_tokens(WRITE, read)
        off = percent(1 - billed / everything)
        rows.append((f"{read}", round(billed), off, published[read]))
    return table(["price of a read", "billed tokens", "off", "published"], rows)


if __name__ == "__main__":
    main(__file__, page)
