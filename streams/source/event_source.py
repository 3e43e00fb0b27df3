"""The event source: register handlers for event types, then run. Wires everything else together.

It has three parts: ``Declarations``, ``SourceRun`` (the engine, its start and its end), and ``SourceRequests`` (queries
within the process, requests for visits).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from streams.core.router import check_callable
from streams.errors import RegistrationError
from streams.formats.rules import TypeRule
from streams.metrics import MetricsHandler
from streams.model.answers import Answer
from streams.model.commands import Versioned
from streams.model.topics import TopicSpec
from streams.outcomes import Retry
from streams.records import Delivery, TopicPartition
from streams.runtime import source_topics
from streams.runtime.partition.event_context import EventContext
from streams.settings.config import EventSourceConfig
from streams.source.aggregates import AggregateRules
from streams.source.declarations import Declarations, Lifespan
from streams.source.declaring import Declaring
from streams.source.requests import SourceRequests
from streams.source.running import SourceRun, connected
from streams.statistics import SourceState, SourceStatistics
from streams.stores.table import Table

if TYPE_CHECKING:
    from streams.runtime.replay import Program

StoreT = TypeVar("StoreT")
T = TypeVar("T")
K = TypeVar("K")
S = TypeVar("S")


class EventSource(Declaring[StoreT]):
    """Reads a topic of typed events, and handles each exactly once.

    ``store`` makes the state store of one partition (``Table.factory(...)``, or a factory of your own); without it the
    source is stateless. Register handlers, then ``run`` (or ``await consume_events()`` in a loop of your own, or
    ``kes run module:source``). One object runs once at a time; registering ends with the first start.

    ``routed_by`` makes the key of the *records*, text or bytes, from a key of the store, for all that looks for a key
    in the running source (``StateReader``, ``kes state get --ask-owner``, the monitor). Declare it where handlers use
    the key of their records (``routed_by=str``, or ``lambda key: key``), or one that this can be derived from; without
    it a key that is not in the partition of records with the same key may be in another one.

    ``types`` is the rule that gives the records of the topic their types, if they have not our headers:
    ``types=Only(Click)``, or ``ByField``, ``ByHeader``, ``ByFunction``, ``CloudEvents`` of ``streams.formats``.

    ``lifespan`` makes an asynchronous context manager of things that handlers and jobs need as long as the source runs
    (an HTTP client, a database pool). It is entered on the event loop before any partition is worked on, and left after
    the last. An exception on the way in stops the source with a ``StreamsError``. Replays (``streams.spark.replay``) do
    not enter it.
    """

    @overload
    def __init__(
        self: EventSource[None],
        config: EventSourceConfig,
        *,
        lifespan: Lifespan | None = None,
        types: TypeRule | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: EventSourceConfig,
        store: Callable[[TopicPartition], StoreT],
        *,
        lifespan: Lifespan | None = None,
        routed_by: Callable[[Any], str | bytes] | None = None,
        types: TypeRule | None = None,
    ) -> None: ...

    def __init__(
        self,
        config: EventSourceConfig,
        store: Callable[[TopicPartition], Any] | None = None,
        *,
        lifespan: Lifespan | None = None,
        routed_by: Callable[[Any], str | bytes] | None = None,
        types: TypeRule | None = None,
    ) -> None:
        declared = Declarations(config, store, types)
        if routed_by is not None:
            check_callable("routed_by", routed_by, "key")
        if lifespan is not None:
            declared.lifespans.append(lifespan)
        self.routed_by: Final = routed_by
        self._hold(declared)

    def _hold(self, declared: Declarations) -> None:
        """Stand on these declarations, with a life of its own that has not begun."""
        self._declared = declared
        self._run = SourceRun(declared, self)
        self._requests = SourceRequests(declared, self._run)

    # -- commands ------------------------------------------------------------------------------------------------------

    def aggregate(
        self: EventSource[Table[K, Versioned[S]]],
        initial: S,
        *,
        events: str,
        remember: timedelta = timedelta(days=1),
        on_error: Retry | None = None,
    ) -> AggregateRules[S]:
        """Declare that the source takes commands to its states: the store is ``Aggregate.factory(...)``. Returns what
        has the decorators ``decide`` and ``evolve``.

        A command is a record of the source's topic with an id in the header ``kes-id``; ``CommandClient.ask`` sends
        it, and returns its answer. Its events go to the topic ``events``, with the numbers 1, 2, 3 ... of their key in
        the header ``kes-version``. ``initial`` is the state of a key that has none. An id takes effect once within
        ``remember`` (a minute to 366 days), and the answer is kept as long. ``on_error`` (default:
        ``config.error_policy``): for commands whose ``decide`` or ``evolve`` fails otherwise than by ``Rejected``.
        Raises ``ConfigError``; ``RegistrationError`` for a second one, and after the start.
        """
        return self._declared.declare_aggregate(initial, events, remember, on_error)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until stopped, on an event loop of its own. SIGINT and SIGTERM drain and stop; a second one exits at
        once.

        Raises the ``StreamsError`` that made the source stop, unless the stop was requested.
        """
        self._run.run(self.consume_events)

    async def consume_events(self) -> None:
        """Run until stopped, on the current event loop. Cancelling it is ``stop_now``. Raises like ``run``."""
        await self._run.consume(connected)

    async def stop(self) -> None:
        """Drain and stop: running events end, complete ones are committed, the group is left. Returns when that is
        done."""
        self._run.ask_to_stop(drain=True)
        await self._run.wait_stopped()

    def stop_now(self) -> None:
        """Stop without draining: uncommitted work is dropped, and the next owner does it again. Any thread."""
        self._run.ask_to_stop(drain=False)

    async def wait_stopped(self) -> None:
        """Wait until the source has stopped, for whatever reason. From any loop."""
        await self._run.wait_stopped()

    @property
    def state(self) -> SourceState:
        """Return the state of the event source in its life cycle."""
        return self._run.state

    def add_metrics_handler(self, handler: MetricsHandler) -> None:
        """Call this handler with each measurement of the coming runs, besides that of the settings. The same rules hold
        for it."""
        self._declared.metrics_handlers.append(handler)

    def statistics_threadsafe(self) -> concurrent.futures.Future[SourceStatistics]:
        """``statistics`` from any thread, with the ``end`` of each partition. The future ends when the loop and the
        thread that reads have answered, within a tenth of a second, unless the loop stands still. Raises ``Stopped``
        when the source is not running."""
        return self._run.statistics_threadsafe()

    def statistics(self) -> SourceStatistics:
        """Return the present state in figures. Call it on the loop of the event source."""
        return self._run.statistics()

    @property
    def member_id(self) -> str:
        """Return the member id in the group, also while the member is joining; empty while it has none. Any thread."""
        return self._run.member_id

    def remove_member(self, member_id: str, instance: str = "", timeout_seconds: float = 10.0) -> bool:
        """Take a member *that is known to be dead* out of the group, so that its session need not end first.

        ``instance`` is that of a static member. ``False``: it was not in the group any more. Harmless when a successor
        took its place meanwhile. One that is only frozen may answer queries from old state for up to half a session
        when it goes on. Blocks: call it on any thread but the loop's. Raises ``Stopped``,
        ``BrokerUnavailable``.
        """
        client = self._run.present().takeover_client
        return client.remove_member(member_id, instance or None, time.monotonic() + timeout_seconds)

    @property
    def store_factory(self) -> Callable[[TopicPartition], StoreT]:
        """Return the factory of the stores of its partitions."""
        return self._declared.store_factory

    def program(self) -> Program:
        """Return the registrations and settings, to be run elsewhere (``streams.spark.replay``). Addresses, credentials
        and callbacks are left out: they stay in this process."""
        return self._declared.program()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def interject(
        self, partition: int, handler: Callable[[EventContext[StoreT]], Any], /, *, blocking: bool = False
    ) -> Any:
        """Run a handler once, in this partition's order and transaction. Returns its answer once it is *committed*. The
        handler has its place between two events: it waits neither for queued events nor for work that runs ahead.
        ``blocking=True`` runs a plain function on a thread of the partition.

        Call it on the loop of the event source; ``interject_threadsafe`` is for other threads. Raises the handler's own
        exception (its effects are undone then), ``NotOwned`` when the partition is not active on this member or is
        given up before the commit, ``MembershipLost`` when it was lost before the commit, ``Stopped``. Awaiting it
        always ends. A caller that is cancelled before the interjection began withdraws it. When the partition is
        restarted meanwhile (another event of it is refused by the broker, or a store cannot undo one) it has its turn
        afterwards; if it had begun, it starts over. A handler must not await it for its own partition:
        ``WouldDeadlock``, as far as that can be detected.
        """
        return await self._run.present().ad_hoc.interject(partition, handler, blocking=blocking)

    async def interject_all(
        self,
        handler: Callable[[EventContext[StoreT]], Any],
        /,
        *,
        blocking: bool = False,
        return_exceptions: bool = False,
    ) -> dict[int, Any]:
        """Run ``interject`` on every partition that is active on this member. Returns the answers by partition, in the
        order of their numbers, once all have ended.

        Each partition has its own order and transaction. They run side by side, and some may be committed while others
        fail. When all have ended, errors are raised as one ``ExceptionGroup`` (each with a note that names its
        partition), or, with ``return_exceptions``, returned in the place of answers.
        """
        return await self._run.present().ad_hoc.interject_all(
            handler, blocking=blocking, return_exceptions=return_exceptions
        )

    def interject_threadsafe(
        self, partition: int, handler: Callable[[EventContext[StoreT]], Any], /, *, blocking: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Run ``interject`` from any thread, or from another event loop (``await asyncio.wrap_future(...)``). The
        handler runs on the event source's loop, as ever. The future always ends; do not wait for it on the event
        source's loop. Raises ``Stopped`` when the source is not running."""
        return self._run.present().ad_hoc.interject_threadsafe(partition, handler, blocking=blocking)

    async def start_visit(self, name: str, *, run_id: str | None = None) -> str:
        """Start a run of a visit, in all partitions. Returns its id when the request is written, which is before the
        first key is visited.

        A partition takes each ``run_id`` once, so a call that has failed is repeated with the same one; without it each
        call is a run of its own. While a run of the visit is under way, the next one waits for its end. It may be
        called whether the source runs in this process or not, on any event loop. Raises ``RegistrationError`` for a
        visit that is not registered, ``ConfigError``, ``TopicError``, ``BrokerUnavailable``.
        """
        return await self._requests.start_visit(name, run_id)

    async def cancel_visit(self, name: str, *, run_id: str | None = None) -> None:
        """Cancel a run of a visit, or all that are under way or wait. What is visited stays so, the other keys are not
        visited in this run, and a run of this id does not begin any more. Raises as ``start_visit``."""
        await self._requests.cancel_visit(name, run_id)

    async def query(
        self,
        key: str | bytes | None,
        read: Callable[[StoreT], T],
        /,
        *,
        partition: int | None = None,
        at_least: Delivery | Mapping[TopicPartition, int] | None = None,
        confirm: bool = False,
        timeout_seconds: float = 10.0,
    ) -> Answer[T]:
        """Read the state of one partition: ``(await source.query("ada", lambda store: store.get("ada"))).value``.

        ``key`` is that of the *records*, which choose the partition by it; or it is ``None``, and ``partition`` is
        named. ``read`` is a plain function. It runs between two events, and must be quick: its partition waits for it.
        It must not write, nor return the store or an iterator over it. Its answer is given when everything that it saw
        is committed, with a proof that this member still owns the partition (docs/guides/queries.md). Queries that wait
        share one turn.

        ``at_least``: wait until the state contains this: a ``Delivery`` to an input of the source, or ``positions`` of
        earlier answers, of which those of other partitions are passed over. ``confirm``: prove the ownership by a
        commit, and not by a heartbeat of the last seconds.

        Call it on the loop of the event source, or use ``query_threadsafe``. Raises what ``read`` raises;
        ``StoreError`` for a ``read`` that writes or returns what it may not; ``NotOwned`` when the partition is not
        here, or is lost or given up before the answer is proven; ``NotCaughtUp`` after ``timeout_seconds``;
        ``ConfigError`` for arguments that cannot be; ``Stopped``.
        """
        return await self._requests.query(
            key, read, partition=partition, at_least=at_least, confirm=confirm, timeout_seconds=timeout_seconds
        )

    def query_threadsafe(
        self,
        key: str | bytes | None,
        read: Callable[[StoreT], T],
        /,
        *,
        partition: int | None = None,
        at_least: Delivery | Mapping[TopicPartition, int] | None = None,
        confirm: bool = False,
        timeout_seconds: float = 10.0,
    ) -> concurrent.futures.Future[Answer[T]]:
        """Run ``query`` from any thread, or from another event loop (``await asyncio.wrap_future(...)``). ``read`` runs
        on the event source's loop. Do not wait for the future there. Raises ``Stopped`` when the source is not
        running."""
        return self._run.threadsafe(
            lambda: self.query(
                key, read, partition=partition, at_least=at_least, confirm=confirm, timeout_seconds=timeout_seconds
            )
        )

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
            connected(config),
            self.outputs,
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
        if self._run.is_at_work:
            raise RegistrationError(
                "delete_source was called while the event source is running; stop all members first"
            )
        config = self.config.resolved()
        return await source_topics.delete(config, connected(config))
