"""The encoder in Java beside the one in Python: the same rows are the same bytes. No broker, no Spark session."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import types as t

import streams.spark as kes_spark
from streams.errors import RecordRefused
from streams.kafka.wire.compression import decompressed
from streams.records import DEFAULT_MESSAGE_LIMIT
from streams.sak import spark_jar
from streams.spark.columns import HEADERS_TYPE
from streams.spark.writing import batch_encoding
from streams.spark.writing.batch_encoding import BatchEncoder, compression_settings
from tests.spark.log_kit import seed
from tests.spark.test_batch_encoding import HEADERS, SHAPES, any_table
from tests.unit.waiting import give_own

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK"),
]

NOW = 1_750_000_000_123
TURN = 4_711
TYPES: dict[str, t.DataType] = {
    "topic": t.StringType(),
    "key": t.BinaryType(),
    "value": t.BinaryType(),
    "type": t.StringType(),
    "version": t.IntegerType(),
    "headers": HEADERS_TYPE,
    "partition": t.IntegerType(),
    "timestamp": t.TimestampType(),
}
Case = tuple[str | None, dict[str, str], Any]
"""Topic, settings, and rows by Arrow."""


@pytest.fixture(scope="module")
def jar(kes_jar: Path | None) -> Path:
    assert kes_jar is not None
    assert spark_jar.problem(pyspark.__version__, kes_jar) == ""
    return kes_jar


def compiled(jar: Path, program: str, folder: Path) -> list[str]:
    """The command of a program beside the classes of the jar, compiled into this folder."""
    libraries = f"{jar}{os.pathsep}{Path(pyspark.__file__).parent}/jars/*"
    opened = ["--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"]
    quiet = f"-Dlog4j2.configurationFile={Path(kes_spark.__file__).with_name('log4j2.properties').as_uri()}"
    subprocess.run(["javac", "-cp", libraries, "-d", folder, Path(__file__).with_name(f"{program}.java")], check=True)
    words = ["-XX:TieredStopAtLevel=1", quiet, *opened, "-cp", f"{folder}{os.pathsep}{libraries}"]
    return ["java", *words, f"kes.spark.{program}"]


def in_java(jar: Path, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """What the encoder in Java makes of each case."""
    (folder / "cases").write_text(json.dumps([described(*case) for case in cases]))
    subprocess.run([*compiled(jar, "EncodeRows", folder), folder / "cases", folder / "made"], check=True)
    found: list[dict[str, Any]] = json.loads((folder / "made").read_text())
    return found


def described(topic: str | None, kafka: dict[str, str], rows: Any) -> dict[str, Any]:
    types = {
        field.name: t.StringType() if pa.types.is_string(field.type) else INTEGERS.get(field.type, TYPES[field.name])
        for field in rows.schema
    }
    codec, level = compression_settings(kafka)
    return {
        "topic": topic,
        "shapes": SHAPES,
        "codec": codec,
        "level": level,
        "record_limit": int(kafka.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT)),
        "batch_limit": int(kafka.get("batch.size", 1_000_000)),
        "now": NOW,
        "turn": TURN,
        "schema": json.loads(t.StructType([t.StructField(name, kind) for name, kind in types.items()]).json()),
        "rows": [[plain(value) for value in row.values()] for row in micros(rows).to_pylist()],
    }


INTEGERS: dict[Any, t.DataType] = {
    pa.int8(): t.ByteType(),
    pa.int16(): t.ShortType(),
    pa.int32(): t.IntegerType(),
    pa.int64(): t.LongType(),
}


def micros(rows: Any) -> Any:
    if "timestamp" not in rows.schema.names:
        return rows
    at = rows.schema.get_field_index("timestamp")
    return rows.set_column(at, "timestamp", rows.column(at).cast(pa.int64()))


def plain(value: Any) -> Any:
    """For JSON."""
    if isinstance(value, str | bytes):
        return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
    if isinstance(value, list):
        return [None if header is None else [plain(header["key"]), plain(header["value"])] for header in value]
    return value


def in_python(case: Case) -> dict[str, Any]:
    topic, kafka, rows = case
    encoder = BatchEncoder(topic, kafka, "test", SHAPES.__getitem__)
    encoder._keyless = TURN * batch_encoding.KEYLESS_RUN
    try:
        made = list(encoder.encode([rows]))
    except RecordRefused as error:
        return {"error": f"streams.errors.RecordRefused: {error}"}
    batches = [[one.topic, one.partition, one.partitions, one.head + one.body, one.checksum] for one in made]
    return {"rows": encoder.rows, "batches": batches}


def compare(jar: Path, cases: list[Case], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Compare every case; return what was made of them."""
    give_own(monkeypatch, "time", batch_encoding, time=lambda: NOW / 1000)
    made = in_java(jar, cases, folder)
    assert len(made) == len(cases)
    for case, found in zip(cases, made, strict=True):
        for batch in found.get("batches", ()):
            batch[3] = base64.b64decode(batch[3])
        wanted = in_python(case)
        if compression_settings(case[1])[0] == "none" and "error" not in found:
            assert found == wanted, case
            continue
        if "error" in found and case[2].num_rows == 1:
            assert found == wanted  # of several rows that are refused each names another
        assert ("error" in found, found.get("rows")) == ("error" in wanted, wanted.get("rows")), case
        pairs = zip(found.get("batches", ()), wanted.get("batches", ()), strict=True)
        assert all(unpacked(one) == unpacked(other) for one, other in pairs), case
    return made


def unpacked(batch: list[Any]) -> tuple[Any, ...]:
    """A batch without what depends on the library that compressed it: its length, its checksums, and its codec."""
    head, body, attribute = batch[3][:61], batch[3][61:], batch[3][22] & 7
    records = decompressed(attribute, body) if attribute else body
    return (*batch[:3], head[:8], head[12:17], head[21:22], head[23:], records)


def rows_of(**columns: tuple[Any, list[Any]]) -> Any:
    made = {name: pa.array(values, kind) for name, (kind, values) in columns.items()}
    return pa.record_batch(list(made.values()), names=list(made))


def edges() -> list[Case]:
    """Ends of ranges, turns of rows without keys, and a dozen rows that are refused."""
    plain: dict[str, str] = {"compression.type": "none"}
    binary, text, stamp = pa.binary(), pa.string(), pa.timestamp("us", "UTC")
    words = ["a", "é", "\N{GRINNING FACE}", None]
    keys = [b"'", b'"', b"'\"", b"\\\n\r\t\x00\x7f\xff", b"k" * 41]
    return [
        ("t", plain, rows_of(value=(binary, [b"v"] * 6_500))),  # turns of rows without keys
        ("t", plain, rows_of(key=(binary, [None, b"k"] * 2_100), value=(binary, [None] * 4_200))),
        ("t", plain, rows_of(key=(text, words), value=(text, words), type=(text, words))),
        ("a", plain, rows_of(value=(binary, [b"x" * n for n in range(0, 70_000, 997)]))),
        *(
            ("t", plain, rows_of(value=(binary, [b""] * 3), type=(text, ["T"] * 3), version=(kind, [-1, None, 127])))
            for kind in INTEGERS
        ),
        *(("t", plain, rows_of(value=(binary, [b""]), partition=(kind, [2]))) for kind in INTEGERS),
        ("t", plain, rows_of(value=(binary, [b"", b""]), partition=(pa.int64(), [2, 3]))),
        ("t", plain, rows_of(value=(binary, [b""]), partition=(pa.int64(), [-1]))),
        (None, plain, rows_of(value=(binary, [b""]), topic=(text, [None]))),
        ("t", plain, rows_of(value=(binary, [b""]), timestamp=(stamp, [999]))),
        ("t", plain, rows_of(value=(binary, [b""] * 2), timestamp=(stamp, [2**62, 1000]))),
        ("t", plain, rows_of(value=(binary, [b""]), headers=(HEADERS, [[None]]))),
        ("t", plain, rows_of(value=(binary, [b""]), headers=(HEADERS, [[{"key": None, "value": b""}]]))),
        ("t", plain, rows_of(value=(binary, [b""]), version=(pa.int32(), [3]), headers=(HEADERS, [[]]))),
        *(
            ("t", {**plain, "message.max.bytes": "100"}, rows_of(key=(binary, [key]), value=(binary, [b"v" * 100])))
            for key in keys
        ),
        ("b", plain, rows_of(key=(binary, [b"large"]), value=(binary, [b"v" * 12_000]))),
        (None, plain, rows_of(topic=(text, ["b", "a", "b", "t"] * 900), value=(binary, [b"v" * 90] * 3_600))),
    ]


def test_the_same_rows_are_the_same_bytes(jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mixture of columns, codec, size of batches and limit of records; and the edges of each."""
    rng = random.Random(seed())
    cases = edges()
    for number in range(120):
        topic, _, rows = any_table(rng)
        codec = "none" if number % 2 else rng.choice(["gzip", "snappy", "lz4", "zstd"])
        kafka = {"compression.type": codec, "batch.size": str(rng.choice([1, 200, 1_000_000]))}
        if number % 10 == 1:
            kafka["message.max.bytes"] = "5000"
        cases.append((topic, kafka, rows))
    made = compare(jar, cases, tmp_path, monkeypatch)
    assert sum("error" in one for one in made[:-120]) == 12


@pytest.mark.nightly
def test_many_mixtures(jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed())
    cases: list[Case] = []
    for _ in range(8_000):
        topic, _, rows = any_table(rng)
        codec = rng.choice(["none", "none", "gzip", "snappy", "lz4", "zstd"])
        kafka = {"compression.type": codec, "batch.size": str(rng.choice([1, 100, 200, 9_000, 1_000_000]))}
        cases.append((topic, kafka, rows))
    compare(jar, cases, tmp_path, monkeypatch)
