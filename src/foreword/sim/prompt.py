"""A record as the core sees it: its Chain, and how many tokens each of its ids stands for.

Where a trace has ids of blocks, the core runs with a block size of 1 and such an id is its token.
The core always leaves the last token to compute, and a trace's last id may stand for fewer tokens
than the others; so a mark is appended that nobody shares, and that is never filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from foreword.core.block import BlockHash, Chain
from foreword.sim.trace import Record

MARK = 2**32 - 1  # importers keep ids below it
_UNFINISHED = 3 << 30  # and a record's place above: an id that no other request has


def prompt_chain(record: Record, block_size: int, *, keep_partial: bool = False) -> Chain:
    """The chain of a record's prompt. `block_size` counts for traces of token ids. With ids of
    blocks the last one may stand for fewer tokens: it takes its room and is never found again, as
    in an engine that hashes full blocks. `keep_partial` lets equal ones match, as
    kvcache-simulator does."""
    root = BlockHash(sha256(b"tenant " + record.tenant.encode()).digest())
    if record.id_tokens == 1:
        return Chain(root, block_size, record.ids)
    ids = [*record.ids, MARK]
    if record.num_tokens % record.id_tokens and not keep_partial:
        ids[-2] = _UNFINISHED + record.place
    return Chain(root, 1, ids)


@dataclass(frozen=True, slots=True)
class Visit:
    """A request from its prompt to its end. Of `whole`, which is the prompt and what its answer
    adds, `num_filled` tokens get KV: not the mark, nor the answer's last token."""

    prompt: Chain
    whole: Chain
    num_filled: int
    reuses: bool = True  # False: its prompt's logits are wanted, so all of it is computed

    @property
    def num_reusable(self) -> int:
        """Blocks that may be known already."""
        return (len(self.prompt) - 1) // self.prompt.block_size if self.reuses else 0

    @property
    def num_kept(self) -> int:
        """Full blocks that it leaves behind."""
        return self.num_filled // self.prompt.block_size

    @property
    def answer_ends(self) -> Sequence[int]:
        """How many tokens have KV, each time that the answer fills a block or comes to its end."""
        size, start = self.prompt.block_size, len(self.prompt)
        if self.num_filled <= start:
            return ()
        return (*range(start - start % size + size, self.num_filled, size), self.num_filled)

    @property
    def num_slots(self) -> int:
        """Slots of the device that it holds at its end."""
        return -(-len(self.whole) // self.prompt.block_size)


def visit(record: Record, block_size: int, *, keep_partial: bool = False) -> Visit:
    """As `prompt_chain`, with the answer's tokens where the record has them. A request that was
    cancelled before its first token leaves nothing here: how far it came depends on the clock."""
    prompt = prompt_chain(record, block_size, keep_partial=keep_partial)
    if record.cancelled_at is not None:
        return Visit(prompt, prompt, 0, reuses=False)
    if record.id_tokens > 1:
        return Visit(prompt, prompt, len(prompt) - 1)
    answer = record.answers[0]  # the others' blocks are theirs alone, until they are asked about
    reuses = not record.wants_prompt
    if len(answer) < 2:
        return Visit(prompt, prompt, len(prompt), reuses)
    whole = prompt.copy()
    whole.extend(answer[:-1])
    return Visit(prompt, whole, len(whole), reuses)
