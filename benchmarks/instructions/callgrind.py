"""Processor instructions per event, by ``valgrind --tool=callgrind``: C and Python together, the same at any load.

The simulated processor counts from the moment that the process opens its window, so the start of the interpreter is
neither counted nor slow. For that the process calls two macros of ``valgrind/callgrind.h``, compiled when needed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.instructions.child import run
from benchmarks.systems import Failed, Unavailable

_SOURCE = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""


def instructions(folder: Path, system: str, warm: int, events: int) -> float:
    """Count in a process of its own, per event. Takes some 10 s. Raises ``Unavailable`` and ``Failed``."""
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed; instructions are counted with valgrind and a C compiler")
    with TemporaryDirectory(prefix="instructions-") as scratch:
        source, library, out = (Path(scratch, name) for name in ("window.c", "window.so", "out"))
        source.write_text(_SOURCE)
        compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
        done = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"valgrind's headers cannot be compiled: {done.stderr[-500:]}")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        run(folder, system, warm, events, str(library), valgrind)
        total = re.search(r"^totals: (\d+)", out.read_text(errors="replace"), re.MULTILINE)
    if total is None:
        raise Failed("valgrind counted nothing")
    return int(total[1]) / events


class Window:
    """A ``drive.Meter``: valgrind counts all threads between ``begin`` and ``end``, which may come twice."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.PyDLL(library)
        self._is_open = False

    def begin(self) -> None:
        """Count from now on."""
        if not self._is_open:
            self._is_open = True
            self._library.begin()

    def end(self) -> None:
        """Count no more."""
        if self._is_open:
            self._is_open = False
            self._library.end()
