"""Rows in the order that is meant, in batches and in streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as _compute
from pyspark.sql import Column, DataFrame

from streams.errors import ConfigError
from streams.spark.columns import SINK_COLUMNS

pc: Any = _compute  # its functions are made at run time

_ROWS: Final = 10_000


def ordered(df: DataFrame, *by: str | Column, partitions: int) -> DataFrame:
    """Encoded events, all of one key in one of ``partitions`` tasks, sorted by ``by`` there: the order they are
    written in.

    Kafka keeps what is written in order per key; this makes the order of the rows the one that is meant. Columns that
    are no record's (those kept by ``encode(keep=...)``) are dropped after sorting. Nulls come first.

    A streaming DataFrame is sorted within each micro-batch; rows that come in a later batch are written later, whatever
    they say. Spark sorts no streams, so this is done by Arrow in the tasks: each holds its rows of one batch in memory,
    and ``by`` are names of columns (``ConfigError`` otherwise).
    """
    extra = [name for name in df.columns if name not in SINK_COLUMNS]
    together = df.repartition(partitions, "key")
    if not df.isStreaming:
        return together.sortWithinPartitions(*by).drop(*extra)
    names = [column for column in by if isinstance(column, str)]
    if len(names) != len(by):
        raise ConfigError("ordered: a stream is sorted by columns that are given by name, ascending")
    if missing := [name for name in names if name not in df.columns]:
        raise ConfigError(
            f"ordered: {', '.join(missing)} is no column of the DataFrame; it has {', '.join(df.columns)}"
        )
    return together.mapInArrow(_sorter(names, extra), df.drop(*extra).schema)


def _sorter(names: list[str], extra: list[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def sort(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # The end of the input may be a failure of what comes before (see sink.py): the task fails then, after this.
        rows: Any = list(batches)
        if not rows:
            return
        table = pa.Table.from_batches(rows)
        keys = [(name, "ascending") for name in names]
        order = pc.sort_indices(table, sort_keys=keys, null_placement="at_start")
        yield from table.drop_columns(extra).take(order).to_batches(max_chunksize=_ROWS)

    return sort
