"""`foreword chat`: talk with a model in the terminal, and see what each turn reused.

The whole chat is sent every turn, as any client of the API does: that only the new message is
computed is the cache's work.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from foreword.cli.client import Client, server
from foreword.cli.failure import Failure
from foreword.cli.settings import count

DEFAULT_MODEL = "smollm2"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = "/new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="a running server (http://127.0.0.1:8000 if one answers there, else one is started)",
    )
    parser.add_argument("--model", help="for a server that is started (smollm2)")
    parser.add_argument("--system", default="", help="what the model is told before the chat")
    parser.add_argument("--max-tokens", type=count, help="of an answer (the rest of the context)")


def run(args: argparse.Namespace) -> int:
    """The API key of a server that asks for one is taken from OPENAI_API_KEY."""
    with _found(args) as (client, model):
        print(f"{model} at {client.url}. {HELP}")
        _talk(Chat(client, model, args.system, args.max_tokens))
    return 0


@contextmanager
def _found(args: argparse.Namespace) -> Iterator[tuple[Client, str]]:
    client = Client(args.url or "http://127.0.0.1:8000", os.environ.get("OPENAI_API_KEY"))
    try:
        model = client.model()
    except OSError as error:
        if args.url:
            raise Failure(f"no server answers at {args.url}: {error}", "failed") from error
    else:
        if args.model not in (None, model):
            print(f"A server runs already: --model {args.model} is for one that is started.")
        yield client, model
        return
    name = args.model or DEFAULT_MODEL
    print(f"Starting a server for {name}.", flush=True)
    with server("--model", name) as started:
        yield started


class Chat:
    """The messages so far. A turn that fails or is stopped leaves what was said."""

    def __init__(self, client: Client, model: str, system: str, max_tokens: int | None) -> None:
        self._client = client
        self._fields: dict[str, Any] = {
            "model": model,
            "stream_options": {"include_usage": True},
            **({"max_tokens": max_tokens} if max_tokens else {}),
        }
        self._system = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        self._messages = list(self._system)

    def turn(self, text: str) -> str:
        """Print the answer as it comes. Returns what it cost in a line."""
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {**self._fields, "messages": messages}
        said, first_s, usage, begin_s = "", 0.0, None, time.perf_counter()
        try:
            with closing(self._client.events("/v1/chat/completions", body)) as events:
                for event in events:
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        piece = choice["delta"].get("content") or ""
                        first_s = first_s or (piece and time.perf_counter() - begin_s) or 0.0
                        said += piece
                        print(piece, end="", flush=True)
        finally:
            print()
            if said:
                self._messages = [*messages, {"role": "assistant", "content": said}]
        return _cost(usage, first_s, time.perf_counter() - begin_s)


def _cost(usage: dict[str, Any] | None, first_s: float, whole_s: float) -> str:
    line = f"first token {first_s:.2f} s"
    if usage is None:
        return line
    num_prompt, num_new = usage["prompt_tokens"], usage["completion_tokens"]
    num_reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if num_new > 1:
        line += f", then {(num_new - 1) / max(whole_s - first_s, 1e-9):.0f} tokens/s"
    return f"{num_reused:,} of {num_prompt:,} prompt tokens reused, {line}"


def _talk(chat: Chat) -> None:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text == "/new":
            chat.clear()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            try:
                cost = chat.turn(text)
            except KeyboardInterrupt:
                continue
            except (Failure, OSError) as error:
                cost = str(error)
            print(f"{DIM}{cost}{PLAIN}" if colour else cost)
