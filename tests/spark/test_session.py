"""What ``local_session`` leaves behind when it does not come to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.spark.log_kit import until

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
            until(lambda: any("SparkSubmit" in command for command in _commands(me)), "Java starts", 60)
            os.kill(job.pid, signal.SIGINT)
            assert job.stdout is not None
            assert job.stdout.readline() == "interrupted\n"
            until(lambda: not _commands(me), "Java has ended", 60)
        finally:
            job.kill()
