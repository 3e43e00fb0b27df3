"""Which reader ``records`` takes, and what it says to Spark's connector. No Spark, but for the connector itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.broker import KafkaBroker
from streams.errors import ConfigError
from streams.spark.reading.read_options import read_options
from streams.spark.reading.records import connector_options, records
from tests.spark.log_kit import Log

pytestmark = pytest.mark.spark
SERVERS = {"kafka.bootstrap.servers": "b:1"}


def translated(**options: str) -> dict[str, str]:
    given = {**SERVERS, "subscribe": "t", **options}
    return connector_options(given, read_options(given, stream="maxOffsetsPerTrigger" in options))


def test_options_are_translated() -> None:
    assert translated(startingoffsets="earliest", maxOffsetsPerTrigger="7", stallSeconds="9", types="A") == {
        "kafka.bootstrap.servers": "b:1",
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
        "kafkaConsumer.pollTimeoutMs": "9000",
        "subscribe": "t",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "7",
    }
    assert translated(isolation="read_uncommitted")["kafka.isolation.level"] == "read_uncommitted"
    login = {"kafka.security.protocol": "sasl_ssl", "kafka.ssl.ca.location": "/ca.pem", "kafka.sasl.username": "u"}
    found = translated(**login, **{"kafka.sasl.mechanism": "scram-sha-512", "kafka.sasl.password": 'p"\\'})
    assert found["kafka.security.protocol"] == "SASL_SSL"
    assert (found["kafka.ssl.truststore.type"], found["kafka.ssl.truststore.location"]) == ("PEM", "/ca.pem")
    assert found["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="p\\"\\\\";'
    )
    assert "kafka.sasl.password" not in found


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"idPrefix": "a."}, "no option idPrefix"),
        ({"kafka.socket.timeout.ms": "1"}, r"kafka\.socket\.timeout\.ms is not translated"),
        ({"kafka.sasl.mechanism": "GSSAPI"}, "GSSAPI is not translated"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        translated(**options)


class Session:
    """A session; a reader of it; and a DataFrame, which is known by its format and options."""

    def __init__(self, *, connector: bool = False) -> None:
        self.connector = connector
        self.read = self.readStream = self.schema = self
        self.chosen: tuple[str, dict[str, str]] = ("", {})

    def format(self, name: str) -> Session:
        self.chosen = name, {}
        return self

    def options(self, **options: str) -> Session:
        self.chosen[1].update(options)
        return self

    def load(self) -> Session:
        if self.chosen[0] == "kafka" and not self.connector:
            raise AnalysisException("Failed to find data source: kafka")
        return self


def chosen(session: Any, **more: Any) -> tuple[str, dict[str, str]]:
    found: Any = records(session, "t", servers="b:1", **more)
    name, options = found.chosen
    return name, options


def test_ours_is_taken_where_the_connector_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streams.spark")
    assert chosen(Session()) == ("grt", {"subscribe": "t", **SERVERS})
    assert "t is read by format('grt'): this session has no jar" in caplog.text
    assert chosen(Session(connector=True), reader="grt")[0] == "grt"
    assert chosen(Session(connector=True), options={"idPrefix": "a."})[0] == "grt"
    assert "t is read by format('grt'): it has no option idPrefix" in caplog.text


def test_a_reader_that_is_demanded_and_not_there() -> None:
    with pytest.raises(ConfigError, match="no jar of Spark's Kafka connector"):
        chosen(Session(), reader="connector")
    with pytest.raises(ConfigError, match="it has no option idPrefix"):
        chosen(Session(connector=True), reader="connector", options={"idPrefix": "a."})
    with pytest.raises(ConfigError, match="reader must be auto, connector or grt"):
        chosen(Session(), reader="jvm")
    with pytest.raises(ConfigError, match="unknown option subscripe"):
        chosen(Session(), options={"subscripe": "u"})


@pytest.mark.nightly
@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_readers_give_the_same_rows_and_a_topic_made_again_is_noticed(tmp_path: Path) -> None:
    """The connector needs its jars when the Java machine starts: run alone, or it is skipped."""
    run = pytest.importorskip("benchmarks.spark.run")
    if SparkSession.getActiveSession() is not None:
        pytest.skip("there is a session already, without the connector's jars")
    spark, missing = run.session()
    if missing:
        pytest.skip(missing)
    with KafkaBroker() as broker:
        log, mine = Log(broker.bootstrap_servers), {"servers": broker.bootstrap_servers}
        log.create("in", 2)
        log.create("out")
        log.create("moved")
        log.send("in", range(100), 2, headers=[("__grt__", b"A"), ("__grv__", b"2")])
        log.transactions("x", "in", (["no"], False), (["yes"], True))
        both = [kes_spark.records(spark, "in", reader=name, **mine) for name in ("connector", "grt")]  # type: ignore[arg-type]
        assert both[0].schema.simpleString() == both[1].schema.simpleString()
        rows = [frame.orderBy("partition", "offset").collect() for frame in both]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 101
        some = kes_spark.records(spark, "in", reader="connector", options={"types": "A"}, **mine)
        assert some.count() == 100

        def run_once(reader: Any = "connector", *, to: str = "out") -> None:
            frame = kes_spark.records(
                spark, "in", stream=True, reader=reader, options={"startingOffsets": "earliest"}, **mine
            )
            writer = frame.select("key", "value").writeStream.format("grt").options(**{**SERVERS,
                "kafka.bootstrap.servers": broker.bootstrap_servers, "topic": to, "sink": "s", "sourceTopics": "in",
                "checkpointLocation": str(tmp_path / to)
            })  # fmt: skip
            writer.trigger(availableNow=True).start().awaitTermination()

        def written(to: str = "out") -> int:
            return sum(1 for _ in log.records(to))

        run_once()
        log.send("in", range(10), 2)
        run_once()
        assert written() == 111
        run_once(to="moved")
        log.send("in", range(5), 2)
        run_once("grt", to="moved")  # it goes on where the connector was
        assert written("moved") == 116
        log.send("in", range(4), 2)
        with pytest.raises(Exception, match=r"Expected e\.g\. .*|JSON|json"):
            run_once(to="moved")  # which does not read positions of ours, and says so
        assert written("moved") == 116
        run_once("grt", to="moved")
        assert written("moved") == 120
        log.make_again("in", 2)
        log.send("in", range(200), 2)
        with pytest.raises(Exception, match="source topic in was deleted and recreated"):
            run_once()
        assert written() == 111
