"""One question to several members: the next one gets it as well while those before are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from streams.errors import StreamsError
from streams.queries.routing import Server

T = TypeVar("T")

HEDGE_SECONDS: Final = 0.25
"""After so long without an answer a member with a copy gets the question as well, where it may answer."""


async def hedged(
    partition: int,
    servers: Sequence[Server],
    put: Callable[[Server], Coroutine[Any, Any, T | StreamsError | None]],
    look: Callable[[], Coroutine[Any, Any, Sequence[Server]]],
    note_silence: Callable[[Server], None],
) -> T | StreamsError | None:
    """Ask one member after the other, the next one also when the ones before are silent: the first answer counts, and
    an error of a copy only where there is none.

    ``put`` returns an answer or the reason why there is none. ``look`` reads the group: it is called once, when all
    members are silent, because the description that named them may be older than a copy.
    """
    reason: StreamsError | None = None
    failed: StreamsError | None = None
    waiting, asked = list(servers)[::-1], set[str]()
    asking = dict[asyncio.Task[T | StreamsError | None], Server]()
    looks, looking = [look], set[asyncio.Task[Sequence[Server]]]()
    try:
        while waiting or asking:
            if waiting:
                server = waiting.pop()
                asked.add(server.address)
                asking[asyncio.create_task(put(server))] = server
            patience = HEDGE_SECONDS if waiting or looks else None  # each has its own deadline
            under_way: set[asyncio.Task[Any]] = {*asking, *looking}
            done, _ = await asyncio.wait(under_way, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in asking if each in done]:
                server = asking.pop(task)
                try:
                    answered = task.result()
                except StreamsError as error:
                    if partition in server.owned:
                        raise
                    failed = failed or error
                    continue
                if answered is not None and not isinstance(answered, StreamsError):
                    return answered
                reason = answered or reason
            for look_up in [each for each in looking if each in done]:
                looking.remove(look_up)
                waiting = [each for each in look_up.result() if each.address not in asked][::-1]
            for server in () if done else asking.values():
                note_silence(server)
            if not done and not waiting and looks:
                looking.add(asyncio.create_task(looks.pop()()))
        if failed is not None:
            raise failed
        return reason
    finally:
        for ended in {*asking, *looking}:
            ended.cancel()
        await asyncio.gather(*asking, *looking, return_exceptions=True)
