"""vLLM: our store below its CPU tier, named in its configuration. Imported by vLLM alone."""

from foreword.plugins.vllm.tier import ForewordTier as ForewordTier
