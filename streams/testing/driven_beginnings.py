"""The beginning of a ``TestDriver``'s source, as ``kes offsets start`` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streams.errors import ConfigError, OffsetError
from streams.runtime.changelog import BeginRecord, beginning
from streams.testing.driver_base import Driving

if TYPE_CHECKING:
    from streams.stores.foreign import ForeignRow


class DrivenBeginnings(Driving):
    """The part of ``TestDriver`` about where its source begins."""

    def begin(
        self,
        at: Mapping[int, int],
        inputs: Mapping[str, Mapping[int, int]] | None = None,
        *,
        rows: Sequence[ForeignRow] = (),
        take: Callable[[Any, ForeignRow], None] | None = None,
    ) -> None:
        """Begin at these offsets of the source's topic, and of other inputs, as ``kes offsets start`` does; partitions
        without one begin at their start. For a driver made with ``start=False``, before ``start``. ``rows`` of another
        program come along: ``take`` puts each into the store of its partition. Raises ``ConfigError`` for a source that
        has begun, or an input that always begins at its start, and ``OffsetError`` for a place that is not in the
        log."""
        self._check_open()
        world, config = self._world, self._world.config
        broker = world.broker
        plain = [name for name, spec in world.inputs_read.items() if not spec.is_own and spec.table is None]
        given: dict[str, Mapping[int, int]] = {config.topic: at, **{name: {} for name in plain}}
        for topic, offsets in (inputs or {}).items():
            if topic not in plain:
                raise ConfigError(f"{topic!r} is no further input that can begin anywhere")
            given[topic] = offsets
        if any(broker.log(config.changelog, number).end for number in self._partitions()):
            raise ConfigError("the source has begun already: make the driver with start=False, and call begin first")
        places: dict[int, dict[str, int]] = {}
        for topic, offsets in given.items():
            for number in offsets:
                self._check_partition(number)
            for number in self._partitions():
                log = broker.log(topic, number)
                offset = places.setdefault(number, {})[topic] = offsets.get(number, log.start)
                if not log.start <= offset <= log.end:
                    raise OffsetError(f"{topic}[{number}]: {offset} is not in the log, {log.start} to {log.end}")
        ids = {topic: broker.identity(topic).topic_id for topic in (*given, config.changelog)}
        for number, found in places.items():
            texts = {topic: f"{number}@{offset}" for topic, offset in found.items()}
            began = BeginRecord(how="start", at=found, places=texts, by="driver.begin", at_ms=broker.wall_ms())
            begin, position = beginning(began, number, ids, ids[config.changelog])
            for key, value in (begin, *self._taken(number, rows, take).items(), position):
                broker.append(config.changelog, number, key, value, None)
            for topic, offset in found.items():
                broker.offsets[broker.offset_key(topic, number)] = offset

    def _taken(
        self, number: int, rows: Sequence[ForeignRow], take: Callable[[Any, ForeignRow], None] | None
    ) -> dict[bytes, bytes]:
        """Return the entries that the rows of a partition make in its store."""
        if not rows:
            return {}
        if take is None:
            raise ConfigError("rows need take: a function of a store and a row")
        store = self._world.restored_store(number)  # empty: there is no changelog yet
        store.begin([])
        for row in rows:
            if row.partition == number:
                take(store, row)
        store.end()
        return dict(store.dump())
