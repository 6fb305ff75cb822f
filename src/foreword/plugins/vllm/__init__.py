"""What vLLM finds by name in `foreword.plugins.vllm`. Imported by vLLM alone."""

import logging

from foreword.plugins.vllm.cpu import ForewordCPUSpec as ForewordCPUSpec
from foreword.plugins.vllm.policy import ForewordPolicy as ForewordPolicy
from foreword.plugins.vllm.tier import ForewordTier as ForewordTier

# What we say appears where, and as, vLLM's own lines do.
logging.getLogger("foreword").parent = logging.getLogger("vllm")
