"""``GlobalChangeLog``: all partitions of a compacted topic, followed in any process, as a read-only view."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar

import msgspec

from streams.errors import ConfigError, RegistrationError
from streams.outcomes import STOP
from streams.protocols import Codec
from streams.runtime.reading.view_follower import LogPartitionStatistics, OnError, Receiver, to_changes
from streams.settings.config import EventSourceConfig
from streams.statistics import SourceState
from streams.views.global_table import GlobalTable, make_table
from streams.views.topic_reader import reader_of

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


class GlobalChangeLogStatistics(msgspec.Struct, frozen=True):
    """State of a global change log at one moment. ``caught_up``: each partition has met the end of its log once.
    ``partitions`` is empty before the start."""

    state: SourceState
    topic: str
    caught_up: bool
    partitions: tuple[LogPartitionStatistics, ...]


class GlobalChangeLog:
    """Follows all partitions of a compacted topic, in any process and without a group, and hands every change to
    receivers: prices, rates, customers, or the state of an event source, as a view for all readers::

        rates = GlobalChangeLog("rates", bootstrap_servers="localhost:9092")
        table = rates.table(key=str, value=Rate)
        async with rates:
            await rates.wait_caught_up(timeout_seconds=60)
            await source.consume_events()                # handlers call table.get("EUR")

    Every partition is read from the start of its log, ``read_committed``, and followed until ``stop``. Each receiver
    gets each record once, in the order of its partition; partitions have no order among each other. Tombstones come
    as changes without value. Records of the toolkit in an event source's changelog (keys that start with
    ``RESERVED_KEY_PREFIX``) are left out, so ``GlobalChangeLog.of(source.config)`` is a live view of its stores.
    Nothing is written, no offset is committed.

    **Threads.** One daemon thread reads, and calls the receivers, one at a time; another one asks the cluster about
    the topic. ``start``, ``stop``, ``wait_...`` and ``statistics`` belong to one event loop; ``pause`` and ``resume``
    may be called from any thread, receivers included. A receiver that is slow holds up all partitions, never the loop.

    **When something is wrong.** After an outage of the cluster the log goes on by itself. It *fails* when a receiver
    raises or a record cannot be decoded and ``on_error`` is a stop (``RecordError``, ``DecodeError``, with
    ``topic[partition]@offset``), when its place in a log was deleted, the topic was recreated, or a partition was not
    read on for longer than tombstones live (``OffsetError``), and when the topic is gone or may not be read
    (``TopicError``). Nothing is received any more then, tables refuse to be read, and the error is raised by
    ``wait_caught_up``, ``wait_stopped``, and ``async with``, whose body is cancelled.

    ``on_error``: a ``Retry`` (retries, then stop or skip), or a function ``(record, error) -> ErrorResponse``,
    on the reading thread, that answers ``CONTINUE`` or ``FAIL_CONSUMER``. ``client_settings`` are librdkafka's, as in
    ``EventSourceConfig``. ``client_id`` also stands for the ``group.id`` that librdkafka wants to have (no group is
    joined). ``topic_timeout_seconds``: how long to wait for a missing topic. ``only_compacted``: a topic that is not
    compacted is refused (``TopicError``), where there is a warning else.

    An object runs once. Raises ``ConfigError``.
    """

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str = "",
        client_settings: Mapping[str, Any] | None = None,
        on_error: OnError = STOP,
        client_id: str = "kes",
        topic_timeout_seconds: float = 30.0,
        only_compacted: bool = False,
    ) -> None:
        self.topic = topic
        self._reader = reader_of(
            topic,
            bootstrap_servers=bootstrap_servers,
            client_settings=client_settings,
            on_error=on_error,
            client_id=client_id,
            topic_timeout_seconds=topic_timeout_seconds,
            only_compacted=only_compacted,
        )

    @classmethod
    def of(cls, config: EventSourceConfig, **settings: Any) -> GlobalChangeLog:
        """Make a global change log of the changelog of an event source: a live view of all its stores. ``settings`` are
        those of this class. The event source must have made its topics, or make them within
        ``topic_timeout_seconds``."""
        config = config.resolved()
        common = {"bootstrap_servers": config.bootstrap_servers, "client_settings": config.client_settings}
        return cls(config.changelog, **{**common, **settings})

    def __repr__(self) -> str:
        return f"GlobalChangeLog({self.topic!r}, bootstrap_servers={self._reader.addresses!r}, {self.state.value})"

    # -- receivers -----------------------------------------------------------------------------------------------------

    def add_receiver(self, receiver: R) -> R:
        """Add one of these, before the start; usable as decorator. Returns it.

        * an object with ``receive_change(change)``, like every ``StateStore``; if it has ``revoked``, that is called
          once at the end;
        * a plain function ``receiver(record)`` that gets the ``IncomingRecord`` (``value is None``: a tombstone), and
          so partition, offset, time and headers;
        * a ``GlobalTable`` of this topic, as ``table`` makes one.

        All are called on the reading thread, one at a time. Raises ``RegistrationError`` for anything else, and after
        the start: a later receiver would miss earlier records.
        """
        self._check_not_started()
        given: Any = receiver
        if isinstance(given, GlobalTable):
            self._reader.receivers.append(given.receiver())
            return receiver
        name = getattr(given, "__qualname__", None) or type(given).__name__
        change = getattr(given, "receive_change", None)
        if _is_plain(change) and not isinstance(given, type):
            self._reader.receivers.append(Receiver(name, to_changes(change), getattr(given, "revoked", None)))
        elif change is None and callable(given) and _is_plain(given) and not isinstance(given, type):
            self._reader.receivers.append(Receiver(name, given, None))
        else:
            raise RegistrationError(
                f"{name} can not receive changes: it must be an object with the method receive_change(change), or a "
                "plain function of one record (no coroutine: it runs on the reading thread)"
            )
        return receiver

    def table(
        self,
        *,
        key: type[K],
        value: type[V],
        ordered: bool = False,
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
    ) -> GlobalTable[K, V]:
        """Make a table that this log keeps up to date; before the start. The arguments are those of ``Table.factory``.
        Event classes are read in every version that has upcasters. Each value is decoded once when it comes, so that
        ``on_error`` decides about a bad one. Raises ``ConfigError``, ``RegistrationError``."""
        self._check_not_started()
        return self.add_receiver(make_table(self.topic, key, value, ordered, key_codec, value_codec))

    def _check_not_started(self) -> None:
        if self.state is not SourceState.CREATED:
            raise RegistrationError(
                f"the global change log of {self.topic} was started: a receiver that comes now would miss what was "
                "received before; add it before the start, or to another GlobalChangeLog"
            )

    # -- its life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the topic and begin to read; returns when that is under way, not when it has caught up.

        Waits up to ``topic_timeout_seconds`` for the topic (``TopicError``) and for a broker (``BrokerUnavailable``).
        ``ConfigError``: librdkafka or the cluster refuses the settings. ``RegistrationError``: it was started before,
        or has no receiver. After an error it may be tried again. ``Stopped``: ``stop`` was called meanwhile.
        """
        await self._reader.start()

    async def stop(self) -> None:
        """Stop reading; returns when no receiver runs any more and ``revoked`` was called. A receiver that does not
        come back within ten seconds is left to itself (logged). Both threads end, the one for requests when the answer
        that it waits for has come or is overdue. Repeating is harmless; does not raise a failure."""
        await self._reader.stop()

    async def wait_stopped(self) -> None:
        """Wait until it was stopped, or failed: raises that error then. Returns at once if it was not started."""
        await self._reader.wait_stopped()

    async def __aenter__(self) -> Self:
        """Start, and cancel the body if the log fails. Enter and leave it in the same task."""
        await self._reader.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises the error that the log failed with, unless the body ended with an error of its own."""
        await self._reader.__aexit__(kind, error, trace)

    # -- how far it is -------------------------------------------------------------------------------------------------

    async def wait_caught_up(self, timeout_seconds: float | None = None, *, settle_seconds: float = 1.0) -> bool:
        """Wait until everything is received that was committed in the topic when this was called.

        The ends of all partitions are read from the cluster first: the *last stable offset* (LSO), up to which every
        transaction has ended, and the high watermark. The receivers have had every committed record below the LSO
        when this returns; aborted records, markers, compacted holes and empty partitions count as passed.

        Records between the two belong to open transactions, or stand behind one, or were committed just now (a commit
        is answered before its markers are written, so the LSO may be behind it for a moment). Such transactions get
        ``settle_seconds`` to end. ``True``: everything below the high watermark of the call was received, and so every
        record committed by then. ``False``: an open transaction still holds something back (logged); it comes by itself
        when the transaction ends, at the latest by its timeout. With ``math.inf`` the answer is ``True`` or
        ``NotCaughtUp``; with 0 nothing above the LSO is waited for.

        Raises ``NotCaughtUp`` after ``timeout_seconds`` (``None``: waits on, progress is logged), ``BrokerUnavailable``
        if no broker answered until then, ``Stopped``, and the error that the log failed with. Paused partitions are
        waited for; records that ``resume(at_offset=...)`` jumped over count as received.
        """
        return await self._reader.wait_caught_up(timeout_seconds, settle_seconds)

    async def wait_for_positions(self, positions: Mapping[int, int], timeout_seconds: float | None = None) -> None:
        """Wait until everything below these offsets, by partition, was received: one beyond the offset of a record that
        was written, or where another reader is. What an open transaction holds back is waited for.

        Raises ``ConfigError`` for a partition that the topic does not have, ``NotCaughtUp`` after ``timeout_seconds``
        (``None``: waits on), and as ``wait_caught_up``.
        """
        await self._reader.wait_for_positions(positions, timeout_seconds)

    async def wait_changed(self, timeout_seconds: float) -> None:
        """Wait until state or progress have news, or so long. Spurious news are possible."""
        await self._reader.wait_changed(timeout_seconds)

    @property
    def is_cut_off(self) -> bool:
        """Check whether the cluster has not answered the last request about the topic; there is one every five
        seconds, for as long at most."""
        return self._reader.is_cut_off

    def statistics(self) -> GlobalChangeLogStatistics:
        """Return the present state in figures."""
        caught_up, partitions = self._reader.statistics()
        return GlobalChangeLogStatistics(self.state, self.topic, caught_up, partitions)

    @property
    def state(self) -> SourceState:
        """Return the state of the log in its life cycle."""
        return self._reader.state

    # -- pausing -------------------------------------------------------------------------------------------------------

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Hand over nothing of these partitions (``None``: of all present ones) until ``resume``. The record that
        receivers have at this moment is the last one. From any thread. Raises ``ConfigError`` for an unknown partition,
        ``Stopped``.

        After a pause for longer than the topic's ``delete.retention.ms`` (a day by default) the log fails when it reads
        on (``OffsetError``): compaction may have removed tombstones meanwhile, and their keys would stay in the view.
        """
        self._reader.running().pause(partitions)

    def resume(self, partitions: Collection[int] | int | None = None, at_offset: int | None = None) -> None:
        """Undo ``pause``: each goes on after the last record that was received. With ``at_offset`` (for one partition,
        paused or not) it goes on there: receivers get the records from there on again, and never those that were jumped
        over. An offset that is not in the log makes the log fail with ``OffsetError``. From any thread. Raises as
        ``pause``."""
        if at_offset is not None and not isinstance(partitions, int):
            raise ConfigError("at_offset is an offset of one partition: resume(partition, at_offset)")
        chosen = [partitions] if isinstance(partitions, int) else partitions
        self._reader.running().resume(chosen, at_offset)


def _is_plain(function: object) -> TypeGuard[Callable[..., object]]:
    """Check that the function does its work when it is called, not when its result is awaited."""
    call = getattr(function, "__call__", None)  # noqa: B004  # of an object, it is what may be a coroutine
    return call is not None and not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(call)
