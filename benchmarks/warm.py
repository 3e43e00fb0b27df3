"""When a broker is warm: its Java machine has compiled what the load needs.

On two cores the compiler's threads take as much of the machine as a system under test for the first minute, and a
broker that is still interpreted takes three times its later price per record. So uncounted runs go on until these
threads have little to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

COLD_SHARE = 0.1
"""Compilers that take more than this share of a core are still at work."""
MOST_RUNS = 12
_COMPILERS = ("C1 Compiler", "C2 Compiler")


class Warmth(msgspec.Struct, frozen=True):
    """After so many uncounted runs the compilers took this share of a core during the last one."""

    runs: int
    share: float


def until_warm(pid: int, run: Callable[[int], object]) -> Warmth:
    """``run(number)`` again and again until Java's compilers are calm in process ``pid``; twelve times at most."""
    share = 1.0
    number = 0
    while share > COLD_SHARE and number < MOST_RUNS:
        began, compiled = time.monotonic(), compiler_seconds(pid)
        run(number)
        number += 1
        share = (compiler_seconds(pid) - compiled) / (time.monotonic() - began)
    return Warmth(number, share)


def compiler_seconds(pid: int) -> float:
    """Processor time that a Java machine's compilers have taken so far."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:
            continue  # the thread ended
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name.startswith(_COMPILERS):
            fields = rest.split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, which are fields 14 and 15 of all
    return ticks / os.sysconf("SC_CLK_TCK")
