"""Files with a secret in them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_TOO_OPEN: Final = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def read_private(path: str | Path) -> bytes:
    """Return the content of a file that other users can neither read nor change. Its group may read it: so services
    are often given their secrets. Raises ``OSError``; for one that is too open ``PermissionError``, with the way out.
    Any thread."""
    with open(path, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)  # of what is read: a path could lead elsewhere meanwhile
        if mode & _TOO_OPEN:
            way_out = f"other users can read or change it (its mode is {mode:o}): chmod g-w,o= {path}"
            raise PermissionError(errno.EACCES, way_out, str(path))
        return file.read()
