"""The life of an event source: its state, the engine of its present run, and what starts and stops it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import msgspec

from streams.errors import RegistrationError, Stopped, StreamsError
from streams.metrics import Measurement
from streams.runtime import source_topics
from streams.runtime.ports import Connections
from streams.runtime.system import MACHINE, Environment
from streams.sak import leaves
from streams.settings.config import EventSourceConfig
from streams.source.declarations import Declarations
from streams.statistics import SourceState, SourceStatistics

if TYPE_CHECKING:
    from streams.runtime.engine import Engine
    from streams.runtime.queries.local import LocalQueries
    from streams.runtime.reading.lookups import Lookups

T = TypeVar("T")

_log = logging.getLogger(__name__)

ENDS_SECONDS: Final = 1.0
"""Seconds to wait for the ends of partitions, which the thread that reads has; it may be busy or gone."""
_AT_WORK: Final = (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING)


def load_engine() -> None:
    """Import the engine and the clients of Kafka, as a start does, for a process that freezes what it has loaded."""
    import streams.runtime.connections
    import streams.runtime.engine
    import streams.runtime.queries.local  # noqa: F401


def connected(config: EventSourceConfig) -> Connections:
    """Make the clients of a source, without any I/O."""
    # Imported when a source starts, as the engine is: a program that only declares one (a replay, a command) does not
    # pay for the clients of Kafka.
    from streams.runtime.connections import KafkaConnections

    return KafkaConnections(config)


class SourceRun:
    """The runs of one event source, one at a time. On the loop of the present one, unless said otherwise.

    ``engine``: that of the present run, once it is built. ``loop``: of the present run, or of the last one.
    """

    def __init__(self, declared: Declarations, source: object) -> None:
        """``source``: whose run it is, for callbacks."""
        self._declared, self._source = declared, source
        self.state = SourceState.CREATED
        self.engine: Engine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._queries: LocalQueries | None = None  # of the present run, once there was one
        self._stopped = threading.Event()
        self._stop_asked: bool | None = None  # drain or not
        self._preparing: anyio.CancelScope | None = None  # while there is no engine yet
        self._entering: asyncio.Task[Any] | None = None  # while its lifespan is entered

    @property
    def config(self) -> EventSourceConfig:
        """Return the settings of the source. Any thread."""
        return self._declared.config

    @property
    def is_at_work(self) -> bool:
        """Check whether it runs, or is about to, or is about to end. Any thread."""
        return self.state in _AT_WORK

    def present(self) -> Engine:
        """Return the engine of the present run. Raises ``Stopped``. Any thread."""
        if self.engine is None:
            raise Stopped("the event source is not running")
        return self.engine

    def queries(self) -> LocalQueries:
        """Return the queries of the present run. Raises ``Stopped``."""
        from streams.runtime.queries.local import LocalQueries

        engine = self.present()
        if self._queries is None or self._queries.engine is not engine:
            self._queries = LocalQueries(engine)
        return self._queries

    def threadsafe(self, call: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop of the present run. Raises ``Stopped``. Any thread."""
        self.present()
        loop = self.loop
        assert loop is not None
        called = call()
        try:
            return asyncio.run_coroutine_threadsafe(called, loop)
        except RuntimeError as error:  # it has stopped since
            called.close()
            raise Stopped("the event source is not running") from error

    # -- statistics ----------------------------------------------------------------------------------------------------

    def statistics_threadsafe(self) -> concurrent.futures.Future[SourceStatistics]:
        """See ``EventSource.statistics_threadsafe``. Any thread."""
        engine = self.present()

        async def read() -> SourceStatistics:
            ends: list[Mapping[int, int]] = []
            with anyio.move_on_after(ENDS_SECONDS):
                for asked in [port.ends() for port in engine.inputs]:
                    ends.append(await asyncio.wrap_future(asked))
            return self.statistics(ends)

        return self.threadsafe(read)

    def statistics(self, ends: Sequence[Mapping[int, int]] = ()) -> SourceStatistics:
        """Return the state in figures. ``ends``: of each input by partition, as far as they are known."""
        from streams.runtime.ages import with_ages  # with the engine

        engine = self.engine
        if engine is None:
            return SourceStatistics(self.state, self.config.instance_id, -1, (), 0, 0, 0, hot_path=leaves.summary())
        topics = [engine.config.topic, *(spec.topic for spec, _ in engine.further_inputs)]
        return SourceStatistics(
            self.state,
            engine.config.instance_id,
            engine.membership.group_metadata.generation,
            tuple(
                with_ages(worker.statistics(known), worker, known, engine.pool.unsettled)
                for number, worker in sorted(engine.workers.items())
                for known in [[found.get(number, -1) for found in ends]]
            ),
            engine.committed_transactions,
            engine.committed_events,
            len(engine.pool.unsettled),
            engine.replicas.statistics(),
            engine.handover.statistics(),
            engine.membership.group_metadata.member_id,
            tuple(engine.status.rebalances),
            engine.stages.statistics(),
            len(engine.hung_calls),
            () if engine.keeper is None else engine.keeper.statistics(),
            0 if engine.keeper is None else engine.keeper.folders_set_aside,
            engine.lookups.statistics(),
            {topic: port.received_bytes for topic, port in zip(topics, engine.inputs, strict=True)},
            leaves.summary(),
            engine.schema_waits.partitions,
            engine.router.handled,
            engine.router.failed,
            engine.config.shadow_of,
            engine.pool.muted_records(),
        )

    @property
    def member_id(self) -> str:
        """See ``EventSource.member_id``. Any thread."""
        engine = self.engine
        if engine is None:
            return ""
        return getattr(engine.membership, "joining_as", "") or engine.membership.group_metadata.member_id

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, consume: Callable[[], Awaitable[None]]) -> None:
        """Run until stopped, on an event loop of its own, with signals; ``consume`` is ``EventSource.consume_events``.
        Raises the error of the run, and not the group that it came in."""
        try:
            anyio.run(self._run_with_signals, consume)
        except BaseExceptionGroup as group:
            first = _first(group)
            raise first from first.__cause__

    async def wait_stopped(self) -> None:
        """Wait until the source has stopped, for whatever reason. From any loop."""
        while self.state is not SourceState.CREATED and not self._stopped.is_set():
            await anyio.sleep(0.005)

    async def _run_with_signals(self, consume: Callable[[], Awaitable[None]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            await consume()
            return
        from streams.runtime.partition.failures import Cancellation, no_foreign_cancellation

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signals)
            try:
                await no_foreign_cancellation(consume, Cancellation().begin())  # one of a lifespan
            finally:
                tasks.cancel_scope.cancel()

    async def _stop_on_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            received = 0
            async for number in signals:
                received += 1
                if received > 1:
                    os._exit(128 + number)  # at once: what hangs may be a thread that nothing else ends
                _log.info("%s: draining; a second signal exits at once", signal.Signals(number).name)
                self.ask_to_stop(drain=True)

    async def consume(
        self, connect: Callable[[EventSourceConfig], Connections], environment: Environment = MACHINE
    ) -> None:
        """Run until stopped, on the current event loop. ``connect`` makes the connections from the settings."""
        if self.is_at_work:
            raise RegistrationError("this event source is running already")
        self._declared.freeze()
        self._stopped.clear()
        self.state = SourceState.STARTING
        self.loop = asyncio.get_running_loop()
        try:
            await self._consume_until_stopped(connect, environment)
            self.state = SourceState.STOPPED
        except BaseException:
            self.state = SourceState.FAILED
            raise
        finally:
            self.engine = None
            self._stop_asked = None
            self._stopped.set()  # last: who waits for it may start the next run at once

    async def _consume_until_stopped(
        self, connect: Callable[[EventSourceConfig], Connections], environment: Environment
    ) -> None:
        import streams.runtime.engine  # noqa: F401  # before the lifespan, which may freeze what is loaded
        from streams.runtime.reading.lookups import Lookups

        declared = self._declared
        config = self.measured(self.config.resolved())
        _log.info("group %s: hot path: %s", config.group_id, leaves.advised())
        connections = connect(config)
        with anyio.CancelScope() as self._preparing:
            await self._look_up_schemas(connections)
            outputs = declared.outputs.by_topic.values()
            inputs, looked_into = declared.inputs.topics(), declared.lookups.topics()
            await source_topics.prepare(config, connections, outputs, inputs, looked_into)
        if self._stop_asked is not None:  # it came while there was no engine that could be stopped
            return
        async with AsyncExitStack() as resources:
            lookups = Lookups(declared.lookups.by_topic.values(), lambda topic: connections.followed(topic))
            resources.push_async_callback(lookups.stop)  # before the start: one that is cut short is stopped, too
            with anyio.CancelScope() as self._preparing:
                await lookups.start()
            if self._stop_asked is None:
                await self._enter_lifespan(resources)
            if self._stop_asked is None:
                await self._run_engine(config, connections, environment, lookups)

    async def _look_up_schemas(self, connections: Connections) -> None:
        """Have the codecs of events and the rules that need a registry ask it, until it answers; other sources do
        nothing. Raises ``ConfigError``, ``RegistryUnavailable``."""
        if not (needy := self._declared.schema_needs()):
            return
        from streams.formats.schema_codecs import prepare

        if all(each.registry.is_local for each in needy):
            prepare(needy)
            return
        thread = connections.worker("kes-registry")
        try:
            await thread.call(prepare, needy)
        finally:
            thread.abandon()

    def measured(self, config: EventSourceConfig) -> EventSourceConfig:
        """Have the added handlers called as well."""
        if not self._declared.metrics_handlers:
            return config
        own = () if config.metrics_handler is None else (config.metrics_handler,)
        handlers = (*self._declared.metrics_handlers, *own)  # that of the settings last: what it raises ends the call

        def measure(measurement: Measurement) -> None:
            for handler in handlers:
                handler(measurement)

        return msgspec.structs.replace(config, metrics_handler=measure)

    async def _enter_lifespan(self, resources: AsyncExitStack) -> None:
        task = self._entering = asyncio.current_task()
        try:
            for lifespan in self._declared.lifespans:
                await resources.enter_async_context(lifespan())
        except asyncio.CancelledError:
            if self._stop_asked is None or task is None:
                raise
            task.uncancel()  # it was cancelled by a stop, and the run goes on to its end in order
        except Exception as error:
            what = f"the event source of group {self.config.group_id} does not start: its lifespan failed"
            raise StreamsError(f"{what}: {error!r}") from error
        finally:
            self._entering = None

    async def _run_engine(
        self, config: EventSourceConfig, connections: Connections, environment: Environment, lookups: Lookups
    ) -> None:
        from streams.runtime.engine import Engine
        from streams.runtime.ownership.replicas import make_store

        declared = self._declared
        limit = getattr(connections, "message_limit", 1_000_000)
        connections.place_by(declared.outputs.partitioners, declared.outputs.null_keys)
        engine = self.engine = Engine(
            config,
            declared.router,
            declared.handlers.schedules,
            partial(make_store, declared.store_factory),
            connections,
            message_limit=limit,
            now=asyncio.get_running_loop().time,
            environment=environment,
            topics=declared.outputs.sent_to,
            inputs=[*declared.inputs.by_topic.values()],
            lookups=lookups,
            callbacks={
                moment: [partial(function, self._source) for function in functions]
                for moment, functions in declared.callbacks.items()
            },
        )
        lookups.on_failure(engine.fail)  # one of before, while a lifespan was entered, is reported now
        try:
            await engine.run(self._started)
        except BaseExceptionGroup as group:
            first = _first(group)
            raise first from first.__cause__

    def _started(self) -> None:
        self.state = SourceState.RUNNING

    def ask_to_stop(self, *, drain: bool) -> None:
        """Have it stop, with or without draining; return at once. Any thread."""
        if self.is_at_work:
            self.state = SourceState.STOPPING
            self._stop_asked = drain
            # By way of the loop: scopes and tasks may be cancelled there only.
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._stop_on_loop, drain)

    def _stop_on_loop(self, drain: bool) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        if self._entering is not None:  # a task, not a scope: what is entered may leave scopes of its own open
            self._entering.cancel()
        if self.engine is not None:
            self.engine.stop(drain=drain)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
