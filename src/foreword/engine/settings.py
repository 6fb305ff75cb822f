"""What may be chosen about the engine. Needs no torch, so that a wrong choice shows at once."""

from dataclasses import dataclass
from pathlib import Path

from foreword.core.waiting import LONGEST_PREFIX

BLOCK_SIZE = 16  # tokens
KINDS = ("int4", "int8")  # of quantised weights


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a user may choose about the engine."""

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
    evict: str = "gittins"  # which block leaves first: of core.policies.POLICIES
    store: str = "gain"  # what goes below the device: of core.place.PLACEMENTS
    order: str = LONGEST_PREFIX  # who is admitted next: of core.waiting.ORDERS
    num_threads: int | None = None  # None: torch's own choice
    quantise: str | None = None  # weights: int4 or int8, for bfloat16 on the CPU
    calibrate: bool = False  # begin with costs that are remembered, or measured in some seconds


def check_quantisation(kind: str, dtype: str, device: str) -> None:
    """Raises ValueError where there are no kernels for it."""
    if kind not in KINDS:
        raise ValueError(f"quantise {kind!r} is not one of {', '.join(KINDS)}")
    if (dtype, device) != ("bfloat16", "cpu"):
        raise ValueError(f"{kind} weights need bfloat16 on the CPU, not {dtype} on {device}")
