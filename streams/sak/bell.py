"""A wait for a descriptor that other threads can end."""

from __future__ import annotations

import contextlib
import select
import socket


class Bell:
    """One thread waits, and closes; any thread rings."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        for end in (self._sender, self._receiver):
            end.setblocking(False)

    def ring(self) -> None:
        """End the wait that is under way, or the next one, at once."""
        with contextlib.suppress(OSError):  # it is full, or closed
            self._sender.send(b"\0")

    def wait(self, descriptor: int, seconds: float) -> None:
        """Wait until there is something to read, or for so long, or for a ring."""
        waiting = select.poll()
        for each in (descriptor, self._receiver.fileno()):
            waiting.register(each, select.POLLIN)
        waiting.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(64)

    def close(self) -> None:
        """Close both ends. Later rings do nothing."""
        self._sender.close()
        self._receiver.close()
