"""A server of OpenAI's API as a client sees it: one that runs, or one started for a while."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from foreword.cli.failure import Failure

START_S = 180.0  # to load a model
READ_S = 10.0
ANSWER_S = 300.0  # between two parts of an answer


class Client:
    """`url` is a server's address, with or without /v1. Raises Failure for one that is no URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._connect, self._port = kinds[parts.scheme], parts.port
            self._host = str(parts.hostname or "")
        except (ValueError, KeyError):
            self._host = ""
        if not self._host:
            raise Failure(f"{url!r} is no server's URL: http://127.0.0.1:8000", "usage")
        self.url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """The name of the first model that it serves. Raises OSError while it does not answer."""
        raw = self.read("GET", "/v1/models")
        try:
            return str(json.loads(raw)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Failure(f"{self.url} has no list of models", "failed") from error

    def read(self, method: str, path: str) -> bytes:
        """The body of an answer. Raises Failure with the server's words for another status than
        200, OSError where it does not answer."""
        with closing(self._connect(self._host, self._port, timeout=READ_S)) as connection:
            connection.request(method, f"{self._path}{path}", headers=self._headers)
            try:
                response = connection.getresponse()
                raw: bytes = response.read()
            except http.client.HTTPException as error:
                raise Failure(f"what answers at {self.url} is no HTTP server", "failed") from error
            if response.status != 200:
                raise self._refusal(response.status, raw)
            return raw

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Raises Failure with the server's words where it refuses
        or fails, OSError where it is gone. Closing the iterator cancels the request."""
        with self.sent(path, body) as connection:
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response.status, response.read())
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Failure(event["error"]["message"], "failed")
                    yield event
        raise Failure(f"{self.url} broke the answer off", "failed")

    @contextmanager
    def sent(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
        """A connection on which a streamed answer was asked for. Leaving the context cancels it."""
        with closing(self._connect(self._host, self._port, timeout=ANSWER_S)) as connection:
            payload = json.dumps({**body, "stream": True})
            connection.request("POST", f"{self._path}{path}", payload, self._headers)
            yield connection

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name; of histograms only sum and count. What has labels is added
        up, and by each label's value it is under "name.value". Raises as `read` does."""
        families = text_string_to_metric_families(self.read("GET", "/metrics").decode())
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if "le" not in sample.labels:
                for name in (sample.name, *(f"{sample.name}.{x}" for x in sample.labels.values())):
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def _refusal(self, status: int, raw: bytes) -> Failure:
        try:
            reason = str(json.loads(raw)["error"]["message"])
            advice = " foreword takes it from OPENAI_API_KEY." if status == 401 else ""
            return Failure(f"{reason}{advice}", "failed")
        except (ValueError, KeyError, TypeError):
            return Failure(f"{self.url} answers {status}: is it an OpenAI server?", "failed")


@contextmanager
def server(*flags: str) -> Iterator[tuple[Client, str]]:
    """A `foreword serve` on a free port of this machine while the context lasts, and its model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "foreword.cli.main", "serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as log:  # a pipe that nobody reads would fill and block it
        # Flags alone say what it does; of our own variables only the cache folder's goes on.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FOREWORD_") or name == "FOREWORD_CACHE_DIR"
        }
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        try:
            client = Client(f"http://127.0.0.1:{port}")
            yield client, _wait_until_ready(process, client, log)
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_ready(process: "subprocess.Popen[bytes]", client: Client, log: IO[bytes]) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().split("\n")[-1]
            raise Failure(f"the server ended: {last}", "failed")
        try:
            return client.model()
        except OSError:
            time.sleep(0.2)
    raise Failure(f"the server was not ready after {START_S:.0f} s", "failed")
