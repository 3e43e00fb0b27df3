"""``kes run --reload``: notice that the user's code has changed, and check whether it can be compiled."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from watchfiles import PythonFilter, watch

from streams.cli.supervisor import CodeChange
from streams.errors import ConfigError
from streams.settings.sources import FILE_NAME

_CHECK_MS: Final = 200


class WatchedCode:
    """The Python files below a folder, and ``kes.toml``. Its descriptor can be read once they have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._changed: set[Path] = set()
        self._broken: set[Path] = set()
        self._lock = threading.Lock()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: Exception | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, on a thread, as long as the block runs. Raises ``ConfigError``: the folder cannot be watched."""
        thread = threading.Thread(target=self._watch, name="kes-reload", daemon=True)
        thread.start()
        try:
            self._begun.wait()  # what changes from here on is noticed
            if self._error is not None:
                raise ConfigError(f"--reload cannot watch {self.folder}: {self._error}")
            yield
        finally:
            self._ended.set()
            thread.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._wake_read

    def taken(self) -> CodeChange | None:
        """Return what has changed since the last call, if anything has. A file that cannot be compiled stays a problem
        until it can."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with self._lock:
            changed, self._changed = self._changed, set()
        if not changed:
            return None
        problems = {path: problem for path in changed | self._broken if (problem := _problem(path, self.folder))}
        self._broken = set(problems)
        files = tuple(sorted(_shown(path, self.folder) for path in changed))
        return CodeChange(files, "; ".join(sorted(problems.values())))

    def _watch(self) -> None:
        files = PythonFilter(extra_extensions=(FILE_NAME,))
        try:
            for changes in watch(
                self.folder,
                watch_filter=files,
                stop_event=self._ended,
                rust_timeout=_CHECK_MS,
                yield_on_timeout=True,  # the first one says that the watch has begun
                raise_interrupt=False,
            ):
                self._begun.set()
                if changes:
                    with self._lock:
                        self._changed |= {Path(path) for _, path in changes}
                    with contextlib.suppress(BlockingIOError):  # it is full: there is enough to wake for
                        os.write(self._wake_write, b"x")
        except Exception as error:  # no such folder, or too many files for the system
            self._error = error
        finally:
            self._begun.set()


def _problem(path: Path, folder: Path) -> str:
    """Return the place and text of the error that keeps a file from being compiled, if there is one."""
    if path.suffix != ".py":
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):  # the worker that runs it warns
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError:  # it is gone
        return ""
    except SyntaxError as error:
        return f"{_shown(path, folder)}:{error.lineno}: {error.msg}"
    except ValueError as error:  # null bytes
        return f"{_shown(path, folder)}: {error}"
    return ""


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
