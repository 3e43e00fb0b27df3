"""Rows on their way: staged by tasks, in messages or files, and given to a producer by the driver. No broker."""

from __future__ import annotations

import inspect
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from streams.spark.sending import Sender

from streams.errors import ConfigError, RecordRefused, StagingError
from streams.spark import record_batches, replay_task, staging
from streams.spark.staging import remove, remove_files, stage, staged_batches, staging_folder
from tests.spark.log_kit import seed

pytestmark = pytest.mark.spark

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Told:
    """Stands in for a producer (full now and then) and for the client that knows the topics."""

    def __init__(self, every: int = 7) -> None:
        self.records: list[tuple[Any, ...]] = []
        self._calls = 0
        self._every = every

    def produce(
        self, topic: str, value: Any, key: Any, partition: int, callback: None, on_delivery: None, timestamp: int,
        headers: Any,
    ) -> None:  # fmt: skip
        self._calls += 1
        if self._calls % self._every == 0:
            raise BufferError
        assert callback is None
        assert on_delivery is None
        self.records.append((topic, value, key, partition, timestamp, headers))

    def poll(self, timeout: float) -> int:
        return 0

    def list_topics(self, topic: str, timeout: float) -> Any:
        described = type("Topic", (), {"error": None, "partitions": [0, 1, 2]})()
        return type("Topics", (), {"topics": {topic: described}})()


def sent(batch: Any, topic: str | None = None) -> list[tuple[Any, ...]]:
    told = Told()
    client: Any = told
    sender = Sender(client, client, topic, {}, "test")
    assert sender.send(batch) == batch.num_rows
    return told.records


def expected(rows: list[dict[str, Any]], topic: str | None) -> list[tuple[Any, ...]]:
    """Row by row, as plainly as can be."""
    records = []
    for row in rows:
        ours: list[tuple[str, bytes | None]] = []
        if row.get("type") is not None:
            ours.append(("__grt__", row["type"].encode()))
            if row.get("version") not in (None, 1):
                ours.append(("__grv__", str(row["version"]).encode()))
        own = [(pair["key"], pair["value"]) for pair in row.get("headers") or ()]
        replaced = ["__grt__"] if ours else []
        replaced += ["__grv__"] if ours and row.get("version") is not None else []
        kept = [pair for pair in own if pair[0] not in replaced]
        partition = row.get("partition")
        stamp = row.get("timestamp")
        records.append(
            (
                topic or row["topic"],
                row["value"],
                row.get("key"),
                -1 if partition is None else partition,
                0 if stamp is None else stamp // 1000,
                ours + kept,
            )
        )
    return records


def test_any_mixture_of_columns() -> None:
    rng = random.Random(seed())
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {
        "topic": (pa.string(), ["a", "b"]),
        "key": (pa.binary(), [None, b"", b"k", b"l"]),
        "value": (pa.binary(), [None, b"", b"v"]),
        "type": (pa.string(), [None, "T", "U"]),
        "version": (pa.int32(), [None, 0, 1, 2, 30]),
        "headers": (
            HEADERS,
            [
                None,
                [],
                [{"key": "x", "value": b"1"}],
                [{"key": "x", "value": None}, {"key": "x", "value": b"2"}, {"key": "__grt__", "value": b"old"}],
                [{"key": "__grv__", "value": b"9"}],
            ],
        ),
        "partition": (pa.int32(), [None, 0, 1, 2]),
        "timestamp": (pa.int64(), [None, 1000, 1_700_000_000_123_456]),
    }
    for _ in range(400):
        names = ["value", *(name for name in columns if name != "value" and rng.random() < 0.6)]
        topic = None if "topic" in names and rng.random() < 0.5 else "t"
        # Often only a few different values, so that whole columns are alike.
        choices = {name: rng.sample(columns[name][1], rng.randint(1, len(columns[name][1]))) for name in names}
        rows = [{name: rng.choice(choices[name]) for name in names} for _ in range(rng.choice([0, 1, 2, 5, 30]))]
        batch = pa.record_batch(
            [pa.array([row[name] for row in rows], columns[name][0]) for name in names], names=names
        )
        if "timestamp" in names:
            position = names.index("timestamp")
            stamps = batch.column(position).cast(pa.timestamp("us", "UTC"))
            batch = batch.set_column(position, "timestamp", stamps)
        start = rng.randint(0, len(rows))
        for part, part_rows in ((batch, rows), (batch.slice(start), rows[start:])):
            assert sent(part, topic) == expected(part_rows, topic)


@pytest.mark.parametrize("version", [b"x", b"0", b"2147483648", None], ids=str)
def test_what_is_read_is_written_as_it_is_with_a_version_that_makes_no_sense(version: bytes | None) -> None:
    """Read back it must not have become version 1."""
    headers: list[tuple[str, bytes | None]] = [("__grt__", b"T"), ("__grv__", version)]
    _, number = record_batches._type_and_version(tuple(headers))
    pairs = [{"key": key, "value": value} for key, value in headers]
    row = {"value": [b"v"], "type": ["T"], "version": pa.array([number], pa.int32())}
    ((*_, written),) = sent(pa.record_batch({**row, "headers": pa.array([pairs], HEADERS)}), "t")
    assert written == headers


def test_rows_without_headers_are_replayed_with_their_version() -> None:
    assert replay_task._with_type(None, "T", 2) == [("__grt__", b"T"), ("__grv__", b"2")]
    assert replay_task._with_type(None, "T", 1) == [("__grt__", b"T")]
    assert replay_task._with_type(None, "T", 0) == [("__grt__", b"T"), ("__grv__", b"0")], "which is refused"


def test_the_client_takes_its_arguments_in_the_order_that_is_relied_on() -> None:
    documented = inspect.getdoc(Producer.produce) or ""
    assert "produce(topic, [value], [key], [partition], [on_delivery], [timestamp], [headers])" in documented
    producer = Producer({"bootstrap.servers": "127.0.0.1:1"})
    any_producer: Any = producer
    any_producer.produce("t", b"v", b"k", 0, None, None, 12, [("h", b"x"), ("n", None)])
    with pytest.raises(TypeError):
        any_producer.produce("t", b"v", b"k", 0, None, None, "headers first", 12)
    producer.purge()


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("timestamp", pa.array([None, 999], pa.timestamp("us", "UTC")), "column timestamp is 1970"),
        ("timestamp", pa.array([5000, -1], pa.timestamp("us", "UTC")), "column timestamp is 1970"),
        ("headers", pa.array([[None], []], HEADERS), "a header that is null, or whose key is"),
        ("headers", pa.array([[None], None], HEADERS), "a header that is null, or whose key is"),
        ("headers", pa.array([[{"key": None, "value": b"x"}], []], HEADERS), "a header that is null, or whose key is"),
        ("partition", pa.array([0, 3], pa.int32()), "names partition 3 of 't', which has 3"),
        ("partition", pa.array([None, -1], pa.int32()), "names partition -1 of 't'"),
    ],
)
def test_rows_that_are_no_records(column: str, values: Any, problem: str) -> None:
    with pytest.raises(RecordRefused, match=problem):
        sent(pa.record_batch({"value": pa.array([b"a", b"b"]), column: values}), "t")


ROWS = [pa.record_batch({"value": [b"a", b"b"], "offset": [1, 2]}), pa.record_batch({"value": [b"c"], "offset": [3]})]


def values(*messages: Any) -> list[bytes]:
    return [value.as_py() for batch in staged_batches(messages) for value in batch.column("value")]


@pytest.mark.parametrize("threshold", [0, 10, 1 << 20])
def test_there_and_back(tmp_path: Path, threshold: int) -> None:
    first = stage(iter(ROWS), threshold=threshold, folder=tmp_path / "a" / "b")
    second = stage(iter(ROWS[1:]), threshold=threshold, folder=tmp_path / "a" / "b")
    empty = stage(iter(()), threshold=threshold, folder=tmp_path / "a" / "b")
    assert (first.rows, second.rows, empty.rows, empty.data, empty.path) == (3, 1, 0, None, None)
    assert [bool(each.path) for each in (first, second)] == [threshold < 100] * 2
    assert values(first, empty, second) == [b"a", b"b", b"c", b"c"]
    assert {tuple(batch.schema.names) for batch in staged_batches([first])} == {("value",)}
    remove_files([first, second, empty])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_failed_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Any:
        yield ROWS[0]
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        stage(failing(), threshold=0, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_gone_or_cut_are_an_error(tmp_path: Path) -> None:
    message = stage(iter(ROWS), threshold=0, folder=tmp_path)
    message.rows += 1
    with pytest.raises(StagingError, match="4 written, 3 found"):
        values(message)
    remove_files([message])
    with pytest.raises(StagingError, match="a folder that driver and executors share"):
        values(message)


def test_without_a_shared_folder_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LARGEST_MESSAGE", 1000)
    many = [pa.record_batch({"value": [bytes([number]) * 400]}) for number in range(10)]
    with pytest.raises(ConfigError, match="give the option stagingDir"):
        stage(iter(many), threshold=0, folder=None)


def test_folders_go_when_they_are_empty_and_stay_for_others(tmp_path: Path) -> None:
    ours, others = tmp_path / "user" / "sink" / "1", tmp_path / "user" / "other"
    for folder in (ours, others):
        stage(iter(ROWS), threshold=0, folder=folder)
    remove(ours, up_to=tmp_path)
    assert [path.name for path in (tmp_path / "user").iterdir()] == ["other"]
    remove(others, up_to=tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove(others, up_to=tmp_path)  # nothing there: nothing to do


def test_a_folder_that_goes_while_a_task_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, times = tmp_path / "a" / "b", 0

    def tidied(found: Path) -> None:
        nonlocal times
        times += 1
        if times < 3:
            remove(found, up_to=tmp_path)

    monkeypatch.setattr(staging, "_check_own", tidied)
    message = stage(iter(ROWS), threshold=0, folder=folder)
    assert (values(message), times) == ([b"a", b"b", b"c"], 3)


def test_somebody_elses_folder_in_the_temporary_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = staging_folder(None, "sink", one_machine=True)
    assert folder is not None
    assert staging_folder(None, "sink", one_machine=False) is None
    assert values(stage(iter(ROWS), threshold=0, folder=folder)) == [b"a", b"b", b"c"]
    assert folder.parent.stat().st_mode & 0o077 == 0
    remove(folder, up_to=tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.symlink_to(tmp_path / "elsewhere")  # as one that another user has made: not to be followed
    with pytest.raises(StagingError, match="not this user's"):
        stage(iter(ROWS), threshold=0, folder=folder)
