"""Disk stores in a folder of their own, closed in the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disks import Stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    folder = tmp_path / "kv"
    folder.mkdir()
    opened = Stores(folder)
    yield opened
    for store in opened.opened:
        store.close()
