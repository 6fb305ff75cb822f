"""Reuse against brute force: the longest common prefix with anything stored, token for token.

Prompts branch off earlier ones over a small alphabet, and every known prompt is asked about: with
independent prompts and one question, a dropped subtree goes unnoticed.
"""

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from laws import check_index, check_pool

ROOTS = [BlockHash(bytes([i]) * 32) for i in range(2)]


def common(left, right):
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


@given(st.data())
def test_reuse_is_the_longest_common_prefix(data):
    block_size = data.draw(st.sampled_from([1, 2, 4, 5]))
    alphabet = data.draw(st.integers(1, 3))
    cache = KVCache(400, block_size)
    stored = []
    known = [(0, [])]
    for _ in range(data.draw(st.integers(1, 12))):
        root, base = data.draw(st.sampled_from(known))
        root = data.draw(st.sampled_from([root, root, 1 - root]))
        tokens = base[: data.draw(st.integers(0, len(base)))]
        tokens = tokens + data.draw(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=9))
        known.append((root, tokens))
        for ask_root, ask in [*known[1:], (root, tokens)]:
            lease, copies = cache.admit(Chain(ROOTS[ask_root], block_size, ask))
            best = max((common(t, ask) for r, t in stored if r == ask_root), default=0)
            assert lease.num_reused_tokens == min(best, len(ask) - 1)
            for copy in copies:
                cache.filled(lease, copy.num_tokens)
            stop = data.draw(st.integers(lease.num_computed_tokens, len(ask)))
            cache.filled(lease, stop - lease.num_computed_tokens)
            cache.release(lease)
            stored.append((ask_root, ask[:stop]))
            check_pool(cache, [])
            check_index(cache)
