"""What a partition's worker needs of whoever it works for: the engine, or a replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from streams.config import EventSourceConfig
from streams.core.router import Route, Router
from streams.core.schedule import Schedule
from streams.core.transaction import Transaction, Waiter
from streams.metrics import Measurement
from streams.records import Change, Output
from streams.runtime.handler_threads import HandlerThreads
from streams.runtime.ports import Connections, Input
from streams.runtime.stages import Stages

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker


class Admission(Protocol):
    """Where completed events go (``transaction_pool.TransactionPool``, which documents the methods)."""

    @property
    def is_full(self) -> bool: ...

    async def wait_room(self) -> None: ...

    def admit(
        self,
        partition: int,
        offset: int,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
    ) -> None: ...

    def pump(self) -> None: ...
    def last_with(self, partition: int) -> Transaction | None: ...


class Host(Protocol):
    """``lifecycle.Engine`` is one, ``replay.PartitionReplay`` another."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def router(self) -> Router: ...
    @property
    def schedules(self) -> Sequence[tuple[Schedule, Route]]: ...
    @property
    def rng(self) -> random.Random: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def message_limit(self) -> int: ...
    @property
    def connections(self) -> Connections | None:
        """``None``: it is connected to nothing."""
        ...

    @property
    def input(self) -> Input: ...
    @property
    def pool(self) -> Admission: ...
    @property
    def handler_threads(self) -> HandlerThreads: ...
    @property
    def stages(self) -> Stages: ...
    @property
    def fires_timers(self) -> bool: ...

    def looked(self, worker: PartitionWorker, waiter: Waiter) -> None:
        """An interjection changed nothing; ``waiter`` is told when it is known that what it saw was the truth."""
        ...

    async def in_process(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def measure(self, measurement: Measurement) -> None: ...
    def exit_now(self, text: str) -> NoReturn: ...
    def wall_ms(self) -> int: ...
    def revoke_store(self, store: Any, partition: int) -> None: ...
