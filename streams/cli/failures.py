"""The error that a command failed with, among the groups that tasks wrap it in; what errors mean; and the way out."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from typing import Final, NoReturn, TextIO

from streams.errors import StreamsError

_ESCAPES: Final = "kes.escapes"
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, or of a quota."""


def escape_unknown_characters(stream: TextIO) -> None:
    """Have a stream write ``\\u2026`` for a character that its encoding lacks, as JSON has it, instead of raising."""
    if isinstance(stream, io.TextIOWrapper) and not stream.closed:
        codecs.register_error(_ESCAPES, _escaped)
        stream.reconfigure(errors=_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    units = memoryview(error.object[error.start : error.end].encode("utf-16-be", "surrogatepass"))
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)), error.end


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
