"""A relay as a process of its own that kills or freezes itself at a named point: before or after one of its steps.

``python outbox_program.py NAME DATABASE SERVERS [POINT:COUNT:ACTION]``
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from streams import Relay, RelayConfig
from streams.kafka.writing.blocking import BlockingSlot
from streams.outbox.positions import ShardPositions
from streams.outbox.postgres import PostgresSession

STEPS: dict[str, tuple[type, str]] = {
    "about": (PostgresSession, "about"),
    "claim": (BlockingSlot, "open"),
    "ring": (ShardPositions, "read"),
    "fetch": (PostgresSession, "fetch"),
    "send": (BlockingSlot, "send"),
    "commit": (BlockingSlot, "commit"),
    "delete": (PostgresSession, "delete"),
    "note": (PostgresSession, "_note"),  # within the transaction that deletes
}
POINTS = [f"{step}.{when}" for step in STEPS for when in ("before", "after")]
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def strike_at(point: str, count: int, action: str) -> None:
    """Send this process the signal when a point is passed for the ``count``-th time (a fetch counts if it has rows)."""
    step, _, when = point.partition(".")
    owner, method = STEPS[step]
    original: Callable[..., Any] = getattr(owner, method)
    lock, passed = threading.Lock(), 0

    def strike() -> None:
        nonlocal passed
        with lock:
            passed += 1
            if passed == count:
                os.kill(os.getpid(), SIGNALS[action])

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        if when == "before":
            strike()
        result = original(self, *arguments, **options)
        if when == "after" and not (step == "fetch" and not result):
            strike()
        return result

    setattr(owner, method, wrapped)


def main(name: str, database: str, servers: str, fault: str = "") -> None:
    if fault:
        point, count, action = fault.split(":")
        strike_at(point, int(count), action)
    config = RelayConfig(name=name, database=database, bootstrap_servers=servers, batch_rows=20, session_seconds=3.0)
    relay = Relay(config)
    relay.on_event(lambda event: print(event, flush=True))
    relay.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
