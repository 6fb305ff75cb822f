"""`--warm FILE`: openings that are prefilled before the server's port opens.

Each line is a request as the API takes it, `{"messages": [...]}` or `{"prompt": "..."}`; what it
says of the answer's length and form is left aside.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.core.errors import RequestError
from foreword.core.request import Engine, Request
from foreword.server.openai import Kind, parse

_OF_ANSWERS = ("max_completion_tokens", "min_tokens", "stream", "stream_options", "n")
log = logging.getLogger("foreword.warm")


def read_bodies(path: Path | None) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with their line numbers. Raises Failure."""
    if path is None:
        return []
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"--warm {path} cannot be read: {reason}", "settings") from error
    bodies = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Failure(f"--warm {path}, line {number}: {error}", "settings") from error
        if not isinstance(body, dict):
            raise Failure(f"--warm {path}, line {number}: it is no JSON object", "settings")
        bodies.append((number, body))
    return bodies


def openings(
    engine: Engine, bodies: Sequence[tuple[int, Mapping[str, Any]]], tenants: Sequence[str]
) -> list[Request]:
    """What to prefill, for each tenant, since none sees another's. Raises Failure that names the
    line for one that the server would not take."""
    requests: list[Request] = []
    for tenant in tenants:
        for number, body in bodies:
            kind: Kind = "chat" if "messages" in body else "text"
            kept = {name: value for name, value in body.items() if name not in _OF_ANSWERS}
            raw = json.dumps({"model": engine.card.name, **kept, "max_tokens": 1}).encode()
            try:
                requests += parse(engine, kind, raw, tenant).requests
            except RequestError as error:
                raise Failure(f"--warm, line {number}: {error}", "settings") from error
    return requests


async def warm(engine: Engine, requests: list[Request]) -> None:
    """Prefill all, one after the other, in the order of the file: what comes last stays longest
    where not all have room. Raises EngineStopped when the engine stops meanwhile."""
    if not requests:
        return
    begin_s = time.perf_counter()
    for request in requests:
        async for _output in engine.generate(request):
            pass
    num_tokens = sum(len(request.prompt) for request in requests)
    seconds = time.perf_counter() - begin_s
    log.info("warmed %d openings, %d tokens, in %.1f s", len(requests), num_tokens, seconds)
