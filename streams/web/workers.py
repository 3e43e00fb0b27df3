"""The workers of ``kes run`` as members: each serves its own facts on loopback, read from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import aiohttp
import msgspec

from streams.observability.health import Verdict
from streams.web.facts import MemberFacts, SourceFacts

WORKER_SECONDS: Final = 0.9
_MOST_BYTES: Final = 8 * 1024 * 1024
_decoder: Final[msgspec.json.Decoder[MemberFacts]] = msgspec.json.Decoder(MemberFacts)


class WorkerAddress(NamedTuple):
    """The port where a worker serves its facts (``None``: none yet), the secret that it gave, its number of starts."""

    port: int | None
    secret: str
    starts: int


class WorkerMembers:
    """The workers, as ``addresses`` knows them. On the loop of the monitor."""

    def __init__(self, addresses: Callable[[], Mapping[str, WorkerAddress]]) -> None:
        self._addresses = addresses

    async def read(self) -> tuple[MemberFacts, ...]:
        """Return the facts of all workers; of one that does not answer in time, why."""
        timeout = aiohttp.ClientTimeout(WORKER_SECONDS)
        # A session for each look: a second's worth of connections on loopback is cheaper than one that is stale.
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            return tuple(
                await asyncio.gather(*(_one(session, name, worker) for name, worker in self._addresses().items()))
            )


async def _one(session: aiohttp.ClientSession, name: str, worker: WorkerAddress) -> MemberFacts:
    if worker.port is None:
        return MemberFacts(name=name, starts=worker.starts, problem="it is being started, or gone")
    try:
        address = f"http://127.0.0.1:{worker.port}/facts"
        right = {"Authorization": f"Bearer {worker.secret}"}
        async with session.get(address, headers=right, allow_redirects=False) as answer:
            if answer.status != 200:
                return MemberFacts(name=name, starts=worker.starts, problem=f"it answers with status {answer.status}")
            data = await answer.content.read(_MOST_BYTES)
            while not answer.content.at_eof() and len(data) < _MOST_BYTES:
                data += await answer.content.read(_MOST_BYTES - len(data))
        return msgspec.structs.replace(_decoder.decode(data), name=name, starts=worker.starts)
    except (TimeoutError, aiohttp.ClientError):
        return MemberFacts(name=name, starts=worker.starts, problem=f"no answer within {WORKER_SECONDS:g} s")
    except msgspec.MsgspecError:
        return MemberFacts(name=name, starts=worker.starts, problem="its answer cannot be read")


def facts_probe(facts: SourceFacts) -> Callable[[dict[str, str]], Verdict]:
    """Return what a worker serves at ``/facts``."""

    def answer(query: dict[str, str]) -> Verdict:
        return Verdict(True, msgspec.json.encode(facts.read()).decode())

    return answer
