"""The interface of one running member to the rooms that own partitions for it (``engine.Engine`` is one).

A room gets its collaborators as constructor arguments, and from here the shared parts: clients, clock, settings, and
the ways to begin a task and to stop the source.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NoReturn, Protocol

from streams.core.router import Router
from streams.metrics import Measurement
from streams.model.group import Membership, TakeOver
from streams.model.topics import InputSpec
from streams.runtime.keeping.keeper import StateKeeper
from streams.runtime.partition.failures import Cancellation
from streams.runtime.partition.host import Host
from streams.runtime.partition.muted_worker import Follows
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import Blocking, Connections, Input, SourceLog
from streams.runtime.reading.lookups import Lookups
from streams.runtime.system import Environment
from streams.runtime.transactions.hung_calls import HungCalls
from streams.runtime.transactions.pool import TransactionPool
from streams.runtime.transactions.producer_slots import Slots
from streams.settings.config import EventSourceConfig


class Member(Protocol):
    """One running member. On the loop."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def router(self) -> Router: ...
    @property
    def connections(self) -> Connections: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def writer(self) -> str: ...  # the name of this run in offset records
    @property
    def input(self) -> Input: ...
    @property
    def inputs(self) -> list[Input]: ...  # all of them, that one first
    @property
    def further_inputs(self) -> Sequence[tuple[InputSpec, Input]]: ...
    @property
    def lookups(self) -> Lookups: ...
    @property
    def pool(self) -> TransactionPool: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def keeper(self) -> StateKeeper | None: ...  # of state on disk, if there is any
    @property
    def hung_calls(self) -> HungCalls: ...
    @property
    def membership(self) -> Membership: ...
    @property
    def takeover_client(self) -> TakeOver: ...
    @property
    def source_log(self) -> TakeOver | SourceLog: ...
    @property
    def control(self) -> Blocking: ...  # the thread for the requests of take-overs and look-ups
    @property
    def workers(self) -> dict[int, PartitionWorker]: ...  # at work here, or soon; ``ownership.partitions`` changes it
    @property
    def following(self) -> Follows: ...  # of the source that muted partitions follow
    @property
    def members(self) -> Collection[str]: ...  # the instance ids of the group's members
    @property
    def incarnation(self) -> int: ...
    @property
    def is_current(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def cancellation(self) -> Cancellation: ...

    def thread(self, name: str) -> Blocking: ...
    def spawn(self, task: Callable[[], Awaitable[None]], *, drain: bool = True) -> None: ...
    def fail(self, error: BaseException, *, drain: bool = True) -> None: ...
    def reading_failed(self, error: Exception) -> None: ...
    def exit_now(self, text: str) -> NoReturn: ...
    def measure(self, measurement: Measurement) -> None: ...
    def revoke_store(self, store: object, partition: int) -> None: ...
    def wall_ms(self) -> int: ...


class WorkingMember(Member, Host, Protocol):
    """A member that is the host of its partitions, too."""

    @property
    def connections(self) -> Connections: ...
    @property
    def pool(self) -> TransactionPool: ...
