"""Parents of a source's folders, and the room that there is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from streams.errors import ConfigError
from streams.runtime.keeping.folders.folder import LOCK, check_private, lock_file
from streams.sak.open_files import advice


def parent_of(folder: str, group_id: str, topic: str) -> Path:
    """Return the parent of a source's folders; its names cannot lead elsewhere (a group may be called ``..``)."""
    return Path(folder).absolute() / f"group-{group_id}" / f"topic-{topic}"  # the program may change its directory


def prepare_root(folder: str, group_id: str, topic: str) -> Path:
    """Make the parent of the partitions' folders, and check that it can be used. Raises ``ConfigError``."""
    root, parent = Path(folder).absolute(), parent_of(folder, group_id, topic)
    try:
        import fcntl  # noqa: F401  # not on Windows

        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (root, parent.parent, parent):
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)
        # A file system without locks is refused here, and not when a second process is in the same folder (K6).
        probe = os.open(parent / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            lock_file(probe)
        finally:
            os.close(probe)
    except ImportError:
        raise ConfigError("StateConfig.folder: state on disk needs file locks of POSIX, which Windows lacks") from None
    except OSError as error:
        raise ConfigError(f"StateConfig.folder is {folder!r}, and cannot be used: {error}") from error
    return parent


def room_for(error: OSError, path: Path) -> str:
    """Return what there is of what an error says is lacking, in words for a log."""
    return advice() if error.errno in (errno.EMFILE, errno.ENFILE) else room_at(path)


def room_at(path: Path) -> str:
    """Return how many bytes are free where a folder is, in words for a log."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"free bytes are not known: {error}"
    return f"{found.f_bavail * found.f_frsize} bytes are free"
