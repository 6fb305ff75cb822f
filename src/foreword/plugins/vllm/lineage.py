"""Lineage: which of a request's chunks comes before which.

vLLM names a chunk by an offload key, a block hash and 4 bytes of KV cache group; each group has
chains of its own. It says where in the prompt a key ends, but has no public way to ask for the
keys of a request: where it has them is read here alone. Without it no parent is known.
"""

from collections.abc import Collection
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

GROUP_BYTES = 4


class Lineage:
    """Of one request."""

    __slots__ = ("_keys", "_num_seen", "_steps")

    def __init__(self) -> None:
        self._keys: dict[bytes, dict[int, OffloadKey]] = {}  # by group and end, in tokens
        self._steps: dict[bytes, int] = {}  # tokens per chunk, by group
        self._num_seen = 0

    @classmethod
    def of(cls, req_context: ReqContext) -> "Lineage":
        """The request's own, which goes when it does, with the keys it got since."""
        lineage: Lineage | None = req_context.get_state(cls)
        if lineage is None:
            lineage = cls()
            req_context.set_state(lineage)
        ends: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
        for key, end in islice(ends.items(), lineage._num_seen, None):
            group = key[-GROUP_BYTES:]
            lineage._keys.setdefault(group, {})[end] = key
            lineage._steps.setdefault(group, end)  # a request's first chunk is its first key
        lineage._num_seen = len(ends)
        return lineage

    @property
    def groups(self) -> Collection[bytes]:
        return self._keys

    def keys(self, group: bytes) -> list[OffloadKey]:
        """Of a group, from the prompt's first chunk on."""
        return list(self._keys[group].values())

    def position(self, key: OffloadKey, end: int | None) -> int:
        """How many whole chunks come before the one that ends at token `end`; 0 if not known."""
        step = self._steps.get(key[-GROUP_BYTES:])
        return (end - 1) // step if end is not None and step is not None else 0

    def parent(self, key: OffloadKey, end: int | None) -> OffloadKey | None:
        """The whole chunk before the one that ends at token `end`. None where there is none, or
        none is known. Never one that ends later, so no two chunks wait for each other."""
        group = key[-GROUP_BYTES:]
        step = self._steps.get(group)
        if end is None or step is None:
            return None
        return self._keys[group].get((end - 1) // step * step)
