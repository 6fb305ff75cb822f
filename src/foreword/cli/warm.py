"""`--warm FILE`: openings that are prefilled before the server's port opens.

Each line is a request as the API takes it, `{"messages": [...]}` or `{"prompt": "..."}`; what is
left out has its default.
"""

import json
import logging
import time
from pathlib import Path

from foreword.cli.failure import Failure
from foreword.core.errors import RequestError
from foreword.core.request import Engine, Request
from foreword.server.openai import Kind, parse

log = logging.getLogger("foreword.warm")


def read_openings(engine: Engine, path: Path) -> list[Request]:
    """Raises Failure that names the line for one that the server would not take."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"--warm {path} cannot be read: {reason}", "settings") from error
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            if not isinstance(body, dict):
                raise ValueError("it is no JSON object")
            kind: Kind = "chat" if "messages" in body else "text"
            raw = json.dumps({"model": engine.card.name, **body, "max_tokens": 1}).encode()
            requests += parse(engine, kind, raw).requests
        except (ValueError, RequestError) as error:
            raise Failure(f"--warm {path}, line {number}: {error}", "settings") from error
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
