"""Names that users import: those of a first program in ``streams``, those of a feature in its package, and all that
``streams`` listed before 0.2 are served there as before."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import streams

BEFORE = """
COMPUTE DEAD_LETTER FAST_NETWORK SKIP SLOW_NETWORK STOP WIDE_NETWORK AsyncBatcher AsyncEventProducer AsyncJobScheduler
AsyncOutbox BatchContext BatchItem BatchProducer BatcherConfig BlockingEventProducer BlockingView Change Codec Delivery
Election ElectionTerm ErrorResponse EventContext EventFailure EventProducer EventSource EventSourceConfig ExecutionState
GlobalChangeLog GlobalChangeLogStatistics GlobalTable GroupConfig Heap IncomingRecord Index Joined JoinedTable Journal
JournalReader JournalTerm JournalledStore LateItem Lookup MissedRuns NamedTable NotDelivered NotLeading ObservingStore
Outbox PartitionStatistics PoolConfig PostgresSink QueryConfig QueueConfig Record Relay RelayConfig Replicated Retry
SchedulerConfig SimpleStore SinkItem SnapshotFolder SourceState SourceStatistics StateConfig StateStore Stores
SyncJournal Table TimeoutConfig Timer TopicPartition Topology TransactionRecords Update View ViewChange ViewSnapshot
ViewState ViewStatistics Window Windows event_type to_record upcaster
"""
FEATURES = ("journal", "outbox", "settings", "source", "stores", "views")


def test_every_name_of_before_is_served() -> None:
    assert [name for name in BEFORE.split() if not hasattr(streams, name)] == []
    assert set(streams.__all__) <= {*BEFORE.split(), "PARK", "partition_of"}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_package_exports_the_names_of_its_feature(feature: str) -> None:
    package = import_module(f"streams.{feature}")
    for name in package.__all__:
        assert getattr(package, name) is getattr(streams, name, getattr(package, name)), name
    with pytest.raises(AttributeError, match=rf"module 'streams.{feature}' has no attribute 'Nothing'"):
        _ = package.Nothing
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from streams.{feature} import Nothing")


def test_a_checker_sees_the_names_that_are_served_and_no_others() -> None:
    """What ``TYPE_CHECKING`` imports is a list beside the one of the names: they must be equal."""
    for package in ("", *(f".{name}" for name in FEATURES)):
        module = import_module(f"streams{package}")
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        typed: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streams.") and node.module:
                stars = import_module(node.module).__all__ if node.names[0].name == "*" else []
                typed |= {*stars, *(alias.name for alias in node.names)} - {"*", "LazyNames", "refuse"}
        served = {name for text in streams._NAMES.values() for name in text.split()} if not package else module.__all__
        assert typed == set(served), module.__name__
