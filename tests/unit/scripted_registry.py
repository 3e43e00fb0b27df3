"""A schema registry on a port of this machine that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
Script = Callable[[Any], Answer | None]


class Server:
    """``answer``: of a request (its handler) the status and the body; ``None``: it has answered itself."""

    def __init__(self) -> None:
        self.answer: Script = lambda request: (404, {"error_code": 40403, "message": "Schema not found"})
        self.requests: list[str] = []
        self.headers: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(f"{self.command} {self.path}")
                outer.headers.append(self.headers)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = outer.answer(self)
                if answer is not None:
                    body = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                    self.send_response(answer[0])
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - as the library looks for it

            def log_message(self, *_: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None: ...

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def scripted() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()
