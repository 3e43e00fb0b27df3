"""The connections of a proxy, and frames on them: see ``streams.testing.proxy``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from streams.testing.proxy_wire import Address, MalformedFrame, RequestHeader

LARGEST_FRAME: Final = 256 << 20
"""Bytes: above what any broker takes or gives. A longer one is a sign that this is not Kafka's protocol."""

CLOSE_SECONDS: Final = 1.0


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that was sent on, until it is answered."""

    header: RequestHeader
    expected: int = 1
    """Replies that will come: more than one after a doubled request."""

    deliver: int = 1
    """The one of them that is passed on to the client."""

    seen: int = 0


@dataclass(eq=False)
class Link:
    """One client connection, and the one to the broker that belongs to it."""

    address: Address
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    broker: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    client_id: str = ""
    waiting: dict[int, PendingRequest] = field(default_factory=dict)

    def abort(self) -> None:
        """Close both sides at once; what is on its way is lost."""
        self.client[1].transport.abort()
        self.broker[1].transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once its queued bytes are sent, unless the other side does not take them."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await writer.wait_closed()
    except (OSError, asyncio.CancelledError):
        writer.transport.abort()


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next frame; nothing at the end of the stream."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
    except asyncio.IncompleteReadError:
        return None
    if size > LARGEST_FRAME:
        raise MalformedFrame(f"a frame of {size} bytes: is this Kafka's protocol, without TLS?")
    return await reader.readexactly(size)


def write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Queue a frame."""
    writer.write(len(frame).to_bytes(4, "big"))
    writer.write(frame)
