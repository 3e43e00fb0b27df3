"""Parked keys and durable jobs of a running group: listed, and acted on, at the members that own them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from streams.errors import NotCaughtUp, NotOwned, StoreError, StreamsError
from streams.queries.asking import GroupAsker
from streams.runtime.queries.jobs import JobReply, JobRequest, ShownJob
from streams.runtime.queries.operating import PAGE, Named, OperatorRequest
from streams.runtime.queries.parked import ParkedEvent, ParkedQueue, ParkedReply, ParkedRequest


class Listed(Protocol):
    """An entry of a list, which an operator acts on."""

    @property
    def place(self) -> str: ...
    @property
    def named(self) -> Named: ...


E = TypeVar("E", bound=Listed)
Q = TypeVar("Q", bound=OperatorRequest[Any])
R = TypeVar("R", bound=ParkedReply | JobReply)


class OperatorClient(GroupAsker[Q, R], Generic[Q, R, E]):
    """An operator's way to the owners of partitions. Use it as ``StateReader``; all methods raise as its reads, and
    ``ConfigError`` where a member does not take acts (``QueryConfig.operate``)."""

    _request: type[Q]
    command: ClassVar[str]
    """The command that lists, for messages."""

    async def listed(self, partition: int, *, after: str = "", timeout_seconds: float = 10.0, **only: Any) -> R:
        """List a page of a partition's entries, those that wait longest first, behind the place ``after``. ``only``:
        fields of the request that choose some of them."""
        request = self._request(group=self.config.group_id, partition=partition, after=after, **only)
        return (await self._ask(request, timeout_seconds))[0]

    async def find(self, timeout_seconds: float, partition: int | None = None, **only: Any) -> list[tuple[int, E]]:
        """Return the entries of all partitions, or of one, as far as owners answer, each with its partition. ``only``:
        see ``listed``. Raises, if one was named that is not found, or all were wanted, why an owner did not answer."""

        async def found_in(number: int) -> list[tuple[int, E]]:
            found: list[tuple[int, E]] = []
            while True:
                after = found[-1][1].place if found else ""
                reply: Any = await self.listed(number, after=after, timeout_seconds=timeout_seconds, **only)
                found += [(number, each) for each in reply.found]
                if not reply.more:
                    return found

        numbers = range(self.config.num_partitions) if partition is None else [partition]
        answers = await asyncio.gather(*map(found_in, numbers), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        there = [each for answer in answers if isinstance(answer, list) for each in answer]
        if errors and not (self._names_one(only) and there):
            raise next((error for error in errors if not isinstance(error, StreamsError)), errors[0])
        return there

    def _names_one(self, only: dict[str, Any]) -> bool:
        """Check for a list of one entry, which is in one partition."""
        raise NotImplementedError

    async def act(
        self,
        partition: int,
        action: str,
        seen: Sequence[Named],
        *,
        timeout_seconds: float = 10.0,
        **more: Any,
    ) -> frozenset[str]:
        """Act on entries of a partition, as they were seen (``named``), in one transaction for each ``PAGE`` of them.
        ``more``: fields of the request. Returns the names of those on which it was carried out, and is committed; the
        others are other ones by now. A request that is put again, to this member or to the next owner, does nothing a
        second time."""
        done = set[str]()
        for start in range(0, len(seen), PAGE):
            some = tuple(seen[start : start + PAGE])
            group = self.config.group_id
            request = self._request(group=group, partition=partition, action=action, seen=some, **more)
            try:
                reply, _ = await self._ask(request, timeout_seconds)
            except (NotOwned, NotCaughtUp) as error:
                raise type(error)(f"{error}. It may have been carried out: see {self.command}") from error
            done.update(reply.done)
        return frozenset(done)


class ParkedClient(OperatorClient[ParkedRequest, ParkedReply, ParkedQueue]):
    """An operator's way to parked keys. ``queue=`` chooses one; ``as_letters=`` of an act keeps what goes."""

    _request, _reply = ParkedRequest, ParkedReply
    command: ClassVar[str] = "kes parked list"

    def _names_one(self, only: dict[str, Any]) -> bool:
        return bool(only.get("queue"))

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


class JobClient(OperatorClient[JobRequest, JobReply, ShownJob]):
    """An operator's way to durable jobs. ``name=`` or ``id=`` chooses one, with its item; ``jobs=`` those of a
    definition; ``only_parked=`` those that wait for an operator."""

    _request, _reply = JobRequest, JobReply
    command: ClassVar[str] = "kes jobs list"

    def _names_one(self, only: dict[str, Any]) -> bool:
        return bool(only.get("id"))  # partitions may have jobs of one name


def refuse_undone(done: frozenset[str], queue: ParkedQueue) -> None:
    """Raise ``StoreError`` where an act on one queue was not carried out."""
    if queue.queue not in done:
        raise StoreError(
            f"the queue {queue.queue} is another one by now: its events were tried, or let go, meanwhile, by another "
            "operator or by this request, if it was put twice. Look again: kes parked list"
        )
