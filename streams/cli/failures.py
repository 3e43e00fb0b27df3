"""The error that a command failed with, among the groups that tasks wrap it in; what errors mean; and the way out."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Final, NoReturn, TextIO

from streams.errors import StreamsError

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, or of a quota."""


def leave(code: int, when_unwritten: int = 0) -> NoReturn:
    """Exit with this code, also where stdout and stderr hold what they cannot write: the interpreter would try again,
    and make it 120. ``when_unwritten``: the code in place of 0 if the disk has no room for what stdout holds."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "closed", stream is None):
            continue
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and error.errno in NO_ROOM:
                code = code or when_unwritten
            with suppress(OSError):
                discard(stream)
    sys.exit(code)


def discard(stream: TextIO) -> None:
    """Drop what a stream holds and what is written to it from now on: the interpreter would try again at the exit."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def innermost(error: Exception) -> Exception:
    """The error to report: of a group, its first ``StreamsError``, or its only error; else ``error`` itself."""
    leaves = list(_leaves(error))
    ours = [leaf for leaf in leaves if isinstance(leaf, StreamsError)]
    if ours:
        return ours[0]
    return leaves[0] if len(leaves) == 1 else error


def _leaves(error: Exception) -> list[Exception]:
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
