"""Replays without a broker: what stops one, what is refused, and how a source comes to the executors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams import (
    STOP,
    EventContext,
    EventSource,
    EventSourceConfig,
    Table,
)
from streams.core.parking import ParkedKeys, queued_record
from streams.errors import ConfigError, EventFailure, StreamsError
from streams.runtime.changelog import encode_timer, timer_key
from streams.spark.replaying import bootstrapping, replay_task
from tests.spark import tokens
from tests.spark.replay_kit import encoded
from tests.spark.replay_sources import PARTITIONS, Failing, Moved, bank, named

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
HEADERS = "headers array<struct<key: string, value: binary>>"
COLUMNS = f"topic string, partition int, offset long, key binary, value binary, {HEADERS}"


def rows(spark: SparkSession, *events: Any, topic: str = "moves", partition: int = 0) -> DataFrame:
    data = []
    for offset, event in enumerate(events):
        value, headers = encoded(event)
        data.append((topic, partition, offset, event.account.encode(), value, headers))
    return spark.createDataFrame(data, COLUMNS)


def balances(found: kes_spark.Replay) -> dict[bytes, int]:
    return {bytes(row.key): msgspec.json.decode(bytes(row.value))["cents"] for row in found.stores.collect()}


def test_a_record_that_stops_the_source_stops_its_partition(spark: SparkSession) -> None:
    """What the other policies make of a record: ``unit/test_runtime_replay.py``."""
    one = Moved("a", 1, "EUR")
    source = bank(on_error=STOP)
    both = rows(spark, one, Failing("a", 1), one).unionAll(rows(spark, one, one, partition=2))
    with pytest.raises(EventFailure, match=r"moves\[0\]@1 \(Failing\) failed after 1 attempt.*attempt 1 of a"):
        kes_spark.replay(source, both)
    with kes_spark.replay(source, both, on_stop="keep") as found:
        assert list(found.stopped) == [0]
        assert found.offsets == {0: 1, 2: 2}  # the record will be met again
        assert [(row.cause.partition, row.cause.offset) for row in found.outputs.collect()] == [(0, 0), (2, 0), (2, 1)]
        assert found.records == 3


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda df: df.withColumn("partition", f.lit(PARTITIONS)),
            f"a row has partition {PARTITIONS}, but the source 'moves' has {PARTITIONS}",
        ),
        (lambda df: df.withColumn("topic", f.lit("other")), "a row is of topic other, not of 'moves'"),
        (lambda df: df.drop("offset", "partition"), "needs the columns offset, partition"),
        (lambda df: df.drop("headers"), "needs the column headers or type"),
        (lambda df: df.withColumn("value", f.lit("x")), "column value must be binary, not string"),
    ],
)
def test_rows_that_are_not_those_of_the_source_are_refused(
    spark: SparkSession, change: Callable[[DataFrame], DataFrame], problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        kes_spark.replay(bank(), change(rows(spark, Moved("a", 1, "EUR"), Moved("a", 2, "EUR"))))


def test_a_state_with_two_positions_of_a_partition_is_refused(spark: SparkSession) -> None:
    stores = spark.createDataFrame([], "partition int, key binary, value binary, type string")
    positions = spark.createDataFrame([(0, 1), (0, 2)], "partition int, offset long")
    with pytest.raises(StreamsError, match="more than one position of partition 0"):
        kes_spark.replay(bank(), rows(spark, Moved("a", 1, "EUR")), state=kes_spark.State(stores, positions))


def test_a_changelog_with_parked_keys_is_no_beginning_of_another_source(spark: SparkSession) -> None:
    """Their events are below its positions: nothing would ever handle them."""
    parked = ParkedKeys()
    changes = parked.begun(queued_record("t", 1, 5, None, b"k", b"value"), "me", 1, 1, "", "", 7, 16)
    parked.apply(changes)
    changes |= parked.keys[b"k"].followed_by(queued_record("t", 2, 5, None, b"k", b"value" * 9), 16)
    written = {timer_key(name): encode_timer(timer) for name, timer in changes.items() if timer is not None}
    assert len(written) > 3  # in pieces
    written |= {b"k": b"1", timer_key("other"): b"{}", timer_key("@park/x"): b"{}"}
    records = [(0, number, key, value) for number, (key, value) in enumerate(written.items())]
    changelog = spark.createDataFrame(records, "partition int, offset long, key binary, value binary")
    with kes_spark.changelog_state(changelog) as state:
        assert (state.stores.count(), state.parked and state.parked.count()) == (1, 2)
        with pytest.raises(ConfigError, match="2 events of parked keys wait in the changelog"):
            kes_spark.bootstrap(bank(), state)
        with pytest.raises(ConfigError, match="parked is 'keep'; use 'refuse' or 'leave out'"):
            kes_spark.bootstrap(bank(), state, parked="keep")  # type: ignore[arg-type]


def test_streams_and_states_that_are_none_are_refused(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="replay takes a batch DataFrame"):
        kes_spark.replay(bank(), stream)
    good = rows(spark, Moved("a", 1, "EUR"))
    with pytest.raises(ConfigError, match="state is DataFrame; give a Replay"):
        kes_spark.replay(bank(), good, state=good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state is DataFrame; give a Replay"):
        kes_spark.bootstrap(bank(), good)  # type: ignore[arg-type]


def test_rows_that_have_type_and_version_only(spark: SparkSession) -> None:
    """As files may have them: the headers are made again."""
    plain = rows(spark, Moved("a", 1, "EUR")).drop("headers", "topic").withColumn("type", f.lit("Moved"))
    older = plain.withColumns({"value": f.lit(b'{"account":"b","cents":3}'), "version": f.lit(1), "offset": f.lit(7)})
    with kes_spark.replay(bank(), plain.withColumn("version", f.lit(2)).unionByName(older)) as found:
        assert balances(found) == {b"a": 1, b"b": 3}


def test_interjections_are_refused_unless_they_are_nothing(spark: SparkSession) -> None:
    source = bank()
    source.schedule_interjection(lambda ctx: None, every=1.0)
    with pytest.raises(ConfigError, match=r"scheduled interjections \(.*interjections='ignore'"):
        kes_spark.replay(source, rows(spark, Moved("a", 1, "EUR")))
    with kes_spark.replay(source, rows(spark, Moved("a", 1, "EUR")), interjections="ignore") as found:
        assert balances(found) == {b"a": 1}


def test_a_task_whose_rows_are_cut_off_fails() -> None:
    """An iterator that ends is not the end of the rows: only the row behind the last one is."""
    there, _ = replay_task.travelling(bank())
    with pytest.raises(RuntimeError, match="cut off"):
        list(replay_task.replayer(there, wall_ms=0)(iter([])))


# ------------------------------------------------------------------------------------------------- travelling


def test_a_source_travels_by_its_name(spark: SparkSession) -> None:
    name = "tests.spark.replay_sources:named"
    for source in (named, name):
        there, program = replay_task.travelling(source)
        assert (there.name, there.program, there.arrive().fingerprint) == (name, None, program.fingerprint)
    with kes_spark.replay("tests.spark.replay_sources:bank", rows(spark, Moved("a", 1, "EUR"))) as found:
        assert balances(found) == {b"a": 1}


def test_a_source_that_was_changed_here_is_not_taken_for_the_one_over_there() -> None:
    there, _ = replay_task.travelling("tests.spark.replay_sources:named")
    changed = msgspec.structs.replace(
        there, fingerprint=(*there.fingerprint[:-2], ("New", "handler"), *there.fingerprint[-1:])
    )
    with pytest.raises(ConfigError, match=r"is another one on the executors \(it differs in: \(default\), New\)"):
        changed.arrive()


def test_what_is_no_source_or_cannot_be_pickled_is_refused() -> None:
    unpicklable = bank()
    lock = threading.Lock()
    unpicklable._declared.router.routes[b"Moved"].handler = lambda ctx, event: lock.acquire()
    for source, told in (
        ("tests.spark.no_such", "cannot import"),
        ("tests.spark.replay_sources:PARTITIONS", "neither"),
        (unpicklable, r"cannot be sent to executors: .*module that the executors can import"),
    ):
        with pytest.raises(ConfigError, match=told):
            replay_task.travelling(source)


def test_classes_that_only_this_process_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function or ``__main__``, such as a script, has is not what executors have."""

    class Local(msgspec.Struct):
        account: str

    of_a_script = msgspec.defstruct("In", [("account", str)], module="__main__")
    for cls, told in ((Local, "Local exists in this process only"), (of_a_script, r"In exists .* only \(__main__\)")):
        source: EventSource[Any] = EventSource(EventSourceConfig(group_id="g", topic="moves", num_partitions=1))
        source.register_event_type(cls, lambda ctx, event: None)
        monkeypatch.setattr("__main__.source", source, raising=False)
        with pytest.raises(ConfigError, match=told + ".*'module:attribute'"):
            replay_task.travelling(source)


def test_secrets_do_not_travel() -> None:
    source = bank(client_settings={"sasl.password": "hunter2"}, bootstrap_servers="there:9092")
    there, program = replay_task.travelling(source)
    assert there.program is not None
    assert "hunter2" not in repr(msgspec.structs.asdict(there.program.config))
    assert program.config.bootstrap_servers == ""


def test_a_bootstrap_signs_in_by_the_token_function_of_its_source() -> None:
    sasl = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": tokens.alice}
    config = bank(client_settings={**sasl, "compression.level": 3}, bootstrap_servers="127.0.0.1:9").config
    kafka = bootstrapping._target(config).kafka
    assert tokens.signing_in(kafka).count(".") == 2
    assert kafka["compression.level"] == "3"


def test_handlers_in_a_closure_travel(spark: SparkSession) -> None:
    config = EventSourceConfig(group_id="g", topic="moves", num_partitions=1)
    factor = 7
    source = EventSource(config, Table.factory(key=str, value=int))

    @source.register_event_type(Moved)
    def on_moved(ctx: EventContext[Table[str, int]], event: Moved) -> None:
        ctx.store.put(event.account, event.cents * factor)

    with kes_spark.replay(source, rows(spark, Moved("a", 6, "EUR"))) as replayed:
        assert [row.value for row in replayed.table(key=str, value=int).collect()] == [42]
