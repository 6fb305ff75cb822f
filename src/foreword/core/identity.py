"""Identity: everything that must match before two blocks may share bytes.

It seeds the hash chain, so a difference in any field is another chain: a miss, never a wrong hit.
"""

from dataclasses import astuple, dataclass, fields
from hashlib import sha256

from foreword.core.block import BlockHash

_FORMAT = b"foreword-identity-1"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a block's bytes depend on, besides its tokens.

    Digests are lower-case hex; an empty string means "does not apply" (no LoRA, no numerics rule).
    """

    weights: str  # SHA-256 over the weights' files and how they are quantised, not the served name
    dtype: str  # of the stored keys and values, as torch names it: "bfloat16"
    num_layers: int
    num_kv_heads: int
    head_size: int
    attention: str  # canonical JSON of RoPE and attention configuration
    layout: str  # how a block's bytes are ordered
    parallel: str  # tensor/pipeline layout and rank
    lora: str
    block_size: int  # tokens
    tokenizer: str
    chat_template: str
    numerics: str  # exact mode only: flag, torch version, device type, instruction set

    def root_hash(self, cache_salt: str = "") -> BlockHash:
        """The parent of every first block under this identity and tenant salt.

        Each field is length-prefixed, so no two different identities encode alike.
        """
        digest = sha256(_FORMAT)
        for value in (*astuple(self), cache_salt):
            encoded = str(value).encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return BlockHash(digest.digest())

    def differences(self, other: "Identity") -> tuple[str, ...]:
        """Names of the fields that differ, in field order: why two caches cannot share."""
        return tuple(
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )
