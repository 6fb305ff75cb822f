"""What a user may choose about the engine, and the tiers that follow from it."""

import logging
from dataclasses import dataclass
from pathlib import Path

from foreword.store.disk import DiskStore
from foreword.store.host import HostStore
from foreword.store.store import KVStore

log = logging.getLogger("foreword.engine")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: str = "smollm2"
    served_name: str | None = None
    device: str = "cpu"
    dtype: str = "bfloat16"
    max_model_len: int | None = None  # tokens; None: the model's own
    kv_bytes: int = 1 << 30  # device memory for KV
    host_bytes: int = 0  # main memory for KV that the device evicts; 0: none
    disk_bytes: int = 0  # and room in `disk_folder`; 0: none
    disk_folder: Path = Path("kv")
    max_num_seqs: int = 64
    max_queue: int = 256  # sequences that may wait; more are refused
    max_batch_tokens: int = 512  # of one step while others decode
    max_prefill_tokens: int = 2048  # of one step while nothing decodes
    exact: bool = True
    prefix_caching: bool = True
    num_threads: int | None = None  # None: torch's own choice
    quantise: str | None = None  # weights: int4 or int8, for bfloat16 on the CPU


def open_stores(settings: EngineSettings, record_bytes: int) -> list[KVStore]:
    """The tiers below the device, the fastest first. A folder that cannot be used costs its tier,
    not the server."""
    stores: list[KVStore] = []
    if not settings.prefix_caching:
        return stores
    if settings.host_bytes:
        stores.append(HostStore(settings.host_bytes, record_bytes))
    if settings.disk_bytes:
        try:
            settings.disk_folder.mkdir(parents=True, exist_ok=True)
            stores.append(DiskStore(settings.disk_folder, settings.disk_bytes, record_bytes))
        except OSError as error:
            log.warning("KV is not kept on disk: %s", error)
    return stores
