"""OuterCache over a folder, and blocks whose bytes their keys decide."""

from random import Random

from foreword.core.identity import Identity
from foreword.plugins import outer
from foreword.plugins.outer import Block, OuterCache
from foreword.store.disk import DiskStore
from foreword.store.faults import Fault, FaultyStore

SIZE = 10_000  # bytes of a block
MIB = 1 << 20
IDENTITY = Identity(
    weights="w", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_size=8, attention="{}",
    layout="test", parallel="", lora="", block_size=16, tokenizer="", chat_template="", numerics="",
)  # fmt: skip


def blocks_of(name: str, count: int) -> list[Block]:
    keys = [f"{name}-{at}".encode() for at in range(count)]
    return [Block(key, keys[at - 1] if at else None, at) for at, key in enumerate(keys)]


def content(block: Block) -> memoryview:
    return memoryview(Random(block.engine_key).randbytes(SIZE))


def targets(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


def kept(cache: OuterCache, blocks: list[Block]) -> None:
    assert all(cache.store(blocks, [content(block) for block in blocks]))
    assert cache.flush(10)


def loaded(cache: OuterCache, blocks: list[Block]) -> list[str | None]:
    """Why each is not there; what is there is right."""
    into = targets(len(blocks))
    lost = cache.load(blocks, into)
    for block, target, reason in zip(blocks, into, lost, strict=True):
        if reason is None:
            assert target == content(block)
    return lost


def found(cache: OuterCache, blocks: list[Block]) -> int:
    """As `num_found`, however slow the machine is."""
    return cache.probe(blocks).result(10).count(True)


def faulty(monkeypatch, fault: Fault) -> list[FaultyStore]:
    """From now on disk stores fail that way; the last one is the one opened last."""
    stores: list[FaultyStore] = []

    def make(*args) -> FaultyStore:
        stores.append(FaultyStore(DiskStore(*args), fault))
        return stores[-1]

    monkeypatch.setattr(outer, "DiskStore", make)
    return stores
