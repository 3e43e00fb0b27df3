"""Files that arrive while the pipeline runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 30.0
"""The time over which the second half of the files arrives."""


class Arrivals:
    """Moves files into ``folder``: the first half at once, the others one by one. A context manager."""

    def __init__(self, files: Sequence[Path], folder: Path, *, seconds: float = SECONDS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.total, self.arrived = len(files), 0
        self._files, self._folder = list(files), folder
        self._pause = seconds / max(1, len(files) // 2)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._move, name="arrivals", daemon=True)

    @property
    def all_arrived(self) -> bool:
        """Whether no file is to come."""
        return self.arrived == self.total

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _move(self) -> None:
        for file in self._files:
            if self.arrived >= (self.total + 1) // 2 and self._stopped.wait(self._pause):
                return
            file.rename(
                self._folder / file.name
            )  # whole at once, with its time: the file source takes the oldest first
            self.arrived += 1
