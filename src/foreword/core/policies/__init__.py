"""The policies, by name. Each file here has one that nothing else depends on."""

from foreword.core.policies.gittins import GITTINS
from foreword.core.policy import FIFO, LRU

DEFAULT = GITTINS
POLICIES = {policy.name: policy for policy in (GITTINS, LRU, FIFO)}
