"""Typed events by a schema registry, which the driver alone asks."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.events import event_type_of
from streams.formats import BySchema, registry
from tests.spark.conftest import MakeTopic
from tests.spark.schema_events import REGISTRY, Balance, Deposited, Read
from tests.spark.test_typed_events import connector, good
from tests.spark.typed_events import Withdrawn
from tests.spark.typed_kit import frame
from tests.unit.scripted_registry import Server, scripted

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
AT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
OLD = json.dumps(
    {
        "type": "record", "name": "Deposited", "namespace": "sent",
        "fields": [{"name": "account", "type": "string"}, {"name": "cents", "type": "int"}],
    }
)  # fmt: skip
DEPOSITS, BALANCES = (
    BySchema(REGISTRY, subjects=["sent-deposits-value"]),
    BySchema(REGISTRY, subjects=["sent-balances-value"]),
)


class Script:
    """The versions of each subject, oldest first, as pairs of an id and a text."""

    def __init__(self) -> None:
        codecs: list[Any] = [event_type_of(cls).codec for cls in (Deposited, Balance)]
        deposited, balance = (codec.schema.text for codec in codecs)
        self.subjects = {"sent-deposits-value": [(5, OLD), (7, deposited)], "sent-balances-value": [(8, balance)]}

    def answer(self, request: Any) -> tuple[int, Any]:
        """All of an API's answer that is looked at."""
        found = re.fullmatch(r"/subjects/([^/]+)(?:/versions(?:/(\d+))?)?", request.path)
        versions = self.subjects.get(found[1]) if found else None
        if versions is None:
            return 404, {"error_code": 40401, "message": "Subject not found"}
        assert found is not None
        if request.command == "POST":
            return 200, {"id": versions[-1][0]}
        if found[2] is None:
            return 200, [*range(1, len(versions) + 1)]
        number, text = versions[int(found[2]) - 1]
        return 200, {
            "id": number,
            "schema": text,
            "schemaType": "JSON" if found[1] == "sent-balances-value" else "AVRO",
        }


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture(autouse=True)
def server(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A registry whose address no worker has: they were started before."""
    with scripted() as server:
        server.answer = script.answer
        monkeypatch.setenv(registry.URL_VARIABLE, server.url)
        for name in ("_address", "_client", "_found"):
            monkeypatch.setattr(REGISTRY, name, None)
        for cls in (Deposited, Balance):
            monkeypatch.setattr(event_type_of(cls).codec, "prefix", b"")
        yield server


def old(number: int, cents: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + b"\2a" + bytes([2 * cents])


def test_rows_are_written_and_read_back_and_tasks_ask_nothing(spark: SparkSession, server: Server) -> None:
    events = [Deposited("a", 5, AT, ["x"]), Deposited("b", 6)]
    encoded = kes_spark.encode(frame(spark, events), Deposited, key="account")
    balances = kes_spark.encode(frame(spark, [Balance("a", 5)]), Balance, key="account")
    asked = len(server.requests)
    values = [bytes(row["value"]) for row in encoded.collect()]
    assert values == [event_type_of(Deposited).encode(event) for event in events]
    assert {value[:5] for value in values} == {b"\0\0\0\0\7"}
    [balance] = [bytes(row["value"]) for row in balances.collect()]
    assert balance == b'\0\0\0\0\x08{"account":"a","cents":5}'
    assert len(server.requests) == asked

    df = connector(spark, [(values[0], None), (old(5, 9), None), (old(9, 9), None)])
    for found in (
        kes_spark.events(df, Deposited, types=DEPOSITS),
        kes_spark.events(df.where("offset < 2"), [Deposited], types=DEPOSITS).select("`sent.Deposited`.*", "_error"),
    ):
        asked = len(server.requests)
        rows = found.collect()
        assert [(row["account"], row["cents"], row["tags"], row["_error"]) for row in rows[:2]] == [
            ("a", 5, ["x"], None), ("a", 9, [], None)]  # fmt: skip
        assert rows[0]["at"] == AT.replace(tzinfo=None)
        assert len(server.requests) == asked
    [row] = kes_spark.events(connector(spark, [(balance, None)]), Balance, types=BALANCES).collect()
    assert (row["account"], row["cents"]) == ("a", 5)


def test_an_id_that_the_driver_does_not_know_is_named_and_known_to_the_next_query(
    spark: SparkSession, script: Script, server: Server
) -> None:
    df = connector(spark, [(old(5, 1), None), (old(9, 2), None)])
    rows = kes_spark.events(df, [Deposited], types=DEPOSITS).collect()
    assert rows[0]["_error"] is None
    assert rows[1]["_error"].startswith("the schema 9 was not sent with the job: the driver fetches those")
    assert (rows[1]["_meta"]["partition"], rows[1]["_meta"]["offset"]) == (3, 1)
    with pytest.raises(PySparkException, match=r"t\[3\]@1: the schema 9 was not sent with the job"):
        kes_spark.events(df, Deposited, types=DEPOSITS, on_error="fail").collect()
    script.subjects["sent-deposits-value"].append((9, OLD.replace("int", "long")))
    again = kes_spark.events(df, Deposited, types=DEPOSITS)  # as a function of foreachBatch has it, for each batch
    assert [row["cents"] for row in again.collect()] == [1, 2]


def test_by_our_header_through_a_topic_both_ways(
    spark: SparkSession, make_topic: MakeTopic, servers: str, server: Server
) -> None:
    topic = make_topic()
    events = [Deposited("a", 5, AT), Deposited("b", 6)]
    kes_spark.write(
        kes_spark.encode(frame(spark, events), Deposited, key="account"), write_id="1", topic=topic, servers=servers
    )
    asked = len(server.requests)
    for decode in ("jvm", "python"):
        found = kes_spark.read_events(spark, Deposited, topic=topic, servers=servers, decode=decode)  # type: ignore[arg-type]
        asked = len(server.requests)
        rows = found.orderBy("_meta.offset").collect()
        assert [(row["account"], row["cents"], row["_error"]) for row in rows] == [("a", 5, None), ("b", 6, None)]
        assert len(server.requests) == asked


def test_a_replay_reads_and_writes_by_what_the_driver_has_fetched(spark: SparkSession, server: Server) -> None:
    df = connector(spark, [(old(5, 9), None)]).withColumn("topic", f.lit("deposits"))
    with kes_spark.replay("tests.spark.schema_events:source", df) as replayed:
        [row] = replayed.outputs.collect()
    assert bytes(row["value"]) == b'\0\0\0\0\x08{"account":"a","cents":9}'


def test_what_the_registry_lacks_is_refused_in_the_driver(spark: SparkSession, script: Script) -> None:
    df = connector(spark, [good(Withdrawn("a", 3))])
    with pytest.raises(ConfigError, match=r"sent\.Read: .* has no schema of the named subjects"):
        kes_spark.events(df, Read)
    with pytest.raises(ConfigError, match=r"name those whose versions are read, by BySchema\(registry, subjects="):
        kes_spark.events(df, Read, types=BySchema(REGISTRY))
    with pytest.raises(ConfigError, match=r"sent\.Read is not written: .* AvroCodec\(subject=\.\.\.\)"):
        kes_spark.encode(frame(spark, [Read("a")]), Read, key="account")
    del script.subjects["sent-deposits-value"]
    with pytest.raises(ConfigError, match=r"not registered under 'sent-deposits-value'.*kes schema register"):
        kes_spark.encode(frame(spark, [Deposited("a", 5)]), Deposited, key="account")
