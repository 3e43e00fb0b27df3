"""The event source: register handlers for event types, then run. Wires everything else together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Final, TypeVar, overload

import anyio
import msgspec

from streams.core.router import check_callable
from streams.errors import RegistrationError, Stopped, StreamsError
from streams.metrics import Measurement, MetricsHandler
from streams.model.topics import TopicSpec
from streams.protocols import StateStore
from streams.records import DEFAULT_MESSAGE_LIMIT, TopicPartition
from streams.runtime import source_topics
from streams.runtime.connections import KafkaConnections
from streams.runtime.engine import Engine
from streams.runtime.ownership.replicas import make_store
from streams.runtime.ports import Connections
from streams.runtime.reading.lookups import Lookups
from streams.runtime.replay import Program
from streams.runtime.system import MACHINE, Environment
from streams.sak import leaves
from streams.sak.users_code import calling_place
from streams.settings.config import EventSourceConfig
from streams.source.interjecting import Interjecting
from streams.statistics import SourceState, SourceStatistics
from streams.stores.stateless import Stateless

_log = logging.getLogger(__name__)

ENDS_SECONDS = 1.0
"""The wait for the thread that reads, for the ends of partitions; it may be busy or gone."""

StoreT = TypeVar("StoreT")
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


class EventSource(Interjecting[StoreT]):
    """Reads a topic of typed events, and handles each exactly once.

    ``store`` makes the state store of one partition (``Table.factory(...)``, or a factory of your own); without it the
    source is stateless. Register handlers, then ``run`` (or ``await consume_events()`` in a loop of your own, or
    ``kes run module:source``). One object runs once at a time; registering ends with the first start.

    ``routed_by`` makes the key of the *records*, text or bytes, from a key of the store, for all that looks for a key
    in the running source (``StateReader``, ``kes state get --ask-owner``, the monitor). Declare it where handlers use
    the key of their records (``routed_by=str``, or ``lambda key: key``), or one that this can be derived from; without
    it a key that is not in the partition of records with the same key may be in another one.

    ``lifespan`` makes an asynchronous context manager of things that handlers and jobs need as long as the source runs
    (an HTTP client, a database pool). It is entered on the event loop before any partition is worked on, and left after
    the last. An exception on the way in stops the source with a ``StreamsError``. Replays (``streams.spark.replay``) do
    not enter it.
    """

    @overload
    def __init__(self: EventSource[None], config: EventSourceConfig, *, lifespan: Lifespan | None = None) -> None: ...

    @overload
    def __init__(
        self,
        config: EventSourceConfig,
        store: Callable[[TopicPartition], StoreT],
        *,
        lifespan: Lifespan | None = None,
        routed_by: Callable[[Any], str | bytes] | None = None,
    ) -> None: ...

    def __init__(
        self,
        config: EventSourceConfig,
        store: Callable[[TopicPartition], Any] | None = None,
        *,
        lifespan: Lifespan | None = None,
        routed_by: Callable[[Any], str | bytes] | None = None,
    ) -> None:
        super().__init__(config)
        if store is not None:
            what = "the store, which is to be a factory such as Table.factory(...),"
            check_callable(what, store, "topic_partition")
            if isinstance(store, type) and not issubclass(store, StateStore):
                raise RegistrationError(f"{what} is the class {store.__qualname__}{calling_place()}, which is no store")
        if routed_by is not None:
            check_callable("routed_by", routed_by, "key")
        self.routed_by: Final = routed_by
        self._lifespan = lifespan
        self._further_lifespans: list[Lifespan] = []
        self._is_stateless = store is None
        self._store_factory: Callable[[TopicPartition], Any] = store or Stateless
        self._state = SourceState.CREATED
        self._metrics_handlers: list[MetricsHandler] = []
        self._stopped = threading.Event()
        self._stop_asked: bool | None = None  # drain or not
        self._preparing: anyio.CancelScope | None = None  # while there is no engine yet
        self._entering: asyncio.Task[Any] | None = None  # while its lifespan is entered

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until stopped, on an event loop of its own. SIGINT and SIGTERM drain and stop; a second one exits at
        once.

        Raises the ``StreamsError`` that made the source stop, unless the stop was requested.
        """
        try:
            anyio.run(self._run_with_signals)
        except BaseExceptionGroup as group:
            first = _first(group)
            raise first from first.__cause__

    async def consume_events(self) -> None:
        """Run until stopped, on the current event loop. Cancelling it is ``stop_now``. Raises like ``run``."""
        await self._consume(lambda config: KafkaConnections(config))

    async def stop(self) -> None:
        """Drain and stop: running events end, complete ones are committed, the group is left. Returns when that is
        done."""
        self._ask_to_stop(drain=True)
        await self.wait_stopped()

    def stop_now(self) -> None:
        """Stop without draining: uncommitted work is dropped, and the next owner does it again. Any thread."""
        self._ask_to_stop(drain=False)

    async def wait_stopped(self) -> None:
        """Wait until the source has stopped, for whatever reason. From any loop."""
        while self._state is not SourceState.CREATED and not self._stopped.is_set():
            await anyio.sleep(0.005)

    @property
    def state(self) -> SourceState:
        """Return the state of the event source in its life cycle."""
        return self._state

    def add_metrics_handler(self, handler: MetricsHandler) -> None:
        """Call this handler with each measurement of the coming runs, besides that of the settings. The same rules hold
        for it."""
        self._metrics_handlers.append(handler)

    def statistics_threadsafe(self) -> concurrent.futures.Future[SourceStatistics]:
        """``statistics`` from any thread, with the ``end`` of each partition. The future ends when the loop and the
        thread that reads have answered, within a tenth of a second, unless the loop stands still. Raises ``Stopped``
        when the source is not running."""
        engine, loop = self._running(), self._loop
        assert loop is not None

        async def look() -> SourceStatistics:
            ends: list[Mapping[int, int]] = []
            with anyio.move_on_after(ENDS_SECONDS):
                for asked in [port.ends() for port in engine.inputs]:
                    ends.append(await asyncio.wrap_future(asked))
            return self._statistics(ends)

        looking = look()
        try:
            return asyncio.run_coroutine_threadsafe(looking, loop)
        except RuntimeError as error:  # it has stopped since
            looking.close()
            raise Stopped("the event source is not running") from error

    def statistics(self) -> SourceStatistics:
        """Return the present state in figures. Call it on the loop of the event source."""
        return self._statistics([])

    def _statistics(self, ends: Sequence[Mapping[int, int]]) -> SourceStatistics:
        engine = self._engine
        if engine is None:
            return SourceStatistics(self._state, self.config.instance_id, -1, (), 0, 0, 0, hot_path=leaves.summary())
        return SourceStatistics(
            self._state,
            engine.config.instance_id,
            engine.membership.snapshot.generation,
            tuple(
                worker.statistics([found.get(number, -1) for found in ends])
                for number, worker in sorted(engine.workers.items())
            ),
            engine.committed_transactions,
            engine.committed_events,
            len(engine.pool.unsettled),
            engine.replicas.statistics(),
            engine.handover.statistics(),
            engine.membership.snapshot.member_id,
            tuple(engine.status.rebalances),
            engine.stages.statistics(),
            len(engine.hung_calls),
            () if engine.keeper is None else engine.keeper.statistics(),
            0 if engine.keeper is None else engine.keeper.folders_set_aside,
            engine.lookups.statistics(),
            leaves.summary(),
        )

    @property
    def member_id(self) -> str:
        """Return the member id in the group, also while the member is joining; empty while it has none. Any thread."""
        engine = self._engine
        if engine is None:
            return ""
        return getattr(engine.membership, "joining_as", "") or engine.membership.snapshot.member_id

    def remove_member(self, member_id: str, instance: str = "", timeout_seconds: float = 10.0) -> bool:
        """Take a member *that is known to be dead* out of the group, so that its session need not end first.

        ``instance`` is that of a static member. ``False``: it was not in the group any more. Harmless when a successor
        took its place meanwhile. One that is only frozen may answer queries from old state for up to half a session
        when it goes on. Blocks: call it on any thread but the loop's. Raises ``Stopped``,
        ``BrokerUnavailable``.
        """
        client = self._running().takeover_client
        return client.remove_member(member_id, instance or None, time.monotonic() + timeout_seconds)

    async def _run_with_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            await self.consume_events()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signals)
            try:
                await self.consume_events()
            finally:
                tasks.cancel_scope.cancel()

    async def _stop_on_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            received = 0
            async for number in signals:
                received += 1
                if received > 1:
                    os._exit(128 + number)
                _log.info("%s: draining; a second signal exits at once", signal.Signals(number).name)
                self._ask_to_stop(drain=True)

    async def _consume(
        self, connect: Callable[[EventSourceConfig], Connections], environment: Environment = MACHINE
    ) -> None:
        if self._state in (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING):
            raise RegistrationError("this event source is running already")
        self._check_inputs()
        self._check_visits(lambda: make_store(self._store_factory, TopicPartition(self.config.topic, 0)))
        self._router.freeze()
        self._stopped.clear()
        self._state = SourceState.STARTING
        self._loop = asyncio.get_running_loop()
        try:
            await self._consume_until_stopped(connect, environment)
            self._state = SourceState.STOPPED
        except BaseException:
            self._state = SourceState.FAILED
            raise
        finally:
            self._engine = None
            self._stop_asked = None
            self._stopped.set()

    async def _consume_until_stopped(
        self, connect: Callable[[EventSourceConfig], Connections], environment: Environment
    ) -> None:
        config = self._measured(self.config.resolved())
        _log.info("group %s: hot path: %s", config.group_id, leaves.advised())
        connections = connect(config)
        with anyio.CancelScope() as self._preparing:
            await source_topics.prepare(
                config, connections, self._outputs.values(), self.input_topics(), self.lookup_topics()
            )
        if self._stop_asked is not None:
            return
        async with AsyncExitStack() as resources:
            lookups = Lookups(self._lookups.values(), lambda topic: connections.followed(topic))
            resources.push_async_callback(lookups.stop)
            with anyio.CancelScope() as self._preparing:
                await lookups.start()
            if self._stop_asked is None:
                await self._enter_lifespan(resources)
            if self._stop_asked is None:
                await self._run_engine(config, connections, environment, lookups)

    def _measured(self, config: EventSourceConfig) -> EventSourceConfig:
        """Have the added handlers called as well."""
        if not self._metrics_handlers:
            return config
        own = () if config.metrics_handler is None else (config.metrics_handler,)
        handlers = (*self._metrics_handlers, *own)  # the last one, since what it raises ends the call

        def measure(measurement: Measurement) -> None:
            for handler in handlers:
                handler(measurement)

        return msgspec.structs.replace(config, metrics_handler=measure)

    def _add_lifespan(self, lifespan: Lifespan) -> None:
        """Have another context entered, behind the user's own."""
        self._further_lifespans.append(lifespan)

    async def _enter_lifespan(self, resources: AsyncExitStack) -> None:
        own = [] if self._lifespan is None else [self._lifespan]
        task = self._entering = asyncio.current_task()
        try:
            for lifespan in (*own, *self._further_lifespans):
                await resources.enter_async_context(lifespan())
        except asyncio.CancelledError:
            if self._stop_asked is None or task is None:
                raise
            task.uncancel()  # a stop does not wait for it
        except Exception as error:
            what = f"the event source of group {self.config.group_id} does not start: its lifespan failed"
            raise StreamsError(f"{what}: {error!r}") from error
        finally:
            self._entering = None

    async def _run_engine(
        self, config: EventSourceConfig, connections: Connections, environment: Environment, lookups: Lookups
    ) -> None:
        limit = getattr(connections, "message_limit", 1_000_000)
        engine = self._engine = Engine(
            config,
            self._router,
            self._schedules,
            partial(make_store, self._store_factory),
            connections,
            message_limit=limit,
            now=asyncio.get_running_loop().time,
            environment=environment,
            topics=self._topics_sent_to,
            inputs=[*self._inputs.values()],
            lookups=lookups,
        )
        lookups.on_failure(engine.fail)
        try:
            await engine.run(self._started)
        except BaseExceptionGroup as group:
            first = _first(group)
            raise first from first.__cause__

    def _started(self) -> None:
        self._state = SourceState.RUNNING

    def _ask_to_stop(self, *, drain: bool) -> None:
        if self._state in (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING):
            self._state = SourceState.STOPPING
            self._stop_asked = drain
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_on_loop, drain)

    def _stop_on_loop(self, drain: bool) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        if self._entering is not None:  # a task, not a scope: what is entered may leave scopes of its own open
            self._entering.cancel()
        if self._engine is not None:
            self._engine.stop(drain=drain)

    def program(self) -> Program:
        """Return the registrations and settings, to be run elsewhere (``streams.spark.replay``). Addresses, credentials
        and callbacks are left out: they stay in this process."""
        config, router = self.config, self._router
        limit = int(config.client_settings.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT))
        bare = msgspec.structs.replace(
            config,
            bootstrap_servers="",
            client_settings={},
            source_bootstrap_servers="",
            source_client_settings={},
            on_partition_activated=None,
            on_partition_revoked=None,
            metrics_handler=None,
        )
        interjections = tuple(route.name for _, route in self._schedules)
        rest = self._store_factory, interjections, limit, tuple(self._inputs), tuple(self._lookups)
        return Program(bare, tuple(router.routes.values()), router.default, *rest)

    # -- topics --------------------------------------------------------------------------------------------------------

    def specs(self) -> list[TopicSpec]:
        """Return the specifications of the topics that this source needs: source, changelog, dead letters (and the
        stand-in for a source on another cluster, ``config.offsets_topic``)."""
        return source_topics.specs(self.config)

    async def create_source(self) -> list[str]:
        """Create missing topics, declared inputs, lookups and outputs among them; verify the others. Returns the names
        of the created ones.

        Raises ``TopicError``, which names each difference (an existing topic is never changed), and
        ``BrokerUnavailable``.
        """
        config = self.config.resolved()
        return await source_topics.create_and_verify(
            config,
            KafkaConnections(config),
            self._outputs.values(),
            self.input_topics(),
            self.lookup_topics(),
            creates_others=True,
        )

    async def delete_source(self) -> list[str]:
        """Delete the topics of the source (its own topic, changelog, dead letters), with everything in them. Outputs
        stay.

        Returns their names. Stop all members first: ``RegistrationError`` while this object runs, and other processes
        stop with an error when their topics are gone.
        """
        if self._state in (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING):
            raise RegistrationError(
                "delete_source was called while the event source is running; stop all members first"
            )
        config = self.config.resolved()
        return await source_topics.delete(config, KafkaConnections(config))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
