"""The channel between the supervisor of ``kes run`` and one of its workers: a few messages each way.

Each side holds one end of a socket pair. When the supervisor is gone, however it went, the channel ends, and the
worker drains and leaves. A worker sends the name by which the group knows it; when it dies, the supervisor has the
other workers remove that name, so the group does not wait for its session to end. No settings, no credentials and no
code of the user cross the channel.

A message may be torn (the other side was killed while it wrote, or froze until the buffer was full): a line
that cannot be decoded is skipped, and nothing here ever waits for the other side.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import msgspec

_LONGEST: Final = 64 * 1024
"""Bytes without a line's end that are kept; messages are shorter than a kilobyte."""


class GroupIdentity(msgspec.Struct, frozen=True, tag="member"):
    """Worker to supervisor: the id by which the group knows the worker. Empty: it is in no group, or shall stay in it
    (a static member that stopped). ``group_instance`` is empty for dynamic members."""

    member_id: str
    group_instance: str = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Worker to supervisor: the source has drained, or finished. Exit code 0 alone does not say so: ``sys.exit()``
    anywhere in the user's code gives it, too."""


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Supervisor to workers: this member is dead, take it out of the group."""

    member_id: str
    group_instance: str = ""


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """Worker to supervisor: the member is not in the group any more. ``found``: by this worker; else it was gone."""

    member_id: str
    found: bool


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """Worker to supervisor: its metrics, and its facts for the monitor, are at this port of the loopback address, for
    requests with ``secret``."""

    port: int
    secret: str = ""


Message = GroupIdentity | Done | Remove | Removed | Serving
_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


class Channel:
    """One end of the channel. Any thread may send; one at a time may receive. Nothing is raised when the other end is
    gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        self._end = end
        self._rest = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Send a message, unless the other side is gone or does not read."""
        # The first newline ends a message that may have been left torn before.
        try:
            self._end.send(b"\n" + msgspec.json.encode(message) + b"\n")
        except OSError:  # BlockingIOError: the buffer is full: the other side has not read for a long time
            return

    def receive(self, wait_seconds: float = 0.0) -> list[Message] | None:
        """Return the messages since the last call; ``None``: the other side is gone, and all it sent was received."""
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
        return [message for line in lines if line and (message := _decoded(line)) is not None]

    def close(self) -> None:
        """Close this end: the other one notices."""
        self._end.close()


def _decoded(line: bytes) -> Message | None:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
