"""Run handlers over records from elsewhere than Kafka: one partition's worker as in the engine, its host without a
broker.

Decoding, upcasters, retries, error policies, the journalled undo and the restart of stores that cannot be undone are
the worker's own. The host differs: effects of completed events are kept here instead of being sent; a store that has to
be restored is filled from these, as its changelog would hold them; retries do not wait, and no interjection is ever
due.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import msgspec

from streams.core.cron import AnySchedule
from streams.core.jobs import is_job
from streams.core.known_failures import ALWAYS, KnownFailures
from streams.core.origin import Origin
from streams.core.parking import PREFIX as PARKED
from streams.core.partition import PartitionState
from streams.core.policy import Failure
from streams.core.position import Position
from streams.core.router import Route, Router
from streams.core.runs import Run
from streams.core.timers import Timer
from streams.core.transaction import Transaction, Waiter
from streams.errors import ConfigError, EventFailure, StreamsError
from streams.formats.cloudevents import CloudEvents
from streams.metrics import EventFailed, Measurement
from streams.model.own_metrics import OwnMetric
from streams.model.topics import TypesRecords
from streams.outcomes import ErrorResponse, Retry, adapted, policy_name
from streams.records import Change, IncomingRecord, Output, OwnSample, TopicPartition
from streams.runtime.async_work.async_stage import Stages
from streams.runtime.bridge import Worker, in_process
from streams.runtime.changelog import TIMER_PREFIX, timer_key
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import make_store
from streams.runtime.partition.failures import Cancellation, RestartNeeded
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.state import Partition
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.reading.lookups import NO_LOOKUPS
from streams.runtime.reading.schema_wait import NoSchemaWaits
from streams.settings.config import EventSourceConfig

_replaying: ContextVar[bool] = ContextVar("_replaying", default=False)
# Every failure of a replay is in its results, and not in the log. Other sources of the process go on logging theirs.
logging.getLogger("streams.runtime.partition.execution").addFilter(lambda record: not _replaying.get())


class Program(msgspec.Struct, frozen=True):
    """The routes and settings of an event source, apart from its connections. ``interjections``: names of those that
    are scheduled; ``inputs``: further topics that are read; ``lookups``: topics that are looked into; ``types``: the
    rule of the own topic; ``forms``: of topics that are written to."""

    config: EventSourceConfig
    routes: tuple[Route, ...]
    default: Route | None
    store_factory: Callable[[TopicPartition], Any]
    interjections: tuple[str, ...]
    message_limit: int
    inputs: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()
    types: TypesRecords | None = None
    forms: dict[str, CloudEvents] = {}
    own_metrics: dict[str, OwnMetric] = {}

    @property
    def fingerprint(self) -> tuple[tuple[str, ...], ...]:
        """Return the parts of a source that two copies of it have in common, as far as they can be seen from
        outside."""
        config = self.config
        where = ("config", config.group_id, config.topic, str(config.num_partitions), policy_name(config.decode_policy))
        routes = [*self.routes, *([self.default] if self.default is not None else [])]
        types = () if self.types is None else (("types", self.types.title),)
        return (where, *types, *(_described(route) for route in routes), ("interjections", *self.interjections))


def refuse_several_inputs(what: str, inputs: Collection[str], lookups: Collection[str] = ()) -> None:
    """Raise ``ConfigError`` for a source that reads further topics, or looks into them: ``what`` has records without
    their order."""
    if lookups:
        raise ConfigError(
            f"{what} takes the records of one topic, and this source has lookups ({', '.join(lookups)}): which row of "
            "another topic a live source has met with an event is not in the topics"
        )
    if inputs:
        raise ConfigError(
            f"{what} takes the records of one topic, and this source has further inputs ({', '.join(inputs)}): which "
            "record of another topic a live source has handled before which one is not in the topics"
        )


class Completed(msgspec.Struct, frozen=True):
    """The effects of a slice of records, in order. ``dead``: offsets whose (only) output is their dead letter."""

    outputs: list[Output]
    dead: set[int]
    failed: list[EventFailed]


class PartitionReplay:
    """One partition from a state and an offset on. Used on one event loop, by one task; ``close`` at the end.

    ``stopped`` is the error after which it handles nothing any more: a record's policy is to stop, and the
    ``watermark`` stays at that record. ``wall_ms`` is the time that dead letters get. No timer fires here; one that is
    set makes ``handle`` raise ``StreamsError``, unless ``ignores_timers``.
    """

    def __init__(self, program: Program, partition: int, *, wall_ms: int, ignores_timers: bool = False) -> None:
        refuse_several_inputs("a replay", program.inputs, program.lookups)
        self.config = program.config
        self.router = _without_waiting(program)
        self.schedules: Sequence[tuple[AnySchedule, Route]] = ()
        self.fires_timers = False
        self.cancellation = Cancellation()
        # The seed is fixed, so that the same data have the same results.
        self.rng = random.Random(0)
        self.writer = "replay"
        self.now = asyncio.get_running_loop().time
        self.message_limit = program.message_limit
        self.handler_threads = HandlerThreads(Worker)
        self.stages = Stages(self)
        self.connections = None
        self.input = _NoInput()
        self.further_inputs = ()
        self.lookups, self.schema_waits = NO_LOOKUPS, NoSchemaWaits()
        self.pool = _SettledAtOnce(self)
        self.partition = partition
        self.records = 0
        self.stopped: EventFailure | None = None
        self._wall_ms = wall_ms
        self._ignores_timers = ignores_timers
        self._store_factory = program.store_factory
        self._state: dict[bytes, bytes] = {}
        self._types: dict[bytes, str] = {}  # of keys whose changes have one
        self._timers: dict[str, Timer] = {}
        self._last_offset = -1
        self._completed = Completed([], set(), [])
        self._known: dict[Origin, Failure] = {}  # failures that a new worker must not try again
        self._worker: PartitionWorker | None = None
        self._watermark = 0

    # -- before, and after ---------------------------------------------------------------------------------------------

    def restore(self, changes: Iterable[Change]) -> None:
        """Begin with a state: the last change of each key. Before any record is handled. Raises ``StreamsError`` for a
        key that comes twice: which of the two would be the last one?"""
        for change in changes:
            if change.key in self._state:
                raise StreamsError(f"the state of partition {self.partition} has the key {change.key[:64]!r} twice")
            self._keep(change)

    def begin(self, offset: int = 0) -> None:
        """Pass over the records below this offset: they are in the state already."""
        self._watermark = offset

    @property
    def watermark(self) -> int:
        """Return the first offset that is not handled yet."""
        return self._watermark if self._worker is None else self._worker.watermark

    def contents(self) -> Iterator[Change]:
        """Return the state: the last change of each key that is there."""
        for key, value in self._state.items():
            yield Change(key, value, None, self._types.get(key, ""))

    def prove_read(self, partition: Partition, waiter: Waiter, proof: Proof) -> None:
        waiter(None)

    def close(self) -> None:
        self.stages.close()
        self.handler_threads.close()
        if self._worker is not None:
            self._worker.drop_store()

    # -- work ----------------------------------------------------------------------------------------------------------

    async def handle(self, records: list[IncomingRecord]) -> Completed:
        """Handle records, in the order of their offsets; nothing once ``stopped``. Raises ``StreamsError`` when the
        offsets do not rise: the same record twice, or out of order."""
        self._completed = Completed([], set(), [])
        self._check_order(records)
        records = [record for record in records if record.offset >= self.watermark]
        if self.router.types is not None:
            records = self.router.types.received(records)
        await self._all(records)
        return self._completed

    async def _all(self, records: list[IncomingRecord]) -> None:
        while records and self.stopped is None:
            worker = self._at_work()
            worker.inbox.add(records, 0)  # they are here already, and bound nothing
            batch = worker.inbox.take()
            outside = _replaying.set(True)
            try:
                await worker.handle(batch)
                # Work ahead of its turn ends within this call: between two calls nothing runs on.
                await worker.settle_line()
            except RestartNeeded as need:
                self._restart(worker, need)
            except EventFailure as failure:
                self.stopped = failure
            finally:
                _replaying.reset(outside)
                worker.drop_line()
            self._watermark = worker.watermark
            left = [record for record in records if record.offset >= self._watermark]
            self.records += len(records) - len(left)
            # A worker that has neither stopped nor been replaced gets no farther: another round would be without end.
            if left and self._worker is worker and self.stopped is None:
                raise StreamsError(f"{left[0].where}: the replay does not get past it")
            records = left

    def _check_order(self, records: list[IncomingRecord]) -> None:
        for record in records:
            if record.offset <= self._last_offset:
                raise StreamsError(f"{record.where} comes after offset {self._last_offset}: is it in the data twice?")
            self._last_offset = record.offset

    def _at_work(self) -> PartitionWorker:
        if self._worker is None:
            store = make_store(self._store_factory, TopicPartition(self.config.topic, self.partition))
            for change in self.contents():
                store.receive_change(change)
            worker = self._worker = PartitionWorker(self, self.partition, 1)
            copy = Replica(self.partition, 1, store, 0.0)
            copy.timers = self._timers
            worker.adopt(copy)
            worker.state = worker.state.to(PartitionState.ACTIVE)
            worker.failures = KnownFailures(self._known)
            worker.failures.single_until = ALWAYS  # or results would depend on how Spark cuts the data
            worker.start_at(self._watermark)
        return self._worker

    def _restart(self, worker: PartitionWorker, need: RestartNeeded) -> None:
        """Replace a store that cannot be undone by a new one, filled from the completed changes."""
        if need.failure.attempts:
            worker.failures.add(need.origin, need.failure)
        self._known = worker.failures.carried_over()
        # The timers are taken over as they are: their changes are not among those that the next store is filled from.
        self._timers = worker.timers.contents()
        worker.drop_store()
        self._worker = None

    def _keep(self, change: Change) -> None:
        self._state.pop(change.key, None)  # so that the order is that of a compacted changelog
        self._types.pop(change.key, None)
        if change.value is not None:
            self._state[change.key] = change.value  # not the change, which holds the value before it, too
            if change.type:
                self._types[change.key] = change.type

    # -- the worker's host (``partition.host.Host``) -------------------------------------------------------------------

    def admit(self, outputs: list[Output], changes: list[Change]) -> None:
        """Keep the effects of completed events."""
        self._completed.outputs.extend(output for output in outputs if not isinstance(output, OwnSample))
        for change in self._without_timers(changes):
            self._keep(change)

    def _without_timers(self, changes: list[Change]) -> list[Change]:
        """Return the changes of the store. (The timers set now prove nothing: one event may have set a timer that the
        next one has removed.)"""
        for change in changes:
            if change.key.startswith(timer_key(PARKED)):
                raise StreamsError(
                    f"offset {change.origin}: the event is to be parked, and a replay has no queues: repair its handler"
                )
            if change.key.startswith(TIMER_PREFIX) and change.value is not None and not self._ignores_timers:
                name = change.key[len(TIMER_PREFIX) :].decode()
                what = "starts a job" if is_job(name) else f"sets the timer {name!r}"
                raise StreamsError(
                    f"offset {change.origin}: an event {what}, and a replay fires no timers and runs no such jobs: "
                    "what they store and send would be missing. If they do nothing, pass interjections='ignore'"
                )
        return [change for change in changes if not change.key.startswith(TIMER_PREFIX)]

    def measure(self, measurement: Measurement) -> None:
        """Note failed events, before their dead letter is admitted."""
        if isinstance(measurement, EventFailed):
            self._completed.failed.append(measurement)
            if measurement.response == ErrorResponse.DEAD_LETTER.value:
                self._completed.dead.add(measurement.offset)

    async def in_process(self, function: Callable[..., Any], *args: Any) -> Any:
        return await in_process(function, *args)

    def exit_now(self, text: str) -> NoReturn:
        """End the partition where the policy would end the process."""
        raise EventFailure(text)

    def wall_ms(self) -> int:
        return self._wall_ms

    def revoke_store(self, store: Any, partition: int) -> None:
        store.revoked()


class _SettledAtOnce:
    """``host.Admission`` with room at all times, where everything is settled at once."""

    is_full = False

    def __init__(self, replay: PartitionReplay) -> None:
        self._replay = replay

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
    ) -> None:
        self._replay.admit(outputs, changes)
        if waiter is not None:
            waiter(None)

    def pump(self) -> None: ...

    def last_with(self, partition: int) -> Transaction | None:
        return None


class _NoInput:
    """``ports.Input`` for records that the caller hands in: nothing is read."""

    def start(self, *_: Any, **__: Any) -> None: ...

    received_bytes = 0
    expect = add = remove = pause = resume = handled = close = start

    def ends(self) -> NoReturn:
        raise AssertionError("no statistics are taken of a replay")


def _described(route: Route) -> tuple[str, ...]:
    handler = route.handler
    name = f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', type(handler).__qualname__)}"
    ahead = () if route.ahead is None else route.ahead.stage.described
    kind = () if route.kind is None else (route.kind.name,)
    decode = () if route.decode_policy is None else (policy_name(route.decode_policy),)
    return (
        route.name,
        name,
        str(route.version),
        str(route.is_blocking),
        policy_name(route.policy),
        *decode,
        *kind,
        *ahead,
    )


def _without_waiting(program: Program) -> Router:
    """Make the same routes, with as many attempts, and no time between them."""
    router = Router()
    router.jobs = None
    router.types, router.forms, router.own_metrics = program.types, program.forms, program.own_metrics
    for route in program.routes:
        router.add(_copy(route))
    if program.default is not None:
        router.set_default(_copy(program.default))
    router.freeze()
    return router


def _copy(route: Route) -> Route:
    return route.with_policy(adapted(route.policy, _at_once))


def _at_once(policy: Retry) -> Retry:
    return msgspec.structs.replace(policy, backoff_seconds=0.0, max_backoff_seconds=0.0)
