"""kafka-event-source: exactly-once event sourcing on Kafka, in Python. The public names; all else is internal.

A name is imported when it is first used, so that a program that needs the vocabulary only (a Spark task, the command
line) does not pay for the engine and its clients.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.core.schedule import MissedRuns
    from streams.core.timers import Timer
    from streams.election import Election, ElectionTerm
    from streams.errors import EventFailure, NotDelivered, NotLeading
    from streams.events import event_type, to_record, upcaster
    from streams.journal.journal import Journal
    from streams.journal.reader import JournalReader
    from streams.journal.replicated import Replicated
    from streams.journal.snapshots import SnapshotFolder
    from streams.journal.sync import SyncJournal
    from streams.journal.term import JournalTerm
    from streams.model.topology import Topology
    from streams.outbox.config import RelayConfig
    from streams.outbox.relay import Relay
    from streams.outbox.stash import AsyncOutbox, Outbox
    from streams.outcomes import DEAD_LETTER, SKIP, STOP, ErrorResponse, ExecutionState, Retry
    from streams.protocols import Codec, JournalledStore, ObservingStore, StateStore
    from streams.records import Change, Delivery, IncomingRecord, Record, TopicPartition
    from streams.runtime.async_work.batch_stage import BatchItem
    from streams.runtime.partition.batch_handlers import BatchContext
    from streams.runtime.partition.event_context import EventContext
    from streams.settings.config import EventSourceConfig
    from streams.settings.groups import GroupConfig, PoolConfig, QueryConfig, QueueConfig, StateConfig, TimeoutConfig
    from streams.settings.jobs import (
        COMPUTE,
        FAST_NETWORK,
        SLOW_NETWORK,
        WIDE_NETWORK,
        BatcherConfig,
        SchedulerConfig,
    )
    from streams.source.async_batcher import AsyncBatcher
    from streams.source.batch_producer import BatchProducer
    from streams.source.event_producer import (
        AsyncEventProducer,
        BlockingEventProducer,
        EventProducer,
        TransactionRecords,
    )
    from streams.source.event_source import EventSource
    from streams.source.jobs import AsyncJobScheduler
    from streams.source.lookups import Lookup
    from streams.source.postgres_sink import PostgresSink, SinkItem
    from streams.statistics import PartitionStatistics, SourceState, SourceStatistics
    from streams.stores.heap import Heap
    from streams.stores.indexes import Index
    from streams.stores.joined import Joined
    from streams.stores.joined_table import JoinedTable, Update
    from streams.stores.named_table import NamedTable
    from streams.stores.read_table import ReadTable
    from streams.stores.several import Stores
    from streams.stores.simple import SimpleStore
    from streams.stores.table import Table
    from streams.stores.windows import LateItem, Window, Windows
    from streams.views.blocking import BlockingView
    from streams.views.global_change_log import GlobalChangeLog, GlobalChangeLogStatistics
    from streams.views.global_table import GlobalTable
    from streams.views.state import ViewState, ViewStatistics
    from streams.views.table import ViewChange, ViewSnapshot
    from streams.views.view import View

__all__ = [
    "COMPUTE",
    "DEAD_LETTER",
    "FAST_NETWORK",
    "SKIP",
    "SLOW_NETWORK",
    "STOP",
    "WIDE_NETWORK",
    "AsyncBatcher",
    "AsyncEventProducer",
    "AsyncJobScheduler",
    "AsyncOutbox",
    "BatchContext",
    "BatchItem",
    "BatchProducer",
    "BatcherConfig",
    "BlockingEventProducer",
    "BlockingView",
    "Change",
    "Codec",
    "Delivery",
    "Election",
    "ElectionTerm",
    "ErrorResponse",
    "EventContext",
    "EventFailure",
    "EventProducer",
    "EventSource",
    "EventSourceConfig",
    "ExecutionState",
    "GlobalChangeLog",
    "GlobalChangeLogStatistics",
    "GlobalTable",
    "GroupConfig",
    "Heap",
    "IncomingRecord",
    "Index",
    "Joined",
    "JoinedTable",
    "Journal",
    "JournalReader",
    "JournalTerm",
    "JournalledStore",
    "LateItem",
    "Lookup",
    "MissedRuns",
    "NamedTable",
    "NotDelivered",
    "NotLeading",
    "ObservingStore",
    "Outbox",
    "PartitionStatistics",
    "PoolConfig",
    "PostgresSink",
    "QueryConfig",
    "QueueConfig",
    "ReadTable",
    "Record",
    "Relay",
    "RelayConfig",
    "Replicated",
    "Retry",
    "SchedulerConfig",
    "SimpleStore",
    "SinkItem",
    "SnapshotFolder",
    "SourceState",
    "SourceStatistics",
    "StateConfig",
    "StateStore",
    "Stores",
    "SyncJournal",
    "Table",
    "TimeoutConfig",
    "Timer",
    "TopicPartition",
    "Topology",
    "TransactionRecords",
    "Update",
    "View",
    "ViewChange",
    "ViewSnapshot",
    "ViewState",
    "ViewStatistics",
    "Window",
    "Windows",
    "event_type",
    "to_record",
    "upcaster",
]

_NAMES = {
    "core.schedule": "MissedRuns",
    "core.timers": "Timer",
    "election": "Election ElectionTerm",
    "errors": "EventFailure NotDelivered NotLeading",
    "events": "event_type to_record upcaster",
    "journal.journal": "Journal",
    "journal.reader": "JournalReader",
    "journal.replicated": "Replicated",
    "journal.snapshots": "SnapshotFolder",
    "journal.sync": "SyncJournal",
    "journal.term": "JournalTerm",
    "model.topology": "Topology",
    "outbox.config": "RelayConfig",
    "outbox.relay": "Relay",
    "outbox.stash": "AsyncOutbox Outbox",
    "outcomes": "DEAD_LETTER ErrorResponse ExecutionState Retry SKIP STOP",
    "protocols": "Codec JournalledStore ObservingStore StateStore",
    "records": "Change Delivery IncomingRecord Record TopicPartition",
    "runtime.async_work.batch_stage": "BatchItem",
    "runtime.partition.batch_handlers": "BatchContext",
    "runtime.partition.event_context": "EventContext",
    "settings.config": "EventSourceConfig",
    "settings.groups": "GroupConfig PoolConfig QueryConfig QueueConfig StateConfig TimeoutConfig",
    "settings.jobs": "BatcherConfig COMPUTE FAST_NETWORK SLOW_NETWORK SchedulerConfig WIDE_NETWORK",
    "source.async_batcher": "AsyncBatcher",
    "source.batch_producer": "BatchProducer",
    "source.event_producer": "AsyncEventProducer BlockingEventProducer EventProducer TransactionRecords",
    "source.event_source": "EventSource",
    "source.jobs": "AsyncJobScheduler",
    "source.lookups": "Lookup",
    "source.postgres_sink": "PostgresSink SinkItem",
    "statistics": "PartitionStatistics SourceState SourceStatistics",
    "stores.heap": "Heap",
    "stores.indexes": "Index",
    "stores.joined": "Joined",
    "stores.joined_table": "JoinedTable Update",
    "stores.named_table": "NamedTable",
    "stores.several": "Stores",
    "stores.read_table": "ReadTable",
    "stores.simple": "SimpleStore",
    "stores.table": "Table",
    "stores.windows": "LateItem Window Windows",
    "views.blocking": "BlockingView",
    "views.global_change_log": "GlobalChangeLog GlobalChangeLogStatistics",
    "views.global_table": "GlobalTable",
    "views.table": "ViewChange ViewSnapshot",
    "views.state": "ViewState ViewStatistics",
    "views.view": "View",
}
_HOME = {name: f"streams.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
