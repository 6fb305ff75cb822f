"""ForewordTier whose disk hangs, or whose blocks nobody verifies, as long as a file says so.

vLLM loads it by `module_path`. The files lie in the folder that SWITCHES names.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreword.plugins import outer
from foreword.plugins.vllm import ForewordTier
from foreword.store import store
from foreword.store.codec import RecordKey, check
from foreword.store.disk import DiskStore

__all__ = ["SwitchedTier"]

HANG = Path(os.environ["SWITCHES"]) / "hang"
UNVERIFIED = Path(os.environ["SWITCHES"]) / "unverified"


def _hanging(call: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        while HANG.exists():
            time.sleep(0.02)
        return call(*args)

    return made


class HangingStore(DiskStore):
    """As a disk that does not answer: each call in progress waits, and so does each new one."""

    contains = _hanging(DiskStore.contains)
    get = _hanging(DiskStore.get)
    put = _hanging(DiskStore.put)
    delete = _hanging(DiskStore.delete)
    tend = _hanging(DiskStore.tend)


def _check(record: memoryview, key: RecordKey) -> None:
    if not UNVERIFIED.exists():
        check(record, key)


outer.DiskStore = HangingStore
store.check = _check


class SwitchedTier(ForewordTier):
    """The same settings."""
