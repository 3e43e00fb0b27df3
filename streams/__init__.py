"""kafka-event-source: exactly-once event sourcing on Kafka, in Python. The public names; all else is internal."""

from __future__ import annotations

from streams.config import EventSourceConfig, PoolConfig
from streams.event_source import EventSource
from streams.events import event_type, upcaster
from streams.outcomes import DEAD_LETTER, SKIP, STOP, ErrorPolicy, ErrorResponse, ExecutionState
from streams.protocols import Codec, JournalledStore, StateStore
from streams.records import Change, IncomingRecord, Record, TopicPartition
from streams.runtime.event_context import EventContext
from streams.statistics import PartitionStatistics, SourceState, SourceStatistics
from streams.stores.simple import SimpleStore
from streams.stores.table import Table

__all__ = [
    "DEAD_LETTER",
    "SKIP",
    "STOP",
    "Change",
    "Codec",
    "ErrorPolicy",
    "ErrorResponse",
    "EventContext",
    "EventSource",
    "EventSourceConfig",
    "ExecutionState",
    "IncomingRecord",
    "JournalledStore",
    "PartitionStatistics",
    "PoolConfig",
    "Record",
    "SimpleStore",
    "SourceState",
    "SourceStatistics",
    "StateStore",
    "Table",
    "TopicPartition",
    "event_type",
    "upcaster",
]
