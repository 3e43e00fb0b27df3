"""What a read asks of its clients, and what functions make of their arguments. No session of Spark, no broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

import streams.spark as kes_spark
from streams.errors import BrokerUnavailable, ConfigError, OffsetError
from streams.events import event_type
from streams.records import TopicPartition
from streams.spark import lane, lanes, reader, topic_logs
from streams.spark.kafka import client, translated
from streams.spark.markers import WriteRequest
from streams.spark.planning import Bounds, TopicLog
from streams.spark.read_options import ReadOptions, read_options
from streams.spark.reader import Range
from streams.spark.topic_logs import LogView
from streams.spark.typed import _types_option

pytestmark = pytest.mark.spark
P0 = TopicPartition("t", 0)


def options(**more: str) -> ReadOptions:
    return read_options({"kafka.bootstrap.servers": "b:1", "subscribe": "t", **more})


class Told(Exception):
    """Ends a call that has said enough."""


class Client:
    """A client of any kind, which the broker does not contradict. Its commit tells what it was asked for."""

    def __init__(self, kind: Any, kafka: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        self.settings = {**kafka, **(settings or {})}

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None

    def committed(self, places: list[Any], timeout: float) -> list[Any]:
        return [SimpleNamespace(offset=-1001, error=None)]

    def position(self, places: list[Any]) -> list[Any]:
        return [SimpleNamespace(offset=50)]

    def get_watermark_offsets(self, *given: Any, **named: Any) -> tuple[int, int]:
        return 60, 100

    def commit_transaction(self, *seconds: float) -> None:
        raise Told(self.settings, seconds)


@pytest.mark.parametrize(
    ("given", "size", "expected"),
    [
        ({}, 0, 60_000),
        ({}, 100 << 20, 160_000),
        ({}, 1 << 40, 900_000),
        ({"transaction.timeout.ms": "7000"}, 0, "7000"),
    ],
)
def test_a_commit_waits_for_its_rows_as_long_as_its_transaction_lasts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], size: int, expected: int | str
) -> None:
    monkeypatch.setattr(lane, "client", Client)
    monkeypatch.setattr(lane, "partition_count", lambda *asked: 1)
    where = lane.Lane(identity="l", marker_topic="t", topic="t", kafka={"bootstrap.servers": "b:1", **given})
    request = WriteRequest(write_id="w", run="r", rows=0)
    with pytest.raises(Told) as told:
        lane.write_lane(where, request, list, size=size)
    settings, seconds = told.value.args
    assert settings["transaction.timeout.ms"] == settings["message.timeout.ms"] == expected
    assert seconds == (), "the client's own limit is that of the transaction"


@pytest.mark.parametrize(
    "settled", [lane._translated, lambda error, where, doing: translated(error, doing, where.kafka)]
)
def test_what_is_late_is_not_always_the_brokers_fault(settled: Any) -> None:
    late = KafkaException(KafkaError(KafkaError._TIMED_OUT, "3 messages timed out"))
    told = settled(late, lane.Lane(identity="l", marker_topic="t", topic="t", kafka={"bootstrap.servers": "b:1"}), "w")
    assert isinstance(told, BrokerUnavailable)
    assert "in time" in str(told)
    assert "3 messages timed out" in str(told)
    assert "the line too slow for" in str(told)


@pytest.mark.parametrize(
    "code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION]
)
def test_offsets_that_the_log_does_not_hold(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(reader, "client", Client)
    monkeypatch.setattr(LogView, "topic_id", lambda view, topic: "id")
    reading = reader._RangeReader(Range("t", 0, 5, 80, "id"), options())
    with pytest.raises(OffsetError, match=r"records from offset 50 are gone .* the log has 60 to 100 now"):
        reading._take_error(KafkaError(code))


def test_settings_of_the_user_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has a value of its own here; what the protocol needs is refused as an option."""
    given = {"fetch.queue.backoff.ms": "7", "queued.max.messages.kbytes": "100", "reconnect.backoff.max.ms": "9"}
    mine = options(**{f"kafka.{name}": value for name, value in given.items()})

    def made(kind: Any, kafka: dict[str, Any], settings: dict[str, Any] | None = None) -> Any:
        raise Told({**kafka, **(settings or {})})

    monkeypatch.setattr(reader, "client", made)
    monkeypatch.setattr(topic_logs, "client", made)
    for ask in (lambda: reader._RangeReader(Range("t", 0, 0, 5, "id"), mine), lambda: LogView(mine)._client()):
        with pytest.raises(Told) as told:
            ask()
        settings = told.value.args[0]
        assert {name: settings[name] for name in given if name in settings}.items() <= given.items()
        assert settings["reconnect.backoff.max.ms"] == "9"


@pytest.mark.parametrize("name", ["error_cb", "oauth_cb", "default.topic.config"])
def test_a_setting_that_no_text_can_be_is_told_as_that(name: str) -> None:
    with pytest.raises(ConfigError, match=r"an option kafka\.\* is wrong"):
        client(Consumer, {"bootstrap.servers": "b:1", "group.id": "g", name: "x"})


@pytest.mark.parametrize(("edge", "at"), [("starting", 150), ("ending", 100)])
def test_a_time_behind_an_open_transaction(monkeypatch: pytest.MonkeyPatch, edge: str, at: int) -> None:
    """Records 100 to 149 are older than the time, and not readable yet. A read ends before them, and one that begins
    at this time never gives them."""
    monkeypatch.setattr(LogView, "_offsets", lambda view, *asked: [{P0: 150}])
    mine = options(**{f"{edge}Timestamp": "5"})
    logs = {"t": TopicLog("x", {0: Bounds(0, 100, 200)})}
    found = LogView(mine).resolve(mine.starting if edge == "starting" else mine.ending, logs)
    assert found.at == {P0: at}


@event_type("Refunded, later")
class Refunded(msgspec.Struct):
    cents: int


class Sold(msgspec.Struct):
    cents: int


def test_a_type_is_skipped_where_it_is_read_unless_the_option_cannot_say_its_name() -> None:
    assert (_types_option(Sold), _types_option(Refunded), _types_option([Sold])) == ("Sold", None, None)


NOBODY: Any = None


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: kes_spark.read_events(NOBODY, Sold, topic="t", options={"Subscribe": "u"}), "option subscribe is 'u'"),
        (lambda: kes_spark.read_events(NOBODY, Sold, topic="t", options={"types": "Other"}), "option types is 'Other'"),
        (lambda: kes_spark.write(NOBODY, write_id="w", topic="t", options={"topic": "u"}), "option topic is 'u'"),
        (lambda: kes_spark.write(NOBODY, write_id="w", topic="t", options={"writeid": "v"}), "option writeId is 'v'"),
        (
            lambda: kes_spark.write_lanes(NOBODY, 1, sink="s", lanes=1, options={"sink": "z"}),
            "option sink is 'z', but the call says 's'",
        ),
        (lambda: kes_spark.end_offsets("t", options={"subscribe": "u"}), "option subscribe is 'u'"),
    ],
)
def test_an_option_that_says_something_else_than_its_argument(call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call()


def test_lanes_listen_to_what_an_operator_says_in_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(settings: Any, plan: Any) -> None:
        raise Told(plan)

    class Rows:
        columns = ("value",)
        schema = kes_spark.schema_of(msgspec.defstruct("Bytes", [("value", bytes)]))

        def select(self, names: list[str]) -> Rows:
            return self

    monkeypatch.setattr(lanes, "_pin", pinned)
    said = {"replaceQuery": "old", "lastWrittenBatch": "q:3", "bootstrap.servers": "b:1"}
    rows: Any = Rows()
    with pytest.raises(Told) as told:
        kes_spark.write_lanes(rows, None, sink="s", lanes=1, topic="t", options=said)
    plan = told.value.args[0]
    assert (plan.replaces, plan.last_written) == ("old", ("q", 3))
