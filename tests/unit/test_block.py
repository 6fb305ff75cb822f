"""Hashes are a stored format: golden values, and what each depends on."""

from dataclasses import replace
from hashlib import sha256

import pytest

from foreword.core.block import Chain, token_key
from foreword.core.identity import Identity

IDENTITY = Identity(
    weights="w" * 64,
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=1,
    head_size=4,
    attention="{}",
    layout="layer-major",
    parallel="",
    lora="",
    block_size=4,
    tokenizer="t",
    chat_template="c",
    numerics="",
)


def test_golden_hashes():
    """A change here orphans every stored block: it needs a decision record."""
    root = IDENTITY.root_hash()
    assert root.hex() == "32e6e6b588ab21b2b3a5f117bb33b68d0123b6ff02ead06b885b1e8ce585a1f3"
    chain = Chain(root, 4, range(9))
    assert [h.hex() for h in chain.hashes] == [
        "a4c6d22e5c1ddc5b4dc2d543e78cc234f231947e0b2a90bd75fae695661be880",
        "a91797fec35a40e41325f7e854c1873acabf44be4753c385a02fc00f84e6fea1",
    ]


def test_the_format_is_what_the_docstring_says():
    root = IDENTITY.root_hash()
    first = sha256(root + b"".join(i.to_bytes(4, "big") for i in (7, 8, 9, 1 << 20))).digest()
    second = sha256(first + b"".join(i.to_bytes(4, "big") for i in (1, 2, 3, 4))).digest()
    assert Chain(root, 4, (7, 8, 9, 1 << 20, 1, 2, 3, 4)).hashes == [first, second]


@pytest.mark.parametrize("field", Identity.__slots__)
def test_every_identity_field_is_in_the_hash(field):
    value = getattr(IDENTITY, field)
    other = replace(IDENTITY, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.root_hash() != IDENTITY.root_hash()
    assert other.differences(IDENTITY) == (field,)


def test_fields_do_not_run_into_each_other():
    left = replace(IDENTITY, layout="ab", parallel="c")
    right = replace(IDENTITY, layout="a", parallel="bc")
    assert left.root_hash() != right.root_hash()


def test_equal_identities_agree():
    assert replace(IDENTITY).root_hash() == IDENTITY.root_hash()
    assert IDENTITY.differences(replace(IDENTITY)) == ()


def test_salt_is_another_chain():
    salted, plain = IDENTITY.root_hash("tenant"), IDENTITY.root_hash()
    assert salted != plain
    assert Chain(salted, 4, range(4)).hashes != Chain(plain, 4, range(4)).hashes


def test_a_chain_grows_token_by_token_as_at_once():
    root = IDENTITY.root_hash()
    whole, grown = Chain(root, 4, range(11)), Chain(root, 4)
    for token in range(11):
        grown.extend((token,))
    assert grown.hashes == whole.hashes
    assert bytes(grown.key) == bytes(whole.key) == token_key(range(11))
    assert grown.token_ids == list(range(11))
    assert len(grown) == 11


def test_a_hash_covers_all_that_came_before():
    root = IDENTITY.root_hash()
    left, right = Chain(root, 2, (1, 2, 3, 4)), Chain(root, 2, (9, 2, 3, 4))
    assert left.hashes[1] != right.hashes[1]


def test_keys_sort_as_tokens_do():
    lists = [[0], [1], [1, 0], [2], [255], [256], [65536], [1 << 24]]
    assert sorted(lists) == sorted(lists, key=token_key)
    assert [token_key(tokens) for tokens in lists] == sorted(token_key(t) for t in lists)


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_ids_that_do_not_fit_are_refused(token):
    chain = Chain(IDENTITY.root_hash(), 2, (1,))
    with pytest.raises(OverflowError):
        chain.extend((2, token))
    assert (chain.token_ids, len(chain.key), chain.hashes) == ([1], 4, [])


def test_hashes_do_not_depend_on_how_the_tokens_came() -> None:
    whole = Chain(IDENTITY.root_hash(""), 4, range(13))
    pieces = Chain(IDENTITY.root_hash(""), 4)
    for token_id in range(13):
        pieces.extend((token_id,))
    assert pieces.hashes == whole.hashes
    assert len(set(whole.hashes)) == 3


def test_a_copy_goes_its_own_way() -> None:
    chain = Chain(IDENTITY.root_hash(""), 4, range(6))
    twin = chain.copy()
    assert (twin.root, twin.block_size) == (IDENTITY.root_hash(""), 4)
    assert (twin.token_ids, twin.key, twin.hashes) == (chain.token_ids, chain.key, chain.hashes)
    twin.extend((6, 7))
    assert (len(chain), len(chain.key), len(chain.hashes)) == (6, 24, 1)
    chain.extend((6, 7))
    assert twin.hashes == chain.hashes
