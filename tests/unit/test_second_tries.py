"""Only the broker's own hiccups have a second try: the rule of ``tests/conftest.py``."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.broker.diagnosis import timed_out
from streams.errors import EmbeddedBrokerError, TransactionFailed
from streams.kafka.translate import broker_unavailable
from streams.testing.oracle import Report
from tests.conftest import is_hiccup

HICCUPS = [
    timed_out(60, "a line of its log"),
    EmbeddedBrokerError("formatting a log folder took more than 60 s; is the machine overloaded?"),
    EmbeddedBrokerError("no node of the cluster answers who keeps group g within 30 s"),
    TransactionFailed("send_offsets", "COORDINATOR_LOAD_IN_PROGRESS", "unknown", "still loading"),
    KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE, "not yet")),
    broker_unavailable("asking", "a:1", "NOT_COORDINATOR"),
]
FINAL = [
    AssertionError("waited 60 s in vain: the others have everything"),
    AssertionError("the log says COORDINATOR_LOAD_IN_PROGRESS"),
    AssertionError(f"{Report(1, 1, 1, ('out[0], key k: 1 record is not there',))}"),
    TimeoutError(),
    ConnectionRefusedError("refused"),  # outside of a fixture
    broker_unavailable("asking", "localhost:1", "localhost:1/1: Connection refused"),
    EmbeddedBrokerError("the broker ended while it started"),
    KafkaException(KafkaError(KafkaError._TIMED_OUT, "late")),
    TransactionFailed("commit_transaction", "PRODUCER_FENCED", "fenced", "another one"),
]


def test_hiccups_are_known_by_their_texts() -> None:
    assert [error for error in HICCUPS if not is_hiccup(error)] == []
    assert [error for error in FINAL if is_hiccup(error)] == []


def test_only_what_runs_beside_real_parts_has_one(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("flaky") is None
    assert pytestconfig.getoption("max_suite_reruns") == 4
