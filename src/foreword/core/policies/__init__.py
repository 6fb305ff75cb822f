"""The policies, by name. Nothing else knows of any but the default one, LRU and FIFO."""

from foreword.core.policies.arc import ADAPTIVE
from foreword.core.policies.gittins import GITTINS
from foreword.core.policies.lru2 import LRU_2
from foreword.core.policies.s3fifo import S3_FIFO
from foreword.core.policy import FIFO, LRU

DEFAULT = GITTINS
POLICIES = {policy.name: policy for policy in (GITTINS, LRU, LRU_2, ADAPTIVE, S3_FIFO, FIFO)}
