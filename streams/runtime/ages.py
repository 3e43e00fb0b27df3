"""Ages of the events of a partition: of the oldest record that is not committed, and of the last one handled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from streams.core.position import offsets_of
from streams.core.transaction import Transaction
from streams.runtime.partition.worker import PartitionWorker
from streams.statistics import PartitionStatistics


def with_ages(
    found: PartitionStatistics, worker: PartitionWorker, ends: Sequence[int], unsettled: Iterable[Transaction]
) -> PartitionStatistics:
    """Return the figures of a partition with its ages. ``ends``: of its inputs, as far as they are known (-1: not);
    ``unsettled``: transactions, oldest first."""
    host = worker.engine
    now, now_ms = host.now(), host.wall_ms()
    opened = next((txn.opened_at for txn in unsettled if worker.partition in txn.cuts), None)
    topics = [worker.topic_partition.topic, *(spec.topic for spec, _ in host.further_inputs)]
    places = zip(topics, worker.inboxes, offsets_of(worker.position), offsets_of(worker.committed), strict=False)
    lags: dict[str, float] = {}
    for number, (topic, inbox, position, committed) in enumerate(places):
        ages: list[float] = []
        first = inbox.oldest(position)
        if first is not None and first.timestamp_ms >= 0:
            ages.append(max(0.0, (now_ms - first.timestamp_ms) / 1000))
        if opened is not None and committed < position:
            # Of what is handled and not committed only this is known: it was there when its transaction was opened.
            ages.append(max(0.0, now - opened))
        if not ages and first is None and number < len(ends) and 0 <= ends[number] <= position:
            ages.append(0.0)
        if ages:
            lags[topic] = max(ages)
    handled: dict[str, float] = {}
    if worker.last_handled is not None:
        record, at = worker.last_handled
        if record.timestamp_ms >= 0:
            handled[record.topic] = max(0.0, (now_ms - record.timestamp_ms) / 1000 - (now - at))
    return msgspec.structs.replace(found, lag_seconds=lags, event_age_seconds=handled)
