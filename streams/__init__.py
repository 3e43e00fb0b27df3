"""kafka-event-source: exactly-once event sourcing on Kafka, in Python.

Here are the names of a first program. Those of one feature are in its package: ``streams.settings``, ``streams.source``
(inputs, sinks, producers), ``streams.stores``, ``streams.views``, ``streams.journal``, ``streams.outbox``. All else is
internal, but for the modules that the reference lists.

A name is imported when it is first used, so that a program that needs the vocabulary only (a Spark task, the command
line) does not pay for the engine and its clients.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.core.schedule import MissedRuns
    from streams.core.timers import Timer
    from streams.events import event_type, to_record, upcaster
    from streams.model.partitioners import partition_of
    from streams.outcomes import DEAD_LETTER, PARK, SKIP, STOP, ErrorResponse, ExecutionState, Retry
    from streams.records import Delivery, IncomingRecord, Record, TopicPartition
    from streams.runtime.async_work.batch_stage import BatchItem
    from streams.runtime.partition.batch_handlers import BatchContext
    from streams.runtime.partition.event_context import EventContext
    from streams.settings.config import EventSourceConfig
    from streams.source.async_batcher import AsyncBatcher
    from streams.source.batch_producer import BatchProducer
    from streams.source.event_producer import EventProducer
    from streams.source.event_source import EventSource
    from streams.source.jobs import AsyncJobScheduler
    from streams.stores.several import Stores
    from streams.stores.table import Table
    from streams.views.view import View

    # isort: split
    # Names of features; ``import A as A`` and ``import *`` pass them on to a checker.
    from streams.election import Election as Election
    from streams.election import ElectionTerm as ElectionTerm
    from streams.errors import EventFailure as EventFailure
    from streams.errors import NotDelivered as NotDelivered
    from streams.errors import NotLeading as NotLeading
    from streams.journal import Journal as Journal
    from streams.journal import JournalReader as JournalReader
    from streams.journal import JournalTerm as JournalTerm
    from streams.journal import Replicated as Replicated
    from streams.journal import SnapshotFolder as SnapshotFolder
    from streams.journal import SyncJournal as SyncJournal
    from streams.outbox import *  # noqa: F403
    from streams.protocols import Codec as Codec
    from streams.protocols import JournalledStore as JournalledStore
    from streams.protocols import ObservingStore as ObservingStore
    from streams.protocols import StateStore as StateStore
    from streams.records import Change as Change
    from streams.settings import *  # noqa: F403
    from streams.source import *  # noqa: F403
    from streams.statistics import PartitionStatistics as PartitionStatistics
    from streams.statistics import SourceState as SourceState
    from streams.statistics import SourceStatistics as SourceStatistics
    from streams.stores import Heap as Heap
    from streams.stores import Index as Index
    from streams.stores import Joined as Joined
    from streams.stores import JoinedTable as JoinedTable
    from streams.stores import LateItem as LateItem
    from streams.stores import NamedTable as NamedTable
    from streams.stores import ReadTable as ReadTable
    from streams.stores import SimpleStore as SimpleStore
    from streams.stores import Update as Update
    from streams.stores import Window as Window
    from streams.stores import Windows as Windows
    from streams.views import *  # noqa: F403

__all__ = [
    "DEAD_LETTER",
    "PARK",
    "SKIP",
    "STOP",
    "AsyncBatcher",
    "AsyncJobScheduler",
    "BatchContext",
    "BatchItem",
    "BatchProducer",
    "Delivery",
    "ErrorResponse",
    "EventContext",
    "EventProducer",
    "EventSource",
    "EventSourceConfig",
    "ExecutionState",
    "IncomingRecord",
    "MissedRuns",
    "Record",
    "Retry",
    "Stores",
    "Table",
    "Timer",
    "TopicPartition",
    "View",
    "event_type",
    "partition_of",
    "to_record",
    "upcaster",
]

_NAMES = {
    "core.schedule": "MissedRuns",
    "core.timers": "Timer",
    "election": "Election ElectionTerm",
    "errors": "EventFailure NotDelivered NotLeading",
    "events": "event_type to_record upcaster",
    "journal": "Journal JournalReader JournalTerm Replicated SnapshotFolder SyncJournal",
    "model.partitioners": "partition_of",
    "outbox": "AsyncOutbox Outbox Relay RelayConfig",
    "outcomes": "DEAD_LETTER ErrorResponse ExecutionState PARK Retry SKIP STOP",
    "protocols": "Codec JournalledStore ObservingStore StateStore",
    "records": "Change Delivery IncomingRecord Record TopicPartition",
    "runtime.async_work.batch_stage": "BatchItem",
    "runtime.partition.batch_handlers": "BatchContext",
    "runtime.partition.event_context": "EventContext",
    "settings": "BatcherConfig COMPUTE EventSourceConfig FAST_NETWORK GroupConfig Once ParkingConfig PoolConfig "
    "QueryConfig QueueConfig SLOW_NETWORK SchedulerConfig StateConfig TimeoutConfig WIDE_NETWORK header",
    "source": "AggregateRules Answer AsyncBatcher AsyncEventProducer AsyncJobScheduler BatchProducer "
    "BlockingEventProducer EventProducer EventSource JobRun Lookup PartitionChange PostgresSink RecordOptions SinkItem "
    "Topology TopologyHandler TopologyTopic TransactionRecords",
    "statistics": "PartitionStatistics SourceState SourceStatistics",
    "stores": "Heap Index Joined JoinedTable LateItem NamedTable ReadTable SimpleStore Stores Table Update Window "
    "Windows",
    "views": "BlockingView GlobalChangeLog GlobalChangeLogStatistics GlobalTable View ViewChange ViewSnapshot "
    "ViewState ViewStatistics",
}
"""By module: the names of the list above, and those of features, which stood in it before 0.2 and are served on."""

if not TYPE_CHECKING:  # a checker sees the imports above, and so a name that is misspelled
    __getattr__ = LazyNames(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _OldPaths:
    """The last finder of modules: the import of a path from before 0.2 fails with that of today."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("streams."):
            from streams.model.moved import refuse

            refuse(name, sys._getframe(1))


if not any(getattr(finder, "__name__", "") == _OldPaths.__name__ for finder in sys.meta_path):  # imported again
    sys.meta_path.append(_OldPaths)
