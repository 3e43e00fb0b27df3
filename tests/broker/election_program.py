"""A candidate as a process of its own, which writes to a file that takes no write of a term before the last one.

``python election_program.py NAME SERVERS FILE SESSION_SECONDS``
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path

from streams import Election, NotLeading


def write(file: Path, token: int) -> bool:
    """Write a line of this term, unless a later term has written; as a database does by its fence."""
    with file.open("a+", encoding="utf-8") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        lines.seek(0)
        last = lines.read().splitlines()[-1:]
        if last and int(last[0].split()[0]) > token:
            return False
        lines.write(f"{token} {os.getpid()}\n")
        return True


async def main(name: str, servers: str, file: str, session: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Election(name, bootstrap_servers=servers, session_seconds=float(session)) as election:
        election.on_event(lambda event: print(event, flush=True))
        work = asyncio.create_task(lead(election, Path(file)))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def lead(election: Election, file: Path) -> None:
    while True:
        try:
            async with election.term() as term:
                while True:
                    if not write(file, term.token):
                        print(f"refused {term.token}", flush=True)
                    await asyncio.sleep(0.01)
        except NotLeading as error:
            print(error, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
