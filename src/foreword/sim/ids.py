"""Ids as a trace writes them, made into numbers below 2**32; and prefixes made into numbers.

A trace's id names a block of tokens by its content, or by all that came before it too. What is
done here is right for both: blocks are told apart by their whole prefix.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final

import numpy as np
import numpy.typing as npt

from foreword.sim.pieces import Bad
from foreword.sim.trace import Record, TraceError

Ids = npt.NDArray[np.uint32]
Prefixes = npt.NDArray[np.uint64]

OWN_MAX: Final = 1 << 31  # whole numbers below it stay what they are; others get numbers from it up
_FRESH_MAX = 2**32 - 2  # counted down; the number above is prompt_chain's mark
_SPREAD_1, _SPREAD_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's


class IdSpace:
    """Numbers for a trace's ids, the same for all tenants, who share nothing anyway."""

    def __init__(self) -> None:
        self._named: dict[Hashable, int] = {}
        self._next_fresh = _FRESH_MAX

    def fresh(self) -> int:
        """An id that nothing else has."""
        self._next_fresh -= 1
        return self._next_fresh + 1

    def numbers(self, ids: object) -> Ids:
        """A number for each of `ids`, whole numbers and strings. Raises Bad for any other."""
        if not isinstance(ids, list):
            raise Bad(f"a list of ids is expected, not {type(ids).__name__}")
        kinds = set(map(type, ids))
        if kinds <= {int}:
            try:
                found = np.frombuffer(array("I", ids), np.uint32)
            except OverflowError:
                pass
            else:
                if not len(found) or found.max() < OWN_MAX:
                    return found
        elif not kinds <= {int, str}:
            wrong = next(type(one).__name__ for one in ids if type(one) not in (int, str))
            raise Bad(f"an id is a whole number or a string, not {wrong}")
        named = self._named
        return np.array(
            [
                one
                if type(one) is int and 0 <= one < OWN_MAX
                else named.setdefault(one, OWN_MAX + len(named))
                for one in ids
            ],
            np.uint32,
        )

    def runs(self, runs: object, num_ids_max: int) -> Ids:
        """The ids of [first, how many] pairs. Raises Bad, also where they are more than that."""
        if not isinstance(runs, list):
            raise Bad(f"a list of runs is expected, not {type(runs).__name__}")
        num_ids = 0
        for run in runs:
            if not isinstance(run, list) or list(map(type, run)) != [int, int] or run[1] < 1:
                raise Bad("a run is the first id and how many there are, from 1")
            num_ids += run[1]
        if num_ids > num_ids_max:
            raise Bad(f"runs of {num_ids} ids, and the prompt has {num_ids_max} blocks")
        if any(first < 0 or first + length > OWN_MAX for first, length in runs):
            return self.numbers([first + i for first, length in runs for i in range(length)])
        parts = [np.arange(first, first + length, dtype=np.uint32) for first, length in runs]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def prompt(self, ids: Ids, num_tokens: int, id_tokens: int) -> "array[int]":
        """A record's ids. A trace that leaves out the last, unfilled block gets a fresh one for it.
        Raises Bad where the number of ids is not that of the tokens' blocks."""
        num_blocks = -(-num_tokens // id_tokens)
        if len(ids) not in (num_blocks, num_tokens // id_tokens):
            raise Bad(
                f"{len(ids)} ids for {num_tokens} tokens; blocks of {id_tokens} would be "
                f"{num_blocks}"
            )
        found = words(ids)
        if len(ids) < num_blocks:
            found.append(self.fresh())
        return found


def words(ids: Sequence[int] | Ids) -> "array[int]":
    """Ids as an array that can grow."""
    if isinstance(ids, np.ndarray):
        found = array("I")
        found.frombytes(ids.tobytes())
        return found
    return array("I", ids)


def prefixes(ids: Sequence[int], tenant: str = "") -> Prefixes:
    """A number for the prefix that ends with each id: equal ones have the same, and a tenant's are
    its own. 64 bits, not made against an attacker: among ten million prefixes the chance that any
    two share one is 3 in a million."""
    root = np.frombuffer(sha256(tenant.encode()).digest(), np.uint64, 1)[0]
    spread = np.frombuffer(array("I", ids), np.uint32).astype(np.uint64)
    spread += np.arange(1, len(ids) + 1, dtype=np.uint64) << np.uint64(32)
    spread ^= root
    for factor in (_SPREAD_1, _SPREAD_2):
        spread ^= spread >> np.uint64(30)
        spread *= factor
    spread ^= spread >> np.uint64(31)
    return np.cumsum(spread, dtype=np.uint64)


class Coarsening:
    """Records of blocks made into records of larger blocks, each named by the prefix it ends."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._named: dict[int, int] = {}

    def coarse(self, record: Record) -> Record:
        """Raises TraceError where the sizes do not fit."""
        group, rest = divmod(self._num_tokens, record.id_tokens)
        if record.id_tokens == 1:
            raise TraceError("this trace has the ids of tokens; blocks of any size can be replayed")
        if rest or not group:
            raise TraceError(
                f"{self._num_tokens} tokens are no multiple of this trace's {record.id_tokens}"
            )
        ends = prefixes(record.ids, record.tenant)[group - 1 :: group].tolist()
        if record.num_tokens % self._num_tokens:
            ends = [*ends[: record.num_tokens // self._num_tokens], -1 - record.ids[-1]]
        named = self._named
        ids = array("I", [named.setdefault(end, len(named)) for end in ends])
        return replace(record, ids=ids, id_tokens=self._num_tokens)
