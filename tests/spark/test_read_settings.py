"""What is asked of clients and made of their answers, and what functions make of arguments. No Spark, no broker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

import streams.spark as kes_spark
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    OffsetError,
    RecordRefused,
    StreamsError,
    TopicError,
    TransactionFailed,
)
from streams.events import event_type
from streams.kafka.reading.consumer import reading_failed
from streams.kafka.translate import (
    BLOCKED,
    FENCED,
    NO_SUCH_TOPIC,
    NOT_AUTHORIZED,
    READING_ENDS,
    REFUSED,
    request_failed,
)
from streams.records import TopicPartition
from streams.spark.kafka import client, translated
from streams.spark.reading import reader, topic_logs
from streams.spark.reading.planning import Bounds, TopicLog
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.reader import Range
from streams.spark.reading.topic_logs import LogView
from streams.spark.typed.events import _types_option
from streams.spark.writing import sink_transaction as transaction
from streams.spark.writing.sink import StreamWriter, target_of
from streams.spark.writing.write_options import stream_write_options, write_options

pytestmark = pytest.mark.spark
P0 = TopicPartition("t", 0)
KAFKA = {"bootstrap.servers": "b:1"}
TARGET = transaction.WriteTarget(identity="l", marker_topic="t", kafka=KAFKA)


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
        translated(KafkaException(KafkaError(KafkaError._TIMED_OUT, LATE)), "w", KAFKA),
    ],
    ids=["write", "read"],
)
def test_what_is_late_is_not_always_the_brokers_fault(told: StreamsError) -> None:
    assert isinstance(told, BrokerUnavailable)
    assert "in time" in str(told)
    assert LATE in str(told)
    assert "the line too slow for" in str(told)


@pytest.mark.parametrize(
    "code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION]
)
def test_offsets_that_the_log_does_not_hold(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(reader, "client", Client)
    monkeypatch.setattr(reader._RangeReader, "_id_now", lambda reading, seconds: "id")
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


@pytest.mark.parametrize("name", ["error_cb", "default.topic.config"])
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
        (lambda: kes_spark.end_offsets("t", options={"subscribe": "u"}), "option subscribe is 'u'"),
    ],
)
def test_an_option_that_says_something_else_than_its_argument(call: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call()


CODES = sorted(
    code
    for code in {getattr(KafkaError, name) for name in dir(KafkaError) if name.lstrip("_").isupper()}
    if isinstance(code, int) and code != KafkaError.NO_ERROR
)


def each_code() -> Iterator[tuple[str, int, KafkaException]]:
    assert len(CODES) > 150
    for code in CODES:
        error = KafkaError(code, "why")
        yield error.name(), code, KafkaException(error)


def test_a_failed_write_is_fenced_or_refused_as_by_the_engine() -> None:
    differ = []
    for name, code, _ in each_code():
        found = transaction._translated(TransactionFailed("flush", name, "abortable", "why"), TARGET, "w")
        is_fenced = isinstance(found, TransactionFailed) and found.kind == "fenced"
        is_refused = (code in REFUSED or code in BLOCKED) and code not in NO_SUCH_TOPIC  # that is said of the topic
        if is_fenced != (code in FENCED) or isinstance(found, RecordRefused) != is_refused:
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
            is_asked_again = LogView(options())._patiently(ask, "asking") == "the answer"
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
        # A missing right is an error of the topic there, of the settings here.
        if isinstance(found, ConfigError) != (isinstance(engine, ConfigError) or code in NOT_AUTHORIZED):
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
        reading = reader._RangeReader(Range("t", 0, 5, 80, "id"), options())
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


def answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Admin:
    """A client whose answers come from ``script``: ``None`` never comes, an error code is raised."""

    def __init__(self, script: Iterator[int | None]) -> None:
        self._script = script

    def __len__(self) -> int:
        return 0  # as the real one has it: a client with nothing to do counts as false

    def describe_topics(self, topics: Any, request_timeout: float) -> dict[str, Future[Any]]:
        step = next(self._script)
        if step is None:
            return {"t": Future()}
        if step:
            return {"t": answered(KafkaException(KafkaError(step)))}
        return {"t": answered(SimpleNamespace(topic_id="x", is_internal=False, partitions=[SimpleNamespace(id=0)]))}

    def list_offsets(self, wanted: Any, isolation_level: Any, request_timeout: float) -> dict[Any, Future[Any]]:
        return {place: answered(SimpleNamespace(offset=7)) for place in wanted}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int | None], list[Admin]]:
    """What the clients answer, in order, and the clients that were made."""
    steps: list[int | None] = []
    made: list[Admin] = []
    answers = iter(lambda: steps.pop(0) if steps else 0, "never")

    def client(kind: Any, settings: Any, more: Any = None) -> Admin:
        made.append(Admin(answers))
        return made[-1]

    monkeypatch.setattr(topic_logs, "client", client)
    monkeypatch.setattr(topic_logs, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(topic_logs, "GRACE_SECONDS", 0.05)
    return steps, made


LOGS = {"t": TopicLog("x", {0: Bounds(7, 7, 7)})}


@pytest.mark.parametrize(
    ("steps", "found", "clients"),
    [
        ([None], LOGS, 2),
        ([KafkaError._TIMED_OUT], LOGS, 2),
        ([KafkaError._TRANSPORT, None, KafkaError.NOT_LEADER_FOR_PARTITION], LOGS, 4),
        ([KafkaError.UNKNOWN_TOPIC_OR_PART], {}, 1),
    ],
)
def test_what_passes_is_asked_again_with_another_client(
    script: tuple[list[int | None], list[Admin]], steps: list[int | None], found: Any, clients: int
) -> None:
    """One client serves all questions as long as it answers: one that is dropped while it is asked never does."""
    script[0].extend(steps)
    view = LogView(options(stallSeconds="1"))
    assert view.logs() == found
    assert view.logs() == LOGS
    assert len(script[1]) == clients


def test_silence_is_told_and_ends_after_stall_seconds(
    script: tuple[list[int | None], list[Admin]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topic_logs, "_QUIET_SECONDS", 0.3)
    script[0].extend([None] * 100)
    with pytest.raises(BrokerUnavailable, match=r"no answer from b:1 for 1 s \(option stallSeconds\)"):
        LogView(options(stallSeconds="1")).logs()
    (told,) = [record.message for record in caplog.records if "no answer from b:1 yet" in record.message]
    assert "up to 1 s (option stallSeconds)" in told


def test_what_does_not_pass_is_told_at_once(script: tuple[list[int | None], list[Admin]]) -> None:
    script[0].append(KafkaError.SASL_AUTHENTICATION_FAILED)
    with pytest.raises(ConfigError, match=r"refuses the credentials"):
        LogView(options(stallSeconds="1")).logs()


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
