"""Filters of a query that a read takes over, as far as it can: so that less is fetched, and less goes to the JVM.

All of them are left to Spark, too. So a filter here may let rows through, and must only never take out one that Spark
would keep; what is not understood is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as _compute
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from streams.records import TopicPartition

compute: Any = _compute  # its functions are made when it is imported, which type checkers do not see

_COLUMNS: Final[Mapping[str, type]] = {
    "topic": str, "partition": int, "offset": int, "timestamp": datetime, "key": bytes, "type": str,
}  # fmt: skip
_OPERATIONS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    EqualTo: compute.equal,
    GreaterThan: compute.greater,
    GreaterThanOrEqual: compute.greater_equal,
    LessThan: compute.less,
    LessThanOrEqual: compute.less_equal,
    In: lambda column, values: compute.is_in(column, value_set=values),
}
_ORDERS: Final = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@dataclass(frozen=True)
class Condition:
    """One filter: a column of a read, the operation, and its value, for ``In`` a tuple of values."""

    column: str
    operation: type
    value: Any

    def holds(self, column: Any) -> Any:
        """Return for each value of an Arrow column, or a number or text, whether it may stay."""
        values = self.value if self.operation is In else None
        of = column.type if isinstance(column, pa.Array | pa.Scalar) else None
        right = pa.scalar(self.value, of) if values is None else pa.array(values, of)
        return _OPERATIONS[self.operation](column, right)


@dataclass(frozen=True)
class Pushed:
    """The conditions that were understood: all of them must hold."""

    conditions: tuple[Condition, ...] = ()
    of_records: tuple[Condition, ...] = field(default=())
    """Those that need the record: times, keys, and types."""

    def of(self, filters: Iterable[Filter], inside: tuple[str, ...]) -> Pushed:
        """Return these and what is understood of ``filters``; the columns of a read are ``inside`` of a struct."""
        found = [condition for one in filters if (condition := _condition(one, inside)) is not None]
        every = (*self.conditions, *found)
        of_records = tuple(one for one in every if one.column in ("timestamp", "key", "type"))
        return replace(self, conditions=every, of_records=of_records)

    def reads(self, place: TopicPartition) -> bool:
        """Check whether a partition may hold such records."""
        parts = {"topic": pa.scalar(place.topic), "partition": pa.scalar(place.partition, pa.int64())}
        return all(one.holds(parts[one.column]).as_py() for one in self.conditions if one.column in parts)

    def clipped(self, begin: int, end: int) -> tuple[int, int]:
        """Return the part of a range that may hold such records; an empty one has its end at its beginning."""
        for one in self.conditions:
            if one.column != "offset":
                continue
            values = one.value if one.operation is In else (one.value,)
            if one.operation not in (LessThan, LessThanOrEqual):
                begin = max(begin, min(values) + (one.operation is GreaterThan))
            if one.operation not in (GreaterThan, GreaterThanOrEqual):
                end = min(end, max(values) + (one.operation is not LessThan))
        return begin, max(begin, end)

    def since_ms(self) -> int | None:
        """Return the time before which no record is wanted, in milliseconds; ``None`` for all times."""
        times = [
            int(min(one.value if one.operation is In else (one.value,)).timestamp() * 1000) - 1
            for one in self.conditions
            if one.column == "timestamp" and one.operation not in (LessThan, LessThanOrEqual)
        ]
        return max(0, *times) if times else None

    def kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that may be such records."""
        for one in self.of_records:
            batch = batch.filter(one.holds(batch.column(one.column)))
        return batch


def _condition(one: Filter, inside: tuple[str, ...]) -> Condition | None:
    operation, value = type(one), getattr(one, "value", None)
    path: tuple[str, ...] = getattr(one, "attribute", ())
    if operation not in _OPERATIONS or not path or path[:-1] != inside:
        return None
    kind = _COLUMNS.get(path[-1].lower())
    values: tuple[Any, ...] = tuple(value) if operation is In and isinstance(value, tuple | list) else (value,)
    # An In over nothing, or with a null, and bytes as an order, are Spark's to judge.
    if kind is None or not values or any(type(each) is not kind for each in values):
        return None
    if operation in _ORDERS and kind in (bytes, str):
        return None
    if kind is datetime and any(getattr(each, "tzinfo", None) is None for each in values):
        return None
    return Condition(path[-1].lower(), operation, values if operation is In else value)
