"""transformers: its own `generate`, which starts from what earlier calls have computed."""

from foreword.plugins.transformers.prefix import PrefixCache, PrefixStats

__all__ = ["PrefixCache", "PrefixStats"]
