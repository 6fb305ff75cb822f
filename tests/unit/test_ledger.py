"""The ledger: who comes often is there, what is counted lacks no more than it says, and segments
are openings from which requests parted."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.block import BlockHash, Chain
from foreword.core.ghost import DAY_S, Served
from foreword.engine.ledger import Accounts, Ledger

ROOT = BlockHash(b"r" * 32)
KEYS = st.one_of(st.integers(0, 3), st.integers(0, 60))


@given(st.lists(KEYS, max_size=300), st.sampled_from([2, 4, 10]))
def test_counts_lack_no_more_than_they_say(keys, max_rows):
    accounts = Accounts(max_rows, 1)
    for number, key in enumerate(keys, start=1):
        accounts.count(key)
        assert len(accounts.rows) <= max_rows
        assert accounts._missed <= 2 * number / max_rows
    for key in set(keys):
        if key in accounts.rows:
            account = accounts.rows[key]
            assert account.num_requests <= keys.count(key)
            assert keys.count(key) <= account.num_requests + account.missed
        else:
            assert keys.count(key) <= 2 * len(keys) / max_rows


def add(ledger, tokens, found, owner=("", ""), now_s=0.0):
    chain = Chain(ROOT, 2, tokens)
    num = len(chain.hashes)
    ledger.add(Served(owner, chain, num, num, found), 7, now_s)


def segments(ledger):
    """Those where more than one request parted: in blocks, and how often they were reused."""
    return {
        (row.start, row.stop): row.num_reuses
        for row in ledger.segments.rows.values()
        if row.num_requests > 1
    }


def test_a_segment_is_where_requests_part():
    ledger = Ledger.of(2)
    system, doc = [1] * 8, [2] * 6  # four blocks, and three
    add(ledger, [*system, *doc, 10, 10], [0, 0])
    for last in range(11, 14):  # three questions about the document
        add(ledger, [*system, *doc, last, last], [7, 0])
    assert segments(ledger) == {(0, 7): 3}
    for last in range(21, 23):  # two others, whom the system prompt serves too
        add(ledger, [*system, last, last], [2, 2])
    add(ledger, [*system, *doc, 14, 14], [4, 3])
    assert segments(ledger) == {(0, 4): 3, (4, 7): 4}
    of_system, of_doc = (
        row
        for stop in (4, 7)
        for row in ledger.segments.rows.values()
        if row.stop == stop and row.num_requests > 1
    )
    assert of_system.loaded == [8, 4]
    assert of_doc.token_ids == (*doc, 14, 14)
    assert (of_doc.num_blocks, of_doc.loaded) == (4 * 3, [9, 3])
    assert of_doc.num_before == 4 * (4 + 5 + 6)


def test_turns_of_a_chat_are_no_segments():
    ledger, tokens = Ledger.of(1), []
    for turn in range(10):
        tokens += [turn] * 8
        add(ledger, tokens, [len(tokens) // 2 - 4 if turn else 0])
    assert segments(ledger) == {}


def test_tenants_and_documents():
    ledger = Ledger.of(2)
    for number in range(3):
        add(ledger, range(20), [0, 6 if number else 0], ("a", "report"))
    add(ledger, range(20), [0, 0], ("b", ""))
    a, b = (ledger.tenants.rows[salt] for salt in "ab")
    assert (a.num_requests, a.num_reuses, a.num_blocks, a.loaded) == (3, 2, 12, [0, 12])
    assert a.num_before == 2 * sum(range(6))
    assert (b.num_requests, b.num_reuses) == (1, 0)
    assert list(ledger.documents.rows) == [("a", "report")]


def test_accounts_fade():
    ledger = Ledger.of(1)
    add(ledger, range(20), [6], ("a", "report"))
    add(ledger, range(20), [6], ("a", "report"), now_s=DAY_S)
    for row in (ledger.tenants.rows["a"], ledger.documents.rows["a", "report"]):
        assert row.num_blocks == pytest.approx(6 * (1 + exp(-1)))
        assert row.loaded[0] == pytest.approx(row.num_blocks)
