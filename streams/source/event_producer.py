"""Send typed events from any program: a web service, a script, a notebook.

async with EventProducer("localhost:9092") as producer:
    delivery = await producer.send("orders", OrderPlaced("o1", 250), key="o1")

with EventProducer() as producer:  # the same, blocking; the address from KES_BOOTSTRAP_SERVERS
    for order in orders:
        producer.send_soon("orders", order, key=order.id)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

import msgspec

from streams.errors import ConfigError, RecordRefused
from streams.events import to_record
from streams.formats.needs import NotLookedUp, looked_up
from streams.model.partitioners import PARTITIONERS, PartitionerName
from streams.model.tracing import Tracer, stamped
from streams.records import Delivery, Output, Record, as_bytes
from streams.runtime.bridge import Worker
from streams.runtime.signal import Broadcast
from streams.settings import sources
from streams.settings.once import with_id

if TYPE_CHECKING:  # the clients of Kafka are loaded with the first producer, not with this module
    from streams.kafka.writing.blocking import Transactions
    from streams.kafka.writing.sending import SendQueue

POLL_SECONDS: Final = 0.001
"""Seconds between two checks for acknowledgements on an event loop, while any is missing. A check takes a microsecond;
one from a thread of its own would wait for the GIL once per record."""
SENDS_PER_SERVE: Final = 64
"""Number of records between two checks for acknowledgements by the calls that send them."""
_BLOCKING_SECONDS: Final = 0.01
"""Seconds of one wait for acknowledgements, of a call that blocks."""
_CLOSE_SECONDS: Final = 5.0
"""Seconds to wait for records on their way, at the end of a block that has failed."""


class RecordOptions(TypedDict, total=False):
    """Further arguments of ``send``, as those of ``EventContext.forward``: the ``key`` decides the partition unless
    ``partition`` names one; ``headers`` come after the type's own; ``timestamp_ms`` is the time of sending if missing;
    ``id`` is the header ``kes-id``, for sources that handle each id once."""

    key: str | bytes | None
    headers: Iterable[tuple[str, bytes | None]]
    partition: int | None
    timestamp_ms: int | None
    id: str | bytes | int | None


class EventProducer:
    """The settings of a producer of typed events; ``async with`` and ``with`` start one.

    Records are idempotent (a retry makes no copy), acknowledged by all in-sync replicas, and in the order of the calls
    within each partition, also where a broker refuses a batch that is larger than the topic's ``max.message.bytes``: it
    is sent again in smaller ones, and what is behind it waits. Keys go to the partitions where event sources, Spark and
    Kafka's Java clients look for them (murmur2), unless ``partitioner`` names another one: ``"crc32"``, as librdkafka
    does by default, or ``"fnv1a"``, as sarama and goka do, for topics that no event source reads. Records without a key
    share a partition for some milliseconds, or a transaction; with ``null_keys="spread"`` each is placed by itself. A
    ready ``Record`` (a tombstone, for example) may stand in place of topic and event.

    ``bootstrap_servers`` (else ``KES_BOOTSTRAP_SERVERS``) and ``client_settings`` are as those of
    ``EventSourceConfig``. ``max_queued_records``: records sent and not acknowledged; beyond that calls wait.
    ``delivery_timeout_seconds``: how long a record is tried. ``transactional_id`` names the producer of
    ``transaction()``: one id per process, the same after a restart; a transaction that takes longer than
    ``transaction_timeout_seconds`` is aborted by the broker. Raises ``ConfigError``.

    The end of the block waits for all records. ``NotDelivered`` then lists the failures that no ``send`` has raised:
    refused records, which are not in the topic, and records in doubt, which may be.
    """

    def __init__(
        self,
        bootstrap_servers: str = "",
        *,
        client_settings: Mapping[str, Any] | None = None,
        transactional_id: str = "",
        max_queued_records: int = 100_000,
        delivery_timeout_seconds: float = 120.0,
        transaction_timeout_seconds: float = 60.0,
        partitioner: PartitionerName = "murmur2",
        null_keys: Literal["sticky", "spread"] = "sticky",
    ) -> None:
        from streams.kafka.settings import ClientSettings

        if partitioner not in PARTITIONERS:
            raise ConfigError(
                f"partitioner of EventProducer is {partitioner!r}; it must be one of {', '.join(PARTITIONERS)}. What "
                "another function chooses is given as the partition= of each record"
            )
        if null_keys not in ("sticky", "spread"):
            raise ConfigError(f"null_keys of EventProducer is {null_keys!r}; it must be sticky or spread")
        self._settings = ClientSettings(
            sources.bootstrap_servers(bootstrap_servers),
            sources.joined_client_settings(client_settings),
            client_id="kes-producer",
            partitioner=partitioner,
            null_keys=null_keys,
        )
        if type(max_queued_records) is not int or max_queued_records < 1:
            raise ConfigError(f"max_queued_records is {max_queued_records!r}; it must be a whole number, 1 or more")
        for name, seconds in (("delivery", delivery_timeout_seconds), ("transaction", transaction_timeout_seconds)):
            if not 0.001 <= seconds < 86_400:
                raise ConfigError(
                    f"{name}_timeout_seconds is {seconds!r}; it must be a millisecond or more, and less than a day"
                )
        self._id, self._limit = transactional_id, max_queued_records
        self._delivery_seconds, self._transaction_seconds = delivery_timeout_seconds, transaction_timeout_seconds
        self._transactions()  # made to refuse its settings here, not at the first commit
        self._running: BlockingEventProducer | AsyncEventProducer | None = None
        self._tracer: Tracer | None = None

    def set_tracer(self, tracer: Tracer) -> None:
        """Have the records of the coming blocks carry the trace that is current where they are sent
        (``observability.OpenTelemetryTraces`` calls it)."""
        self._tracer = tracer

    def __enter__(self) -> BlockingEventProducer:
        self._check_free()
        self._running = producer = BlockingEventProducer(self._queue(), self._transactions(), self._limit, self._tracer)
        return producer

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert isinstance(self._running, BlockingEventProducer)
        running, self._running = self._running, None
        running.close(error)

    async def __aenter__(self) -> AsyncEventProducer:
        self._check_free()
        # Building a client holds the GIL for some milliseconds, and longer with slow name look-up or TLS.
        queue = await asyncio.to_thread(self._queue)
        self._running = producer = AsyncEventProducer(queue, self._transactions(), self._limit, self._tracer)
        return producer

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert isinstance(self._running, AsyncEventProducer)
        running, self._running = self._running, None
        await running.close(error)

    def _check_free(self) -> None:
        if self._running is not None:
            raise ConfigError("this EventProducer is in use by another block: each needs one of its own")

    def _queue(self) -> SendQueue:
        from streams.kafka.writing.sending import SendQueue

        return SendQueue(self._settings, self._limit, self._delivery_seconds)

    def _transactions(self) -> Transactions:
        from streams.kafka.writing.blocking import Transactions

        return Transactions(self._settings, self._id, self._transaction_seconds, self._delivery_seconds)


class BlockingEventProducer:
    """A running producer, made by ``with EventProducer(...)``. Any thread may use it, of this process: after a fork its
    calls raise ``ConfigError`` in the child."""

    def __init__(self, queue: SendQueue, transactions: Transactions, limit: int, tracer: Tracer | None) -> None:
        self._queue = queue
        self._transactions = transactions
        self._limit = limit
        self._tracer = tracer
        self._serving = threading.Lock()  # one thread takes the acknowledgements, for all
        self._committing = threading.Lock()

    def send(self, topic: str | Record, event: object = None, /, **options: Unpack[RecordOptions]) -> Delivery:
        """Send an event and wait until all in-sync replicas have it; return its partition and offset.

        Raises ``RecordRefused`` (it is not there), ``BrokerUnavailable`` (not acknowledged in time: it may be there),
        ``EncodeError``, ``RegistrationError`` (not an event class).
        """
        outcome: list[Delivery] = []
        self._put(_record(topic, event, tracer=self._tracer, **options), outcome.append)
        self._serve_until(lambda: bool(outcome))
        if outcome[0].error is not None:
            raise outcome[0].error
        return outcome[0]

    def send_soon(
        self,
        topic: str | Record,
        event: object = None,
        /,
        *,  # those of ``RecordOptions``, by name: a dict of them would take a tenth of the rate
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        id: str | bytes | int | None = None,
    ) -> None:
        """Send an event without waiting for it, unless ``max_queued_records`` are on their way. ``flush``, or the end
        of the block, raises its failure. Raises ``EncodeError``, ``RecordRefused``, ``RegistrationError``."""
        record = _record(topic, event, key, headers, partition, timestamp_ms, self._tracer, id)
        queue = self._queue
        if not queue.take(record):  # a call less where there is room
            self._put(record)
        elif queue.sends >= SENDS_PER_SERVE:
            self._serve_some()

    def flush(self) -> None:
        """Wait for all records on their way. Raises ``NotDelivered`` with those of ``send_soon`` that failed."""
        self._serve_until(lambda: not self._queue.unreported)
        self._queue.raise_failures()

    @contextmanager
    def transaction(self) -> Iterator[TransactionRecords]:
        """Collect records, and commit them together at the end of the block: readers of committed records see all of
        them or none. After an exception of the block nothing is sent.

        Raises ``RecordRefused`` (nothing is committed), ``Stopped`` and ``TransactionFailed``. With the kind
        ``unknown`` and the call ``commit_transaction`` the records may be committed or not; with any other they are
        not.
        """
        records = TransactionRecords(self._transactions.transactional_id, self._limit, self._tracer)
        yield records
        self._queue.check_open()
        with self._committing:  # the id has one transaction at a time, whichever threads use it
            self._transactions.commit(records.outputs)

    def close(self, error: BaseException | None) -> None:
        """Wait for the records on their way (after an error of the block: 5 seconds), and close."""
        try:
            self._serve_until(lambda: not self._queue.unreported, None if error is None else _CLOSE_SECONDS)
        except BaseException:
            self._queue.close(is_loud=False)
            raise
        finally:
            self._transactions.close()
        self._queue.close(is_loud=error is None)

    def _put(self, record: Record, settle: Callable[[Delivery], None] | None = None) -> None:
        queue = self._queue
        while not queue.take(record, settle):
            with self._serving:
                queue.serve(_BLOCKING_SECONDS)
        if queue.sends >= SENDS_PER_SERVE:
            self._serve_some()

    def _serve_some(self) -> None:
        if self._serving.acquire(blocking=False):  # else another thread is taking them already
            try:
                self._queue.serve(0)
            finally:
                self._serving.release()

    def _serve_until(self, is_done: Callable[[], bool], seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not is_done() and (deadline is None or time.monotonic() < deadline):
            with self._serving:
                if not is_done():  # another thread may have taken the acknowledgement
                    self._queue.serve(_BLOCKING_SECONDS)


class AsyncEventProducer:
    """A running producer, made by ``async with EventProducer(...)``. Use it on its event loop: in another one, and
    after a fork, its calls raise ``ConfigError`` and send nothing."""

    def __init__(self, queue: SendQueue, transactions: Transactions, limit: int, tracer: Tracer | None) -> None:
        self._queue = queue
        self._transactions = transactions
        self._limit = limit
        self._tracer = tracer
        self._progress = Broadcast()
        self._timer: asyncio.TimerHandle | None = None
        self._worker: Worker | None = None
        self._loop = asyncio.get_running_loop()

    async def send(self, topic: str | Record, event: object = None, /, **options: Unpack[RecordOptions]) -> Delivery:
        """Send an event and wait until all in-sync replicas have it; return its partition and offset.

        A cancelled call may have sent its record. Raises as ``BlockingEventProducer.send``.
        """
        self._check_loop()
        future: asyncio.Future[Delivery] = self._loop.create_future()

        def settle(delivery: Delivery) -> None:
            if not future.done():
                future.set_result(delivery)
            elif delivery.error is not None:  # the caller was cancelled: ``flush`` raises it
                self._queue.note(delivery)

        await self._put(await looked_up(_record, topic, event, tracer=self._tracer, **options), settle)
        delivery = await future
        if delivery.error is not None:
            raise delivery.error
        return delivery

    async def send_soon(
        self,
        topic: str | Record,
        event: object = None,
        /,
        *,  # by name, as those of ``BlockingEventProducer.send_soon``
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        id: str | bytes | int | None = None,
    ) -> None:
        """Send an event without waiting for it, unless ``max_queued_records`` are on their way. ``flush``, or the end
        of the block, raises what became of it. Raises ``EncodeError``, ``RecordRefused``, ``RegistrationError``."""
        if asyncio._get_running_loop() is not self._loop:
            self._check_loop()
        try:
            record = _record(topic, event, key, headers, partition, timestamp_ms, self._tracer, id)
        except NotLookedUp:  # the first of its class
            record = await looked_up(_record, topic, event, key, headers, partition, timestamp_ms, self._tracer, id)
        queue = self._queue
        if not queue.take(record):  # a coroutine less where there is room
            await self._put(record)
        elif queue.sends >= SENDS_PER_SERVE:  # of a loop that leaves the timer no turn
            self._serve()
        elif self._timer is None:
            self._serve_soon()

    async def flush(self) -> None:
        """Wait for all records on their way. Raises ``NotDelivered`` with those of ``send_soon`` that failed."""
        self._check_loop()
        await self._wait_reported()
        self._queue.raise_failures()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[TransactionRecords]:
        """Collect records, and commit them together at the end of the block, as ``BlockingEventProducer.transaction``.

        A commit that is cancelled may still take place.
        """
        records = TransactionRecords(self._transactions.transactional_id, self._limit, self._tracer)
        yield records
        self._check_loop()
        self._queue.check_open()
        if self._worker is None:
            self._worker = Worker("kes-producer")
        await self._worker.call(self._transactions.commit, records.outputs)  # one at a time, in order

    async def close(self, error: BaseException | None) -> None:
        """Wait for the records on their way (after an error of the block: 5 seconds), and close."""
        if self._queue.is_foreign:  # in a forked child: the records are the parent's
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if error is None else _CLOSE_SECONDS):
                    await self._wait_reported()
        except BaseException:
            self._end(is_loud=False)
            raise
        self._end(is_loud=error is None)

    def _end(self, *, is_loud: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            # On its thread: a commit that was cancelled may still run there, and uses what is closed.
            self._worker.post(self._transactions.close)
            self._worker.abandon()
        try:
            self._queue.close(is_loud=is_loud)
        finally:
            self._progress.notify()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError(
                "this AsyncEventProducer belongs to the event loop on which it was entered, which is another one: use "
                "it there, or enter one on each loop (async with EventProducer(...))"
            )

    async def _wait_reported(self) -> None:
        while self._queue.unreported:  # counts events of the client, too, which come without a record
            self._serve_soon()
            await self._progress.wait()

    async def _put(self, record: Record, settle: Callable[[Delivery], None] | None = None) -> None:
        while not self._queue.take(record, settle):
            self._serve_soon()
            await self._progress.wait()
        self._serve_soon()

    def _serve_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(POLL_SECONDS, self._serve_now)

    def _serve_now(self) -> None:
        self._timer = None
        self._serve()

    def _serve(self) -> None:
        try:
            self._queue.serve(0)
        finally:  # also after an error of a callback in the settings (stats_cb): senders wait for the next look
            if self._queue.unreported:
                self._serve_soon()
            self._progress.notify()


class TransactionRecords:
    """The records of one transaction, before its commit."""

    def __init__(self, transactional_id: str, limit: int, tracer: Tracer | None) -> None:
        if not transactional_id:
            raise ConfigError("a transaction needs a name: EventProducer(transactional_id=...), one per process")
        self.outputs: list[Output] = []
        self._limit = limit
        self._tracer = tracer

    def send(self, topic: str | Record, event: object = None, /, **options: Unpack[RecordOptions]) -> None:
        """Add an event to the transaction. Raises ``EncodeError``, ``RegistrationError``, and ``RecordRefused`` beyond
        ``max_queued_records``."""
        if len(self.outputs) >= self._limit:
            raise RecordRefused(
                f"a transaction of more than {self._limit:,} records: make several of it, or raise max_queued_records"
            )
        record = _record(topic, event, tracer=self._tracer, **options)
        partition = -1 if record.partition is None else record.partition
        headers = None if record.headers is None else [*record.headers]
        value, key = as_bytes(record.value), as_bytes(record.key)
        self.outputs.append(Output(record.topic, value, key, headers, partition, record.timestamp_ms or 0, -1, -1))


def _record(
    topic: str | Record,
    event: object,
    key: str | bytes | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    partition: int | None = None,
    timestamp_ms: int | None = None,
    tracer: Tracer | None = None,
    id: str | bytes | int | None = None,
) -> Record:
    if isinstance(topic, str):
        headers = headers if id is None else with_id(headers, id)
        record = to_record(topic, event, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
    elif event is not None or key is not None or headers or (partition, timestamp_ms, id) != (None,) * 3:
        raise TypeError("a Record is complete: send it without further arguments")
    else:
        record = topic
    if tracer is not None and (carrier := tracer.current()):
        record = msgspec.structs.replace(record, headers=stamped(record.headers, carrier))
    return record
