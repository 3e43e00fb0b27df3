"""Files that this process may still open."""

from __future__ import annotations

import errno
import os
from typing import Final

LEFT_FREE: Final = 64
"""Left to what cannot wait: connections to brokers, checkpoints, logs, and what handlers open."""


def refuse_if_few_are_free() -> None:
    """Raise ``OSError`` (``EMFILE``) if fewer than ``LEFT_FREE`` files may still be opened, so none should be opened
    that stays open."""
    import resource  # not on Windows, which has no folders of state either

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/dev/fd"))
    except OSError as error:
        count = limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    if limit != resource.RLIM_INFINITY and count > limit - LEFT_FREE:
        raise OSError(errno.EMFILE, f"{count} files are open, and {LEFT_FREE} are left free; {advice()}")


def advice() -> str:
    """Return what to change where files are short."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the process may open {limit} (ulimit -n): raise that limit, or run more members"
