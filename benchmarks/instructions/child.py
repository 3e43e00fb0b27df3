"""The process in which events are counted: by the code of this checkout, driving the code of any.

``python -c BOOT ROOT FOLDER SYSTEM WARM EVENTS`` prints one ``Counted`` as JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.systems import Failed

ROOT = Path(__file__).parents[2]
_BOOT = (
    "import sys; sys.path[0] = sys.argv[1]; import benchmarks; sys.path[0] = sys.argv[2]; "
    "from benchmarks.instructions.child import main; main()"
)
"""The benchmarks are those of one checkout, ``streams`` that of another."""
COMPILED: Final = "compiled-"
"""Begins the names of systems whose leaves (``streams/sak/leaves.py``) run compiled; others run as plain Python."""


class Counted(msgspec.Struct, frozen=True):
    """Per event and stage. ``functions``: bytecodes by ``stage, function``. ``turns``: of live traffic, per transaction
    (``turns.TURNS``)."""

    bytecodes: dict[str, float]
    calls: dict[str, float]
    c_calls: dict[str, float]
    functions: dict[str, float]
    turns: dict[str, float]


def count(folder: Path, system: str, warm: int, events: int) -> Counted:
    """Count in a process of its own. Raises ``Failed``."""
    return msgspec.json.decode(run(folder, system, warm, events), type=Counted)


def run(folder: Path, system: str, warm: int, events: int, how: str = "count", under: Sequence[str] = ()) -> bytes:
    """Run the process, and return its output. ``how``: ``count``, or the library that opens valgrind's window;
    ``under``: the command that runs it. Raises ``Failed``."""
    is_plain = "0" if system.startswith(COMPILED) else "1"
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "KES_PLAIN": is_plain}
    arguments = [sys.executable, "-c", _BOOT, str(ROOT), str(folder), how, system, str(warm), str(events)]
    done = subprocess.run([*under, *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise Failed(done.stderr.decode(errors="replace").strip()[-2000:])
    return done.stdout


def main() -> None:
    """Run the process."""
    from benchmarks.instructions.callgrind import Window
    from benchmarks.instructions.counting import counting_meter
    from benchmarks.instructions.drive import SYSTEMS

    how, system, warm, events = sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    if system.startswith(COMPILED):
        from streams.sak import leaves

        system = system.removeprefix(COMPILED)
        if leaves.summary() != leaves.COMPILED:
            sys.exit(f"the leaves are not compiled (`make leaves`): {leaves.summary()}")
    if how == "count":
        meter = counting_meter()
        turns = SYSTEMS[system](meter, warm, events)

        functions = {", ".join(name): number for name, number in meter.functions.items()}
        counts: tuple[Mapping[str, int], ...] = (meter.bytecodes, meter.calls, meter.c_calls, functions)
        per_event = ({stage: number / events for stage, number in one.items()} for one in counts)
        of_transactions = {} if turns is None else turns.per_transaction()
        sys.stdout.buffer.write(msgspec.json.encode(Counted(*per_event, of_transactions)))
    else:
        SYSTEMS[system](Window(how), warm, events)
