"""Rules of types, aliases and split events as columns of Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.formats import ByField, CloudEvents, Deleted
from streams.records import Headers
from tests.spark.test_typed_events import connector, headers
from tests.spark.typed_events import Deposited, Withdrawn
from tests.unit.test_split_events import SplitOrder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

FOREIGN: list[tuple[bytes | None, Headers | None]] = [
    (b'{"kind":"in","account":"a","cents":5,"currency":"EUR"}', None),
    (b'{"kind":"out","account":"a","cents":3}', [("__grt__", b"Deposited")]),
    (b'{"kind":"other"}', [("x", b"1")]),
    (None, None),
]


def test_types_by_a_rule(spark: SparkSession) -> None:
    rule = ByField("kind", {"in": Deposited, "out": Withdrawn}, nulls=Deleted)
    df = connector(spark, FOREIGN)
    both = kes_spark.events(df, [Deposited, Withdrawn, Deleted], types=rule).collect()
    assert [(row["Deposited"] or row["Withdrawn"] or row["kes.Deleted"])[0] for row in both if not row["_error"]] == [
        "a",
        "a",
        b"k3",
    ]
    assert [row["_error"] for row in both if row["_error"]] == ["ByField('kind') finds no type in the record"]
    one = kes_spark.events(df, Withdrawn, types=rule).collect()
    assert [(row["cents"], row["_error"] is None) for row in one] == [(3, True), (None, False)]
    [letter] = kes_spark.dead_letters(df, [Deposited, Withdrawn, Deleted], topic="dead", types=rule).collect()
    assert (letter["value"], letter["headers"][0]["key"]) == (b'{"kind":"other"}', "x")


def test_cloudevents_in_two_modes(spark: SparkSession) -> None:
    value = b'{"account":"a","cents":5,"currency":"EUR"}'
    attributes = [("ce_id", b"1"), ("ce_source", b"/x"), ("ce_specversion", b"1.0"), ("ce_type", b"Withdrawn")]
    whole = b'{"id":"2","source":"/x","specversion":"1.0","type":"Withdrawn","data":{"account":"b","cents":7}}'
    rows: list[tuple[bytes | None, Headers | None]] = [
        (value, list(attributes)),
        (whole, [("content-type", b"application/cloudevents+json")]),
        (value, attributes[:2]),
    ]
    found = kes_spark.events(connector(spark, rows), Withdrawn, types=CloudEvents()).collect()
    assert [(row["account"], row["cents"]) for row in found] == [("a", 5), ("b", 7), (None, None)]
    assert found[2]["_error"] == "the CloudEvent lacks the attribute 'specversion'"
    letters = kes_spark.dead_letters(connector(spark, rows[1:]), Withdrawn, topic="d", types=CloudEvents()).collect()
    assert [letter["value"] for letter in letters] == [value]


def test_aliases_are_of_their_class_and_what_splits_is_no_row(spark: SparkSession) -> None:
    rows: list[tuple[bytes | None, Headers | None]] = [
        (b'{"order":"a","lines":1}', headers(b"split-order", b"3")),
        (b'{"order":"a","lines":1}', headers(b"split.Order", b"2")),
    ]
    good_one, split = kes_spark.events(connector(spark, rows), SplitOrder).collect()
    assert (good_one["order"], good_one["_error"]) == ("a", None)
    assert "several events of one" in split["_error"]


def test_what_is_no_rule_and_rows_without_headers_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="types is 'Withdrawn'"):
        kes_spark.events(connector(spark, FOREIGN), Withdrawn, types="Withdrawn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no column headers"):
        kes_spark.events(connector(spark, FOREIGN).drop("headers"), Withdrawn, types=CloudEvents())
    with pytest.raises(ConfigError, match="with types= use decode='jvm'"):
        kes_spark.read_events(spark, Withdrawn, topic="t", decode="python", types=CloudEvents())
