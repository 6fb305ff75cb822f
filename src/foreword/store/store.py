"""KVStore: records by block hash in one place. What may live where is the core's decision."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foreword.core.block import BlockHash
from foreword.store.codec import BadRecord, RecordKey, check


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that a store found when it was opened. `parent` is the root for a first block."""

    block_hash: BlockHash
    parent: BlockHash


@dataclass(frozen=True, slots=True)
class Loan:
    """A record to be copied from where it lies. A writer may overwrite it at any time: what was
    read of it counts only if `kept` says afterwards that the store still has it there."""

    record: memoryview  # to read only
    kept: Callable[[], bool] = lambda: True


def why_lost(loan: Loan | None, key: RecordKey) -> tuple[str, str] | None:
    """None: what a store gave for `key` is its record, whole. Else "missing" or "damaged", and what
    is wrong with it. What was overwritten while it was read is missing, not damaged."""
    if loan is None:
        return "missing", ""
    try:
        check(loan.record, key)
    except BadRecord as error:
        kind = "damaged" if loan.kept() else "missing"
        return kind, f"block {key.block_hash.hex()}: {error}"
    return None


class KVStore(Protocol):
    """Calls block, come in batches, and may come from several threads at once. None raises for
    what is missing or full; OSError says that the place itself fails. What `get` returns is not
    checked: its caller does that (`codec.check`), right after, while the bytes are in the cache.
    """

    @property
    def name(self) -> str:
        """As in metrics and settings: host, disk."""
        ...

    @property
    def capacity(self) -> int:
        """Records that it may hold, as of the last `tend` or `put`: cheap, for any thread. When it
        shrinks, delete some, or puts are refused."""
        ...

    @property
    def shared(self) -> bool:
        """Whether others may write there too."""
        ...

    @property
    def has_others(self) -> bool:
        """Whether others have a part there, as of the last `tend`: cheap, for any thread."""
        ...

    @property
    def num_bytes(self) -> int:
        """What it takes of its place, likewise."""
        ...

    def entries(self) -> Iterable[Entry]:
        """Own records as they were found at opening, least recently used first."""
        ...

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these `get` would find, own or of others that share the place."""
        ...

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        """Read each record to the start of its buffer; how many bytes, 0 where it is not here.
        Buffers are `slot_bytes` long and start at multiples of 4,096 bytes."""
        ...

    @property
    def lend(self) -> Callable[[Sequence[BlockHash]], list[Loan | None]] | None:
        """Each record where it lies in this machine's memory, not checked either; None where it is
        not here. There is no such method (None) where records are not in memory."""
        ...

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        """Keep sealed records, in order. False where there was no room, or writing failed. Each
        record lies at the start of a buffer like those of `get`; its memoryview is that long."""
        ...

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Forget own records; those that are not here are no error."""
        ...

    def tend(self) -> None:
        """Do what was put off, and look how much room there is. To be called about once a second,
        by the thread that calls `put` and `delete`."""
        ...

    def close(self) -> None: ...
