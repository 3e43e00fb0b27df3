"""Two sets of rows, side by side: what a changed handler would send or store, against what production has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from streams.errors import ConfigError
from streams.spark.replaying.replays import Kept

_ORDER: Final = ("cause.partition", "cause.offset", "cause.number"), ("partition", "offset")
"""What gives the order of the rows of a key: for replayed outputs, for records that were read."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Kept):
    """The differences of two sets of rows: the numbers of the ``same``, ``missing`` (expected, not there), ``extra``
    and ``different``. ``differences`` has a row for each of these three: ``difference``, the place (``topic`` and
    ``key``, or ``partition`` and ``key``), ``number`` (which row of that key, from 0), and the two rows, ``expected``
    and ``actual``, as structs. Kept until ``unpersist``, or the end of a ``with``."""

    same: int
    missing: int
    extra: int
    different: int
    differences: DataFrame = field(repr=False, compare=False)
    _kept: DataFrame | None = field(repr=False, compare=False)

    @property
    def is_equal(self) -> bool:
        """Check whether nothing differs."""
        return not (self.missing or self.extra or self.different)


def compare(
    expected: DataFrame,
    actual: DataFrame,
    *,
    ignore_headers: bool | Iterable[str] = False,
    order: Literal["per key", "none"] = "per key",
) -> Comparison:
    """Compare outputs, dead letters or stores with what is expected of them: key by key, in order.

    *Outputs* have a column ``topic``: ``Replay.outputs`` and what ``format("grt")`` reads, in any mix. The rows of one
    topic and key are compared one by one, in the order of their ``cause``, or of partition and offset: ``value``, and
    the type, version and headers that both sides have columns for. ``ignore_headers`` names headers to leave out, or
    (``True``) all of them; type and version count all the same. In which partition a row is, and when it was written,
    does not count. After a missing row, what follows in that key is compared one place off. Where one key is written
    from several input partitions, chance decides their order among each other: ``order="none"`` matches the rows of a
    key as a multiset, and nothing counts as ``different``.

    *Stores* have no column ``topic``: ``Replay.stores``, ``changelog_state(...).stores``, one row for each partition
    and key; ``value`` and ``type`` are compared.

    Runs one job and keeps its result. Raises ``ConfigError`` for sides that are not of one kind.
    """
    have = set(expected.columns) & set(actual.columns)
    if ("topic" in expected.columns) != ("topic" in actual.columns):
        raise ConfigError("compare: one side has a column topic (outputs), the other has none (stores)")
    place = ["topic", "key"] if "topic" in have else ["partition", "key"]
    if missing := {*place, "value"} - have:
        raise ConfigError(f"compare needs the columns {', '.join(sorted(missing))} on both sides")
    content = f.struct(*_content(have, ignore_headers))
    matched = [*place, "number", *(["content"] if order == "none" else [])]
    left, right = (
        _numbered(side, place, content, order).alias(name) for side, name in ((expected, "l"), (actual, "r"))
    )
    joined = left.join(right, [f.col(f"l.{name}").eqNullSafe(f.col(f"r.{name}")) for name in matched], "full_outer")
    difference = (
        f.when(f.col("r.number").isNull(), "missing")
        .when(f.col("l.number").isNull(), "extra")
        .when(~f.col("l.content").eqNullSafe(f.col("r.content")), "different")
    )
    places = [f.coalesce(f"l.{name}", f"r.{name}").alias(name) for name in (*place, "number")]
    rows = [f.when(difference.isNotNull(), f.col(f"{side}.row")).alias(name) for side, name in _SIDES]
    kept = joined.select(difference.alias("difference"), *places, *rows).persist(StorageLevel.MEMORY_AND_DISK)
    counts = {row.difference: row["count"] for row in kept.groupBy("difference").count().collect()}
    return Comparison(
        same=counts.get(None, 0),
        missing=counts.get("missing", 0),
        extra=counts.get("extra", 0),
        different=counts.get("different", 0),
        differences=kept.where("difference is not null"),
        _kept=kept,
    )


def _content(have: set[str], ignore_headers: bool | Iterable[str]) -> Iterator[Column]:
    for name in ("value", "type", "version"):
        if name in have:
            yield f.col(name)
    if "headers" not in have or ignore_headers is True:
        return
    ignored = [] if ignore_headers is False else list(ignore_headers)
    kept = f.filter("headers", lambda header: ~header["key"].isin(ignored)) if ignored else f.col("headers")
    yield f.when(f.size(kept) > 0, kept).alias("headers")  # no headers: null for some readers, empty for others


def _numbered(df: DataFrame, place: list[str], content: Column, order: str) -> DataFrame:
    """The rows with their number among those of their key."""
    names = _ORDER[0] if "cause" in df.columns else _ORDER[1] if "offset" in df.columns else ()
    if not names and "topic" in df.columns and order != "none":
        raise ConfigError("compare: rows of outputs need cause, or partition and offset, to be compared in order")
    row = f.struct(*(name for name in df.columns if name not in place))
    found = df.select(*place, content.alias("content"), row.alias("row"), *(f.col(n).alias(n) for n in names))
    of_key = Window.partitionBy(*place, *(["content"] if order == "none" else []))
    by = [f.col(f"`{name}`") for name in names] or [f.lit(0)]
    return found.withColumn("number", f.row_number().over(of_key.orderBy(*by)) - 1).drop(*names)


_SIDES: Final = (("l", "expected"), ("r", "actual"))
