"""The command ``kes`` as a process, with a broker in its environment; ``kes run`` with workers that may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.broker.battery_kit import wait_until

ROOT = Path(__file__).resolve().parents[2]


class Kes:
    """``kes(*arguments)``: exit code, output, messages. ``start`` for what goes on."""

    def __init__(self, broker: str, folder: Path, *words: str) -> None:
        self.folder, self.words = folder, words
        self.environment = {
            **os.environ, "KES_BOOTSTRAP_SERVERS": broker, "PYTHONPATH": str(ROOT), "COLUMNS": "160"
        }  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "streams", *self.words, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, stdout=pipe, stderr=pipe)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


class KesRun:
    """``kes run --json`` of a source, and what it says of its workers: ``w-0``, ``w-1``, ..."""

    def __init__(
        self,
        source: str,
        workers: int,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.lines: list[dict[str, Any]] = []
        with log.open("ab") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streams", "-v", "run", source, "--json",
                 "--workers", str(workers), "--instance-prefix", "w", "--max-crashes", "100", *options],
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdout=subprocess.PIPE,
                stderr=messages,
            )  # fmt: skip
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line["event"] == event]

    def pid(self, worker: str) -> int | None:
        """Of the process, if the last that was said of it is not its end."""
        of_it = [line for line in list(self.lines) if line.get("worker") == worker]
        last = [line for line in of_it if line["event"] in ("started", "exited")][-1:]
        return next((int(line["pid"]) for line in last if line["event"] == "started"), None)

    def signal(self, worker: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """Strike the process that is this worker now; after SIGKILL another one is started, and the end was told: a
        death that is seen only during a stop is a failed drain."""
        pid: int | None = None

        def struck() -> bool:
            nonlocal pid
            pid = self.pid(f"w-{worker}")
            try:
                if pid is not None:
                    os.kill(pid, number)
            except ProcessLookupError:  # its end is not told yet
                return False
            return pid is not None

        wait_until(struck, f"worker {worker} runs; see {self.log}")
        if number == signal.SIGKILL:
            wait_until(
                lambda: self.pid(f"w-{worker}") != pid,
                f"the supervisor sees the end of worker {worker}; see {self.log}",
            )

    def stop(self, seconds: float = 90.0) -> int:
        """SIGTERM, and wait: returns the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        for line in self.said("started"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(line["pid"], signal.SIGKILL)
        self.process.wait(90)
        self._reading.join(90)
        assert self.process.stdout is not None
        self.process.stdout.close()
