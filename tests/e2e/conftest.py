"""A server with an EchoEngine on a free port, and clients that ask it."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from echo import EchoEngine
from serving import serving


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def url(engine: EchoEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        yield client


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=20) as client:
        yield client
