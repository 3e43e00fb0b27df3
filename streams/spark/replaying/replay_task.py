"""The executor's side of a replay: rows in, in order; rows out. One task, the partitions that are its, one by one.

Arrow batches come and go as the JVM sends and takes them, so what a task holds is one batch, the state of one
partition, and the outputs of a thousand records; never a partition's records.

When something upstream fails, or a task is killed, the iterator that Spark hands to Python ends cleanly, with part of
the rows. So the driver puts a row behind each task's last one, and a task that has not seen it fails.

The event source comes by its name where it has one: each worker imports the module, and has event types, versions,
upcasters and codecs as they are declared there. Else a copy comes by pickle, which carries functions along, but no
class: classes that exist in one process only (``__main__``, a notebook, the inside of a function) are refused by the
driver, where it can still be said why.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.serializers import CloudPickleSerializer

from streams.errors import ConfigError, StreamsError
from streams.kafka.reading.received import received
from streams.model.loading import described, load
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, Headers, IncomingRecord, Output
from streams.runtime.replay import PartitionReplay, Program
from streams.source.event_source import EventSource
from streams.spark.reading.record_batches import HEADERS, header_column
from streams.spark.typed import schemas
from streams.spark.writing.header_columns import type_headers

POSITION, STATE, RECORD, END = range(4)
"""What a row is that a task gets; sorted so within a partition."""

_SLICE: Final = 1_000
"""Records handled before what they led to is handed on."""
_ADVICE = "put it into a module that the executors can import, and name it as 'module:attribute'"
_BATCH_ROWS: Final = 10_000
_BATCH_BYTES: Final = 16 << 20
_HEADERS_KNOWN: Final = 1_000

RESULT: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("input_partition", pa.int32()),
        ("input_offset", pa.int64()),
        ("number", pa.int64()),
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("type", pa.string()),
        ("version", pa.int32()),
        ("headers", HEADERS),
        ("partition", pa.int32()),
        ("timestamp_ms", pa.int64()),
        ("text", pa.string()),
    ]
)
"""What a task gives: rows of all kinds in one schema, distinguished by ``kind``."""


class Travelling(msgspec.Struct, frozen=True):
    """An event source on its way: ``name``, or the program itself; ``fingerprint`` is what the driver saw there,
    ``schemas`` what it has fetched."""

    name: str
    program: Program | None
    fingerprint: tuple[tuple[str, ...], ...]
    schemas: schemas.OfNeeds

    def arrive(self) -> Program:
        """The program, on the executor. Raises ``ConfigError`` when it is not the one that the driver has."""
        if self.program is not None:
            return self.program
        source = loaded(self.name)
        schemas.needs_received(source._declared.schema_needs(), self.schemas)
        program = source.program()
        found = program.fingerprint
        if found != self.fingerprint:
            differing = sorted({str(each[0]) for each in set(found) ^ set(self.fingerprint)})
            raise ConfigError(
                f"the event source {self.name!r} is another one on the executors (it differs in: "
                f"{', '.join(differing)}): do they have the same version of the module, and are all handlers "
                "registered when it is imported?"
            )
        return program


def travelling(source: EventSource[Any] | str) -> tuple[Travelling, Program]:
    """Return the parts that the executors get, and the program as it is here. Raises ``ConfigError`` for what cannot
    travel."""
    if isinstance(source, str):
        found = loaded(source)
        program = found.program()
        return Travelling(source, None, program.fingerprint, schemas.of_needs(found._declared.schema_needs())), program
    if not isinstance(source, EventSource):
        raise ConfigError(f"source is {type(source).__name__}; give an EventSource, or its name as 'module:attribute'")
    sent = schemas.of_needs(source._declared.schema_needs())
    program = source.program()
    name = _name_of(source, program)
    if name:
        return Travelling(name, None, program.fingerprint, sent), program
    for route in program.routes:
        if route.event_type is not None:
            _check_class(route.event_type.cls)
    there = Travelling("", program, (), ())
    try:
        serializer: Any = CloudPickleSerializer  # untyped
        serializer().dumps(there)
    except Exception as error:
        raise ConfigError(f"the event source cannot be sent to executors: {described(error)}; {_ADVICE}") from error
    return there, program


def loaded(name: str) -> EventSource[Any]:
    """The event source of this name. Raises ``ConfigError``."""
    found = load(name)
    if not isinstance(found, EventSource):
        raise ConfigError(f"{name!r} is {type(found).__name__}, not an EventSource")
    return found


def _name_of(source: EventSource[Any], program: Program) -> str:
    """``module:attribute``, if it is a global of a module that others can import: first that of its handlers, because
    the others have only imported it, and may do more than that."""
    routes = [*program.routes, *([program.default] if program.default is not None else [])]
    own = [getattr(route.handler, "__module__", "") for route in routes]
    for module_name in dict.fromkeys([*own, *sys.modules]):
        module = sys.modules.get(module_name)
        if module_name == "__main__" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is source and _is_importable(module_name):
                return f"{module_name}:{attribute}"
    return ""


def _is_importable(module_name: str) -> bool:
    try:
        return getattr(import_module(module_name), "__spec__", None) is not None
    except Exception:
        return False


def _check_class(cls: type) -> None:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or module is None:
        raise ConfigError(
            f"the event class {cls.__qualname__} exists in this process only ({cls.__module__}), so executors cannot "
            f"read its events: {_ADVICE}"
        )


def replayer(
    source: Travelling, *, wall_ms: int, ignores_timers: bool = False
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function for ``mapInArrow``."""

    def replayed(batches: Iterator[Any]) -> Iterator[Any]:
        task = _Task(source.arrive(), wall_ms, ignores_timers)
        with asyncio.Runner() as runner:
            run = runner.get_loop().run_until_complete  # Runner.run would set a signal handler each time
            try:
                for batch in batches:
                    for partition, kind, rows in _runs(batch):
                        yield from task.take(run, partition, kind, rows)
                yield from task.finish()
            finally:
                task.close()

    return replayed


Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs something on the task's loop until it ends."""


class _Task:
    def __init__(self, program: Program, wall_ms: int, ignores_timers: bool) -> None:
        self._program = program
        self._wall_ms, self._ignores_timers = wall_ms, ignores_timers
        self._rows = _Rows()
        self._current: PartitionReplay | None = None
        self._is_whole = False
        self._failed = False

    def take(self, run: Run, partition: int, kind: int, rows: Any) -> Iterator[Any]:
        if kind == END:
            self._is_whole = True
            return
        replay = self._current
        if replay is None or replay.partition != partition:
            yield from self._end_partition()
            self.close()
            replay = self._current = run(self._begin(partition))
            self._failed = False
        if self._failed:
            return
        try:
            if kind == POSITION:
                if rows.num_rows != 1:
                    raise StreamsError(f"the state has more than one position of partition {partition}")
                replay.begin(rows.column("offset")[0].as_py())
            elif kind == STATE:
                replay.restore(_changes(rows))
            else:
                for start in range(0, rows.num_rows, _SLICE):
                    records = _records(rows.slice(start, _SLICE), self._program.config.topic, partition)
                    yield from self._handle(run, replay, records)
        except StreamsError as error:
            self._failed = True
            self._rows.add("error", partition, replay.watermark, type=type(error).__name__, text=str(error))

    async def _begin(self, partition: int) -> PartitionReplay:
        return PartitionReplay(self._program, partition, wall_ms=self._wall_ms, ignores_timers=self._ignores_timers)

    def _handle(self, run: Run, replay: PartitionReplay, records: list[IncomingRecord]) -> Iterator[Any]:
        was_stopped = replay.stopped is not None
        completed = run(replay.handle(records))
        origin, number = -1, 0
        for output in completed.outputs:
            number = number + 1 if output.origin == origin else 0
            origin = output.origin
            self._rows.add_output("dead_letter" if origin in completed.dead else "output", output, number)
        for failed in completed.failed:
            self._rows.add("failure", failed.partition, failed.offset, type=failed.response, text=failed.error)
        if replay.stopped is not None and not was_stopped:
            self._rows.add("stop", replay.partition, replay.watermark, text=str(replay.stopped))
        yield from self._rows.ready()

    def _end_partition(self) -> Iterator[Any]:
        replay = self._current
        if replay is None or self._failed:
            return  # no position either: with it a caller would go on behind the error
        for change in replay.contents():
            self._rows.add_state(replay.partition, change)
            yield from self._rows.ready()
        self._rows.add("position", replay.partition, replay.watermark, number=replay.records)

    def finish(self) -> Iterator[Any]:
        if not self._is_whole:
            raise RuntimeError("the rows of this task were cut off: something before it failed, or it was stopped")
        yield from self._end_partition()
        yield from self._rows.ready(at_all_costs=True)

    def close(self) -> None:
        if self._current is not None:
            self._current.close()


def _runs(batch: Any) -> Iterator[tuple[int, int, Any]]:
    """The batch in pieces of one partition and one kind."""
    partitions, kinds = batch.column("partition").to_pylist(), batch.column("kind").to_pylist()
    start = 0
    for end in range(1, batch.num_rows + 1):
        if end == batch.num_rows or partitions[end] != partitions[start] or kinds[end] != kinds[start]:
            yield partitions[start], kinds[start], batch.slice(start, end - start)
            start = end


def _changes(rows: Any) -> Iterator[Change]:
    columns = (rows.column(name).to_pylist() for name in ("key", "value", "type"))
    for key, value, kind in zip(*columns, strict=True):
        if key is None:
            raise StreamsError("a row of the state has a null key")
        yield Change(key, value, None, kind or "")


def _records(rows: Any, topic: str, partition: int) -> list[IncomingRecord]:
    columns = [rows.column(name).to_pylist() for name in ("offset", "key", "value", "type", "version", "timestamp_ms")]
    return [
        IncomingRecord(topic, partition, offset, key, value, received(_with_type(headers, kind, version)), stamp)
        for offset, key, value, kind, version, stamp, headers in zip(*columns, _headers(rows), strict=True)
    ]


def _headers(rows: Any) -> Iterator[Headers | None]:
    column = rows.column("headers")
    ends = column.offsets.to_pylist()
    names, values = (column.values.field(name).to_pylist() for name in (0, 1))
    known = column.is_valid().to_pylist()
    for number, is_known in enumerate(known):
        start, end = ends[number], ends[number + 1]
        yield list(zip(names[start:end], values[start:end], strict=True)) if is_known else None


def _with_type(headers: Headers | None, kind: str | None, version: int | None) -> Headers | None:
    """The headers as they were; or made from the columns, where rows have those only."""
    if kind is None or (headers and any(name == TYPE_HEADER for name, _ in headers)):
        return headers or None
    return type_headers(kind, version) + [header for header in headers or () if header[0] != VERSION_HEADER]


class _Rows:
    """Result rows on their way to Arrow: tuples in the order of ``RESULT``."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0
        self._types: dict[tuple[tuple[str, bytes | None], ...], tuple[str | None, int]] = {}

    def add_output(self, kind: str, output: Output, number: int) -> None:
        headers = tuple(output.headers or ())
        type_of = self._types.get(headers)
        if type_of is None:
            if len(self._types) >= _HEADERS_KNOWN:
                self._types.clear()
            type_of = self._types[headers] = _type_and_version(headers, output)
        key, value, stamp, target = output.key, output.value, output.timestamp_ms or None, output.partition
        if type(key) is not bytes:
            key = _bytes(key, output)
        if type(value) is not bytes:
            value = _bytes(value, output)
        self._size += len(value or b"") + len(key or b"")
        self._rows.append(
            (
                kind, output.origin_partition, output.origin, number, output.topic, key, value, *type_of, headers,
                None if target < 0 else target, stamp, None,
            )
        )  # fmt: skip

    def add_state(self, partition: int, change: Change) -> None:
        key, value = change.key, change.value or b""
        self._size += len(key) + len(value)
        self._rows.append(("store", partition, None, None, None, key, value, change.type or None, *(None,) * 5))

    def add(
        self, kind: str, partition: int, offset: int, *, number: int | None = None, type: str = "", text: str = ""
    ) -> None:
        nothing = (None, None, None)
        self._rows.append((kind, partition, offset, number, *nothing, type, None, *nothing, text))

    def ready(self, *, at_all_costs: bool = False) -> Iterator[Any]:
        rows = self._rows
        if not rows or not (at_all_costs or len(rows) >= _BATCH_ROWS or self._size >= _BATCH_BYTES):
            return
        self._rows, self._size = [], 0
        columns = [
            header_column(values) if field.name == "headers" else pa.array(values, field.type)
            for field, values in zip(RESULT, zip(*rows, strict=True), strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=RESULT)


def _type_and_version(headers: tuple[tuple[str, Any], ...], output: Output) -> tuple[str | None, int]:
    name: bytes | None = None
    version: bytes | None = None
    for header, content in headers:
        if header == TYPE_HEADER and name is None:
            name = _bytes(content, output)
        elif header == VERSION_HEADER and version is None:
            version = _bytes(content, output)
    number = int(version) if version is not None and version.isdigit() and len(version) <= 9 else 1
    return None if name is None else name.decode(errors="replace"), number


def _bytes(value: object, output: Output) -> bytes | None:
    """Convert to the form that a producer takes: bytes, or text as UTF-8."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    where = f"partition {output.origin_partition}, offset {output.origin}"
    raise StreamsError(f"{where}: a record for topic {output.topic!r} has a {type(value).__name__} in it, not bytes")
