"""The requests to a running event source: interjections, and queries of its state."""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from streams.core.visits import VisitRequest
from streams.errors import ConfigError, RegistrationError, Stopped
from streams.model.answers import Answer
from streams.records import Delivery, TopicPartition
from streams.runtime.connections import KafkaConnections
from streams.runtime.engine import Engine
from streams.runtime.partition.event_context import EventContext
from streams.runtime.queries.local import LocalQueries, place_of_key
from streams.runtime.visit_requests import send_request
from streams.settings.config import EventSourceConfig
from streams.source.registering import Handlers
from streams.source.visits import check_visit_name

StoreT = TypeVar("StoreT")
T = TypeVar("T")


class Interjecting(Handlers[StoreT]):
    """The half of ``EventSource`` that is called while it runs."""

    def __init__(self, config: EventSourceConfig) -> None:
        super().__init__(config)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queries: LocalQueries | None = None  # of the present run, once there was one

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
        return await self._running().ad_hoc.interject(partition, handler, blocking=blocking)

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
        return await self._running().ad_hoc.interject_all(
            handler, blocking=blocking, return_exceptions=return_exceptions
        )

    def interject_threadsafe(
        self, partition: int, handler: Callable[[EventContext[StoreT]], Any], /, *, blocking: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Run ``interject`` from any thread, or from another event loop (``await asyncio.wrap_future(...)``). The
        handler runs on the event source's loop, as ever. The future always ends; do not wait for it on the event
        source's loop. Raises ``Stopped`` when the source is not running."""
        return self._running().ad_hoc.interject_threadsafe(partition, handler, blocking=blocking)

    # -- visits --------------------------------------------------------------------------------------------------------

    async def start_visit(self, name: str, *, run_id: str | None = None) -> str:
        """Start a run of a visit, in all partitions. Returns its id when the request is written, which is before the
        first key is visited.

        A partition takes each ``run_id`` once, so a call that has failed is repeated with the same one; without it each
        call is a run of its own. While a run of the visit is under way, the next one waits for its end. It may be
        called whether the source runs in this process or not, on any event loop. Raises ``RegistrationError`` for a
        visit that is not registered, ``ConfigError``, ``TopicError``, ``BrokerUnavailable``.
        """
        run = uuid.uuid4().hex if run_id is None else run_id
        await self._request_visit(VisitRequest(name, run))
        return run

    async def cancel_visit(self, name: str, *, run_id: str | None = None) -> None:
        """Cancel a run of a visit, or all that are under way or wait. What is visited stays so, the other keys are not
        visited in this run, and a run of this id does not begin any more. Raises as ``start_visit``."""
        if run_id == "":
            raise ConfigError("run_id is empty; leave it out to cancel all runs")
        await self._request_visit(VisitRequest(name, run_id or "", "cancel"))

    async def _request_visit(self, request: VisitRequest) -> None:
        if request.visit not in self._router.visits:
            known = ", ".join(self._router.visits) or "none"
            raise RegistrationError(f"this source has no visit {request.visit!r}; it has {known}")
        if request.run or request.action == "start":
            check_visit_name("run_id", request.run)
        engine = self._engine
        config = self.config.resolved() if engine is None else engine.config
        connections = KafkaConnections(config) if engine is None else engine.connections
        await send_request(config, connections, request)

    # -- queries -------------------------------------------------------------------------------------------------------

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
        engine = self._running()
        if asyncio.get_running_loop() is not self._loop:
            raise RegistrationError(
                "query was called on another event loop than the event source's; use query_threadsafe"
            )
        number = place_of_key(self.config, key, partition)
        return await self._local(engine).query(
            number, read, at_least=at_least, confirm=confirm, timeout_seconds=timeout_seconds
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
        self._running()
        loop = self._loop
        assert loop is not None
        asking = self.query(
            key, read, partition=partition, at_least=at_least, confirm=confirm, timeout_seconds=timeout_seconds
        )
        try:
            return asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as error:  # it has stopped since
            asking.close()
            raise Stopped("the event source is not running") from error

    def _local(self, engine: Engine) -> LocalQueries:
        if self._queries is None or self._queries.engine is not engine:
            self._queries = LocalQueries(engine)
        return self._queries

    def _running(self) -> Engine:
        if self._engine is None:
            raise Stopped("the event source is not running")
        return self._engine
