"""A member of a replicated bank with a register, as a process: requests and answers are lines of JSON over TCP.

``python journal_program.py JOURNAL SERVERS FOLDER PORT SESSION_SECONDS REPLICAS``
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from streams import Journal, NotLeading, Replicated, SnapshotFolder, event_type

TOTAL = 1_000


@event_type("BankMoved")
class BankMoved(msgspec.Struct, frozen=True):
    number: int
    source: int
    target: int


@event_type("RegisterSet")
class RegisterSet(msgspec.Struct, frozen=True):
    value: int


class Machine:
    """Ten accounts, and a register. The numbers of all moves are kept: one that comes twice would be seen."""

    def __init__(self) -> None:
        self.accounts = [TOTAL // 10] * 10
        self.register = 0
        self.moves: list[int] = []

    def apply(self, event: BankMoved | RegisterSet) -> None:
        if isinstance(event, RegisterSet):
            self.register = event.value
            return
        self.accounts[event.source] -= 1
        self.accounts[event.target] += 1
        self.moves.append(event.number)

    def save(self, file: BinaryIO) -> None:
        file.write(msgspec.json.encode([self.accounts, self.register, self.moves]))

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        machine = cls()
        machine.accounts, machine.register, machine.moves = msgspec.json.decode(file.read())
        return machine


def journal_of(name: str, servers: str, session: float, replicas: int = 1) -> Journal:
    events: list[type] = [BankMoved, RegisterSet]
    return Journal(
        name,
        events,
        bootstrap_servers=servers,
        replication_factor=replicas,
        min_insync_replicas=min(replicas, 2),
        session_seconds=session,
    )


async def answer(member: Replicated[Machine], request: dict[str, Any]) -> dict[str, Any]:
    """``ok``: done. ``no``: it is refused, and never will be. Anything else gives no answer."""
    try:
        match request["op"]:
            case "move":
                event = BankMoved(request["number"], request["source"], request["target"])
                await member.decide(lambda state: ([event], None))
                return {"ok": True}
            case "set":
                value = RegisterSet(request["value"])
                await member.decide(lambda state: ([value], None))
                return {"ok": True}
            case "get":
                return {"ok": True, "value": await member.read(lambda state: state.register)}
            case "leads":
                return {"ok": member.is_leading}
    except NotLeading as error:
        return {"no": str(error)}
    raise ValueError(request)


async def main(name: str, servers: str, folder: str, port: str, session: str, replicas: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    journal = journal_of(name, servers, float(session), int(replicas))
    await journal.create()

    async with Replicated(journal, Machine, snapshots=SnapshotFolder(Path(folder)), checkpoint_every=60) as member:

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while line := await reader.readline():
                    writer.write(msgspec.json.encode(await answer(member, msgspec.json.decode(line))) + b"\n")
                    await writer.drain()
            except OSError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(take, "127.0.0.1", int(port))
        ends = [asyncio.create_task(stopped.wait()), asyncio.create_task(member.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        server.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
