"""A record's prompt as the core sees it: a Chain, and how many tokens each of its ids stands for.

Where a trace has ids of blocks, the core runs with a block size of 1 and such an id is its token.
The core always leaves the last token to compute, and a trace's last id may stand for fewer tokens
than the others; so a mark is appended that nobody shares, and that is never filled.
"""

from hashlib import sha256

from foreword.core.block import BlockHash, Chain
from foreword.sim.trace import Record

_MARK = 2**32 - 1  # importers keep ids below it


def prompt_chain(record: Record, block_size: int, *, keep_partial: bool = False) -> Chain:
    """The chain of a record's prompt. `block_size` counts for traces of token ids. With ids of
    blocks the last one, where it stands for fewer tokens, is left out: no engine that hashes full
    blocks finds it again. `keep_partial` lets equal ones match, as kvcache-simulator does."""
    root = BlockHash(sha256(b"tenant " + record.tenant.encode()).digest())
    if record.id_tokens == 1:
        return Chain(root, block_size, record.ids)
    num_ids = len(record.ids) if keep_partial else record.num_tokens // record.id_tokens
    return Chain(root, 1, [*record.ids[:num_ids], _MARK])
