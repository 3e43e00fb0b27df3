"""Handlers that write to PostgreSQL, each event once: a fence in their own transaction.

sink = PostgresSink(source, DATABASE, name="stock")


@sink.register_event_type(StockMoved)
async def moved(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[StockMoved]]) -> None:
    await db.execute(CHANGE, ([item.event.product for item in items], [item.event.count for item in items]))

The *fence* of a partition is a row with the offset that comes next. A batch that is written again, after a lost answer
or beside a frozen owner, finds it moved, and what is done is left out. No epoch is needed: what is written depends on
the log alone, and both have the same log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

import psycopg

from streams.errors import ConfigError, RegistrationError, TopicError, TopicReplaced
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import missing
from streams.outcomes import ErrorPolicy
from streams.records import IncomingRecord
from streams.runtime.async_work.batch_stage import AGAIN, BatchItem
from streams.sak.backoff import backoff_seconds
from streams.settings.jobs import BatcherConfig
from streams.source.async_batcher import AsyncBatcher
from streams.source.event_source import EventSource

_log = logging.getLogger(__name__)

E = TypeVar("E")
Handler = Callable[[psycopg.AsyncConnection[Any], Sequence["SinkItem[E]"]], Awaitable[None]]

SINK_BATCHES: Final = BatcherConfig(max_batch_size=500)
"""Settings of a sink that is given none: one transaction has 500 events, at most."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries of a transaction that the server may take in a moment: the first pause, and the longest."""
_TABLE: Final = """
SELECT pg_advisory_xact_lock(hashtext('kes_inbox')); -- processes that start together make it once
CREATE TABLE IF NOT EXISTS kes_inbox (
  sink text, topic text, partition integer, topic_id text NOT NULL, next_offset bigint NOT NULL,
  PRIMARY KEY (sink, topic, partition)
)
"""
_LOCK_FENCE: Final = """
INSERT INTO kes_inbox VALUES (%s, %s, %s, %s, 0)
ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = kes_inbox.next_offset
RETURNING topic_id, next_offset
"""
_MOVE_FENCE: Final = "UPDATE kes_inbox SET next_offset = %s WHERE (sink, topic, partition) = (%s, %s, %s)"
# A worker that is frozen must not keep its locks. The first timeout runs between two commands only; the second, of
# PostgreSQL 17 and newer, also while the server waits for the rest of a pipeline, as `executemany` sends it.
_SESSION: Final = "SET idle_in_transaction_session_timeout = '10s'"
_SESSION_17: Final = "SET transaction_timeout = '60s'"
# The last ones: by these timeouts, for a worker that was frozen; and a server that is read-only after a failover.
_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,
)


class SinkItem(NamedTuple, Generic[E]):
    """An event that is to be written, and its record."""

    record: IncomingRecord
    event: E


class PostgresSink:
    """Writes the events of a source to PostgreSQL, in batches, each event once.

    ``database``: address for psycopg. ``name``: of the sink, which has its fences under it in the table ``kes_inbox``
    (made if it is missing); each sink of a topic needs one of its own. A handler gets events of one type and one
    partition, in the order of their offsets, within a transaction in which the fence is moved. It may stash in it
    (``AsyncOutbox``): then these records are in Kafka once, too. It must neither commit nor write elsewhere.

    What the server may do better in a moment (``psycopg.OperationalError``: no connection, deadlock, serialization
    failure; a session that was ended while its worker was frozen; a read-only server) is done again for
    ``retry_seconds``. After that, or any other exception, the events of that partition in the batch are handed in once
    more, one by one, each in a transaction of its own: what fails alone goes to its error policy, and the others are
    written, those behind it when its policy has decided.
    So do events of timers: they have no offset, and so no fence. Make it before the source starts; its effects are
    there a moment before the events are committed. Raises ``ConfigError``.
    """

    def __init__(
        self,
        source: EventSource[Any],
        database: str,
        *,
        name: str,
        config: BatcherConfig = SINK_BATCHES,
        retry_seconds: float = 60.0,
    ) -> None:
        if not name or len(name) > 200:
            raise ConfigError(f"the name of a sink is {name!r}; it needs one, with 200 characters at most")
        if not 0 <= retry_seconds <= 86_400:
            raise ConfigError(f"retry_seconds is {retry_seconds!r}; it must be from 0 to a day")
        self.name = name
        self._source, self._database, self._retry_seconds = source, database, retry_seconds
        self._call_seconds = config.timeout_seconds
        self._topic_id = ""
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._batcher: AsyncBatcher[Any, SinkItem[Any]] = AsyncBatcher(
            source, self._write, config=config, name=f"sink {name}"
        )
        # Behind the user's own lifespan, so that it is entered after that, and left before.
        source._declared.lifespans.append(self._opened)

    def register_event_type(
        self, event_class: type[E], /, *, on_error: ErrorPolicy | None = None
    ) -> Callable[[Handler[E]], Handler[E]]:
        """Write the events of this class by the decorated function, ``async def handler(db, items)``. Raises
        ``RegistrationError``."""

        name = self.name

        def register(handler: Handler[E]) -> Handler[E]:
            def plan(record: IncomingRecord, event: E) -> BatchItem[SinkItem[E]]:
                if record.offset < 0:
                    raise RegistrationError(
                        f"sink {name}: a timer's event has no offset, which the fence needs; forward it to a topic, "
                        "and have the sink write that"
                    )
                # The partition is the key: a fence knows one number, so one batch at a time, in order.
                return BatchItem(record.partition, SinkItem(record, event), user_data=handler)

            self._batcher.register_event_type(event_class, plan, on_error=on_error)
            return handler

        return register

    # -- batches -------------------------------------------------------------------------------------------------------

    async def _write(self, items: list[BatchItem[SinkItem[Any]]]) -> list[Any]:
        """Write each partition's items in a transaction; returns the outcome of each item."""
        loop = asyncio.get_running_loop()
        outcomes: dict[int, Any] = {}  # by the place of the item
        for partition in dict.fromkeys(item.key for item in items):
            places = [place for place, item in enumerate(items) if item.key == partition]
            error = await self._tried([items[place] for place in places], self._retry_seconds)
            if error is None or len(places) == 1 or isinstance(error, TopicReplaced):
                outcomes |= dict.fromkeys(places, error)
                continue
            # An event is at fault. The fence must not pass it before its policy has decided: the rest comes again. So
            # does what could not be tried in half of the time of a call: a call that is late fails with all in it.
            seconds = 0.0 if isinstance(error, _PASSING) else self._retry_seconds  # else that time is over
            until = loop.time() + (self._call_seconds or float("inf")) / 2
            left = iter(places)
            for place in left:
                outcomes[place] = await self._tried([items[place]], seconds)
                if outcomes[place] is not None or loop.time() > until:
                    break
            outcomes |= dict.fromkeys(left, AGAIN)
        return [outcomes[place] for place in range(len(items))]

    async def _tried(self, items: list[BatchItem[SinkItem[Any]]], seconds: float) -> Exception | None:
        until, failures = time.monotonic() + seconds, 0
        while True:
            try:
                async with self._connection() as db, db.transaction():
                    await self._write_partition(db, items)
            except _PASSING as error:
                if isinstance(error, psycopg.errors.ProgramLimitExceeded) or time.monotonic() >= until:
                    return error  # the former is a value that is too large for an index
                failures += 1
                _log.warning("sink %s, partition %s: done again: %s", self.name, items[0].key, error)
                await asyncio.sleep(backoff_seconds(failures, _FIRST_PAUSE, _LONGEST_PAUSE))
            except Exception as error:
                return error
            else:
                return None

    async def _write_partition(self, db: psycopg.AsyncConnection[Any], items: list[BatchItem[SinkItem[Any]]]) -> None:
        topic = self._source.config.topic
        where = (self.name, topic, items[0].key)
        # Locked first: a frozen owner that goes on waits here, and then finds the fence moved.
        row = await (await db.execute(_LOCK_FENCE, (*where, self._topic_id))).fetchone()
        assert row is not None
        topic_id, done = row
        if topic_id != self._topic_id:  # offsets of another topic: events would be taken for written ones, and left out
            raise TopicReplaced(
                f"{topic} has the id {self._topic_id}, and the fences of sink {self.name} belong to the topic "
                f"{topic_id}: it was recreated, or another cluster answers, and its offsets start over. If its events "
                f"are new: DELETE FROM kes_inbox WHERE sink = '{self.name}', or another name for the sink"
            )
        new = [item for item in items if item.value.record.offset >= done]
        for handler, of in groupby(new, key=attrgetter("user_data")):
            await handler(db, [item.value for item in of])
        if new:  # in the transaction of the handler: both are there, or neither
            await db.execute(_MOVE_FENCE, (new[-1].value.record.offset + 1, *where))

    # -- connections ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Look at the topic, make the table; close the connections at the end."""
        if self._source.inputs:
            raise ConfigError(
                f"sink {self.name}: its fence is one offset of the source's topic, and the source has further inputs "
                f"({', '.join(self._source.inputs)}): write their events by a source of their own"
            )
        self._topic_id = await asyncio.to_thread(self._identity)
        async with self._connection() as db, db.transaction():
            row = await (await db.execute("SELECT to_regclass('kes_inbox') IS NULL")).fetchone()
            if row is not None and row[0]:  # else it takes no right to make one
                await db.execute(_TABLE)
        try:
            yield
        finally:
            while self._idle:
                await self._idle.pop().close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend a connection; one with which something failed is closed."""
        db = self._idle.pop() if self._idle else await self._connect()
        try:
            yield db
        except BaseException:  # also cancelled: what is under way on it must not meet the next user
            await db.close()
            raise
        self._idle.append(db)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        db = await psycopg.AsyncConnection.connect(self._database, autocommit=True, application_name="kes-sink")
        try:
            await db.execute(_SESSION)
            if db.info.server_version >= 170_000:
                await db.execute(_SESSION_17)
        except BaseException:
            await db.close()
            raise
        return db

    def _identity(self) -> str:
        config = self._source.config.resolved()
        servers, settings = config.bootstrap_servers, config.client_settings
        if config.source_is_elsewhere:
            servers, settings = config.source_bootstrap_servers, config.source_client_settings
        admin = TopicAdmin(ClientSettings(servers, settings, client_id=f"kes-sink-{self.name}"))
        try:
            found = admin.identity(config.topic)
        finally:
            admin.close()
        if found is None:
            raise TopicError(missing(config.topic))
        return found[0]
