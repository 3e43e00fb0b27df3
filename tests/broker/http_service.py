"""A service that is slow and fails at times, as real ones do, and keeps count. Standard library only."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service(ThreadingHTTPServer):
    """Payments (``POST /charges``): ``with Service(seed) as service``.

    A quarter of the calls is answered with 503, some are taken and answered too late. A charge whose idempotency key is
    known is answered as before, and not made again. The customer ``declined`` always hears 402.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls: Counter[str] = Counter()
        """By idempotency key: how often it was called."""
        self.charged: dict[str, tuple[str, int]] = {}
        """By idempotency key: (customer, cents) of the charges that were made, in the order in which they were."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle is none of our business."""

    def charge(self, key: str, customer: str, cents: int) -> tuple[int, dict[str, Any], float]:
        """(status, answer, seconds to wait before it is sent)"""
        with self._lock:
            self.calls[key] += 1
            luck = self._random.random()
            if luck < 0.25:
                return 503, {}, 0.0
            if customer == "declined":
                return 402, {}, 0.0
            self.charged.setdefault(key, (customer, cents))
            return 200, {"receipt": f"receipt of {key}"}, 3.0 if luck > 0.98 else luck / 50


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(*self.server.charge(self.headers["Idempotency-Key"], asked["customer"], asked["cents"]))

    def _answer(self, status: int, answer: dict[str, Any], seconds: float) -> None:
        time.sleep(seconds)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""
