"""Transfer between a real pool and stores that answer when a test lets them."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.lease import Load
from foreword.core.policies import DEFAULT
from foreword.core.scheduler import Scheduler
from foreword.core.sequence import Sequence
from foreword.core.tier import Tier
from foreword.engine import lane, staging, transfer
from foreword.engine.kv import LayerShape, PagedKV
from foreword.engine.tiers import tier_of
from foreword.engine.transfer import Transfer
from foreword.store.codec import seal
from foreword.store.disk import DiskStore
from foreword.store.pages import arena
from foreword.store.patience import Breaker

ROOT = BlockHash(b"root" * 8)
SIZE = 4  # tokens of a block


def num_computable(cache, lease):
    return sum(stop - start for start, stop in cache.computable(lease))


class GatedStore:
    """Keeps records in a dict. Reads and writes wait at a gate each."""

    shared = has_others = False
    lend = None

    def __init__(self, name):
        self.name = name
        self.capacity = 1000
        self.num_bytes = 0
        self.records = {}
        self.reading, self.writing = threading.Event(), threading.Event()
        self.reading.set()
        self.writing.set()
        self.num_reads = 0
        self.error = None

    def entries(self):
        return ()

    def contains(self, hashes):
        return [h in self.records for h in hashes]

    def get(self, hashes, buffers):
        self.num_reads += 1
        assert self.reading.wait(10)
        if self.error:
            raise self.error
        for block_hash, buffer in zip(hashes, buffers, strict=True):
            record = self.records.get(block_hash, b"")
            buffer[: len(record)] = record
        return [len(self.records.get(h, b"")) for h in hashes]

    def put(self, keys, records):
        assert self.writing.wait(10)
        if self.error:
            raise self.error
        for key, record in zip(keys, records, strict=True):
            self.records[key.block_hash] = bytes(record)
        return [True] * len(keys)

    def delete(self, hashes):
        for block_hash in hashes:
            self.records.pop(block_hash, None)

    def tend(self):
        pass

    def close(self):
        pass


@pytest.fixture
def world(monkeypatch):
    """A pool of 20 blocks over two tiers whose staging holds two cells of two blocks each."""
    kv = PagedKV([LayerShape(1, 8, 8, None)] * 2, 20, SIZE, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(staging, "CELL_BYTES", 2 * 4096)
    monkeypatch.setattr(lane, "STAGING_BYTES", 4 * 4096)
    monkeypatch.setattr(transfer, "LOAD_S", 0.2)
    stores = [GatedStore("fast"), GatedStore("slow")]
    cache = KVCache(20, SIZE, tiers=[Tier(1000) for store in stores])
    moves = Transfer(cache, kv, stores, 1, lambda: None)
    yield SimpleNamespace(kv=kv, stores=stores, cache=cache, moves=moves)
    for store in stores:
        store.reading.set()
        store.writing.set()
    moves.close(5.0)


def fill(world, chain):
    """Compute all blocks of a chain with values of its own; stored, released, forgotten."""
    lease, _ = world.cache.admit(chain)
    for at, block_id in enumerate(lease.block_ids[:-1]):
        for pool in (*world.kv.keys, *world.kv.values):
            pool[block_id * SIZE : (block_id + 1) * SIZE] = value(chain, at)
    done = lease.num_computed_tokens
    while done < len(chain):  # two blocks at a time: as much as a cell holds
        step = min(2 * SIZE, len(chain) - done)
        world.cache.filled(lease, step)
        done += step
        world.moves.perform(world.cache.lower.take_effects())
        settle(world, lambda: all(lane.outbound.num_free == 2 for lane in world.moves.lanes))
    world.cache.release(lease)
    forget(world)


def forget(world):
    lease, _ = world.cache.admit(Chain(BlockHash(b"else" * 8), SIZE, range(20 * SIZE)))
    world.cache.release(lease)


def value(chain, at):
    return chain.token_ids[0] + at / 16


def settle(world, until):
    end_s = time.monotonic() + 10
    while True:
        world.moves.settle(0.0)
        if until():
            return
        assert time.monotonic() < end_s
        time.sleep(0.002)


def admit(world, chain):
    lease, loads = world.cache.admit(chain)
    assert all(isinstance(load, Load) for load in loads)
    world.moves.perform(loads)
    return lease


def holds(world, lease, num_blocks):
    return all(
        bool((pool[block_id * SIZE : (block_id + 1) * SIZE] == value(lease.chain, at)).all())
        for at, block_id in enumerate(lease.block_ids[:num_blocks])
        for pool in (*world.kv.keys, *world.kv.values)
    )


def sealed(staging, chain):
    """Keys and records of a chain's blocks, of zeros."""
    keys = transfer._keys(chain, range(len(chain.hashes)))
    cell = memoryview(arena(len(keys) * staging.slot_bytes))
    records = [cell[at * staging.slot_bytes :][: staging.record_bytes] for at in range(len(keys))]
    for key, record in zip(keys, records, strict=True):
        seal(record, key)
    return keys, records


def chain(first, num_blocks=9):
    return Chain(ROOT, SIZE, [first, *range(num_blocks * SIZE)])


def test_more_than_staging_holds_comes_piece_by_piece(world):
    fill(world, chain(1))
    lease = admit(world, chain(1))
    settle(world, lambda: lease.num_computed_tokens == 9 * SIZE)
    assert holds(world, lease, 9)
    stats = world.moves.stats
    assert [tier.num_loaded_blocks for tier in stats] == [9, 0]
    assert [tier.num_stored_blocks for tier in stats] == [9, 9]
    assert world.stores[0].num_reads == 5
    assert world.moves.next_deadline_s is None


def test_a_late_read_gives_up_its_tier_and_no_other(world):
    fill(world, chain(1))
    fill(world, chain(2))
    fast, slow = world.stores
    fast.reading.clear()
    first, second = admit(world, chain(1)), admit(world, chain(2))
    settle(world, lambda: not world.cache.lower.tiers[0].reads)
    assert world.moves.stats[0].lost == {"late": 18}, "who waited behind it too"
    assert num_computable(world.cache, first) == num_computable(world.cache, second) == 9 * SIZE + 1
    world.cache.release(first)
    again = admit(world, chain(1))
    settle(world, lambda: again.num_computed_tokens == 9 * SIZE)
    assert holds(world, again, 9), "from the slow one"
    assert slow.num_reads > 0
    num_reads = fast.num_reads
    fast.reading.set()
    settle(world, lambda: world.cache.lower.tiers[0].reads)
    assert fast.num_reads == num_reads <= 2, "what was given up is not read any more"
    assert all(lane.inbound.num_free == 2 for lane in world.moves.lanes)
    assert not holds(world, second, 1), "nothing came after it was given up"


def test_time_in_which_the_engine_computed_is_not_the_tiers(world):
    fill(world, chain(1))
    world.stores[0].reading.clear()
    lease = admit(world, chain(1))
    deadlines = [read.deadline_s for read in world.moves.lanes[0].reads]
    world.moves.settle(100.0)
    later = [read.deadline_s for read in world.moves.lanes[0].reads]
    gained = [after - before for before, after in zip(deadlines, later, strict=True)]
    assert gained == pytest.approx([0, 0, 100, 100, 100]), "of those that wait for staging"
    world.stores[0].reading.set()
    settle(world, lambda: lease.num_computed_tokens == 9 * SIZE)


def test_what_is_behind_others_may_take_longer(world):
    fill(world, chain(1))
    fill(world, chain(2))
    world.stores[0].reading.clear()
    admit(world, chain(1))
    deadlines = [read.deadline_s for read in world.moves.lanes[0].reads]
    admit(world, chain(2))
    later = [read.deadline_s for read in world.moves.lanes[0].reads][len(deadlines) :]
    own_s = 9 * world.moves.lanes[0].inbound.record_bytes / transfer.LOAD_BYTES_PER_S
    assert min(later) - max(deadlines) >= own_s - 1e-6


def test_a_released_lease_reads_no_more(world):
    fill(world, chain(1))
    world.stores[0].reading.clear()
    lease = admit(world, chain(1))
    world.cache.release(lease)
    world.stores[0].reading.set()
    settle(world, lambda: not list(world.moves.lanes[0].reads))
    assert world.stores[0].num_reads <= 2, "what staging had room for"
    assert world.moves.stats[0].lost == {}
    assert world.moves.stats[0].num_loaded_blocks == 0


def test_what_does_not_fit_in_staging_is_not_stored_and_counted(world):
    world.stores[0].writing.clear()
    lease, _ = world.cache.admit(chain(1))
    world.cache.filled(lease, 9 * SIZE)
    world.moves.perform(world.cache.lower.take_effects())
    stats = world.moves.stats[0]
    assert stats.num_dropped_blocks == 5
    assert world.cache.lower.tiers[0].num_blocks == 4
    world.stores[0].writing.set()
    settle(world, lambda: world.moves.stats[0].num_stored_blocks == 4)
    world.cache.filled(lease, 1)
    world.cache.release(lease)
    lease, [copy] = world.cache.admit(Chain(ROOT, SIZE, [*chain(1).token_ids, *range(9)]))
    world.cache.filled(lease, copy.num_tokens)
    world.cache.filled(lease, len(lease.chain) - lease.num_computed_tokens)
    world.moves.perform(world.cache.lower.take_effects())
    settle(world, lambda: world.cache.lower.tiers[0].num_ready(lease.chain.hashes, 0, 8) == 8)


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("whatever")])
def test_a_store_that_raises_is_left_alone_for_a_while(world, error):
    fill(world, chain(1))
    world.stores[0].error = error
    lease = admit(world, chain(1))
    settle(world, lambda: not world.cache.lower.tiers[0].reads)
    settle(world, lambda: not list(world.moves.lanes[0].reads))
    assert num_computable(world.cache, lease) == 9 * SIZE + 1
    assert world.cache.lower.tiers[0].writes, "writing did not fail"
    assert world.moves.stats[0].lost == {"failed": 9}
    assert world.cache.lower.tiers[0].num_blocks == 9, "they may be there still"


def test_pauses_get_longer_until_it_works():
    breaker = Breaker()
    assert breaker.allows(0.0)
    breaker.failed(10.0, "it")
    assert not breaker.allows(10.9)
    breaker.failed(10.9, "a call that began before")
    assert breaker.allows(11.0)
    breaker.failed(11.0, "it")
    assert not breaker.allows(12.9)
    assert breaker.allows(13.0)
    for at in range(20, 1000, 100):
        breaker.failed(float(at), "it")
    assert not breaker.allows(949.9)
    assert breaker.allows(950.0), "half a minute at most"
    breaker.succeeded()
    breaker.failed(2000.0, "it")
    assert breaker.allows(2001.0)


def test_a_smaller_store_lets_leaves_go(world):
    fill(world, chain(1))
    world.stores[0].capacity = 3
    world.moves.settle(0.0)
    settle(world, lambda: len(world.stores[0].records) == 3)
    assert world.cache.lower.tiers[0].num_ready(chain(1).hashes, 0, 9) == 3


def test_a_tier_that_is_always_too_slow_is_left_alone(world):
    fill(world, chain(1))
    world.stores[1].reading.clear()
    world.stores[0].reading.clear()
    for _ in range(2):
        lease = admit(world, chain(1))
        settle(world, lambda lease=lease: num_computable(world.cache, lease) > 0)
        world.cache.release(lease)
        for store in world.stores:
            store.reading.set()  # too late
        settle(world, lambda: all(not lane.num_overdue for lane in world.moves.lanes))
        for store in world.stores:
            store.reading.clear()
    assert not any(tier.reads for tier in world.cache.lower.tiers), "though its reads came back"


def test_a_probe_that_is_not_answered_is_answered_with_nothing(world):
    tier, store = world.cache.lower.tiers[1], world.stores[1]
    tier.shared = store.has_others = True
    gate = threading.Event()
    store.contains = lambda hashes: gate.wait(10) and [False] * len(hashes)
    [probe] = world.cache.probe(chain(1))
    world.moves.perform([probe])
    end_s = time.monotonic() + 5
    while not (found := world.moves.settle(0.0)):
        assert time.monotonic() < end_s
    assert found == [(probe, 0)]
    world.moves.settle(0.0)
    assert not tier.reads, "the next one is not asked"
    assert world.cache.probe(chain(2)) == []
    gate.set()
    settle(world, lambda: tier.reads)


def test_nobody_waits_for_a_probe_where_no_one_else_has_the_folder(world, tmp_path, monkeypatch):
    """A prompt that the device lacks comes while another decodes: its turn is the next step, or
    where others have stored there the one after their answer."""
    for patience in ("PROBE_S", "LOAD_S"):
        monkeypatch.setattr(transfer, patience, 30.0)
    cell = world.moves.lanes[0].inbound
    ours = DiskStore(tmp_path, 1 << 22, cell.record_bytes)
    cache = KVCache(20, SIZE, tiers=[tier_of(ours, DEFAULT)])
    moves = Transfer(cache, world.kv, [ours], 1, lambda: None)
    scheduler = Scheduler(cache, 4, 100, 100)

    def turn():
        """A step; who took part in it."""
        for probe, num_blocks in moves.settle(0.0):
            scheduler.found(probe, num_blocks)
        step = scheduler.schedule()
        moves.perform(step.loads)
        for sequence, _start, num in step.work:
            if scheduler.settle(sequence, num):
                sequence.chain.extend([7])
        moves.perform(cache.lower.take_effects())
        return [sequence for sequence, *_ in step.work]

    decoding = Sequence(chain(1, 1))
    scheduler.add([decoding])
    assert turn() == [decoding]
    first = Sequence(chain(2, 1))
    assert scheduler.add([first]) == []
    assert turn() == [decoding, first], "its first step is the next"
    scheduler.finish([first])

    other = DiskStore(tmp_path, 1 << 22, cell.record_bytes)
    ours.tend()
    assert other.put(*sealed(cell, chain(3, 2))) == [True, True]
    moves.settle(0.0)
    second = Sequence(chain(3, 2))
    [probe] = scheduler.add([second])
    assert turn() == [decoding], "it waits for the answer"
    scheduler.finish([decoding])  # or it would fill the pool meanwhile
    moves.perform([probe])
    settle(world, lambda: second in turn())
    assert second.lease.restored == {0: 2 * SIZE}
    moves.close(5.0)
    other.close()


def test_damage_is_told_once_for_a_read(world, caplog):
    fill(world, chain(1))
    for records in (world.stores[0].records, world.stores[1].records):
        for block_hash, record in records.items():
            records[block_hash] = record[:-1] + bytes([record[-1] ^ 1])
    lease = admit(world, chain(1))
    settle(world, lambda: num_computable(world.cache, lease) == 9 * SIZE + 1)
    told = [entry for entry in caplog.messages if "checksum" in entry]
    assert len(told) == 5
    assert "of 2 lost" in told[0]
    assert world.moves.stats[0].lost == {"damaged": 9}
    settle(world, lambda: not world.stores[0].records)


def test_a_store_that_hangs_when_it_is_closed_does_not_keep_the_server(world):
    gate = threading.Event()
    world.stores[0].close = lambda: gate.wait(10)
    begin_s = time.monotonic()
    world.moves.close(0.2)
    assert time.monotonic() - begin_s < 2
    gate.set()
