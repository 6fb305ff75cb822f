"""Hypothesis profiles: how many examples each property gets; and a cache folder of the tests' own.

HYPOTHESIS_PROFILE picks one. `ci` is the default and always draws the same examples; `nightly`
looks further; `mutants` stops at the first failing example instead of making it smaller.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

import foreword.engine  # noqa: F401 - says how OpenMP waits, before any test imports torch

SLOW_MACHINE = [HealthCheck.too_slow]

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW_MACHINE
)
settings.register_profile("nightly", max_examples=5000, deadline=None)
settings.register_profile(
    "mutants",
    max_examples=100,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one run of the tests remembers, such as exact mode's verdicts, is not for another's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREWORD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
