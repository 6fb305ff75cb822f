"""What every store keeps to: one suite, each store by its factory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.store.codec import BadRecord, check
from foreword.store.store import KVStore
from records import RECORD_BYTES, SLOT_BYTES, buffer, keys_of, sealed
from stores import FACTORIES

NUM_BYTES = 40 * SLOT_BYTES
KEYS = keys_of(60)
RECORDS = [sealed(key) for key in KEYS]
HASHES = [key.block_hash for key in KEYS]


@pytest.fixture(params=sorted(FACTORIES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with closing(FACTORIES[request.param](tmp_path, NUM_BYTES, RECORD_BYTES)) as made:
        yield made


def put(store: KVStore, *numbers: int) -> list[bool]:
    return store.put([KEYS[i] for i in numbers], [RECORDS[i] for i in numbers])


def read(store: KVStore, number: int) -> bytes | None:
    """The record, checked; None for a miss."""
    page = buffer()
    (length,) = store.get([HASHES[number]], [page])
    if not length:
        return None
    check(page[:length], KEYS[number])
    return bytes(page[:length])


def test_what_was_put_is_read_back(store: KVStore) -> None:
    assert put(store, 0, 1, 2) == [True] * 3
    pages = [buffer() for _ in range(4)]
    lengths = store.get([HASHES[i] for i in (2, 0, 9, 1)], pages)
    assert lengths == [RECORD_BYTES, RECORD_BYTES, 0, RECORD_BYTES]
    assert [bytes(pages[at][:RECORD_BYTES]) for at in (0, 1, 3)] == [
        bytes(RECORDS[i]) for i in (2, 0, 1)
    ]
    assert store.contains([HASHES[i] for i in (0, 9, 2)]) == [True, False, True]


def test_an_empty_store_has_nothing(store: KVStore) -> None:
    assert store.capacity > 0
    assert (list(store.entries()), store.contains(HASHES[:2])) == ([], [False, False])
    assert (store.get([], []), store.put([], []), store.contains([])) == ([], [], [])
    assert read(store, 0) is None
    store.delete(HASHES[:2])


def test_what_was_deleted_is_gone(store: KVStore) -> None:
    put(store, 0, 1)
    store.delete([HASHES[0], HASHES[5]])
    assert (read(store, 0), read(store, 1)) == (None, bytes(RECORDS[1]))
    assert store.contains(HASHES[:2]) == [False, True]


def test_a_record_put_again_replaces_the_damaged_one(store: KVStore) -> None:
    """Or it would stay a miss for ever."""
    damaged = buffer(RECORD_BYTES)
    damaged[:] = RECORDS[0]
    damaged[1000] ^= 1
    store.put([KEYS[0]], [damaged])
    with pytest.raises(BadRecord):
        read(store, 0)
    store.delete([HASHES[0]])
    assert put(store, 0) == [True]
    assert read(store, 0) == bytes(RECORDS[0])


def test_a_full_store_refuses_and_keeps_what_it_has(store: KVStore) -> None:
    num_kept = store.capacity
    kept = put(store, *range(num_kept + 3))
    assert kept == [True] * num_kept + [False] * 3
    assert store.num_bytes <= NUM_BYTES
    assert all(read(store, i) == bytes(RECORDS[i]) for i in range(num_kept))
    assert read(store, num_kept) is None
    store.delete([HASHES[3]])
    assert put(store, num_kept, num_kept + 1) == [True, False]
    assert read(store, num_kept) == bytes(RECORDS[num_kept])
    assert store.num_bytes <= NUM_BYTES


def test_a_put_of_what_is_there_takes_no_room(store: KVStore) -> None:
    put(store, *range(store.capacity))
    assert put(store, 0, 1) == [True, True]
    assert read(store, 0) == bytes(RECORDS[0])


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", sorted(FACTORIES))
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["put", "delete", "get"]), st.lists(st.integers(0, 9))),
        max_size=12,
    )
)
def test_any_order_of_calls_agrees_with_a_dictionary(
    name: str, calls: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(name)
    with closing(FACTORIES[name](folder, NUM_BYTES, RECORD_BYTES)) as store:
        model: dict[int, bytes] = {}
        for verb, numbers in calls:
            if verb == "put":
                assert put(store, *numbers) == [True] * len(numbers)
                model |= {i: bytes(RECORDS[i]) for i in numbers}
            elif verb == "delete":
                store.delete([HASHES[i] for i in numbers])
                model = {i: record for i, record in model.items() if i not in numbers}
            assert [read(store, i) for i in range(10)] == [model.get(i) for i in range(10)]
            assert store.contains(HASHES[:10]) == [i in model for i in range(10)]


def read_over_and_over(store: KVStore, done: threading.Event) -> tuple[int, list[int]]:
    """How many records were accepted before `done`, and which of them were others."""
    num_accepted, wrong = 0, []
    page = buffer()
    while not done.is_set():
        for i, key in enumerate(KEYS):
            (length,) = store.get([key.block_hash], [page])
            try:
                check(page[:length], key)
            except BadRecord:
                continue
            num_accepted += 1
            if page[:length] != RECORDS[i]:
                wrong.append(i)
    return num_accepted, wrong


def test_readers_never_accept_what_a_writer_overwrites(store: KVStore) -> None:
    """Slots change hands under three readers: they get the whole record or none."""
    done = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read_over_and_over, store, done) for _ in range(3)]
        try:
            for turn in range(60):
                numbers = [(turn * 7 + i) % len(KEYS) for i in range(store.capacity // 2)]
                put(store, *numbers)
                store.delete([HASHES[i] for i in numbers[::2]])
                store.delete([HASHES[i] for i in range(turn, len(KEYS), 3)])
        finally:
            done.set()
        results = [reader.result() for reader in readers]
    assert all(num_accepted for num_accepted, _wrong in results)
    assert [wrong for _num_accepted, wrong in results] == [[]] * 3


@pytest.mark.parametrize("name", sorted(set(FACTORIES) - {"host"}))
def test_a_restart_finds_what_was_put(name: str, tmp_path: Path) -> None:
    with closing(FACTORIES[name](tmp_path, NUM_BYTES, RECORD_BYTES)) as store:
        put(store, 0, 1, 2, 3)
        store.delete(HASHES[3:4])
    with closing(FACTORIES[name](tmp_path, NUM_BYTES, RECORD_BYTES)) as store:
        assert {(entry.block_hash, entry.parent) for entry in store.entries()} == {
            (key.block_hash, key.parent) for key in KEYS[:3]
        }
        assert [read(store, i) for i in range(4)] == [*map(bytes, RECORDS[:3]), None]
