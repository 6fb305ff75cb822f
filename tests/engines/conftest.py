"""Real engines for the tests of the plug-ins: `make test-engines`.

They are installed in an environment of their own (tools/engines.py), whose Python runs these tests;
where they are not installed, pytest does not look into this folder.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_server import VllmServer, vllm_server

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

StartVllm = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, two layers of heads as small as vLLM takes on a CPU."""
    from tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", shape={"head_dim": 32})


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model, converted by `make test-engines`."""
    return Path(os.environ["ENGINES_SMOLLM2"])


@pytest.fixture
def start_vllm(tmp_path: Path) -> Iterator[StartVllm]:
    """start_vllm(model, *flags, command=(), **environment): a server that ends with the test."""
    with ExitStack() as servers:
        logs = (tmp_path / f"vllm-{number}.log" for number in range(100))

        def start(model: Path, *flags: str, **options: Any) -> VllmServer:
            return servers.enter_context(vllm_server(model, next(logs), flags, **options))

        yield start
