"""Events decoded where they are read: a record that no column takes is a row with an error, never the end of the job.
No session of Spark, no broker."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec import UNSET, UnsetType

from streams.events import EventType, event_type, event_type_of
from streams.spark.event_format import EventBatches, EventsDataSource, _EventsReader
from streams.spark.python_codec import EventReference

pytestmark = pytest.mark.spark


class Loose:
    """A codec that takes more than msgspec: half surrogate pairs."""

    def encode(self, value: Counts) -> bytes:
        return json.dumps({"by_name": value.by_name}).encode()

    def decode(self, data: bytes) -> Counts:
        return Counts(**json.loads(data))


class Counts(msgspec.Struct):
    by_name: dict[str, int]


class Sighting(msgspec.Struct):
    at: dt.datetime
    number: int | UnsetType = UNSET


@event_type("Paid, at last")
class Paid(msgspec.Struct):
    cents: int


def rows(event: EventType[Any], values: list[bytes]) -> list[dict[str, Any]]:
    count = len(values)
    records = pa.RecordBatch.from_pydict(
        {
            "key": pa.nulls(count, pa.binary()), "value": pa.array(values, pa.binary()), "type": [event.name] * count,
            "version": pa.array([1] * count, pa.int32()), "topic": ["t"] * count,
            "partition": pa.array([0] * count, pa.int32()), "offset": list(range(count)),
            "timestamp": pa.nulls(count, pa.timestamp("us", "UTC")),
        }
    )  # fmt: skip
    found: list[dict[str, Any]] = EventBatches(event).of(records).drop_columns("_meta").to_pylist()
    return found


@pytest.mark.parametrize("far", [b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-14:00"])
def test_a_time_that_utc_does_not_have(far: bytes) -> None:
    good, bad = rows(event_type_of(Sighting), [b'{"at":"2026-01-02T03:04:05+02:00"}', b'{"at":"%s"}' % far])
    assert good["at"] == dt.datetime(2026, 1, 2, 1, 4, 5, tzinfo=dt.UTC)
    assert (bad["at"], bad["_error"]) == (None, "at: a time that is outside of the years 1 to 9999 in UTC")


def test_a_field_that_is_absent_is_null() -> None:
    found = rows(
        event_type_of(Sighting), [b'{"at":"2026-01-02T03:04:05Z"}', b'{"at":"2026-01-02T03:04:05Z","number":7}']
    )
    assert [(row["number"], row["_error"]) for row in found] == [(None, None), (7, None)]


def test_half_a_surrogate_pair_in_a_name() -> None:
    event = event_type_of(event_type("counts", codec=Loose())(Counts))
    good, bad = rows(event, [b'{"by_name":{"a":1}}', b'{"by_name":{"\\ud800":1}}'])
    assert (good["by_name"], good["_error"]) == ([("a", 1)], None)
    assert (bad["by_name"], bad["_error"]) == (None, "by_name{}: half of a surrogate pair")


def test_a_name_with_a_comma_is_one_name() -> None:
    """In the option ``types`` it would be two, and nothing would be read."""
    reference = EventReference.of(event_type_of(Paid), "this test")
    options = {"event": str(reference), "subscribe": "t", "bootstrap.servers": "b:1"}
    source = EventsDataSource(options)
    reader = source.reader(source.schema())
    assert isinstance(reader, _EventsReader)
    assert reader._options.types == {"Paid, at last"}
