"""A server over an engine on a free port, for the tests that ask it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from foreword.cli.serve import bind
from foreword.core.request import Engine
from foreword.server.app import create_app
from foreword.server.connection import Connection


@contextmanager
def serving(engine: Engine, **access: Any) -> Iterator[str]:
    """The URL of a server with `create_app`'s other arguments."""
    app = create_app(engine, **access)
    config = uvicorn.Config(app, http=Connection, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.002)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:  # or a test that fails would never end
            server.should_exit = True
            thread.join()
