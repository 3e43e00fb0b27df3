"""The processes of a trial of ``kes verify``: each runs the event source that is tried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from streams.errors import StreamsError


class TrialFailed(StreamsError):
    """The trial could not be brought to its end: the message names what stood still, and the log."""


class WorkerProcess:
    """A process of the source, started again under the same name whenever it ended."""

    def __init__(self, source: str, servers: str, name: str, folder: Path, state: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._command = [sys.executable, "-m", "streams.testing.verification_worker", source, servers, str(state)]
        self.frozen = False
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env={**os.environ, "KES_INSTANCE_ID": self.name},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    @property
    def runs(self) -> bool:
        """Check whether the process is there, frozen or not."""
        return self.process.poll() is None

    def again(self) -> None:
        """Start it if it ended."""
        if not self.runs:
            self._close_pipe()
            self.process = self._start()

    def signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.runs:
            self.process.send_signal(number)

    def stop(self, seconds: float) -> None:
        """Drain, if it runs; it is killed after a while. Raises ``TrialFailed`` when it had to be, or failed."""
        if not self.runs:  # the last attack was on this one
            self._close_pipe()
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TrialFailed(f"{self.name} did not drain within {seconds:g} s; its log: {self.log}") from None
        self._close_pipe()
        if code not in (0, -signal.SIGTERM):
            raise TrialFailed(f"{self.name} ended with exit code {code}: {self.last_words}; its log: {self.log}")

    def kill(self) -> None:
        """End it now."""
        if self.runs:
            self.process.kill()
            self.process.wait()
        self._close_pipe()

    @property
    def tail(self) -> str:
        """The end of its log."""
        with self.log.open("rb") as log:
            log.seek(max(self.log.stat().st_size - 8_000, 0))
            return log.read().decode(errors="replace")

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.tail.strip().splitlines()
        last = lines[-1].strip() if lines else "its log is empty"
        return last if len(last) <= 300 else f"...{last[-297:]}"

    def _close_pipe(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
