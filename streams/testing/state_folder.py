"""The folder of state on disk for a run over a cluster that is thrown away. It is never that of the source's settings:
the state there is of another cluster, and would be set aside."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from streams.settings.groups import StateConfig


def elsewhere(state: StateConfig, folder: str | Path) -> StateConfig:
    """Return the same settings for state and snapshots in this folder. A source without state on disk has none there,
    either."""
    if not state.folder:
        return state
    snapshots = str(Path(folder) / "snapshots") if state.snapshots else ""
    return msgspec.structs.replace(state, folder=str(Path(folder) / "state"), snapshots=snapshots)


class StateFolder:
    """The folder ``given``, or one that is made when it is needed, and removed by ``close``."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def holding(self, state: StateConfig) -> StateConfig:
        """Return the settings with this folder in the place of theirs; see ``elsewhere``."""
        if state.folder and not self._given and self._made is None:
            self._made = tempfile.TemporaryDirectory(prefix="kes-driver-", ignore_cleanup_errors=True)
        return elsewhere(state, self._given or (self._made.name if self._made is not None else ""))

    def close(self) -> None:
        """Remove what was made. Harmless the second time."""
        if self._made is not None:
            self._made.cleanup()
