"""Typed events: several classes, older versions, codecs of one's own, dead letters, and what cannot be read or written.
What can: ``test_conformance.py``."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.codecs import MsgpackCodec
from streams.errors import ConfigError, DecodeError
from streams.events import event_type, event_type_of, upcaster
from streams.records import Headers, IncomingRecord
from streams.runtime.partition.dead_letters import dead_letter
from streams.spark.typed.event_format import EventsDataSource
from tests.spark.typed_events import Deposited, Level, Opened, Packed, Point, Reversed, Withdrawn
from tests.spark.typed_kit import records

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
RAW = (
    "key binary, value binary, headers array<struct<key: string, value: binary>>, topic string, partition int, "
    "offset bigint, timestamp timestamp, timestampType int"
)
AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678000)


def connector(spark: SparkSession, rows: list[tuple[bytes | None, Headers | None]]) -> DataFrame:
    """A DataFrame as Spark's Kafka connector reads it: no ``type``, no ``version``."""
    return spark.createDataFrame(
        [(b"k%d" % at, value, headers, "t", 3, at, AT, 0) for at, (value, headers) in enumerate(rows)], RAW
    )


def headers(name: bytes | None, version: bytes | None = None) -> Headers:
    return [("__grt__", name)] + ([("__grv__", version)] if version is not None else [])


def good(value: Any) -> tuple[bytes, Headers]:
    event = event_type_of(type(value))
    return event.encode(value), event.headers


NO_TYPE = "no event type: no header __grt__ that is text"
RECORDS: list[tuple[tuple[bytes | None, Headers | None], str | None]] = [
    # value and headers, why they are no event
    (good(Deposited("a", 5, "USD")), None),
    (good(Withdrawn("a", 3)), None),
    ((b'{"account":"a","cents":3}', headers(b"Deposited", b"2")), None),
    ((b'{"account":"a","euros":0.07}', headers(b"Deposited")), None),
    ((b"{}", headers(b"Closed")), "unknown type Closed"),
    ((b"{}", headers(b"x" * 70_000)), "unknown type " + "x" * 64),
    ((b"{}", None), NO_TYPE),
    ((b"{}", [("other", b"1")]), NO_TYPE),
    ((b"{}", headers(None)), NO_TYPE),
    ((b"{}", headers(b"\xff")), NO_TYPE),
    ((b"{}", headers(b"")), "unknown type "),
    ((b"{}", [("__grt__", b"Withdrawn"), ("__grt__", b"Deposited")]), "missing field: account"),
    ((b"{}", headers(b"../../etc/passwd")), "unknown type ../../etc/passwd"),
    ((None, headers(b"Withdrawn")), "null value"),
    ((b"{", headers(b"Deposited", b"1")), "not an older Deposited: DecodeError: Input data was truncated"),
    ((b"{}", headers(b"Deposited", b"2")), "Deposited: the upcaster from version 2 failed: KeyError: 'account'"),
    (
        (b'{"account":"a list, please"}', headers(b"Deposited", b"2")),
        "Deposited: the upcaster from version 2 returned list, not a dict",
    ),
    ((b"{}", headers(b"Deposited", b"4")), "version 4 is newer than 3, the newest known here: update this program"),
    ((b"{}", headers(b"Deposited", b"x")), "the version header is no number"),
    ((b"{}", headers(b"Deposited", b"3\n")), "the version header is no number"),
    ((b"{}", headers(b"Deposited", b"0")), "versions start at 1"),
    ((b"{}", headers(b"opened.v2")), "version 1 is older than 2, and the class has no upcaster for it"),
]
MIXED, REASONS = [record for record, _ in RECORDS], [reason for _, reason in RECORDS]
CLASSES = [Deposited, Withdrawn, Opened]


def is_read_by_the_event_source(value: bytes | None, given: Headers | None) -> bool:
    record = IncomingRecord("t", 3, 0, None, value, given)
    event = {event_type_of(cls).name: event_type_of(cls) for cls in CLASSES}.get(record.record_type or "")
    number = record.header("__grv__")
    try:
        return event is not None and event.decode(value, int(number) if number else 1) is not None
    except (DecodeError, ValueError):
        return False


def test_several_classes_are_struct_columns_and_every_record_is_accounted_for(spark: SparkSession) -> None:
    found = kes_spark.events(connector(spark, MIXED), CLASSES)
    assert found.columns == ["Deposited", "Withdrawn", "opened.v2", "_error", "_meta"]
    rows = found.orderBy("_meta.offset").collect()
    assert [row._error for row in rows] == REASONS
    assert [not is_read_by_the_event_source(*record) for record in MIXED] == [reason is not None for reason in REASONS]
    first, second, upcast, twice = rows[:4]
    assert tuple(first.Deposited) == ("a", 5, "USD")
    assert first.Withdrawn is None
    assert tuple(second.Withdrawn) == ("a", 3)
    assert second.Deposited is None
    assert tuple(upcast.Deposited) == ("a", 3, "EUR")
    assert tuple(twice.Deposited) == ("a", 7, "EUR"), "two steps, and the version of a record without the header is 1"
    assert all(row[0] is None and row[1] is None and row[2] is None for row in rows[4:])
    assert first._meta.asDict() == {
        "topic": "t", "partition": 3, "offset": 0, "timestamp": AT, "key": b"k0", "type": "Deposited", "version": 3,
    }  # fmt: skip


def test_one_class_has_its_fields_as_columns_and_leaves_other_types_out(spark: SparkSession) -> None:
    found = kes_spark.events(connector(spark, MIXED), Deposited)
    assert found.columns == ["account", "cents", "currency", "_error", "_meta"]
    rows = found.orderBy("_meta.offset").collect()
    mine = [at for at, (_, given) in enumerate(MIXED) if (given or [("", b"")])[0] == ("__grt__", b"Deposited")]
    assert [row._meta.offset for row in rows] == mine
    assert [row.cents for row in rows] == [5, 3, 7, *[None] * 7]


def test_dead_letters_are_the_other_half_and_look_like_the_event_sources(spark: SparkSession) -> None:
    df = connector(spark, MIXED)
    kept = kes_spark.events(df, CLASSES, on_error="deadletter")
    letters = kes_spark.dead_letters(df, CLASSES, topic="dlq")
    assert [row._meta.offset for row in kept.orderBy("_meta.offset").collect()] == [0, 1, 2, 3]
    rows = letters.collect()
    assert len(rows) == len(MIXED) - 4
    for row in rows:
        sent: dict[str, bytes] = {h.key: bytes(h.value) for h in row.headers if h.key.startswith("__kes_dlq_")}
        at = int(sent["__kes_dlq_offset"])
        record = IncomingRecord("t", 3, at, b"k%d" % at, *MIXED[at], int(AT.replace(tzinfo=dt.UTC).timestamp() * 1000))
        failed_at = int(sent["__kes_dlq_failed_at_ms"])
        expected = dead_letter("dlq", record, DecodeError(f"{record.where}: {REASONS[at]}"), 1, failed_at)
        assert (row.topic, row.partition, row.key, row.value) == (
            expected.topic, expected.partition, expected.key, expected.value,
        )  # fmt: skip
        assert [(h.key, h.value) for h in row.headers] == expected.headers
        assert failed_at > 1_700_000_000_000


def test_dead_letters_can_be_written_beside_the_outputs(
    spark: SparkSession, make_topic: Callable[..., str], read: Callable[..., DataFrame], servers: str
) -> None:
    topic, dead = make_topic("in", 4), make_topic("dead", 4)
    df = connector(spark, MIXED)
    kept = kes_spark.events(df, Withdrawn, on_error="deadletter")
    outputs = kes_spark.encode(kept, Withdrawn, key="account", topic=topic)
    both = outputs.unionByName(kes_spark.dead_letters(df, Withdrawn, topic=dead), allowMissingColumns=True)
    kes_spark.write(both, write_id="w", servers=servers, options={"markerTopic": topic})
    assert [row.value for row in read(topic).collect()] == [b'{"account":"a","cents":3}']
    letters = read(dead).orderBy("offset").collect()
    assert {(row.partition, row.type, row.value) for row in letters} == {
        (3, "Withdrawn", b"{}"),
        (3, "Withdrawn", None),
    }
    assert {h.key for h in letters[0].headers} >= {"__grt__", "__kes_dlq_message", "__kes_dlq_error"}


def test_rows_without_headers_are_refused_by_the_name_of_the_option(spark: SparkSession) -> None:
    df = connector(spark, MIXED).drop("headers")
    with pytest.raises(ConfigError, match=r"no column type and no column version.*includeHeaders"):
        kes_spark.events(df, Deposited)
    typed = df.selectExpr("*", "'Deposited' type", "1 version")
    assert kes_spark.events(typed, Deposited).columns[-1] == "_meta"
    with pytest.raises(ConfigError, match=r"no column headers, and a dead letter carries.*includeHeaders"):
        kes_spark.dead_letters(typed, Deposited, topic="dlq")
    with pytest.raises(ConfigError, match="the rows have no column offset"):
        kes_spark.events(typed.drop("offset"), Deposited)
    with pytest.raises(ConfigError, match="column value must be binary, not string"):
        kes_spark.events(typed.withColumn("value", f.lit("x")), Deposited)


class Meta(msgspec.Struct):
    _meta: int


@event_type("withdrawn")
class Shouted(msgspec.Struct):
    cents: int


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ([], "events of no class"),
        (Meta, "Meta: two columns would be called _meta"),
        ([Withdrawn, Shouted], "Shouted: two columns would be called withdrawn"),
        ([Withdrawn, Withdrawn], "two columns would be called Withdrawn"),
    ],
)
def test_columns_that_would_clash_are_named(spark: SparkSession, classes: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kes_spark.events(connector(spark, []), classes)
    with pytest.raises(ConfigError, match="on_error must be null, fail or deadletter, not 'column'"):
        kes_spark.events(connector(spark, []), Withdrawn, on_error="column")  # type: ignore[arg-type]


def plans(df: DataFrame) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())  # type: ignore[operator]


def test_python_is_only_asked_where_it_is_needed(spark: SparkSession) -> None:
    df = connector(spark, MIXED)
    assert "ArrowEvalPython" not in plans(kes_spark.events(df, [Withdrawn, Opened]))
    assert plans(kes_spark.events(df, CLASSES)).count("ArrowEvalPython") == 1


@pytest.mark.parametrize("on_error", ["null", "fail", "deadletter"])
def test_each_value_is_parsed_once(spark: SparkSession, on_error: Any) -> None:
    optimized = kes_spark.events(connector(spark, MIXED), Withdrawn, on_error=on_error)._jdf.queryExecution()
    assert str(optimized.optimizedPlan().toString()).count("from_json(") == 1  # type: ignore[operator]


PACKED = Packed(
    uuid.UUID(int=7), b"\x00\xff", dt.datetime(2020, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    dt.date(1970, 1, 1), Decimal("1E+3"), Level.HIGH, [Point(-0.0, {"a": 1}), Point(1.5)], None, 3,
)  # fmt: skip


def test_classes_with_a_codec_of_their_own_are_read_and_written_in_python(spark: SparkSession) -> None:
    reversed_ = Reversed("é", Point(2.0, {"b": 2}))
    old = {name: getattr(PACKED, name) for name in PACKED.__struct_fields__ if name != "count"}
    older = msgspec.msgpack.encode(msgspec.to_builtins(old | {"points": []}, builtin_types=(bytes,)))
    too_big = MsgpackCodec(Packed).encode(msgspec.structs.replace(PACKED, count=2**63))
    too_fine = MsgpackCodec(Packed).encode(msgspec.structs.replace(PACKED, price=Decimal("0.0000000001")))
    df = connector(spark, [
        good(PACKED), good(reversed_), (older, headers(b"Packed")), (b"\xc1", headers(b"Packed", b"2")),
        (too_big, headers(b"Packed", b"2")), (too_fine, headers(b"Packed", b"2")),
        (b"", headers(b"Packed", b"3")), (None, headers(b"Packed")),
    ])  # fmt: skip
    rows = kes_spark.events(df, [Packed, Reversed]).orderBy("_meta.offset").collect()
    assert [(row._error or "")[:42] for row in rows] == [
        "", "", "", "not a Packed: DecodeError: MessagePack dat"[:42], "count: integer of more than 64 bits",
        "price: not a decimal of at most 29 digits "[:42],
        "Packed version 3 is newer than version 2, "[:42], "null value",
    ]  # fmt: skip
    packed = rows[0].Packed
    assert (packed.ident, packed.raw, packed.at) == (str(PACKED.ident), PACKED.raw, dt.datetime(2020, 1, 1, 22))
    assert (packed.day, packed.price, packed.level) == (PACKED.day, Decimal(1000), "high")
    assert ([tuple(point) for point in packed.points], packed.first) == ([(-0.0, {"a": 1}), (1.5, {})], None)
    assert (rows[1].Reversed.text, tuple(rows[1].Reversed.inner)) == ("é", (2.0, {"b": 2}))
    assert (rows[2].Packed["count"], rows[2].Packed.points) == (41, [])

    typed = kes_spark.events(df.where("offset = 0"), Packed)
    written = kes_spark.encode(typed, Packed, key="ident").collect()[0]
    again = event_type_of(Packed).decode(bytes(written.value), written.version)
    assert again == msgspec.structs.replace(PACKED, at=PACKED.at.astimezone(dt.UTC))
    typed = kes_spark.events(df.where("offset = 1"), Reversed)
    assert kes_spark.encode(typed, Reversed, key="text").collect()[0].value == event_type_of(Reversed).encode(reversed_)


def test_a_row_that_a_codec_cannot_take_fails_the_job(spark: SparkSession) -> None:
    df = spark.sql("select cast(null as string) text, named_struct('x_pos', 1D) inner")
    with pytest.raises(Exception, match=r"cannot write Reversed: ValidationError: Expected `str`, got `null`"):
        kes_spark.encode(df, Reversed, key=None).collect()


def test_classes_that_workers_cannot_import_are_refused_by_name(spark: SparkSession) -> None:
    @event_type("Local", version=2)
    @dataclasses.dataclass
    class Local:
        text: str

    df = connector(spark, [])
    assert kes_spark.events(df, Local).columns[0] == "text", "the JVM needs no class"

    @upcaster(Local, from_version=1)
    def step(old: dict[str, Any]) -> dict[str, Any]:
        return old

    with pytest.raises(ConfigError, match=r"Local: upcasters run in Python on the workers.*move it to the top"):
        kes_spark.events(df, Local)


def test_events_decoded_where_they_are_read_are_the_same(
    spark: SparkSession, make_topic: Callable[..., str], servers: str
) -> None:
    topic = make_topic("in", 2)
    rows = connector(spark, [*MIXED, good(PACKED), (b"\xc1", headers(b"Packed", b"2"))])
    kes_spark.write(rows.select("key", "value", "headers"), topic=topic, write_id="w", servers=servers)
    for cls in (Deposited, Packed):
        jvm = kes_spark.read_events(spark, cls, topic=topic, servers=servers)
        python = kes_spark.read_events(spark, cls, topic=topic, servers=servers, decode="python")
        assert python.schema.simpleString() == jvm.schema.simpleString()
        ours, theirs = (df.orderBy("_meta.partition", "_meta.offset").collect() for df in (python, jvm))
        assert [(row[:-2], row._meta) for row in ours] == [(row[:-2], row._meta) for row in theirs]
        assert [row._error is None for row in ours] == [row._error is None for row in theirs]
        assert len(ours) > 1

    kept = kes_spark.read_events(spark, Deposited, topic=topic, servers=servers, decode="python", on_error="deadletter")
    assert kept.count() == 3
    failing = kes_spark.read_events(spark, Deposited, topic=topic, servers=servers, decode="python", on_error="fail")
    with pytest.raises(Exception, match=r"cannot read Deposited at .*in\[\d\]@\d+: "):
        failing.select("account").collect()
    with pytest.raises(ConfigError, match="decode='python' is for one class"):
        kes_spark.read_events(spark, [Deposited], topic=topic, servers=servers, decode="python")
    with pytest.raises(ConfigError, match="needs the option event"):
        EventsDataSource({}).schema()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Other(msgspec.Struct):
    text: str


class Small(msgspec.Struct):
    name: str
    count: int
    price: Decimal = Decimal("1.5")
    colour: Colour = Colour.RED
    tags: list[str] = []
    day: dt.date | None = None
    zoned: Annotated[dt.datetime, msgspec.Meta(tz=True)] | None = None


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "tombstone": (None, "null value"),
    "empty": (b"", "empty value"),
    "not JSON": (b'{"name": "a', "corrupt"),
    "not UTF-8": (b'{"name":"\xff","count":1}', "corrupt: not UTF-8"),
    "fraction for a whole number": (b'{"name":"a","count":1.5}', "corrupt"),
    "missing": (b'{"name":"a"}', "missing field: count"),
    "null for a value": (b'{"name":null,"count":1}', "missing field: name"),
    "decimal of ten places": (b'{"name":"a","count":1,"price":"0.1234567891"}', "price: not a decimal"),
    "tiny decimal": (b'{"name":"a","count":1,"price":"1e-10"}', "price: not a decimal"),
    "no decimal": (b'{"name":"a","count":1,"price":"x"}', "price: not a decimal"),
    "huge decimal": (b'{"name":"a","count":1,"price":"1e40"}', "price: not a decimal"),
    "no such colour": (b'{"name":"a","count":1,"colour":"green"}', "colour: not one of red, blue"),
    "null in a list": (b'{"name":"a","count":1,"tags":["x",null]}', "null in tags[]"),
    "no date": (b'{"name":"a","count":1,"day":"yesterday"}', "day: not a date in ISO 8601"),
    "no zone": (b'{"name":"a","count":1,"zoned":"2026-01-02T03:04:05"}', "zoned: not a datetime with a zone"),
}


def test_what_cannot_be_read_says_why_and_shows_nothing(spark: SparkSession) -> None:
    decoded = kes_spark.events(records(spark, Small, [value for value, _ in BROKEN.values()]), Small)
    rows = decoded.orderBy("_meta.offset").collect()
    wrong = {
        case: row._error
        for row, (case, (_, reason)) in zip(rows, BROKEN.items(), strict=True)
        if not (row._error or "").startswith(reason)
    }
    assert wrong == {}
    assert all(value is None for row in rows for value in row[:7])


def test_defaults_fill_in_what_older_writers_left_out(spark: SparkSession) -> None:
    values: list[bytes | None] = [
        b'{"name":"a","count":1,"from_the_future":[1]}',
        b'{"name":"b","count":2,"price":1E-7,"zoned":"2026-01-02T03:04:05+02:00"}',
    ]
    first, second = kes_spark.events(records(spark, Small, values), Small).orderBy("_meta.offset").collect()
    assert tuple(first[:8]) == ("a", 1, Decimal("1.5"), "red", [], None, None, None)
    assert (second.price, second.zoned, second._error) == (Decimal("1e-7"), dt.datetime(2026, 1, 2, 1, 4, 5), None)


def test_split_gives_a_frame_for_each_class_and_fail_names_the_record(spark: SparkSession) -> None:
    both = records(spark, Small, [event_type_of(Small).encode(Small("a", 1))]).union(records(spark, Other, [b"{}"]))
    found = kes_spark.split(both, [Small, Other])
    assert {cls: df.count() for cls, df in found.items()} == {Small: 1, Other: 1}
    with pytest.raises(Exception, match=r"cannot read Other at t\[0\]@0: missing field: text"):
        kes_spark.events(both, Other, on_error="fail").collect()


class Measured(msgspec.Struct):
    value: float


@pytest.mark.parametrize(
    ("cls", "columns", "error", "problem"),
    [
        # Rows that nobody could read back fail the job.
        (Small, "cast(null as string) name, 1 count", Exception, "Small.name: null"),
        (Small, "'a' name, 1 count, 'green' colour", Exception, "Small.colour: not one of"),
        (Small, "'a' name, 1 count, array('x', null) tags", Exception, r"Small.tags\[\]: null"),
        (Small, "'a' name, 1 count, date'12345-01-01' day", Exception, "Small.day: year"),
        (Measured, "double('NaN') value", Exception, r"Measured\.value: NaN or infinite"),
        (Measured, "double('-Infinity') value", Exception, r"Measured\.value: NaN or infinite"),
        # Columns that do not fit are named before there is one.
        (Small, "'a' name", ConfigError, r"Small\.count has no column; there are name"),
        (
            Small,
            "'a' name, 1.5D count",
            ConfigError,
            r"Small\.count is bigint, but the column is double; cast the column",
        ),
        (Small, "'a' name, 1 count, array(1) tags", ConfigError, r"Small\.tags\[\] is string, but the column is int"),
        (Small, "1 name, 1 count", ConfigError, r"Small\.name is string"),
    ],
)
def test_what_cannot_be_written_is_named(
    spark: SparkSession, cls: type, columns: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        kes_spark.encode(spark.sql(f"select {columns}"), cls, key=None).collect()


def test_several_classes_are_encoded_in_one_pass(spark: SparkSession, tmp_path: Path) -> None:
    """The rows that one encode for each class gives, in the order of the input, as a batch and as a stream."""
    rows = [("a", 1, "x"), ("b", 2, "y"), ("c", None, "z"), ("d", 0, "-")]
    df = spark.createDataFrame(rows, "name string, count int, text string").coalesce(1)
    df.write.parquet(str(tmp_path / "rows"))
    outputs = [
        kes_spark.Encoding(Small, key="name", where="count > 0", topic="small"),
        kes_spark.Encoding(Other, key=None, where=f.col("text") != "-", topic=f.concat(f.lit("other-"), "text")),
    ]

    def written(of: DataFrame, *keep: str) -> DataFrame:
        return kes_spark.encode_each(of, *outputs, keep=keep)

    found = [tuple(row) for row in written(df, "text").collect()]
    alone = [
        {row.text: row for row in kes_spark.encode(df.where(where), cls, key=key, topic="t", keep=["text"]).collect()}
        for cls, key, where in ((Small, "name", "count > 0"), (Other, None, "text != '-'"))
    ]
    places = [("small", 0, "x"), ("other-x", 1, "x"), ("small", 0, "y"), ("other-y", 1, "y"), ("other-z", 1, "z")]
    assert found == [(topic, *alone[number][text][1:]) for topic, number, text in places]
    plan = written(df)._jdf.queryExecution().toString()
    assert plan.count("LogicalRDD") == 3, "the input is read once: it is in each of the three logical plans once"
    stream = written(spark.readStream.schema(df.schema).parquet(str(tmp_path / "rows")))
    query = stream.writeStream.format("memory").queryName("encoded").trigger(availableNow=True).start()
    query.awaitTermination()
    assert [tuple(row) for row in spark.table("encoded").collect()] == [row[:-1] for row in found]
    for wrong, says in (
        ([], "needs an Encoding"),
        ([outputs[0], kes_spark.Encoding(Other, key=None)], "give topic= for all outputs"),
        ([kes_spark.Encoding(Small, key="nobody")], "nobody"),
    ):
        with pytest.raises(ConfigError, match=says):
            kes_spark.encode_each(df, *wrong)


def test_keys_must_be_columns_of_text_or_bytes(spark: SparkSession) -> None:
    df = spark.sql("select 'é漢' name, 1 count, 7 number, X'00ff' raw")
    assert kes_spark.encode(df, Small, key="name").collect()[0].key == "é漢".encode()
    assert kes_spark.encode(df, Small, key="raw").collect()[0].key == b"\x00\xff"
    assert kes_spark.encode(df, Small, key=f.col("number").cast("string")).collect()[0].key == b"7"
    assert kes_spark.encode(df, Small, key=None).collect()[0].key is None
    with pytest.raises(ConfigError, match="key is int; cast it to string"):
        kes_spark.encode(df, Small, key="number")
    with pytest.raises(ConfigError, match="key='nobody' is no column"):
        kes_spark.encode(df, Small, key="nobody")
