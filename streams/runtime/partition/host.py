"""The interface of a partition's host: the engine, or a replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from streams.core.cron import AnySchedule
from streams.core.position import Position
from streams.core.router import Route, Router
from streams.core.runs import Run
from streams.core.transaction import Transaction, Waiter
from streams.metrics import Measurement
from streams.model.topics import InputSpec
from streams.records import Change, IncomingRecord, Output
from streams.runtime.partition.failures import Cancellation
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.reorder_buffer import Entry
from streams.runtime.partition.state import Partition
from streams.runtime.ports import Connections, Input, LookupTables
from streams.settings.config import EventSourceConfig


class Admission(Protocol):
    """The destination of completed events (``transactions.pool.TransactionPool``, which documents the methods)."""

    @property
    def is_full(self) -> bool: ...

    async def wait_room(self) -> None: ...

    def admit(
        self,
        partition: int,
        offset: Position,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
        runs: Sequence[Run] = (),
    ) -> None: ...

    def last_with(self, partition: int) -> Transaction | None: ...


class StageIntake(Protocol):
    """The way into a stage that works ahead (``async_work.async_stage``)."""

    def begin(self, entry: Entry) -> bool: ...


class StageIntakes(Protocol):
    """The stages of one run, by their definitions."""

    def get(self, definition: Any, /) -> StageIntake: ...


class SchemasOfHeads(Protocol):
    """The wait for a schema registry (``reading.schema_wait``)."""

    def waits(self, at: tuple[int, str], rule: Any, record: IncomingRecord, known: Callable[[], None]) -> bool: ...


class Host(Protocol):
    """The host of partitions (``engine.Engine``, ``replay.PartitionReplay``)."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def router(self) -> Router: ...
    @property
    def schedules(self) -> Sequence[tuple[AnySchedule, Route]]: ...
    @property
    def writer(self) -> str:
        """The name of this run of the process: another one after each start."""
        ...

    @property
    def rng(self) -> random.Random: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def message_limit(self) -> int: ...
    @property
    def connections(self) -> Connections | None:
        """The clients; ``None``: the host is connected to nothing."""
        ...

    @property
    def input(self) -> Input: ...
    @property
    def further_inputs(self) -> Sequence[tuple[InputSpec, Input]]:
        """The declared inputs beside the source's own topic, each with its reader."""
        ...

    @property
    def lookups(self) -> LookupTables: ...
    @property
    def schema_waits(self) -> SchemasOfHeads: ...
    @property
    def pool(self) -> Admission: ...
    @property
    def handler_threads(self) -> HandlerThreads: ...
    @property
    def stages(self) -> StageIntakes: ...
    @property
    def fires_timers(self) -> bool: ...
    @property
    def cancellation(self) -> Cancellation: ...

    def prove_read(self, partition: Partition, waiter: Waiter, proof: Proof) -> None:
        """Call ``waiter`` once the state seen by an interjection without changes is proven current."""
        ...

    async def in_process(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def measure(self, measurement: Measurement) -> None: ...
    def exit_now(self, text: str) -> NoReturn: ...
    def wall_ms(self) -> int: ...
    def revoke_store(self, store: Any, partition: int) -> None: ...
