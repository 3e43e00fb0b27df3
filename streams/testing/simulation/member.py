"""One process's member of the group and its questions of a take-over: the real ones, over simulated connections.

What is simulated is the thread between: calls of the engine reach the member some time later, in order, and so do its
events the engine; a call that waits for an answer waits in a fiber.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from streams.core.group_member import GroupMember, Holdings
from streams.errors import BrokerUnavailable, StreamsError
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.link import CannotJoinYet, NoCommonStrategy
from streams.kafka.group.membership import GroupMembership
from streams.kafka.wire.client import WireClient
from streams.model.group import Assigned, Copies, Fatal, GroupEvent, Lost, Order, Revoked
from streams.testing.simulation.process import Process
from streams.testing.simulation.virtual_time import ORDERED

T = TypeVar("T")

POINT_BEFORE = {Assigned: "assigned.before", Revoked: "revoke.before", Lost: "lost.before", Fatal: "fatal.before"}
"""Event that the engine is about to receive, and the point that is passed then."""


class SimClient(WireClient):
    """The client of one process. ``call`` waits in a fiber."""

    def __init__(self, process: Process, addresses: str, name: str) -> None:
        super().__init__(addresses, name, loop=process.loop)
        self._process = process

    def call(self, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """See ``WireClient.call``."""
        self._process.at("ask.before")
        return self.wait_for(work, deadline)

    def wait_for(self, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Run it on the loop, and wait for it."""
        if self._closed:
            raise BrokerUnavailable(f"the client of {self.addresses} is closed")
        loop = self._process.loop
        task = self.spawn(loop.create_task(_awaited(work)))
        self._process.pause(max(0.0, deadline - loop.time()) + 1.0, task)
        if not task.done() or task.cancelled():
            task.cancel()
            raise BrokerUnavailable(f"no answer from {self.addresses} in time")
        return task.result()

    def close(self, timeout_seconds: float = 0.0) -> None:
        """See ``WireClient.close``."""
        if not self._closed:
            self._closed = True
            self._process.loop.call_soon(self._shut)  # a fiber is not on the loop


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


class SimMember(GroupMembership):
    """The membership of one process (``process.Membership``). ``failures``: what went wrong in it that no answer of a
    broker explains: mistakes of the member, or of this simulation."""

    def __init__(
        self, process: Process, client: SimClient, settings: GroupSettings, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._process, self._waiting = process, client.wait_for
        super().__init__(client, settings, alive, clock=process.loop.time)
        self._state = _Noted(process, settings)
        self._posted_until = self._delivered_until = 0.0
        self.failures: list[BaseException] = []

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        process, loop = self._process, self._process.loop

        def send(event: GroupEvent) -> None:
            self._delivered_until = max(self._delivered_until + ORDERED, loop.time() + process.faults.hear())
            loop.call_at(self._delivered_until, receive, event)

        def receive(event: GroupEvent) -> None:
            if not self._is_over():
                process.passes(POINT_BEFORE[type(event)])
            if not self._is_over():
                deliver(event)
                if isinstance(event, Assigned):
                    for partition in event.releasing:
                        process.note("told", partition)

        super().start(send)

    def _is_over(self) -> bool:
        return self._closed or self._process.dead

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        self._process.passes("revoke.after")
        super().released(partitions, incarnation, generation)

    def handed_over(self, partition: int, order: Order) -> None:
        self._process.note("handing", partition)
        super().handed_over(partition, order)

    def took(self, partition: int, incarnation: int) -> None:
        self._process.note("taking", partition)
        super().took(partition, incarnation)

    def _post(self, work: Callable[[], Any]) -> None:
        loop = self._process.loop
        self._posted_until = max(self._posted_until + ORDERED, loop.time() + self._process.faults.post())
        loop.call_at(self._posted_until, super()._post, work)

    def _call(self, work: Callable[[], Any], deadline: float) -> None:
        self._waiting(work, deadline)

    async def _step(self) -> None:
        try:
            await super()._step()
        except (NoCommonStrategy, CannotJoinYet, StreamsError):
            raise
        except Exception as error:
            self.failures.append(error)
            raise

    # -- what the world looks at ---------------------------------------------------------------------------------------

    @property
    def holdings(self) -> Holdings:
        """The claims of this member."""
        return self._state.holdings

    @property
    def member(self) -> str:
        """The member id, empty while it has none."""
        return self.joining_as

    def kill(self) -> None:
        """The process is dead."""
        self._client.close(0.0)


class _Noted(GroupMember):
    """The state of a member, which notes the steps of moves. A process that starts again counts its reports from later
    on, as by the time of day."""

    def __init__(self, process: Process, settings: GroupSettings) -> None:
        super().__init__(
            settings.instance,
            session_seconds=settings.session_timeout_ms / 1000,
            rebalance_seconds=settings.rebalance_timeout_ms / 1000,
            sequence=int(process.loop.time() * 1_000_000),
        )
        self._note = process.note

    def handed_over(self, partition: int, order: Order) -> bool:
        stands = super().handed_over(partition, order)
        self._note("handed" if stands else "withdrawn", partition)
        return stands

    def took(self, partition: int, incarnation: int) -> bool:
        took = super().took(partition, incarnation)
        if took:
            self._note("took", partition)
        return took

    def copies_changed(self, copies: Copies, *, announce: bool) -> None:
        had_news = self.has_news
        super().copies_changed(copies, announce=announce)
        if self.has_news and not had_news:
            self._note("announced", -1)
