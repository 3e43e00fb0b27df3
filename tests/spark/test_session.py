"""What ``local_session`` leaves behind when it does not come to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

_PROGRAM = """
import sys
import streams.spark as kes_spark
try:
    kes_spark.local_session("interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.read()
"""


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _commands(process: psutil.Process) -> list[str]:
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or only its parent's to bury
            found.append(" ".join(child.cmdline()))
    return found


def test_interrupted_while_java_starts() -> None:
    root = Path(__file__).parents[2]
    job = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with job:
        try:
            me = psutil.Process(job.pid)

            assert _wait(lambda: any("SparkSubmit" in command for command in _commands(me)))
            os.kill(job.pid, signal.SIGINT)
            assert job.stdout is not None
            assert job.stdout.readline() == "interrupted\n"
            assert _wait(lambda: not _commands(me))
        finally:
            job.kill()
