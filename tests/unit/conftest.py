"""Disk stores, and caches of other engines, in a folder of their own, closed in the end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disks import Stores
from foreword.core.identity import Identity
from foreword.plugins import outer
from foreword.plugins.outer import Budgets, OuterCache
from outers import IDENTITY, MIB, SIZE


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    folder = tmp_path / "kv"
    folder.mkdir()
    opened = Stores(folder)
    yield opened
    for store in opened.opened:
        store.close()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OuterCache]]:
    """Makes caches over one folder, open, and closes them at the end. However busy the machine is,
    nothing is late where a test is not about that."""
    monkeypatch.setattr(outer, "LOAD_S", 30.0)
    caches: list[OuterCache] = []

    def make(identity: Identity = IDENTITY, disk: int = 4 * MIB, host: int = 0) -> OuterCache:
        budgets = Budgets(host, disk, tmp_path / "kv")
        cache = OuterCache(lambda: identity, SIZE, budgets)
        assert cache.wait_open(10)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close(1)
