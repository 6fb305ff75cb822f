"""What a server says its cache is worth: at other sizes, and to whom."""

from dataclasses import dataclass
from typing import Protocol

from foreword.core.ghost import Outlook, Owner


@dataclass(frozen=True, slots=True)
class Supposed:
    """What all places together would do, had one of them room for so many blocks."""

    place: str
    times: float  # its size
    num_blocks: int
    num_bytes: int
    outlook: Outlook


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`places` by name, the fastest first, and seconds to load a block from each (None: not
    measured, and counted as none). `num_asked` full blocks of prompts were looked for in `window_s`
    seconds, the old ones counting less; of those that the Ghost follows each stands for
    `sampled_1_in`."""

    window_s: float
    num_asked: float
    sampled_1_in: int
    block_tokens: int
    places: tuple[str, ...]
    load_s: tuple[float | None, ...]
    now: Outlook
    rows: tuple[Supposed, ...]


@dataclass(frozen=True, slots=True)
class Worth:
    """One account, with the numbers of the formula that judges it, in tokens, bytes and seconds:

    shared_prefix_tokens x reuse_count x prefill_s_per_token
        > restore_bytes / bytes_per_s + eviction_penalty_s

    The penalty is what others would find in the room that it holds, as the Ghost has it.
    """

    owner: Owner
    start: int  # of a segment, in tokens
    stop: int
    token_ids: tuple[int, ...]
    num_requests: float
    num_missed: float
    shared_prefix_tokens: float  # on average, of those that reused any
    reuse_count: float
    prefill_s_per_token: float | None  # None: computing was not measured
    restore_bytes: float
    bytes_per_s: float | None  # None: nothing was restored, or not measured
    eviction_penalty_s: float
    held_bytes: tuple[int, ...]  # by place, estimated as if the least recently used had left

    @property
    def saved_s(self) -> float | None:
        """What reuse saved, less the loading. Worth it where that is more than the penalty."""
        if self.prefill_s_per_token is None:
            return None
        restore_s = self.restore_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.shared_prefix_tokens * self.reuse_count * self.prefill_s_per_token - restore_s


@dataclass(frozen=True, slots=True)
class Balance:
    """Whom the cache served, in `window_s` seconds as in WhatIf. Of each dimension those that
    reused most; `places` are those of `held_bytes`."""

    window_s: float
    places: tuple[str, ...]
    tenants: tuple[Worth, ...]
    documents: tuple[Worth, ...]
    segments: tuple[Worth, ...]


class Value(Protocol):
    """Answers within milliseconds, from any thread."""

    def what_if(self) -> WhatIf: ...

    def balance(self, tenant: str) -> Balance:
        """Of documents and segments those of one tenant, whose salts begin with it; of all, if it
        is empty."""
        ...
