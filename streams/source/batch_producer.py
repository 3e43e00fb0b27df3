"""Records of an event on any cluster, outside of transactions, and acknowledged before the event completes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from streams.errors import ConfigError, RecordError
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import Delivery, IncomingRecord, Record
from streams.runtime.async_work.invoke import check_ends
from streams.runtime.async_work.producer_stage import ProducerDefinition, ProducerStage
from streams.runtime.bridge import wait_for
from streams.runtime.partition.event_context import EventContext
from streams.source.event_source import EventSource

StoreT = TypeVar("StoreT")
E = TypeVar("E")
P = TypeVar("P", bound=Callable[..., Any])
Answer = ExecutionState | None
AtTurn = Callable[[EventContext[StoreT], list[Delivery]], Answer | Awaitable[Answer]]


class BatchProducer(Generic[StoreT]):
    """Sends records without a transaction, ahead of the event's turn; the event completes, at its turn, when all of its
    records are acknowledged by all in-sync replicas. Use it for other clusters, and for readers that do not wait for
    transactions. For everything else ``ctx.forward`` is better: it is exactly-once.

    Here records arrive **at least once**: after a crash, a lost partition or an aborted attempt an event is done again,
    and its records are sent again, also to readers that are ``read_committed``. The producer is idempotent: retries of
    its own make no copies, and the records of an input partition reach each target partition in their order, also where
    a broker refuses a batch as too large: it is sent again in smaller ones, and what is behind it waits.

    ``finalizer(ctx, deliveries)`` is a handler like any other: it runs in the order of the partition, has the store,
    forwards, and takes effect exactly once. A ``Delivery`` has its record, and the partition and offset that it got. An
    event without records gets there too, with an empty list. ``on_failure(ctx, deliveries)`` is called in its place
    when at least one has an ``error``: ``RecordRefused`` (it, or its topic, is at fault) or ``BrokerUnavailable`` (not
    acknowledged within ``delivery_timeout_seconds``; it may be there or not). Without it such an event goes to its
    error policy's last word, with the first of the errors.

    ``bootstrap_servers`` and ``client_settings`` are as those of ``EventSourceConfig``. Without an address it is
    connected as the event source is, and ``client_settings`` come on top of the source's. ``max_queued_records``:
    records of one partition that are not acknowledged; beyond that its reading waits, and no other partition's. An
    event with more records goes in alone.

    Make it before the event source starts; it belongs to that source. Raises ``ConfigError``; settings that only the
    client knows are checked when the first record is sent, and stop the source. In a replay nothing is sent.
    """

    def __init__(
        self,
        source: EventSource[StoreT],
        finalizer: AtTurn[StoreT] | None = None,
        *,
        bootstrap_servers: str = "",
        client_settings: Mapping[str, Any] | None = None,
        on_failure: AtTurn[StoreT] | None = None,
        max_queued_records: int = 10_000,
        delivery_timeout_seconds: float = 120.0,
        name: str = "batch-producer",
    ) -> None:
        from streams.kafka.settings import ClientSettings  # with librdkafka: a program that makes none does without

        settings = {} if client_settings is None else dict(client_settings)
        for key in ("message.timeout.ms", "delivery.timeout.ms"):
            if key in settings:
                raise ConfigError(f"kafka setting {key!r} can not be overridden: use delivery_timeout_seconds")
        # Only for its checks: without an address it is that of the source, which is not known before the start.
        ClientSettings(bootstrap_servers or "the-sources:9092", settings)
        if type(max_queued_records) is not int or max_queued_records < 1:
            raise ConfigError(f"max_queued_records is {max_queued_records!r}; it must be a whole number, 1 or more")
        seconds: object = delivery_timeout_seconds  # whatever it is
        if not isinstance(seconds, int | float) or not 0.001 <= delivery_timeout_seconds < 86_400:
            raise ConfigError(
                f"delivery_timeout_seconds is {seconds!r}; it must be a millisecond or more, and less than a day"
            )
        check_ends(f"the producer {name}", "ctx", "deliveries", finalizer=finalizer, on_failure=on_failure)
        self.name = name
        self._source: EventSource[StoreT] = source
        self._definition: ProducerDefinition = ProducerDefinition(
            name=name,
            finalizer=finalizer,
            on_failure=on_failure,
            max_queued_records=max_queued_records,
            delivery_timeout_seconds=delivery_timeout_seconds,
            bootstrap_servers=bootstrap_servers,
            client_settings=settings,
        )

    def register_event_type(
        self,
        event_class: type[E],
        planner: Callable[[IncomingRecord, E], Sequence[Record] | Record | None] | None = None,
        /,
        *,
        on_error: ErrorPolicy | None = None,
    ) -> Callable[[P], P]:
        """Send the records of each event of this class.

        The decorated (or given) function turns ``(record, event)`` into a list of ``Record``s, or a single one, or
        ``None`` (nothing to do: the event completes in its turn, without the finalizer). It runs ahead of the event's
        turn, so it has no store; its exceptions go to ``on_error`` (default: ``config.error_policy``). ``to_record``
        makes a record of an event object. Raises ``RegistrationError``.
        """
        return self._source._declared.handlers.register_planner(
            self._definition, None, _checked, event_class, planner, None, on_error
        )

    async def produce(self, ctx: EventContext[StoreT], records: Sequence[Record]) -> list[Delivery]:
        """Send records for a handler or an interjection that has its turn; returns when all are acknowledged.

        The partition waits meanwhile. Neither finalizer nor ``on_failure`` is called. Raises the first error that a
        record has.
        """
        stage = ctx._host.stages.get(self._definition)
        assert isinstance(stage, ProducerStage)
        return await stage.submit(ctx, records_of(f"the producer {self.name}: produce", list(records)) or [])

    def produce_and_wait(
        self, ctx: EventContext[StoreT], records: Sequence[Record], timeout_seconds: float | None = None
    ) -> list[Delivery]:
        """Send records as ``produce`` does, for a handler registered with ``blocking=True``, on its thread.

        Raises ``TimeoutError`` after ``timeout_seconds`` (records that were sent may arrive all the same), ``Stopped``
        when the event source stops meanwhile, ``RuntimeError`` on the event loop's own thread.
        """
        host = ctx._host
        wait = wait_for if host.connections is None else host.connections.wait_for
        return wait(host.stages.loop, lambda: self.produce(ctx, records), timeout_seconds)


def _checked(what: str, _: IncomingRecord, planned: Any) -> list[Record] | None:
    return records_of(what, planned)


def records_of(what: str, planned: Any) -> list[Record] | None:
    """Turn the answer of a planner into records. Raises ``RecordError``."""
    if planned is None:
        return None
    records = [planned] if isinstance(planned, Record) else planned
    if not isinstance(records, list):
        raise RecordError(f"{what} returned {type(planned).__name__!r}; it must be a list of Record")
    for record in records:
        if not isinstance(record, Record):
            raise RecordError(f"{what} returned a list with {type(record).__name__!r}; it must be a list of Record")
    return records
