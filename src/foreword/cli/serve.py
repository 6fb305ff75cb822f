"""`foreword serve`: bind, load the model, serve until told to stop."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from foreword.cli.failure import Failure
from foreword.cli.settings import add_listen_flags, add_model_flags, api_keys, engine_settings
from foreword.cli.warm import openings, read_bodies, warm
from foreword.core.errors import EngineStopped
from foreword.core.events import Publish
from foreword.core.request import Request
from foreword.engine.request_log import RequestLog
from foreword.engine.source import locate
from foreword.server.app import create_app
from foreword.server.connection import Connection
from foreword.server.tenants import tenant_of

if TYPE_CHECKING:
    from foreword.engine.engine import TorchEngine

log = logging.getLogger("foreword.serve")

DRAIN_S = 10.0  # how long running requests may take to finish after a stop
FLUSH_S = 2.0  # then, how long clients may take to read what was sent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_listen_flags(parser)


def run(args: argparse.Namespace) -> int:
    # Before torch, which takes seconds: a taken port, a wrong name or file shows at once.
    with (
        bind(args.host, args.port) as listener,
        publishing(args.kv_events) as publish,
        logging_requests(args.request_log) as request_log,
    ):
        _log_to_stderr(args.json)
        keys, bodies = api_keys(args.api_keys), read_bodies(args.warm)
        settings = engine_settings(args)
        path, name = locate(args.model)
        served = args.name or name
        settings = replace(settings, model=str(path), served_name=served, calibrate=True)

        from foreword.engine.engine import TorchEngine

        check_device(args.device)
        log.info("loading %s%s", args.model, "" if args.exact == "off" else ", testing exactness")
        try:
            engine = TorchEngine.load(settings)
        except ValueError as error:
            raise Failure.of(error) or Failure(str(error), "settings") from error
        first = openings(engine, bodies, [tenant_of(key) for key in keys] or [""])
        engine.start(publish, request_log)
        app = create_app(engine, keys, args.cors_origins)
        asyncio.run(_serve(engine, app, listener, first, args.json))
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address but does not listen: until the model is loaded, clients are
    refused, not left waiting. Raises Failure."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Naming the protocol matters: asyncio sets TCP_NODELAY only where it is TCP's, and without
        # it every answer on a kept connection is 40 ms late.
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # no such name, or no name at all
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: OSError | UnicodeError) -> Failure:
    reason = getattr(error, "strerror", None) or error
    advice = "--host" if isinstance(error, UnicodeError | socket.gaierror) else "--port"
    return Failure(f"cannot listen on {host}:{port}: {reason}. Try another {advice}.", "address")


@contextlib.contextmanager
def publishing(setting: str | None) -> Iterator[Publish | None]:
    """What publishes KV events while the context lasts, as --kv-events says; None for None. Raises
    Failure."""
    if setting is None:
        yield None
        return
    from foreword.server.publisher import EventPublisher

    endpoint, _, form = setting.partition(",")
    try:
        publisher = EventPublisher(endpoint, form or "mixed")
    except ValueError as error:
        raise Failure(f"--kv-events: {error}", "settings") from error
    except OSError as error:
        reason = f"cannot publish KV events on {endpoint} and the next port: {error.strerror}"
        raise Failure(f"{reason}. Try another --kv-events.", "address") from error
    try:
        yield publisher.publish
    finally:
        publisher.close()


@contextlib.contextmanager
def logging_requests(path: Path | None) -> Iterator[RequestLog | None]:
    """The log that --request-log asks for, while the context lasts; None for None. Raises
    Failure."""
    if path is None:
        yield None
        return
    try:
        request_log = RequestLog(path)
    except OSError as error:
        reason = f"--request-log {path} cannot be written: {error.strerror}"
        raise Failure(reason, "settings") from error
    try:
        yield request_log
    finally:
        request_log.close()


def check_device(name: str) -> None:
    """Raises Failure for a device that this machine does not have."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise Failure(f"--device {name} cannot be used: {reason}", "settings") from error


class JsonLines(logging.Formatter):
    """One JSON object per record: time (Unix seconds), level, logger, message, and where there are
    some, facts and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if facts := getattr(record, "facts", None):
            line["facts"] = facts
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _log_to_stderr(as_json: bool) -> None:
    stderr = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    stderr.setFormatter(JsonLines() if as_json else plain)
    log = logging.getLogger("foreword")
    log.addHandler(stderr)
    log.setLevel(logging.INFO)


class Server(uvicorn.Server):
    """uvicorn with our signals: the first one drains, the second ends the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    engine: "TorchEngine",
    app: ASGIApp,
    listener: socket.socket,
    first: list[Request],
    as_json: bool,
) -> None:
    """Prefill the openings, then serve until SIGINT or SIGTERM. Then refuse new requests, let
    running ones finish for DRAIN_S, and tell those that did not."""
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(DRAIN_S + FLUSH_S),
    )
    server = Server(config)
    say = log.info if as_json else partial(print, flush=True)
    draining: list[asyncio.Task[None]] = []

    def stop(number: int) -> None:
        if draining:
            os._exit(128 + number)  # nothing here outlives the process
        say("Stopping: running requests may finish. Once more stops at once.")
        server.should_exit = True
        draining.append(asyncio.create_task(engine.stop(DRAIN_S)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    host, port = listener.getsockname()[:2]
    try:
        await warm(engine, first)
        facts = {"URL": f"{url(host, port)}/v1", **engine.banner_facts}
        if as_json:
            log.info("Foreword serves.", extra={"facts": facts})
        else:
            say(banner(facts, engine.card.name, url(host, port)))
        await server.serve([listener])
    except EngineStopped as error:
        if not draining:
            raise Failure(f"warming failed: {error}", "failed") from error
    except OSError as error:  # another server began to listen while the model was loading
        raise _taken(host, port, error) from error
    finally:
        await (draining[0] if draining else engine.stop(0))


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(facts: Mapping[str, str], model: str, address: str) -> str:
    message = {"role": "user", "content": "Say hello."}
    body = {"model": model, "messages": [message], "max_tokens": 60}
    lines = [f"  {name:<8} {value}" for name, value in facts.items()]
    return "\n".join(
        [
            "Foreword serves.",
            *lines,
            "Try it:",
            f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d {shlex.quote(json.dumps(body))}",
        ]
    )
