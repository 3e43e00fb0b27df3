"""Spark's errors are the engine's: each code of librdkafka, asked of both. No session of Spark, no broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.clients.consumer import reading_failed
from streams.clients.translate import BLOCKED, NO_SUCH_TOPIC, READING_ENDS, REFUSED, request_failed, transaction_failed
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    OffsetError,
    RecordRefused,
    StreamsError,
    TopicError,
    TransactionFailed,
)
from streams.spark import lane, reader, topic_logs
from streams.spark.kafka import translated
from streams.spark.read_options import read_options
from streams.spark.reader import Range
from streams.spark.topic_logs import LogView
from tests.spark.test_read_settings import Client

pytestmark = pytest.mark.spark

KAFKA = {"bootstrap.servers": "b:1"}
LANE = lane.Lane(identity="l", marker_topic="t", topic="t", kafka=KAFKA)
OPTIONS = read_options({"kafka.bootstrap.servers": "b:1", "subscribe": "t"})
CODES = sorted(
    code
    for code in {getattr(KafkaError, name) for name in dir(KafkaError) if name.lstrip("_").isupper()}
    if isinstance(code, int) and code != KafkaError.NO_ERROR
)


def each_code() -> Iterator[tuple[str, int, KafkaException]]:
    for code in CODES:
        error = KafkaError(code, "why")
        yield error.name(), code, KafkaException(error)


def test_there_are_codes() -> None:
    assert len(CODES) > 150


def test_a_failed_write_is_fenced_or_refused_as_by_the_engine() -> None:
    differ = []
    for name, code, error in each_code():
        found = lane._translated(error, LANE, "w")
        is_fenced = isinstance(found, TransactionFailed) and found.kind == "fenced"
        engine = transaction_failed("commit_transaction", error)
        is_refused = (code in REFUSED or code in BLOCKED) and code not in NO_SUCH_TOPIC  # that is said of the topic
        if is_fenced != (engine.kind == "fenced") or isinstance(found, RecordRefused) != is_refused:
            differ.append(name)
    assert differ == []


def test_a_request_is_made_again_exactly_where_the_engine_makes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_logs.time, "sleep", lambda seconds: None)
    differ = []
    for name, _, error in each_code():
        answers: Iterator[KafkaException | None] = iter([error, None])

        def ask(answers: Iterator[KafkaException | None] = answers) -> str:
            failure = next(answers)
            if failure is not None:
                raise failure
            return "the answer"

        try:
            is_asked_again = LogView(OPTIONS)._patiently(ask, "asking") == "the answer"
        except StreamsError:
            is_asked_again = False
        if is_asked_again != isinstance(request_failed("asking", "b:1", error.args[0]), BrokerUnavailable):
            differ.append(name)
    assert differ == []


def test_refused_credentials_and_missing_topics_are_what_the_engine_calls_them() -> None:
    differ = []
    for name, code, error in each_code():
        found = translated(error, "asking", KAFKA)
        engine = request_failed("asking", "b:1", error.args[0])
        if isinstance(found, ConfigError) != isinstance(engine, ConfigError):
            differ.append(name)
        if isinstance(found, TopicError) != (code in NO_SUCH_TOPIC):
            differ.append(name)
        if isinstance(found, BrokerUnavailable) and not isinstance(engine, BrokerUnavailable):
            differ.append(name)
    assert differ == []


def test_a_read_ends_where_the_engines_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at what a bounded read does not wait for: refused credentials, and records that no attempt can read."""
    monkeypatch.setattr(reader, "client", Client)
    monkeypatch.setattr(reader._RangeReader, "is_planned_topic", lambda reading: False)
    differ = []
    for name, code, error in each_code():
        if code in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._PARTITION_EOF):  # no group is joined
            continue
        engine = reading_failed(error.args[0], "t", 0, 5, "b:1")
        reading = reader._RangeReader(Range("t", 0, 5, 80, "id"), OPTIONS)
        try:
            reading._take_error(error.args[0])
        except OffsetError:
            agrees = isinstance(engine, OffsetError)
        except StreamsError:
            agrees = code in READING_ENDS
        else:
            agrees = reading.ended == (engine is not None)
        if not agrees:
            differ.append(name)
    assert differ == []
