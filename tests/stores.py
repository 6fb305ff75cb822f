"""Every store by its name, for the suites that they all must pass."""

from collections.abc import Callable
from pathlib import Path

from foreword.store.disk import DiskStore
from foreword.store.host import HostStore
from foreword.store.store import KVStore

# (an empty folder, bytes, bytes of a record): a store
FACTORIES: dict[str, Callable[[Path, int, int], KVStore]] = {
    "host": lambda _folder, num_bytes, record_bytes: HostStore(num_bytes, record_bytes),
    "disk": DiskStore,
}
