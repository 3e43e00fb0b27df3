"""A connection for large answers: what is received is written to where it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, cast

from streams.kafka.wire.connection import LARGEST_ANSWER, BrokerConnection
from streams.kafka.wire.messages import LEAST_VERSIONS

_LARGEST_ANSWER: Final = 2**31 - 1  # a record may be larger than a fetch: a broker gives the first batch as a whole
_SMALL_BYTES: Final = 64 * 1024
"""Bytes of an answer up to which it is collected as ``BrokerConnection`` does it."""


class WideConnection(BrokerConnection, asyncio.BufferedProtocol):
    """An open connection whose large frames are memoryviews. Collecting pieces would copy each byte three times, into
    memory that grows: of a log that is read, as much as the rest of reading."""

    def __init__(self, address: str, client_id: str, largest_answer: int = LARGEST_ANSWER) -> None:
        super().__init__(address, client_id, largest_answer)
        self._small = memoryview(bytearray(_SMALL_BYTES))
        self._large: memoryview | None = None
        self._received = 0

    async def introduce(self, needed: Mapping[int, tuple[str, int]] = LEAST_VERSIONS) -> None:
        """Learn which versions and features the broker has; until then large answers are those of another kind of
        server. Raises ``LostConnection``."""
        await super().introduce(needed)
        self._largest_answer = _LARGEST_ANSWER

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go. asyncio calls this."""
        return self._small if self._large is None else self._large[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Give each complete frame to the request that waits for it. asyncio calls this."""
        if self._large is None:
            self.data_received(bytes(self._small[:nbytes]))
            self._look_ahead()
            return
        self.received_at = self._loop.time()
        self._received += nbytes
        if self._received == len(self._large):
            frame, self._large = self._large, None
            self._answered(cast(bytes, frame))  # as bytes, for all that reads it

    def _look_ahead(self) -> None:
        """Make room for a frame that is large and not complete. Its length was looked at already."""
        begun = self._buffer
        if self.lost is not None or len(begun) < 4:
            return
        size = int.from_bytes(begun[:4], "big")
        if size > _SMALL_BYTES:
            self._large, self._received = memoryview(bytearray(size)), len(begun) - 4
            self._large[: self._received] = begun[4:]
            begun.clear()
