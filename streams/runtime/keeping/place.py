"""Places of a source's folders."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from streams.errors import ConfigError
from streams.runtime.keeping.folder import check_private

_LOCK: Final = "lock"


def place_of(folder: str, group_id: str, topic: str) -> Path:
    """Return the parent of a source's folders; its names cannot lead elsewhere (a group may be called ``..``)."""
    return Path(folder).absolute() / f"group-{group_id}" / f"topic-{topic}"  # the program may change its directory


def prepare_root(folder: str, group_id: str, topic: str) -> Path:
    """Make the parent of the partitions' folders, and check that it can be used. Raises ``ConfigError``."""
    root, parent = Path(folder).absolute(), place_of(folder, group_id, topic)
    try:
        import fcntl  # not on Windows

        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (root, parent.parent, parent):
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)
        probe = os.open(parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):  # it has locks
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(probe)
    except ImportError:
        raise ConfigError("StateConfig.folder: state on disk needs file locks of POSIX, which Windows lacks") from None
    except OSError as error:
        raise ConfigError(f"StateConfig.folder is {folder!r}, and cannot be used: {error}") from error
    return parent
