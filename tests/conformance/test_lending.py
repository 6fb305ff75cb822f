"""What a store lends counts only if it was kept until it was copied."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from foreword.store.codec import BadRecord, check
from foreword.store.faults import Fault, FaultyStore
from foreword.store.store import KVStore, Loan
from records import RECORD_BYTES, SLOT_BYTES, keys_of, sealed
from stores import FACTORIES

KEYS = keys_of(60)
RECORDS = [sealed(key) for key in KEYS]
HASHES = [key.block_hash for key in KEYS]


@pytest.fixture(params=["host"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with closing(FACTORIES[request.param](tmp_path, 40 * SLOT_BYTES, RECORD_BYTES)) as made:
        yield made


def lend(store: KVStore, *numbers: int) -> list[Loan | None]:
    assert store.lend is not None
    return store.lend([HASHES[i] for i in numbers])


def lent(store: KVStore, number: int) -> Loan:
    (loan,) = lend(store, number)
    assert loan is not None
    return loan


def put(store: KVStore, *numbers: int) -> None:
    assert all(store.put([KEYS[i] for i in numbers], [RECORDS[i] for i in numbers]))


def test_what_is_not_in_memory_is_not_lent(tmp_path: Path) -> None:
    with closing(FACTORIES["disk"](tmp_path, 40 * SLOT_BYTES, RECORD_BYTES)) as disk:
        assert disk.lend is None
        assert FaultyStore(disk, Fault.FLIP).lend is None


def test_what_was_put_is_lent_where_it_lies(store: KVStore) -> None:
    put(store, 0, 1)
    assert lend(store, 9, 0)[0] is None
    first, again, other = lent(store, 0), lent(store, 0), lent(store, 1)
    assert (first.record, other.record) == (RECORDS[0], RECORDS[1])
    assert first.record.readonly
    assert [loan.kept() for loan in (first, again, other)] == [True] * 3


def test_a_slot_that_changed_hands_is_not_kept(store: KVStore) -> None:
    """Deleted between the check and the copy, and another record written over it."""
    put(store, 0, 1)
    loan, other = lent(store, 0), lent(store, 1)
    check(loan.record, KEYS[0])
    store.delete(HASHES[:1])
    put(store, *range(2, store.capacity + 1))
    assert loan.record != RECORDS[0]
    assert not loan.kept()
    assert other.kept()


def test_a_record_put_again_is_another_one(store: KVStore) -> None:
    """Also where the same bytes come to lie in the same slot: they were torn meanwhile."""
    put(store, 0)
    loan = lent(store, 0)
    put(store, 0)
    assert not loan.kept()
    assert lent(store, 0).kept()


def test_a_closed_store_keeps_nothing(store: KVStore) -> None:
    put(store, 0)
    loan = lent(store, 0)
    store.close()
    assert not loan.kept()
    assert loan.record == RECORDS[0], "the memory stays while it is lent"


def copy_over_and_over(
    store: KVStore, done: threading.Event, num_accepted: list[int], reader: int
) -> list[int]:
    """Which of the records accepted before `done` were others. Counts in `num_accepted`."""
    wrong = []
    while not done.is_set():
        for i, loan in enumerate(lend(store, *range(len(KEYS)))):
            try:
                if loan is None:
                    continue
                check(loan.record, KEYS[i])
            except BadRecord:
                continue
            copy = bytes(loan.record)
            if loan.kept():
                num_accepted[reader] += 1
                if copy != RECORDS[i]:
                    wrong.append(i)
    return wrong


def test_readers_never_accept_what_a_writer_overwrites(store: KVStore) -> None:
    """Slots change hands under three readers: they copy the whole record or none."""
    done, num_accepted = threading.Event(), [0, 0, 0]
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(copy_over_and_over, store, done, num_accepted, i) for i in range(3)]
        try:
            for turn in range(100_000):
                if turn >= 60 and min(num_accepted) >= 20:
                    break
                numbers = [(turn * 7 + i) % len(KEYS) for i in range(store.capacity // 2)]
                store.put([KEYS[i] for i in numbers], [RECORDS[i] for i in numbers])
                store.delete([HASHES[i] for i in numbers[::2]])
                store.delete([HASHES[i] for i in range(turn, len(KEYS), 3)])
        finally:
            done.set()
        results = [reader.result() for reader in readers]
    assert min(num_accepted) >= 20
    assert results == [[]] * 3


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.SWAP, Fault.TRUNCATE])
def test_damage_befalls_what_is_lent_and_not_the_store(store: KVStore, fault: Fault) -> None:
    put(store, 0, 1)
    faulty = FaultyStore(store, fault)
    put(faulty, 2, 3)  # it swaps those that it knows
    for i in range(4):
        loan = lent(faulty, i)
        with pytest.raises(BadRecord):
            check(loan.record, KEYS[i])
        assert loan.kept()
        assert lent(store, i).record == RECORDS[i]
    assert faulty.num_faults == 4
    store.delete(HASHES[:1])
    assert lend(faulty, 0) == [None]


def test_what_cannot_be_reached_lends_nothing(store: KVStore) -> None:
    with pytest.raises(OSError, match="injected"):
        lend(FaultyStore(store, Fault.ERROR), 0)
