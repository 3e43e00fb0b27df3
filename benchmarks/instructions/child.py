"""The process in which events are counted: by the code of this checkout, driving the code of any.

``python -c BOOT ROOT FOLDER SYSTEM WARM EVENTS`` prints one ``Counted`` as JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
_BOOT = (
    "import sys; sys.path[0] = sys.argv[1]; import benchmarks; sys.path[0] = sys.argv[2]; "
    "from benchmarks.instructions.child import main; main()"
)
"""The benchmarks are those of one checkout, ``streams`` that of another."""


class Counted(msgspec.Struct, frozen=True):
    """Per event and stage."""

    bytecodes: dict[str, float]
    calls: dict[str, float]
    c_calls: dict[str, float]


class ChildFailed(Exception):
    """The process ended with an error, which is the text."""


def command(folder: Path, system: str, warm: int, events: int, how: str = "count") -> list[str]:
    """The process's command line."""
    return [sys.executable, "-c", _BOOT, str(ROOT), str(folder), how, system, str(warm), str(events)]


def count(folder: Path, system: str, warm: int, events: int) -> Counted:
    """Count in a process of its own. Raises ``ChildFailed``."""
    return msgspec.json.decode(run(command(folder, system, warm, events), folder), type=Counted)


def run(arguments: list[str], folder: Path) -> bytes:
    """What the process prints. Raises ``ChildFailed``."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise ChildFailed(done.stderr.decode(errors="replace").strip()[-2000:])
    return done.stdout


class Nothing:
    """A ``drive.Meter`` for when something else measures."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


def main() -> None:
    """The process's way in."""
    from benchmarks.instructions.counting import Counter
    from benchmarks.instructions.drive import SYSTEMS

    how, system, warm, events = sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    if how == "count":
        counter = Counter()
        SYSTEMS[system](counter, warm, events)
        found = (
            {stage: number / events for stage, number in counts.items()}
            for counts in (counter.bytecodes, counter.calls, counter.c_calls)
        )
        sys.stdout.buffer.write(msgspec.json.encode(Counted(*found)))
    else:
        SYSTEMS[system](Nothing(), warm, events)
