"""Watch the event loop from a thread: a plain handler that takes long stops everything, and should be recognised.

Until ``limit_seconds`` the member stays in the group; then ``alive`` is false, and the membership leaves, so that
others take over the partitions that this process cannot work on (the meaning of ``max.poll.interval.ms`` in other
clients).
"""

from __future__ import annotations

import logging
import sys
import threading
import time

import anyio

_log = logging.getLogger(__name__)

PULSE_SECONDS = 0.25
SLOW_SECONDS = 1.0
"""A pause of the loop from which on it is logged: transactions of all partitions wait for so long."""


class Watchdog:
    """The watch over one event loop. ``run`` on the loop; the rest from any thread."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._beat = time.monotonic()
        self._stopped = threading.Event()
        self._loop_thread = 0

    def alive(self) -> bool:
        """Check that the loop has run lately."""
        return time.monotonic() - self._beat < self._limit

    async def run(self) -> None:
        """Beat until cancelled."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="kes-watchdog", daemon=True).start()
        try:
            while True:
                self._beat = time.monotonic()
                await anyio.sleep(PULSE_SECONDS)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _watch(self) -> None:
        warned_for = 0.0
        while not self._stopped.wait(PULSE_SECONDS):
            beat = self._beat
            still = time.monotonic() - beat
            if still > SLOW_SECONDS and warned_for != beat:
                warned_for = beat
                _log.warning(
                    "the event loop has stood still for %.1f s in %s; all partitions wait meanwhile: make "
                    "that handler async, "
                    "or register it with blocking=True",
                    still,
                    self._where(),
                )

    def _where(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
