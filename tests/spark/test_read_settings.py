"""What is asked of clients and made of their answers, and what functions make of arguments. No Spark, no broker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from uuid import UUID

import msgspec
import pytest

import streams.spark as kes_spark
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    RecordRefused,
    StreamsError,
    TopicError,
    TransactionFailed,
)
from streams.events import event_type
from streams.kafka.permissions import is_denial
from streams.kafka.wire.answers import PRODUCE, Meaning
from streams.kafka.wire.codes import Code
from streams.kafka.wire.connection import LostConnection
from streams.records import TopicPartition
from streams.spark.kafka import settings_of, translated
from streams.spark.reading import topic_logs
from streams.spark.reading.planning import Bounds, TopicLog
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.topic_logs import LogView
from streams.spark.typed.events import _types_option
from streams.spark.writing import sink_transaction as transaction
from streams.spark.writing.sink import StreamWriter, target_of
from streams.spark.writing.write_options import stream_write_options, write_options
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE
from tests.unit.topics_broker import TopicsBroker, served

pytestmark = pytest.mark.spark
P0 = TopicPartition("t", 0)
KAFKA = {"bootstrap.servers": "b:1"}
TARGET = transaction.WriteTarget(identity="l", marker_topic="t", kafka=KAFKA)


def options(**more: str) -> ReadOptions:
    return read_options({"kafka.bootstrap.servers": "b:1", "subscribe": "t", **more})


@pytest.mark.parametrize(
    ("given", "size", "seconds"),
    [({}, 0, 60), ({}, 100 << 20, 160), ({}, 1 << 40, 900), ({"transaction.timeout.ms": "7000"}, 0, 7)],
)
def test_a_commit_waits_for_its_rows_as_long_as_its_transaction_lasts(
    given: dict[str, str], size: int, seconds: float
) -> None:
    assert transaction._seconds(given, size) == seconds


LATE = "3 messages timed out"


@pytest.mark.parametrize(
    "told",
    [
        transaction._translated(TransactionFailed("flush", "_TIMED_OUT", "unknown", LATE), TARGET, "w"),
        translated(LostConnection(LATE, "_TIMED_OUT"), "w", KAFKA),
    ],
    ids=["write", "read"],
)
def test_what_is_late_is_not_always_the_brokers_fault(told: StreamsError) -> None:
    assert isinstance(told, BrokerUnavailable)
    assert "in time" in str(told)
    assert LATE in str(told)
    assert "the line too slow for" in str(told)


def test_a_setting_that_no_text_can_be_is_told_as_that() -> None:
    with pytest.raises(ConfigError, match="kafka settings: "):
        settings_of({"bootstrap.servers": "b:1", "default.topic.config": "x"}).check()


@pytest.mark.parametrize(("edge", "at"), [("starting", 150), ("ending", 100)])
def test_a_time_behind_an_open_transaction(monkeypatch: pytest.MonkeyPatch, edge: str, at: int) -> None:
    """Records 100 to 149 are older than the time, and not readable yet. A read ends before them, and one that begins
    at this time never gives them."""
    monkeypatch.setattr(LogView, "_patiently", lambda view, ask, doing: {P0: 150})
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
        (lambda: kes_spark.end_offsets("t", options={"subscribe": "u"}), "option subscribe is 'u'"),
    ],
)
def test_an_option_that_says_something_else_than_its_argument(call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call()


NAMES = [*Code.__members__, "_AUTHENTICATION", "_SSL", "_TRANSPORT", "_TIMED_OUT", "_BAD_MSG"]


def named(meaning: Meaning) -> set[str]:
    return {Code(code).name for code, each in PRODUCE.items() if each is meaning}


def test_a_failed_write_is_fenced_or_refused_as_by_the_engine() -> None:
    found = {
        name: transaction._translated(TransactionFailed("flush", name, "abortable", "why"), TARGET, "w")
        for name in NAMES
    }
    fenced = {name for name, error in found.items() if isinstance(error, TransactionFailed) and error.kind == "fenced"}
    assert fenced == named(Meaning.FENCED)
    refused = {name for name, error in found.items() if isinstance(error, RecordRefused)}
    assert refused == named(Meaning.REFUSED) | named(Meaning.BLOCKED)


def test_refused_credentials_and_missing_rights_and_topics_are_told_as_that() -> None:
    found = {name: translated(LostConnection("why", name), "asking", KAFKA) for name in NAMES}
    denied = {name for name in NAMES if is_denial(name)} | {"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED"}
    assert {name for name, error in found.items() if isinstance(error, ConfigError)} == denied
    assert {name for name, error in found.items() if isinstance(error, TopicError)} == {
        "UNKNOWN_TOPIC_OR_PARTITION",
        "UNKNOWN_TOPIC_ID",
    }


@pytest.fixture
def broker() -> Iterator[TopicsBroker]:
    with served(TopicsBroker(brokers=2, topics={"t": 2, "u": 1, "__internal": 1})) as broker:
        broker.topic_id = UUID(int=2**128 - 1)
        yield broker


@pytest.fixture
def view(broker: TopicsBroker) -> Iterator[Callable[..., LogView]]:
    with ExitStack() as views:

        def made(**given: str) -> LogView:
            settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": "t", **given}
            chosen = {name: text for name, text in settings.items() if text}
            parsed = read_options(chosen, stream="commitOffsetsTo" in given)
            return views.enter_context(closing(LogView(parsed)))

        yield made


LOG = TopicLog("/" * 21 + "w", {0: Bounds(2, 7, 9), 1: Bounds(2, 7, 9)})


@pytest.mark.parametrize(
    ("api", "steps", "found"),
    [
        ("Metadata", [0, MUTE], {"t": LOG}),
        ("ListOffsets", [MUTE], {"t": LOG}),
        ("ListOffsets", [GONE, GARBAGE, 6, 75, 78], {"t": LOG}),
        ("Metadata", [0, 3], {}),
    ],
)
def test_what_passes_is_asked_again(
    broker: TopicsBroker,
    view: Callable[..., LogView],
    monkeypatch: pytest.MonkeyPatch,
    api: str,
    steps: list[Any],
    found: dict[str, TopicLog],
) -> None:
    monkeypatch.setattr(topic_logs, "ASK_SECONDS", 0.3)
    broker.answer(api, *steps)
    made = view()
    assert made.logs() == found
    assert made.logs() == {"t": LOG}


def test_topics_are_chosen_by_name_by_pattern_and_by_partition(
    broker: TopicsBroker, view: Callable[..., LogView]
) -> None:
    one = TopicLog(LOG.id, {0: LOG.partitions[0]})
    broker.internal = {"__internal"}
    assert view(subscribe="t,gone").logs() == {"t": LOG}
    pattern = view(subscribe="", subscribePattern=".*")
    assert pattern.logs() == {"t": LOG, "u": one}
    assert view(subscribe="", assign='{"t": [0]}').logs() == {"t": one}
    everything = view(isolation="read_uncommitted").logs()
    assert everything["t"].partitions[0] == Bounds(2, 9, 9)
    with pytest.raises(TopicError, match="topic 't' has no partition 5, it has 2"):
        view(subscribe="", assign='{"t": [0, 5]}').logs()


def test_silence_is_told_and_ends_after_stall_seconds(
    broker: TopicsBroker,
    view: Callable[..., LogView],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(topic_logs, "_QUIET_SECONDS", 0.3)
    broker.answer("ListOffsets", *[6] * 1000)
    with pytest.raises(BrokerUnavailable, match=r"no answer from .* for 3 s \(option stallSeconds\): NOT_LEADER"):
        view(stallSeconds="3").logs()
    (told,) = [record.message for record in caplog.records if "asking for up to 3 s" in record.message]
    assert "no answer in time, the last was: NOT_LEADER_OR_FOLLOWER" in told


@pytest.mark.parametrize(
    ("api", "code", "error", "said"),
    [
        ("Metadata", 29, ConfigError, "not authorised .TOPIC_AUTHORIZATION_FAILED"),
        ("ListOffsets", 29, ConfigError, "not authorised .TOPIC_AUTHORIZATION_FAILED"),
        ("ListOffsets", 42, BrokerUnavailable, "refuses it: INVALID_REQUEST"),
    ],
)
def test_what_does_not_pass_is_told_at_once(
    broker: TopicsBroker, view: Callable[..., LogView], api: str, code: int, error: type[Exception], said: str
) -> None:
    broker.answer(api, *[0] * (api == "Metadata"), *[code] * 100)
    began = time.monotonic()
    with pytest.raises(error, match=said):
        view().logs()
    assert time.monotonic() - began < 30  # stallSeconds are 60


def test_positions_are_committed_for_tools_and_failures_are_logged(
    broker: TopicsBroker, view: Callable[..., LogView], caplog: pytest.LogCaptureFixture
) -> None:
    made = view(commitOffsetsTo="g")
    made.commit({P0: 40})
    assert broker.committed == {0: 40}
    broker.answer("OffsetCommit", 25)
    made.commit({P0: 50})
    assert "positions could not be committed to group g (option commitOffsetsTo): committing at" in caplog.text
    assert "UNKNOWN_MEMBER_ID" in caplog.text
    assert broker.committed == {0: 40}


def test_a_marker_is_read_as_it_is_now(broker: TopicsBroker) -> None:
    """A write is planned: what a transaction holds is not waited for, and a missing right is told at once."""

    def read(topic: str) -> transaction.Stored | None:
        target = dataclasses.replace(TARGET, marker_topic=topic, kafka={"bootstrap.servers": broker.bootstrap_servers})
        return transaction.read_marker(target, "write 'w'", needs_topic=True)

    assert read("t") is None
    broker.committed, broker.text = {0: 7}, "text\0"
    assert read("t") == transaction.Stored(7, "text")
    assert {request.require_stable for _, name, request in broker.requests if name == "OffsetFetch"} == {False}
    with pytest.raises(TopicError, match="topic 'gone' does not exist"):
        read("gone")
    broker.answer("OffsetFetch", 30)
    with pytest.raises(ConfigError, match=r"write 'w': reading the marker: .* not authorised .*Describe on group l"):
        read("t")


def test_columns_of_a_sink_are_checked_when_it_is_made() -> None:
    given = stream_write_options({"bootstrap.servers": "b:1", "topic": "t", "sink": "s"})
    schema = kes_spark.schema_of(msgspec.defstruct("Row", [("value", bytes), ("x", int)]))
    with pytest.raises(ConfigError, match="column x is no part of a record"):
        StreamWriter(given, schema, one_machine=True)


def test_writes_whose_names_run_together_are_two() -> None:
    made = [
        {"bootstrap.servers": "b:1", "topic": topic, "writeId": name} for topic, name in (("a.b", "c"), ("a", "b.c"))
    ]
    first, second = (target_of(write_options(given)) for given in made)
    assert first.identity != second.identity
