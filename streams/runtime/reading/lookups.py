"""The lookups of one member: whole topics in memory, one reader each, shared by all partitions; and the promise that a
partition never looks into an older table than it did before.

A lookup is no part of a transaction. What keeps it from running backwards are positions, one for each partition of its
topic. Each offset record of a partition says how far the tables here were when it was sealed (``beside``): nothing that
was handled before has seen more. The next owner of the partition has tables that are as far.

* After a planned move that is all, if the donor knows the lookups: it has sealed its last record behind everything that
  it looked into. Of one that does not, the record only says how far another member was once: a take-over then.
* After a crash something may have been looked into without a record. So a take-over waits for the last stable offsets
  as well, which it requests behind the fence: the dead cannot have seen more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import le
from typing import Any, Final, Protocol

import anyio
import msgspec
from msgspec import UNSET, Raw, UnsetType

from streams.core.position import Position
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    OffsetError,
    RecordError,
    StreamsError,
    TopicError,
)
from streams.records import IncomingRecord
from streams.runtime.changelog import LOOKUP_PREFIX, LookupPosition, OffsetRecord
from streams.runtime.ports import LogClients, LookupTopic
from streams.runtime.reading.followed_topic import loop_time
from streams.runtime.reading.log_reader import LogReader
from streams.runtime.reading.view_follower import OnError, Receiver
from streams.statistics import LookupStatistics

_log = logging.getLogger(__name__)

LOST_SECONDS: Final = 10.0
"""A recorded position is awaited for so many seconds. Then the ends of the log are looked at: it may have lost
records."""
PAUSE_SECONDS: Final = 1.0
"""Two tries at the start are so many seconds apart, while the broker does not answer."""

FurtherFields = Callable[[int, Position], tuple[str, str, Raw | UnsetType]]


class LookupRows(Protocol):
    """The table of a lookup (``global_table.GlobalTable``)."""

    def receive(self, record: IncomingRecord) -> None: ...
    def revoked(self) -> None: ...


class DeclaredLookup(LookupTopic[LookupRows], Protocol):
    """A lookup as it is declared (``lookups.Lookup``, which documents the settings)."""

    @property
    def on_error(self) -> OnError: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def may_be_made_anew(self) -> bool: ...


class _Reading:
    """One lookup of this member: its table, and the reader that fills it. ``waits``: take-overs that wait for it."""

    def __init__(self, declared: DeclaredLookup, clients: LogClients) -> None:
        self.declared = declared
        self.rows = declared.table()
        self.reader = LogReader(declared.topic, clients, declared.on_error, 30.0, only_compacted=True)
        # Without ``fail``: after a failure the table may be read until the source has stopped. Otherwise handlers would
        # fail meanwhile, and their events meet error policies.
        self.reader.receivers.append(Receiver(f"the lookup {declared.topic}", self.rows.receive, self.rows.revoked))
        self.waits = 0

    def seen(self, writer: str) -> LookupPosition:
        """Return the position up to which rows may have been looked into so far, for an offset record of this
        writer."""
        # The second offset of each place counts: a row that is just coming in may have been seen.
        return LookupPosition(self.reader.topic_id, tuple(seen for _, seen in self.reader.positions), writer)

    def reaches(self, position: LookupPosition | None) -> bool:
        """Check that the table is as far as this. One in another topic is only reached if that is allowed."""
        if position is None:
            return True
        if position.topic_id != self.reader.topic_id:
            return self.declared.may_be_made_anew
        # The first offset of each place counts: a row that is just coming in may not be there yet.
        received = [received for received, _ in self.reader.positions]
        # With more partitions than here the topic has grown, and this member has not noticed yet.
        return len(position.offsets) <= len(received) and all(map(le, position.offsets, received))

    async def wait_stable(self) -> None:
        """Wait until the table has everything that is committed now."""
        with self._waiting():
            await self.reader.wait_stable(self.declared.timeout_seconds)

    async def wait_for(self, position: LookupPosition, where: object) -> None:
        """Wait until the table is as far as handlers of the partition ``where`` have looked. Raises ``OffsetError``
        when it never will be."""
        topic, reader = self.declared.topic, self.reader
        if position.topic_id != reader.topic_id:
            raise OffsetError(
                f"{where}: its handlers have looked into the topic {topic} with the id {position.topic_id}, which was "
                f"deleted: the topic of that name has the id {reader.topic_id}. Restore the topic; or, if it is filled "
                f"anew on purpose, declare source.lookup({topic!r}, ..., may_be_made_anew=True)"
            )
        goals = dict(enumerate(position.offsets))
        with self._waiting():
            try:
                await reader.wait_for_positions(goals, min(LOST_SECONDS, self.declared.timeout_seconds))
            except NotCaughtUp:
                # The reader may be slow, or the log may have lost the position: only its ends tell.
                marks = await reader.wait_stable(self.declared.timeout_seconds)
                for number, goal in goals.items():
                    if number in marks and marks[number].end < goal:
                        raise OffsetError(
                            f"{where}: its handlers have looked into {topic}[{number}] up to offset {goal}, but that "
                            f"ends at {marks[number].end}: the topic has lost records. Restore it; or delete it, fill "
                            f"it anew, and declare source.lookup({topic!r}, ..., may_be_made_anew=True)"
                        ) from None
                await reader.wait_for_positions(goals, self.declared.timeout_seconds)
            except ConfigError as error:  # a topic loses no partition: this broker does not know a new one yet
                raise BrokerUnavailable(f"the lookup {error}; handlers of {where} have looked into more") from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waits += 1
        began = loop_time()
        try:
            yield
        except NotCaughtUp as error:
            if self.reader.is_cut_off or self.reader.cut_off_until >= began:  # its time was not that of the table
                raise BrokerUnavailable(str(error)) from error
            raise NotCaughtUp(
                f"the lookup {error}. Its timeout_seconds in source.lookup(...) is the time that a partition waits"
            ) from error
        finally:
            self.waits -= 1

    def statistics(self) -> LookupStatistics:
        is_complete, partitions = self.reader.statistics()
        return LookupStatistics(
            topic=self.declared.topic,
            state=self.reader.state,
            is_complete=is_complete,
            is_cut_off=self.reader.is_cut_off,
            is_awaited=self.waits > 0,
            records=sum(one.records for one in partitions),
            records_left=sum(one.lag for one in partitions),
            size_bytes=sum(one.size_bytes for one in partitions),
            skipped=sum(one.skipped for one in partitions),
        )


class Lookups:
    """The lookups of one run. On the loop, but for ``table``. Without any, every method does nothing at once."""

    def __init__(
        self, declared: Collection[DeclaredLookup] = (), connect: Callable[[str], LogClients] | None = None
    ) -> None:
        """``connect`` makes the clients of a topic."""
        assert connect is not None or not declared
        self._readings = {} if connect is None else {one.topic: _Reading(one, connect(one.topic)) for one in declared}

    async def start(self) -> None:
        """Begin to read, and wait until all tables are complete. Waits for a broker that does not answer. Raises
        ``TopicError``, ``NotCaughtUp``, and what a reader fails with."""
        # All begin before the first one is waited for: they are read side by side.
        for reading in self._readings.values():
            await _answered(reading.reader.start)
        for reading in self._readings.values():
            await _answered(reading.wait_stable)

    async def stop(self) -> None:
        """Stop reading; the tables refuse to be read from then on."""
        with anyio.CancelScope(shield=True):
            for reading in self._readings.values():
                await reading.reader.stop()

    def on_failure(self, fail: Callable[[BaseException], None]) -> None:
        """Have ``fail`` called with the error when a lookup cannot be read on, or now if one cannot."""

        def failed(reading: _Reading) -> None:
            error = reading.reader.failure
            kind = type(error) if isinstance(error, OffsetError | RecordError | TopicError) else StreamsError
            failure = kind(f"the lookup {reading.declared.topic} cannot be read on: {error}")
            failure.__cause__ = error
            fail(failure)

        for reading in self._readings.values():
            reading.reader.on_failure(partial(failed, reading))

    def table(self, declared: LookupTopic[Any]) -> Any | None:
        """Return the table of a declared lookup; ``None``: it is of another source. Any thread."""
        reading = self._readings.get(getattr(declared, "topic", ""))
        return reading.rows if reading is not None and reading.declared is declared else None

    # -- positions -----------------------------------------------------------------------------------------------------

    def beside(self, writer: str, further_fields: FurtherFields) -> FurtherFields:
        """Return the function that makes the fields of this writer's offset records, with the positions of the lookups
        among those of the inputs; itself without lookups."""

        def with_lookups(partition: int, position: Position) -> tuple[str, str, Raw | UnsetType]:
            source_id, changelog_id, inputs = further_fields(partition, position)
            carried: dict[str, Any] = {} if inputs is UNSET else msgspec.json.decode(inputs, type=dict[str, Raw])
            # The position is that of the sealing, and not of the event: handlers have looked further since, and the
            # next owner must not look into an older table.
            carried |= {f"{LOOKUP_PREFIX}{topic}": reading.seen(writer) for topic, reading in self._readings.items()}
            return source_id, changelog_id, Raw(msgspec.json.encode(carried))

        return with_lookups if self._readings else further_fields

    def reach(self, record: OffsetRecord | None) -> bool:
        """Check that the tables are as far as handlers have looked by this record. ``False`` also for what has to be
        refused: ``wait_for`` does."""
        known = self._known(record)
        return all(self._readings[topic].reaches(position) for topic, position in known.items())

    def reach_donor(self, record: OffsetRecord) -> bool:
        """Check that the tables are as far as the donor with this last record has looked, and that it knows all lookups
        here. Where it does not, others before it may have looked further than the record says."""
        known = self._known(record)
        is_known = all(topic in known and known[topic].writer == record.writer for topic in self._readings)
        return is_known and self.reach(record)

    async def wait_for(self, record: OffsetRecord | None, where: object) -> None:
        """Wait until the tables are as far as the handlers of the partition ``where`` have looked by this record.
        Raises ``OffsetError``, ``NotCaughtUp`` after the lookup's ``timeout_seconds``, ``BrokerUnavailable``, and what
        a reader fails with."""
        for topic, position in self._known(record).items():
            if not self._readings[topic].reaches(position):
                await self._readings[topic].wait_for(position, where)

    async def wait_stable(self) -> None:
        """Wait until the tables have everything that is committed now. Raises as ``wait_for``."""
        for reading in self._readings.values():
            await reading.wait_stable()

    def statistics(self) -> tuple[LookupStatistics, ...]:
        """Return the figures of each lookup, in the order of declaration."""
        return tuple(reading.statistics() for reading in self._readings.values())

    def positions(self) -> dict[str, list[tuple[int, bool]]]:
        """Return, by topic and partition, the offset up to which everything was received, and whether that is held."""
        figures = {topic: reading.reader.statistics()[1] for topic, reading in self._readings.items()}
        return {topic: [(one.position, one.paused) for one in found] for topic, found in figures.items()}

    def _known(self, record: OffsetRecord | None) -> Mapping[str, LookupPosition]:
        """Return the positions that a record names of the lookups here."""
        if record is None or not self._readings:
            return {}
        found = {topic: record.position_of_lookup(topic) for topic in self._readings}
        return {topic: position for topic, position in found.items() if position is not None}


NO_LOOKUPS: Final = Lookups()


async def _answered(step: Callable[[], Any]) -> None:
    """Take a step of the start, again while the broker does not answer."""
    while True:
        try:
            await step()
        except BrokerUnavailable as error:
            _log.warning("waiting for the broker: %s", error)
            await anyio.sleep(PAUSE_SECONDS)
        else:
            return
