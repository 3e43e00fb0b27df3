"""Parked keys of a running group: listed, and acted on, at the members that own them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streams.core.parking_rules import Action
from streams.errors import NotCaughtUp, NotOwned, StoreError, StreamsError
from streams.queries.asking import GroupAsker
from streams.runtime.queries.parked import PAGE, ParkedEvent, ParkedQueue, ParkedReply, ParkedRequest


class ParkedClient(GroupAsker[ParkedRequest, ParkedReply]):
    """An operator's way to the owners of partitions, for their parked keys. Use it as ``StateReader``; all methods
    raise as its reads, and ``ConfigError`` where a member does not take acts (``QueryConfig.operate``)."""

    _reply = ParkedReply

    async def listed(
        self, partition: int, *, queue: str = "", after: str = "", timeout_seconds: float = 10.0
    ) -> ParkedReply:
        """List a page of a partition's queues, those that wait longest first, behind the place ``after``; or the one
        that is named."""
        request = ParkedRequest(group=self.config.group_id, partition=partition, queue=queue, after=after)
        return (await self._ask(request, timeout_seconds))[0]

    async def events(
        self, partition: int, queue: ParkedQueue, timeout_seconds: float, most: int | None = None
    ) -> list[ParkedEvent]:
        """Return the events of a queue, so many at most; fewer if some have gone meanwhile."""
        found, first, more = list[ParkedEvent](), queue.head, True
        while more and (most is None or len(found) < most):
            request = ParkedRequest(group=self.config.group_id, partition=partition, queue=queue.queue, first=first)
            reply, _ = await self._ask(request, timeout_seconds)
            found += reply.events_of_it
            first, more = found[-1].number + 1 if found else first, reply.more
        return found[:most]

    async def find(
        self, queue: str, timeout_seconds: float, partition: int | None = None
    ) -> list[tuple[int, ParkedQueue]]:
        """Return the partitions that have this queue (one, or none), or the queues of all (no ``queue``), as far as
        their owners answer; of one partition, if it is named. Raises, if none is found, why an owner did not answer."""

        async def found_in(number: int) -> list[tuple[int, ParkedQueue]]:
            found: list[tuple[int, ParkedQueue]] = []
            while True:
                after = found[-1][1].place if found else ""
                reply = await self.listed(number, queue=queue, after=after, timeout_seconds=timeout_seconds)
                found += [(number, each) for each in reply.queues]
                if not reply.more:
                    return found

        numbers = range(self.config.num_partitions) if partition is None else [partition]
        answers = await asyncio.gather(*map(found_in, numbers), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        there = [each for answer in answers if isinstance(answer, list) for each in answer]
        if errors and not (queue and there):
            raise next((error for error in errors if not isinstance(error, StreamsError)), errors[0])
        return there

    async def act(
        self,
        partition: int,
        action: Action,
        seen: Sequence[tuple[str, int, int]],
        *,
        as_letters: bool = False,
        timeout_seconds: float = 10.0,
    ) -> frozenset[str]:
        """Act on queues of a partition, as they were seen (``ParkedQueue.named``), in one transaction for each ``PAGE``
        of them. Returns the names of those on which it was carried out, and is committed; the others are other ones by
        now. A request that is put again, to this member or to the next owner, does nothing a second time."""
        done = set[str]()
        for start in range(0, len(seen), PAGE):
            request = ParkedRequest(
                group=self.config.group_id,
                partition=partition,
                action=action,
                seen=tuple(seen[start : start + PAGE]),
                as_letters=as_letters,
            )
            try:
                reply, _ = await self._ask(request, timeout_seconds)
            except (NotOwned, NotCaughtUp) as error:
                raise type(error)(f"{error}. It may have been carried out: see kes parked list") from error
            done.update(reply.done)
        return frozenset(done)


def refuse_undone(done: frozenset[str], queue: ParkedQueue) -> None:
    """Raise ``StoreError`` where an act on one queue was not carried out."""
    if queue.queue not in done:
        raise StoreError(
            f"the queue {queue.queue} is another one by now: its events were tried, or let go, meanwhile, by another "
            "operator or by this request, if it was put twice. Look again: kes parked list"
        )
