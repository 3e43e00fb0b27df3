"""The worker processes of the demo: ``kes run`` for each event source, its status lines read as they come.

Run as a module this file is ``kes run`` that also stops when its standard input ends, so that no worker outlives the
demo, whatever became of the demo.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from examples.flights.report import VARIABLE, Tally

STOP_SECONDS = 30.0
NO_STATE = {"KES_STATE_FOLDER": "", "KES_STATE_SNAPSHOTS": ""}
"""Whatever the settings of the machine say: the cluster is thrown away, and a folder of state would stay."""


class Workers:
    """``number`` processes of one event source. ``pids`` and ``starts`` follow what the supervisor says.
    ``more``: further options of ``kes run``. ``monitor``: the address of its monitor, once there is one.

    Made and stopped by one thread; the attributes may be read by any.
    """

    def __init__(
        self, source: str, number: int, *, name: str, servers: str, log: IO[bytes], more: Sequence[str] = ()
    ) -> None:
        root = Path(__file__).resolve().parents[2]
        self.name = name
        self.number = number
        self.pids: dict[str, int] = {}
        self.tallies: dict[int, Tally] = {}
        self.crashes: list[str] = []
        self.restarts = 0
        self.monitor = ""
        module = "examples.flights.workers"
        options = ["-n", str(number), "--instance-prefix", name, "--json", "--drain-seconds", "15", *more]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, source, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=root,
            start_new_session=True,  # Ctrl-C is for the demo, which stops its workers itself
            env={**os.environ, "KES_BOOTSTRAP_SERVERS": servers, **NO_STATE, "PYTHONPATH": _path(root), VARIABLE: "1"},
        )
        self._listener = threading.Thread(target=self._listen, name=f"workers-{name}", daemon=True)
        self._listener.start()

    @property
    def running(self) -> bool:
        """Whether the supervisor is there (a worker may just be restarting)."""
        return self._process.poll() is None

    @property
    def transactions(self) -> int:
        """Transactions committed by all processes so far, the dead ones included."""
        return sum(tally.transactions for tally in list(self.tallies.values()))

    def kill_one(self) -> tuple[str, int]:
        """SIGKILL to the first worker that runs; its name and process number."""
        name, pid = sorted(self.pids.items())[0]
        os.kill(pid, signal.SIGKILL)
        return name, pid

    def stop(self) -> int:
        """Drain and end; the supervisor's exit code. Safe to repeat."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the workers notice, and leave
                self._process.wait()
        self._listener.join(STOP_SECONDS)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        return self._process.returncode

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    self._note(msgspec.json.decode(line))
                except msgspec.DecodeError:
                    continue  # a line that a handler printed

    def _note(self, status: dict[str, Any]) -> None:
        worker = status.get("worker", "")
        match status["event"]:
            case "tally":
                self.tallies[status["pid"]] = msgspec.convert(status, Tally)
            case "started":
                self.pids[worker] = status["pid"]
                self.restarts += status["starts"] > 1
            case "monitor":
                self.monitor = status["address"]
            case "exited":
                self.pids.pop(worker, None)
                if status["code"] != 0:
                    self.crashes.append(f"{worker} {status['reason']}")
            case "gave up":
                self.crashes.append(f"{worker} gave up")


def _path(root: Path) -> str:
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))


def _follow_stdin() -> NoReturn:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
    raise AssertionError("never reached")


if __name__ == "__main__":
    threading.Thread(target=_follow_stdin, daemon=True).start()
    sys.argv = ["kes", "run", *sys.argv[1:]]
    runpy.run_module("streams", run_name="__main__")
