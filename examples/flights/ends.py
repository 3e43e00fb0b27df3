"""How a demo begins and ends: the folder for what stays, signals, exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import filelock
from rich.console import Console

from examples.flights.fleet import DemoFailed

EXIT_OK, EXIT_WRONG, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 130, 143
FOLDERS = 20


def exit_code_of(work: Callable[[Console], int]) -> int:
    """Run ``work`` with a console on stderr; Ctrl-C and SIGTERM end it, and what it has entered with it.

    Main thread only. Raises what ``work`` raises.
    """
    before = signal.signal(signal.SIGTERM, _terminated)
    # A descriptor of its own: stderr itself may be Spark's for a moment.
    with os.fdopen(os.dup(2), "w") as screen:
        console = Console(file=screen, highlight=False)
        try:
            return work(console)
        except (KeyboardInterrupt, SystemExit, SystemError) as end:
            # A signal that arrives within a call of a C client comes out as a SystemError around it.
            signalled = end.__cause__ if isinstance(end, SystemError) else end
            if isinstance(signalled, KeyboardInterrupt):
                console.print("interrupted; everything is stopped")
                return EXIT_INTERRUPTED
            if isinstance(signalled, SystemExit):
                console.print("terminated; everything is stopped")
                return EXIT_TERMINATED
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def output_folder(asked: Path | None, default: Path) -> Iterator[Path]:
    """The folder for what stays, locked against a second demo: the one that was given, else ``default`` or the next
    free one beside it.

    Raises ``DemoFailed`` if it is in use or not writable.
    """
    candidates = [asked] if asked else [default, *(default.with_name(f"{default.name}-{n}") for n in range(2, FOLDERS))]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / ".lock", timeout=0)
            lock.acquire()
        except filelock.Timeout:
            continue
        except OSError as error:
            raise DemoFailed(
                f"cannot write to {folder} ({error.strerror}); choose another folder with --out"
            ) from error
        try:
            yield folder
        finally:
            lock.release()
        return
    raise DemoFailed(f"another demo writes to {candidates[-1]}; choose another folder with --out")


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)
