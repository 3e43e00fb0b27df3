"""The line between the supervisor of ``kes run`` and one of its workers: a few words each way, and an end that tells.

Each side holds one end of a socket pair. When the supervisor is gone, however it went, the line ends, and the worker
drains and leaves. A worker says under which name the group knows it; when it dies, the others are told to remove that
name, so that nobody waits for its session to end. No settings, no credentials and no code of the user cross the line.

What comes over it may be torn (the other side was killed while it wrote, or froze until the buffer was full): a line
that is not understood is skipped, and nothing here ever waits for the other side.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import msgspec

_LONGEST: Final = 64 * 1024
"""Bytes without a line's end that are kept; words of this line are shorter than a kilobyte."""


class Member(msgspec.Struct, frozen=True, tag="member"):
    """Worker to supervisor: the group knows me by this id. An empty one: I am in no group, or shall stay in it (a
    static member that stopped). ``group_instance`` is empty for dynamic members."""

    member_id: str
    group_instance: str = ""


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Supervisor to workers: this member is dead, take it out of the group."""

    member_id: str
    group_instance: str = ""


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """Worker to supervisor: it is not in the group any more. ``found``: I took it out; else it was gone already."""

    member_id: str
    found: bool


Word = Member | Remove | Removed
_decoder: Final[msgspec.json.Decoder[Word]] = msgspec.json.Decoder(Word)


class Line:
    """One end. Sending may be done by any thread; listening by one at a time. Nothing is raised for an end that is
    gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        self._end = end
        self._rest = b""

    def fileno(self) -> int:
        """For ``select``."""
        return self._end.fileno()

    def say(self, word: Word) -> None:
        """Send a word, unless the other side is gone or does not listen."""
        # The first line's end closes what may have been left torn before.
        try:
            self._end.send(b"\n" + msgspec.json.encode(word) + b"\n")
        except OSError:  # BlockingIOError: the buffer is full, so nobody has listened for a long time
            return

    def hear(self, wait_seconds: float = 0.0) -> list[Word] | None:
        """What was said since the last time; ``None``: the other side is gone, and everything it said was heard."""
        select.select([self._end], [], [], wait_seconds)
        try:
            data = self._end.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError:  # reset
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_LONGEST]
        return [word for line in lines if line and (word := _understood(line)) is not None]

    def close(self) -> None:
        """Let go of this end: the other one notices."""
        self._end.close()


def _understood(line: bytes) -> Word | None:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
