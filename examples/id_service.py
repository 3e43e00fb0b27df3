"""A service that gives out numbers, each once, over HTTP; three members, of which any may be killed.

KES_BOOTSTRAP_SERVERS=127.0.0.1:9092 python -m examples.id_service ids /tmp/ids-1 8001   # and 8002, 8003

curl -L -X POST 127.0.0.1:8001/orders      # {"name": "orders", "number": 1}
curl 127.0.0.1:8002/orders                 # what this member knows: it may be a moment behind

The leader answers; another member sends a client on to it (307), or says that there is none at the moment (503). A
number that a client was given is in the journal, so no later leader gives it out again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from streams import event_type
from streams.errors import NotLeading
from streams.journal import Journal, Replicated, SnapshotFolder

TOO_LATE_SECONDS = 5.0


@event_type("NumberGiven")
class NumberGiven(msgspec.Struct, frozen=True):
    """A number was given out."""

    name: str
    number: int


class Numbers:
    """The last number of each name; the state that all members have."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def apply(self, event: NumberGiven) -> None:
        """Change the state; on the leader and on all others."""
        self.last[event.name] = event.number

    def save(self, file: BinaryIO) -> None:
        """Write it; equal states as equal bytes."""
        file.write(msgspec.json.encode(self.last, order="sorted"))

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        """Read it again."""
        numbers = cls()
        numbers.last = msgspec.json.decode(file.read())
        return numbers


async def answer(ids: Replicated[Numbers], method: str, path: str) -> tuple[str, dict[str, Any], str]:
    """Answer a request: status, body, and where to go instead."""
    name = path.strip("/")

    def next_number(state: Numbers) -> tuple[list[NumberGiven], int]:
        number = state.last.get(name, 0) + 1
        return [NumberGiven(name, number)], number

    if method == "GET":
        number = await ids.read(lambda state: state.last.get(name, 0), barrier=False)
        return "200 OK", {"name": name, "number": number, "leads": ids.is_leading}, ""
    try:
        async with asyncio.timeout(TOO_LATE_SECONDS):
            number = await ids.decide(next_number)
    except NotLeading as error:  # no number was given
        if ids.leader and ids.leader != ids.address:
            return "307 Temporary Redirect", {"error": str(error)}, f"http://{ids.leader}/{name}"
        return "503 Service Unavailable", {"error": str(error)}, ""
    except TimeoutError:  # the number is given or not: the client takes another one
        return "503 Service Unavailable", {"error": "no answer in time"}, ""
    return "200 OK", {"name": name, "number": number}, ""


async def serve(ids: Replicated[Numbers], port: int) -> asyncio.Server:
    """Take requests, one for each connection."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, *_ = (await reader.readline()).decode().split()
            while (await reader.readline()).strip():  # headers
                pass
            status, body, location = await answer(ids, method, path)
            content = msgspec.json.encode(body)
            more = f"Location: {location}\r\n" if location else ""
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{more}Connection: close\r\n\r\n"
            writer.write(head.encode() + content)
            await writer.drain()
        finally:
            writer.close()

    return await asyncio.start_server(take, "127.0.0.1", port)


async def main(name: str, folder: str, port: str, session: str = "6", replicas: str = "3") -> None:
    """Run a member until SIGTERM."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    safe = {"replication_factor": int(replicas), "min_insync_replicas": min(int(replicas), 2)}
    journal = Journal(name, [NumberGiven], session_seconds=float(session), **safe)  # type: ignore[arg-type]
    await journal.create()
    snapshots, address = SnapshotFolder(Path(folder)), f"127.0.0.1:{port}"
    async with Replicated(journal, Numbers, snapshots=snapshots, checkpoint_every=200, address=address) as ids:
        server = await serve(ids, int(port))
        stopping = asyncio.create_task(stopped.wait())
        failing = asyncio.create_task(ids.wait())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        server.close()
        stopping.cancel()
        failing.cancel()


if __name__ == "__main__":
    assert os.environ.get("KES_BOOTSTRAP_SERVERS"), "KES_BOOTSTRAP_SERVERS names the brokers"
    asyncio.run(main(*sys.argv[1:]))
