"""The process between an owner and its broker: it ends the broker when the owner ends, however that happens.

Run as a script by path with an isolated interpreter (a few MB, no import of this package): standard library only.

    _guardian.py SETTINGS      one JSON object: command, log, grace (seconds),
                             throw_away (folders) and files (both removed at the end),
                             lent (descriptors that the broker inherits)

It reads one-byte orders from its standard input and answers with lines on its standard output:

    s  start the broker                 ->  "pid N", or "error TEXT"
    t  SIGTERM, after ``grace`` SIGKILL ->  "exit CODE"
    k  SIGKILL                          ->  "exit CODE"
    f  SIGSTOP, c  SIGCONT
    d  detach: the owner's end is no reason to end any more (SIGTERM, or the broker's end, still is)

The end of its input is the owner's end, since no other process holds the other side of the pipe: also after a kill -9.
A child that the owner forked without exec may hold it too, so the parent's number is watched as well. At the end the
broker is stopped and the folders are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

TICK = 0.2
PR_SET_PDEATHSIG = 1


class Keeper:
    """One broker's life; everything happens on the one thread of the process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.owner = os.getppid()
        self.detached = False
        self.ended = False
        self.child: subprocess.Popen[bytes] | None = None
        self.deadline: float | None = None

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the wait below
        alarm, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        try:
            while not self.ended:
                ready, _, _ = select.select([alarm] + ([] if self.detached else [0]), [], [], TICK)
                if alarm in ready:
                    os.read(alarm, 512)
                if 0 in ready:
                    orders = os.read(0, 64)
                    if not orders:
                        self.ended = True
                    for order in orders.decode("ascii"):
                        self.execute(order)
                self.check()
        finally:
            self.end()

    def _on_term(self, *_: object) -> None:
        self.ended = True

    def execute(self, order: str) -> None:
        if order == "s":
            self.start()
        elif order == "d":
            self.detached = True
        elif self.child is None:
            return
        elif order == "t":
            self.terminate()
        else:
            self.child.send_signal({"k": signal.SIGKILL, "f": signal.SIGSTOP, "c": signal.SIGCONT}[order])

    def start(self) -> None:
        # The broker must not outlive a killed keeper either; only Linux has a way to ask for that.
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        after_fork = (lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)) if prctl else None
        try:
            with open(self.settings["log"], "ab") as log:
                self.child = subprocess.Popen(
                    self.settings["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=os.path.dirname(self.settings["log"]),
                    preexec_fn=after_fork,
                    pass_fds=self.settings["lent"],
                )
        except (OSError, subprocess.SubprocessError) as error:
            self.report(f"error {error}")
        else:
            self.report(f"pid {self.child.pid}")

    def terminate(self) -> None:
        if self.child is not None:
            self.child.terminate()
            self.child.send_signal(signal.SIGCONT)  # a frozen process takes a SIGTERM only when it goes on
            self.deadline = time.monotonic() + self.settings["grace"]

    def check(self) -> None:
        if not self.detached and os.getppid() != self.owner:
            self.ended = True
        if self.child is None:
            return
        code = self.child.poll()
        if code is not None:
            self.child, self.deadline = None, None
            self.report(f"exit {code}")
            self.ended = self.ended or self.detached
        elif self.deadline is not None and time.monotonic() > self.deadline:
            self.child.kill()
            self.deadline = None

    def end(self) -> None:
        if self.child is not None:
            if self.settings["throw_away"]:  # nothing to be saved by an orderly end
                self.child.kill()
            else:
                self.terminate()
            try:
                self.child.wait(self.settings["grace"])
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        for folder in self.settings["throw_away"]:
            shutil.rmtree(folder, ignore_errors=True)
        for file in self.settings["files"]:
            with contextlib.suppress(OSError):
                os.unlink(file)

    def report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the owner is gone; its end is noticed elsewhere
            os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Keeper(json.loads(sys.argv[1])).run()
