"""`foreword chat` in a terminal of its own, against a server with an echo engine."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echo import EchoEngine
from serving import serving


class Terminal:
    """A command that believes it has a terminal; what it wrote is read up to a pattern."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = ""

    def until(self, pattern: str, seconds: float = 20.0) -> str:
        """What came up to the end of the first match, which must come in time."""
        deadline_s = time.monotonic() + seconds
        while (found := re.search(pattern, self._unread)) is None:
            left_s = deadline_s - time.monotonic()
            ready = left_s > 0 and select.select([self._descriptor], [], [], left_s)[0]
            assert ready, f"{pattern!r} did not come; there was {self._unread!r}"
            try:
                self._unread += os.read(self._descriptor, 65536).decode()
            except OSError as error:  # the command has ended
                raise AssertionError(f"{pattern!r} did not come but {self._unread!r}") from error
        text, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())


# So that Ctrl-C is a signal.
TAKE_THE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
CHAT = f"{TAKE_THE_TERMINAL}; from foreword.cli.main import main; raise SystemExit(main())"


@contextmanager
def chatting(
    *flags: str, **environment: str
) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CHAT, "chat", *flags],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


def test_a_chat_shows_what_each_turn_reused(engine: EchoEngine) -> None:
    flags = ("--system", "Echo.", "--model", "other")
    with serving(engine) as url, chatting("--url", url, *flags) as (terminal, process):
        terminal.until("A server runs already: --model other is for one that is started.")
        terminal.until(rf"echo at {url}\. /new starts over")
        terminal.until("> ")
        terminal.type("héllo\n")
        assert "system: Echo.\r\nuser: héllo\r\n" in terminal.until(
            r"\x1b\[2m0 of 27 prompt tokens reused, first token \d+\.\d\d s, .*tokens/s\x1b\[0m"
        )
        terminal.until("> ")
        terminal.type("more\n")
        terminal.until(r"27 of 77 prompt tokens reused")
        terminal.type("/new\n")
        terminal.type("more\n")
        terminal.until(r"20 of 25 prompt tokens reused")
        terminal.type("/what\n")
        terminal.until("/quit or Ctrl-D ends")
        terminal.until("> ")
        terminal.type("\x04")
        assert process.wait(10) == 0
    roles = [
        text for text in (bytes(r.prompt).decode() for r in engine.requests) if "assist" in text
    ]
    assert len(roles) == 1


def test_ctrl_c_stops_the_answer_and_not_the_chat(engine: EchoEngine) -> None:
    engine.step_s = 0.05
    with serving(engine) as url, chatting("--url", url) as (terminal, process):
        terminal.until("> ")
        terminal.type("a long message that is echoed slowly\n")
        terminal.until("user: a")
        terminal.type("\x03")
        terminal.until("> ")
        assert engine.cancelled.wait(5)
        engine.step_s = 0
        terminal.type("on\n")
        terminal.until("user: on")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert process.wait(10) == 0


def test_a_server_s_refusal_does_not_end_the_chat(engine: EchoEngine) -> None:
    engine.busy = True
    with serving(engine, api_keys=["key"]) as url:
        with chatting("--url", url) as (terminal, process):
            terminal.until("asks for an API key")
            assert process.wait(10) == 1
        with chatting("--url", url, OPENAI_API_KEY="key") as (terminal, process):
            terminal.until("> ")
            terminal.type("hello\n")
            terminal.until("The queue is full")
            engine.busy = False
            terminal.type("hello\n")
            terminal.until("user: hello")


def test_where_no_server_is_the_reason_is_said() -> None:
    with chatting("--url", "127.0.0.1:9") as (terminal, process):
        terminal.until("no server answers at 127.0.0.1:9")
        assert process.wait(10) == 1
