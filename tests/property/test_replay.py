"""A replay of tokens finds what the server would have found, to the token."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.lease import Copy
from foreword.core.policies import POLICIES
from foreword.sim.replay import Rules, replay
from foreword.sim.trace import Record, Trace
from foreword.sim.trial import Setting

NAMES = [name for name in POLICIES if name != "fifo"]  # which a replay takes for the plain one


def served(cache: KVCache, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """One request as the engine serves it, a token at a time; how many tokens were reused."""
    admitted = cache.admit(Chain(BlockHash(b"r" * 32), cache.block_size, prompt))
    assert not isinstance(admitted, Refusal)
    lease, effects = admitted
    for effect in effects:
        assert isinstance(effect, Copy)
        cache.filled(lease, effect.num_tokens)
    num_reused = lease.num_reused_tokens
    cache.filled(lease, len(prompt) - lease.num_computed_tokens)
    for token in answer[:-1]:  # the last one is sampled, and never computed
        lease.chain.extend((token,))
        assert cache.extend(lease, len(lease.chain))
        cache.filled(lease, 1)
    cache.release(lease)
    return num_reused


@given(st.data())
def test_traces_of_tokens_find_what_the_server_would_find(data: st.DataObject) -> None:
    """With what answers leave behind, and with just enough room or more."""
    block_size = data.draw(st.integers(1, 5))
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    known: list[list[int]] = [[]]
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        earlier = data.draw(st.sampled_from(known))
        prompt = earlier[: data.draw(st.integers(0, len(earlier)))] + data.draw(tokens)
        turns.append((prompt, data.draw(tokens)))
        known.append([*prompt, *turns[-1][1]])
    longest = max(len(prompt) + len(answer) - 1 for prompt, answer in turns)
    num_blocks = -(-longest // block_size) + data.draw(st.integers(0, 9))
    check(
        turns,
        block_size,
        num_blocks,
        data.draw(st.sampled_from(NAMES)),
    )


def test_an_answer_that_is_known_gives_its_slots_back_as_it_grows() -> None:
    check([([0], [0]), ([0], [0]), ([0], [0, 0]), ([0], [0, 0, 0])], 1, 3, "lru")


def check(
    turns: Sequence[tuple[list[int], list[int]]], block_size: int, num_blocks: int, policy: str
) -> None:
    rules = replace(POLICIES[policy], block_tokens=block_size)
    cache = KVCache(num_blocks, block_size, policy=rules)
    expected = 0
    for number, (prompt, answer) in enumerate(turns):
        cache.tick(number)  # of a trace without times their order is the clock
        expected += served(cache, prompt, answer)
    with Trace(1) as trace:
        for prompt, answer in turns:
            trace.add(Record(len(prompt), prompt, output_ids=answer))
        outcome = replay(trace, [Setting(policy, (num_blocks,))], Rules(block_size)).rows[0].outcome
    assert outcome.num_refused == 0
    assert outcome.total.num_hit_tokens == outcome.tiers[0].num_hit_tokens == expected
    assert outcome.tiers[0].num_evicted_blocks == cache.num_evicted_blocks
