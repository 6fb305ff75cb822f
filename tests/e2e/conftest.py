"""A server with an EchoEngine on a free port, and clients that ask it."""

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
import uvicorn

from echo import EchoEngine
from foreword.cli.serve import bind
from foreword.server.app import create_app


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def url(engine: EchoEngine) -> Iterator[str]:
    config = uvicorn.Config(create_app(engine), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        yield client


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=20) as client:
        yield client
