"""A server with an EchoEngine on a free port, and clients that ask it: polite ones, raw sockets."""

import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from echo import EchoEngine
from raw import Server, answer, connected, impatient, posted, wait_until_idle
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


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with impatient() as server:
        yield server


@pytest.fixture
def peer(server: Server) -> Iterator[socket.socket]:
    with connected(server) as peer:
        yield peer


@pytest.fixture
def unharmed(server: Server) -> Iterator[None]:
    """Whatever a test does: afterwards no request is open and an ordinary one is answered."""
    engine = server[1]
    engine.step_s = 0.0
    yield
    engine.step_s = 0.0
    wait_until_idle(engine)
    with connected(server) as client:
        client.sendall(posted(b'{"model": "echo", "prompt": "hi"}'))
        assert answer(client)[1]["choices"][0]["text"] == "hi"
