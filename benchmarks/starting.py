"""``python -m benchmarks.starting``: what the start of a program costs, as processor time, memory and modules.

Each program runs in processes of its own, which measure from the start of the interpreter's first line on; the least
time of some runs is shown. Tests of the modules that are loaded: ``tests/unit/test_light_start.py``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

RUNS: Final = 7
PROGRAMS: Final = (
    "import streams",
    "from streams import Record, event_type",
    "from streams import View",
    "from streams import EventSource",
    "import streams; [getattr(streams, name) for name in streams.__all__]",
    "from streams.runtime.connections import KafkaConnections; from streams.runtime.engine import Engine",
    "from streams.journal import Journal",
    "from streams.outbox import Relay",
    "import confluent_kafka",
)
CHILD: Final = """
from resource import RUSAGE_SELF, getrusage
before = getrusage(RUSAGE_SELF)
{program}
after = getrusage(RUSAGE_SELF)
import sys
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(seconds, (after.ru_maxrss - before.ru_maxrss) / 1024, len(sys.modules))
"""


def measured(program: str) -> tuple[float, float, int]:
    """Return the processor time in seconds, the memory in MiB, and the number of modules of a program's start."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD.format(program=program)], capture_output=True, text=True, check=True
    )
    seconds, mib, modules = ran.stdout.split()
    return float(seconds), float(mib), int(modules)


def main() -> None:
    """Print a line for each program."""
    print(f"{'s':>6} {'MiB':>6} {'modules':>8}")
    for program in PROGRAMS:
        seconds, mib, modules = min(measured(program) for _ in range(RUNS))
        print(f"{seconds:6.3f} {mib:6.1f} {modules:8}  {program}")


if __name__ == "__main__":
    main()
