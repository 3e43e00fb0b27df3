"""Typed reading: records of a topic as columns of event classes, each with the reason why it is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from streams.codecs import JsonCodec, PydanticCodec
from streams.errors import ConfigError
from streams.events import EventType, event_type_of
from streams.formats.rules import TypeRule
from streams.spark.columns import check_records, described
from streams.spark.options import addressed, agreed
from streams.spark.typed import event_format, json_decoding, python_codec
from streams.spark.typed.event_format import EventsDataSource
from streams.spark.typed.python_codec import EventReference, ImportPath
from streams.spark.typed.rules import CAME, REASON, ruled
from streams.spark.typed.shapes import shape_of

ERROR, META = "_error", "_meta"
OnError = Literal["null", "fail", "deadletter"]

_META_COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "type", "version")
_DEAD_LETTER = "__kes_dlq_"
"""The prefix of a dead letter's headers, as the event source writes them."""
_LONGEST_TEXT: Final = 2_000
_LONGEST_NAME: Final = 64


def events(
    df: DataFrame, classes: type | Iterable[type], *, on_error: OnError = "null", types: TypeRule | None = None
) -> DataFrame:
    """Records as typed columns, with ``_error`` and ``_meta``. For batch and streaming DataFrames, of ``format("grt")``
    or of Spark's Kafka connector (with ``includeHeaders``).

    One class: a column for each of its fields; records of other types are left out. A list of classes: a struct column
    for each class, named like its event, and null unless the record is one; no record is left out, and one of another
    type, or of none, has an ``_error``.

    ``_error`` is null, or why the record is no such event: all its fields are null then. ``_meta`` is a struct of
    topic, partition, offset, timestamp, key, type, version. ``on_error="fail"`` fails the job at the first such record
    (named) that an action looks at; ``"deadletter"`` leaves these records out, for ``dead_letters`` to give them.

    ``types``: the rule of ``streams.formats`` that gives the records their types, in the place of our header; it runs
    in Python on the workers, and the rows need their headers. Of one class, records without a type are kept then, with
    an ``_error``: they may be of it.

    Older versions go through the class's upcasters, as in the event source. These, and codecs of a class's own, run in
    Python on the workers, which must be able to import the class; all else is expressions in the JVM. Raises
    ``ConfigError`` for classes without a schema, and for rows that are no records.
    """
    _check_policy(on_error)
    single = isinstance(classes, type)
    readers = _readers(classes)
    checked = _checked(df, readers, single=single, fail=on_error == "fail", keep=(), types=types)
    if on_error == "deadletter":
        checked = checked.where(f.col(ERROR).isNull())
    good = f.col(ERROR).isNull()
    if single:
        fields = readers[0].shape.fields
        value = f.col(readers[0].column)
        columns = [f.when(good, value[field.name]).alias(field.name) for field in fields]
    else:
        columns = [f.when(good, f.col(reader.column)).alias(reader.event.name) for reader in readers]
    return checked.select(*columns, ERROR, META)


def dead_letters(
    df: DataFrame, classes: type | Iterable[type], *, topic: str, types: TypeRule | None = None
) -> DataFrame:
    """The records that ``events(df, classes, on_error="deadletter")`` leaves out, with the same ``types``, as dead
    letters for ``topic``.

    They look as the event source's: the record's key, value, headers and partition number, and where it came from and
    why it failed in headers ``__kes_dlq_*``. Columns ``topic``, ``partition``, ``key``, ``value``, ``headers``, for
    ``format("grt")``; ``unionByName(..., allowMissingColumns=True)`` with the outputs writes both at one instant. The
    topic needs as many partitions as the one that was read.
    """
    single = isinstance(classes, type)
    check_records(df, headers=True)
    came = "value" if types is None else CAME
    checked = _checked(df, _readers(classes), single=single, fail=False, keep=("key", came, "headers"), types=types)
    facts = {
        "topic": f.col(f"{META}.topic"),
        "partition": f.col(f"{META}.partition"),
        "offset": f.col(f"{META}.offset"),
        "timestamp_ms": f.coalesce(f.unix_millis(f.col(f"{META}.timestamp")), f.lit(-1)),
        "error": f.lit("DecodeError"),
        "message": f.substring(f.concat(_where(), f.lit(": "), f.col(ERROR)), 1, _LONGEST_TEXT),
        "attempts": f.lit(1),
        "failed_at_ms": f.unix_millis(f.current_timestamp()),
    }
    added = [
        f.struct(f.lit(_DEAD_LETTER + name).alias("key"), fact.cast("string").cast("binary").alias("value"))
        for name, fact in facts.items()
    ]
    return checked.where(f.col(ERROR).isNotNull()).select(
        f.lit(topic).alias("topic"),
        f.col(f"{META}.partition").alias("partition"),
        "key",
        f.col(came).alias("value"),
        f.concat(f.coalesce(f.col("headers"), f.array().cast(df.schema["headers"].dataType)), f.array(*added)).alias(
            "headers"
        ),
    )


def read_events(
    spark: SparkSession,
    classes: type | Iterable[type],
    *,
    topic: str,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
    on_error: OnError = "null",
    decode: Literal["jvm", "python", "auto"] = "jvm",
    stream: bool = False,
    types: TypeRule | None = None,
) -> DataFrame:
    """The committed events in a topic, as ``events`` gives them; with ``stream`` as a streaming DataFrame. For one
    class, other types are skipped where they are read.

    ``decode="python"`` decodes them there, too, by the class's own codec, which is faster and takes exactly what the
    event source takes; for one class, which workers must be able to import. ``"auto"``: that for one class of a module
    (on a cluster it must be on the workers, too), else ``"jvm"``.

    ``types``: as for ``events``. ``servers``: ``host:port,...``, default ``KES_BOOTSTRAP_SERVERS``. ``options`` are
    those of ``format("grt")``. Each action on the DataFrame reads up to the end as it is then; give ``endingOffsets``
    as JSON (or ``cache()``) for two actions that must agree. Raises ``ConfigError``.
    """
    if decode not in ("jvm", "python", "auto"):
        raise ConfigError(f"decode must be jvm, python or auto, not {decode!r}")
    if types is not None and decode == "python":
        raise ConfigError("decode='python' is for records with our header; with types= use decode='jvm'")
    _check_policy(on_error)
    given = agreed(options or {}, {"subscribe": topic, "types": None if types is not None else _types_option(classes)})
    reader: Any = spark.readStream if stream else spark.read
    reader = reader.format("grt").option("includeHeaders", "false" if types is None else "true")
    reader = reader.options(**addressed(given, servers))
    if types is not None:
        return events(reader.load(), classes, on_error=on_error, types=types)
    if decode == "jvm" or (decode == "auto" and not _can_be_imported(classes)):
        return events(reader.load(), classes, on_error=on_error)
    if not isinstance(classes, type):
        raise ConfigError("decode='python' is for one class; read several with decode='jvm'")
    _readers(classes)  # refuses what has no columns
    spark.dataSource.register(EventsDataSource)
    reference = EventReference.of(event_type_of(classes), "events decoded where they are read")
    return _judged(reader.format(event_format.NAME).option(event_format.EVENT, str(reference)).load(), on_error)


def _can_be_imported(classes: type | Iterable[type]) -> bool:
    if not isinstance(classes, type):
        return False
    try:
        ImportPath.of(classes, "events decoded where they are read")
    except ConfigError:
        return False
    return True


def _types_option(classes: type | Iterable[type]) -> str | None:
    """Return the types to skip where they are read; ``None`` for several classes, and a name that the option cannot
    say."""
    names = event_type_of(classes).names if isinstance(classes, type) else ()
    return ",".join(names) if all(name == name.strip() and "," not in name for name in names) and names else None


def _check_policy(on_error: str) -> None:
    if on_error not in ("null", "fail", "deadletter"):
        raise ConfigError(f"on_error must be null, fail or deadletter, not {on_error!r}")


def _judged(typed: DataFrame, on_error: OnError) -> DataFrame:
    if on_error == "deadletter":
        return typed.where(f.col(ERROR).isNull())
    if on_error == "null":
        return typed
    checked = typed.withColumn(ERROR, _told(f.col(ERROR)))
    good = f.col(ERROR).isNull()  # so that a query of any field looks at the error
    fields = [name for name in typed.columns if name not in (ERROR, META)]
    return checked.select(*(f.when(good, f.col(f"`{name}`")).alias(name) for name in fields), ERROR, META)


def _told(error: Column) -> Column:
    """The same, but the job fails where there is an error."""
    what = f.coalesce(f.col(f"{META}.type"), f.lit("a record"))
    text = f.concat(f.lit("cannot read "), what, f.lit(" at "), _where(), f.lit(": "), error)
    return f.when(error.isNotNull(), f.raise_error(text).cast("string"))


def split(df: DataFrame, event_classes: Iterable[type]) -> dict[type, DataFrame]:
    """Several event types in one topic: a typed DataFrame for each class, as ``events`` gives it. ``cache()`` ``df``
    to read once."""
    return {cls: events(df, cls) for cls in event_classes}


def _readers(classes: type | Iterable[type]) -> list[EventColumns]:
    found = [EventColumns(cls, f"__event_{at}__") for at, cls in enumerate(_listed(classes))]
    if not found:
        raise ConfigError("events of no class: name at least one event class")
    taken = {ERROR, META}
    for reader in found:
        names = [field.name for field in reader.shape.fields] if isinstance(classes, type) else [reader.event.name]
        for name in names:
            if name.lower() in taken:
                raise ConfigError(
                    f"{reader.event.cls.__name__}: two columns would be called {name} (Spark ignores case, "
                    f"and {ERROR} and {META} are for events itself)"
                )
            if not isinstance(classes, type):
                taken.add(name.lower())
    return found


def _listed(classes: type | Iterable[type]) -> list[type]:
    return [classes] if isinstance(classes, type) else list(classes)


def _checked(
    df: DataFrame,
    readers: list[EventColumns],
    *,
    single: bool,
    fail: bool,
    keep: tuple[str, ...],
    types: TypeRule | None,
) -> DataFrame:
    """Columns ``_meta``, ``_error``, those kept, and the event of each reader. Several steps, not one expression:
    Spark does not merge them, so that each value is parsed once."""
    found = described(df) if types is None else ruled(df, types)
    reason = f.lit(None).cast("string") if types is None else f.col(REASON)
    if single:
        found = found.where(f.col("type").isin(*readers[0].event.names) | (f.col("type").isNull() & reason.isNotNull()))
    more = [name for name in keep if name != "value"] + ([] if types is None else [REASON])
    rows = found.select(f.struct(*_META_COLUMNS).alias(META), "value", *more)
    converted = [step for reader in readers for step in reader.converted()]
    if converted:
        rows = rows.select("*", *converted)
    rows = rows.select("*", *(step for reader in readers for step in reader.parsed()))
    if single:
        error = f.coalesce(reason, readers[0].problem())
    else:
        untyped = f.coalesce(reason, f.lit("no event type: no header __grt__ that is text"))
        error = f.when(f.col(f"{META}.type").isNull() | reason.isNotNull(), untyped)
        for reader in readers:
            error = error.when(reader.is_mine(), reader.problem())
        name = f.substring(f.col(f"{META}.type"), 1, _LONGEST_NAME)
        error = error.otherwise(f.concat(f.lit("unknown type "), name))
    if fail:
        error = _told(error)
    return rows.select(META, error.alias(ERROR), *keep, *(reader.value().alias(reader.column) for reader in readers))


def _where() -> Column:
    meta = f.col(META)
    return f.concat(meta["topic"], f.lit("["), meta["partition"], f.lit("]@"), meta["offset"])


class EventColumns:
    """Expressions for the records of one class, over the columns ``_meta`` and ``value``.

    Each of ``converted``, ``parsed`` and then ``problem`` and ``value`` uses the columns of the step before it. Raises
    ``ConfigError`` for a class that has no schema, or that workers would have to import and cannot.
    """

    def __init__(self, cls: type, column: str) -> None:
        self.event: EventType[Any] = event_type_of(cls)
        self.shape = shape_of(cls)
        self.column = column
        """Where the event is: a name that no field has."""
        self._in_python = not isinstance(self.event._codec, JsonCodec | PydanticCodec)
        self._upcasts = bool(self.event._upcasters) and not self._in_python
        self._text = f"{column}text"
        self._parsed = f"{column}parsed"
        self._converted = f"{column}converted"

    def is_mine(self) -> Column:
        """Check whether a record is of this type."""
        return f.col(f"{META}.type").isin(*self.event.names)

    def converted(self) -> list[Column]:
        """Return the columns that need Python: nothing, as a rule."""
        value, version = f.when(self.is_mine(), f.col("value")), f.col(f"{META}.version")
        if self._in_python:
            made = python_codec.decode_event(self.event, self.shape, f.when(version.isNotNull(), value), version)
        elif self._upcasts:
            older = (version >= 1) & (version < self.event.version)
            made = python_codec.upcast(self.event, f.when(older, value), f.when(older, version))
        else:
            return []
        return [made.alias(self._converted)]

    def parsed(self) -> list[Column]:
        """The JSON, parsed."""
        if self._in_python:
            return []
        value = f.when(self.is_mine() & (f.col(f"{META}.version") == self.event.version), f.col("value"))
        if self._upcasts:
            value = f.coalesce(f.col(f"{self._converted}.value"), value)
        text = value.cast("string")
        return [text.alias(self._text), json_decoding.from_json(text, self.shape).alias(self._parsed)]

    def problem(self) -> Column:
        """Why a record of this type is no such event, or null."""
        version, newest = f.col(f"{META}.version"), self.event.version
        number = version.cast("string")
        is_null = f.when(f.col("value").isNull(), f.lit("null value"))
        no_version = f.when(version.isNull(), json_decoding.in_parts(f.lit("the version header is no number")))
        if self._in_python:
            return f.coalesce(is_null, no_version, f.col(f"{self._converted}.error"))
        newer = f.concat(
            f.lit("version "), number, f.lit(f" is newer than {newest}, the newest known here: update this program")
        )
        older = f.concat(
            f.lit("version "), number, f.lit(f" is older than {newest}, and the class has no upcaster for it")
        )
        text, parsed = f.col(self._text), f.col(self._parsed)
        wrong_version = f.when(version > newest, newer).when(version < 1, f.lit("versions start at 1"))
        if self._upcasts:
            wrong_version = f.coalesce(wrong_version, f.col(f"{self._converted}.error"))
        else:
            wrong_version = wrong_version.when(version < newest, older)
        return f.coalesce(
            is_null,
            no_version,
            f.when(version != newest, wrong_version),
            f.when(f.length("value") == 0, f.lit("empty value")),
            json_decoding.unreadable(parsed, text, self.shape),
        )

    def value(self) -> Column:
        """The event as a struct; of no use where it has a problem."""
        if self._in_python:
            return f.col(f"{self._converted}.value")
        return json_decoding.decoded(f.col(self._parsed), f.col(self._text), self.shape)
