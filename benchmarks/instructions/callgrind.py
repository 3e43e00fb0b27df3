"""Processor instructions per event, by ``valgrind --tool=callgrind``: C and Python together, whatever else the machine
does.

The simulated processor counts from the moment that the process says so, so the start of the interpreter is neither
counted nor slow. For that the process calls two macros of ``valgrind/callgrind.h``, compiled when first needed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.instructions.child import ChildFailed, command, run

_SOURCE = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""
_NEW_OBJECT = "_PyObject_GC_Link"
"""Called by the interpreter for each object that the garbage collector will look at, and that no free list had."""


class Instructions(msgspec.Struct, frozen=True):
    """Per event. ``collected_objects``: made, and counted by the garbage collector until they are gone again."""

    instructions: float
    collected_objects: float


class Unavailable(Exception):
    """Instructions cannot be counted here; the text says what is missing."""


def check() -> None:
    """Raises ``Unavailable``."""
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed; instructions are counted with valgrind and a C compiler")


def instructions(folder: Path, system: str, warm: int, events: int) -> Instructions:
    """Count in a process of its own. Takes some 10 s. Raises ``Unavailable`` and ``ChildFailed``."""
    check()
    with TemporaryDirectory(prefix="instructions-") as scratch:
        library = _compiled(Path(scratch))
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={scratch}/out"]
        arguments = [*valgrind, *command(folder, system, warm, events, str(library))]
        run(arguments, folder)
        found = Profile(Path(scratch, "out"))
    if not found.total:
        raise ChildFailed("valgrind counted nothing")
    return Instructions(found.total / events, found.calls.get(_NEW_OBJECT, 0) / events)


def _compiled(folder: Path) -> Path:
    source, library = folder / "window.c", folder / "window.so"
    source.write_text(_SOURCE)
    done = subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], capture_output=True, check=False)
    if done.returncode:
        raise Unavailable(f"valgrind's headers cannot be compiled: {done.stderr.decode(errors='replace')[-500:]}")
    return library


class Profile:
    """What callgrind wrote: instructions in ``total``, and of each function of C the ``calls``, and what was executed
    from its calls to its returns (``inclusive``)."""

    def __init__(self, file: Path) -> None:
        self.total = 0
        self.calls: dict[str, int] = {}
        self.inclusive: dict[str, int] = {}
        names: dict[str, str] = {}
        callee, is_cost_of_call = "", False
        for line in file.read_text(errors="replace").splitlines():
            if is_cost_of_call:
                self.inclusive[callee] = self.inclusive.get(callee, 0) + int(line.split()[1])
                is_cost_of_call = False
            elif line.startswith(("fn=", "cfn=")):  # a name is told once, then its number
                number, _, name = line.partition("=")[2].partition(" ")
                callee = names.setdefault(number, name.partition("'")[0])
            elif line.startswith("calls="):
                self.calls[callee] = self.calls.get(callee, 0) + int(line[6:].split()[0])
                is_cost_of_call = True
            elif line.startswith("totals:"):
                self.total = int(line.split()[1])


class Window:
    """A ``drive.Meter``: valgrind counts between ``begin`` and ``end``. It counts all threads."""

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
