"""Whatever befalls a store, what is read through the check is right or it is a miss."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.core.identity import Identity
from foreword.store.codec import BadRecord, RecordKey, check
from foreword.store.faults import Fault, FaultyStore
from foreword.store.store import KVStore
from records import BLOCK_SIZE, RECORD_BYTES, SLOT_BYTES, buffer, keys_of, sealed
from stores import FACTORIES

KEYS = keys_of(12)
RECORDS = [sealed(key) for key in KEYS]
HASHES = [key.block_hash for key in KEYS]
# What reading 12 records gives where the fault befalls each.
ALWAYS = {
    Fault.FLIP: {"refused": 12},
    Fault.SWAP: {"refused": 12},
    Fault.TEAR: {"refused": 12},
    Fault.STALE: {"right": 1, "refused": 11},  # before the first there is nothing older
    Fault.LOSE: {"miss": 12},
    Fault.FULL: {"miss": 12},
    Fault.DELAY: {"right": 12},
    Fault.HANG: {"right": 12},
    Fault.ERROR: {"error": 12},
    Fault.CRASH: {"error": 12},
}


@pytest.fixture(params=sorted(FACTORIES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with closing(FACTORIES[request.param](tmp_path, 40 * SLOT_BYTES, RECORD_BYTES)) as made:
        yield made


def read(store: KVStore, key: RecordKey, record: memoryview) -> str:
    page = buffer()
    page[:] = b"\xff" * SLOT_BYTES
    try:
        (length,) = store.get([key.block_hash], [page])
        if not length:
            return "miss"
        check(page[:length], key)
    except OSError:
        return "error"
    except BadRecord:
        return "refused"
    return "right" if page[:length] == record else "WRONG"


def fill(store: KVStore) -> list[bool]:
    """One put for each record, which may fail; whether it was kept."""
    kept = []
    for key, record in zip(KEYS, RECORDS, strict=True):
        try:
            kept += store.put([key], [record])
        except OSError:
            kept.append(False)
    return kept


def read_all(store: KVStore) -> Counter[str]:
    return Counter(map(lambda key, record: read(store, key, record), KEYS, RECORDS))


@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("fault", Fault)
def test_no_fault_serves_wrong_bytes(store: KVStore, fault: Fault, rate: float) -> None:
    for seed in range(5):
        faulty = FaultyStore(store, fault, seed, rate, delay_s=0.001)
        if fault is Fault.HANG:
            faulty.release()
        fill(faulty)
        counts = read_all(faulty)
        assert counts["WRONG"] == 0
        if rate == 1.0:
            assert counts == ALWAYS.get(fault, counts)
            assert (faulty.num_faults > 0) == (fault is not Fault.HANG)
        store.delete(HASHES)


@pytest.mark.parametrize("fault", Fault)
def test_without_a_fault_nothing_changes(store: KVStore, fault: Fault) -> None:
    faulty = FaultyStore(store, fault, rate=0.0)
    assert faulty.contains(HASHES[:1]) == [False]
    assert fill(faulty) == [True] * 12
    assert read_all(faulty) == {"right": 12}
    faulty.delete(HASHES[:1])
    assert faulty.contains(HASHES[:2]) == [False, True]
    assert (faulty.name, faulty.capacity) == (store.name, store.capacity)
    assert faulty.num_bytes == store.num_bytes
    assert list(faulty.entries()) == list(store.entries())
    assert faulty.num_faults == 0


def test_a_truncated_read_says_how_much_it_read(store: KVStore) -> None:
    faulty = FaultyStore(store, Fault.TRUNCATE)
    fill(faulty)
    page = buffer()
    lengths = [faulty.get([block_hash], [page])[0] for block_hash in HASHES]
    assert all(0 <= length < RECORD_BYTES for length in lengths)
    assert bytes(page[lengths[-1] :]) == bytes(SLOT_BYTES - lengths[-1])


def test_the_same_seed_gives_the_same_faults(store: KVStore) -> None:
    def pages(seed: int) -> list[bytes]:
        faulty = FaultyStore(store, Fault.FLIP, seed, rate=0.5)
        fill(faulty)
        read_pages = [buffer() for _ in KEYS]
        faulty.get(HASHES, read_pages)
        return [bytes(page) for page in read_pages]

    assert pages(1) == pages(1)
    assert pages(1) != pages(2)


def test_a_crash_ends_a_put_in_its_middle(store: KVStore) -> None:
    faulty = FaultyStore(store, Fault.CRASH, seed=1, rate=0.2)
    with pytest.raises(OSError, match="injected crash"):
        faulty.put(KEYS, RECORDS)
    with pytest.raises(OSError, match="crashed before"):
        faulty.contains(HASHES)
    counts = read_all(store)  # as after a restart
    assert counts["WRONG"] == 0
    assert counts["refused"] == 1
    assert counts["miss"] == 12 - 1 - counts["right"]
    store.delete(HASHES)
    assert fill(store) == [True] * 12
    assert read_all(store) == {"right": 12}


def test_what_hangs_goes_on_when_released(store: KVStore) -> None:
    fill(store)
    faulty = FaultyStore(store, Fault.HANG)
    results: list[str] = []
    reader = threading.Thread(target=lambda: results.append(read(faulty, KEYS[0], RECORDS[0])))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    faulty.release()
    reader.join()
    assert results == ["right"]
    assert read(faulty, KEYS[1], RECORDS[1]) == "right"


IDENTITY = Identity(
    weights="ab" * 32,
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    attention='{"rope_scaling": null, "rope_theta": 10000.0}',
    layout="layer-major",
    parallel="",
    lora="",
    block_size=BLOCK_SIZE,
    tokenizer="t",
    chat_template="c",
    numerics="exact",
)
OTHERS = {
    "weights under the same name": replace(IDENTITY, weights="cd" * 32),
    "dtype": replace(IDENTITY, dtype="float16"),
    "number of layers": replace(IDENTITY, num_layers=4, head_size=4),
    "number of heads": replace(IDENTITY, num_kv_heads=4, head_size=4),
    "RoPE scaling": replace(
        IDENTITY, attention='{"rope_scaling": {"factor": 2.0}, "rope_theta": 10000.0}'
    ),
    "layout": replace(IDENTITY, layout="token-major"),
    "parallel layout": replace(IDENTITY, parallel="tensor 0 of 2"),
    "LoRA": replace(IDENTITY, lora="ef" * 32),
    "block size": replace(IDENTITY, block_size=2 * BLOCK_SIZE),
    "tokenizer": replace(IDENTITY, tokenizer="u"),
    "chat template": replace(IDENTITY, chat_template="d"),
    "exact flag": replace(IDENTITY, numerics=""),
}


def of_identity(identity: Identity, salt: str = "") -> list[RecordKey]:
    """The keys of one text under an identity."""
    return keys_of(12, identity.root_hash(salt))


@pytest.mark.parametrize("difference", [*OTHERS, "salt"])
def test_another_identity_gets_no_hit(store: KVStore, difference: str) -> None:
    """Not by its hashes, and not where our records lie under them either."""
    ours = of_identity(IDENTITY, "tenant")
    theirs = of_identity(OTHERS.get(difference, IDENTITY), "" if difference == "salt" else "tenant")
    records = [sealed(key) for key in ours]
    assert store.put(ours, records) == [True] * 12
    hashes = [key.block_hash for key in theirs]
    assert store.contains(hashes) == [False] * 12
    assert store.get(hashes, [buffer() for _ in hashes]) == [0] * 12
    assert store.put(theirs, records) == [True] * 12
    assert {read(store, key, sealed(key)) for key in theirs} == {"refused"}
    assert {read(store, *pair) for pair in zip(ours, records, strict=True)} == {"right"}


def test_every_field_of_the_identity_is_swapped() -> None:
    swapped = {field for other in OTHERS.values() for field in IDENTITY.differences(other)}
    assert swapped == set(Identity.__slots__)
