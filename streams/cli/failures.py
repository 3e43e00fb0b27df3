"""The error that a command failed with, among the groups that tasks wrap it in; and what errors mean."""

from __future__ import annotations

import errno
from typing import Final

from streams.errors import StreamsError

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, or of a quota."""


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
