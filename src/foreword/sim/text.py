"""Text as token ids: those of a tokenizer, or an estimate of 4 bytes of UTF-8 a token.

A prompt is a sequence of segments, as a chat template's special tokens part it: each is made into
tokens by itself, so that a message has the same ids wherever it stands and an answer those that it
has as history in the next prompt.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from foreword.sim.pieces import Bad

Tokenize = Callable[[str], Sequence[int]]

TEXT_BYTES_PER_TOKEN: Final = 4  # of English, by the usual rule of thumb
_FILLER = b"\xff"  # in no UTF-8 text: the id of fewer than 4 bytes is no other's
_MEMO_TOKENS_MAX = 16 << 20  # 64 MiB of ids


class Tokens:
    """Makes token ids of text. Remembers a tokenizer's latest segments: chats repeat theirs."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self.estimated = tokenize is None
        self._tokenize = tokenize
        self._memo: OrderedDict[str, array[int]] = OrderedDict()
        self._num_remembered = 0

    def ids(self, segments: Iterable[str]) -> "array[int]":
        """Raises Bad where the tokenizer gives what is no token id."""
        found = array("I")
        if self._tokenize is None:
            for segment in segments:
                raw = segment.encode("utf-8", "surrogatepass")
                found.frombytes(raw + _FILLER * (-len(raw) % TEXT_BYTES_PER_TOKEN))
            return found
        for segment in segments:
            found += self._remembered(segment, self._tokenize)
        return found

    def _remembered(self, segment: str, tokenize: Tokenize) -> "array[int]":
        known = self._memo.get(segment)
        if known is not None:
            self._memo.move_to_end(segment)
            return known
        try:
            made = array("I", tokenize(segment))
        except (OverflowError, TypeError) as error:
            raise Bad(f"the tokenizer gives what is no token id: {error}") from error
        self._memo[segment] = made
        self._num_remembered += len(made) + len(segment)
        while self._num_remembered > _MEMO_TOKENS_MAX:
            oldest, ids = self._memo.popitem(last=False)
            self._num_remembered -= len(ids) + len(oldest)
        return made
