"""Declarations of an application: the event source with its handlers, inputs and jobs, and producers of events.

``declarations`` has what is declared, ``running`` what runs, ``requests`` what is requested of it; ``event_source`` has
the methods that users call, over these three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.model.answers import Answer
    from streams.model.topology import Topology, TopologyHandler, TopologyTopic
    from streams.records import PartitionChange
    from streams.runtime.partition.job_runs import JobRun
    from streams.source.aggregates import AggregateRules
    from streams.source.async_batcher import AsyncBatcher
    from streams.source.batch_producer import BatchProducer
    from streams.source.event_producer import (
        AsyncEventProducer,
        BlockingEventProducer,
        EventProducer,
        RecordOptions,
        TransactionRecords,
    )
    from streams.source.event_source import EventSource
    from streams.source.jobs import AsyncJobScheduler
    from streams.source.lookups import Lookup
    from streams.source.postgres_sink import PostgresSink, SinkItem

__all__ = [
    "AggregateRules",
    "Answer",
    "AsyncBatcher",
    "AsyncEventProducer",
    "AsyncJobScheduler",
    "BatchProducer",
    "BlockingEventProducer",
    "EventProducer",
    "EventSource",
    "JobRun",
    "Lookup",
    "PartitionChange",
    "PostgresSink",
    "RecordOptions",
    "SinkItem",
    "Topology",
    "TopologyHandler",
    "TopologyTopic",
    "TransactionRecords",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "aggregates": "AggregateRules",
            "async_batcher": "AsyncBatcher",
            "batch_producer": "BatchProducer",
            "event_producer": "AsyncEventProducer BlockingEventProducer EventProducer RecordOptions TransactionRecords",
            "event_source": "EventSource",
            "jobs": "AsyncJobScheduler",
            "lookups": "Lookup",
            "postgres_sink": "PostgresSink SinkItem",
            "streams.model.answers": "Answer",
            "streams.records": "PartitionChange",
            "streams.runtime.partition.job_runs": "JobRun",
            "streams.model.topology": "Topology TopologyHandler TopologyTopic",
        },
    )
