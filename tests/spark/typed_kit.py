"""Rows of events made by hand, for tests of typed DataFrames without a topic."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from streams.events import event_type_of


def cell(value: Any) -> Any:
    """A value as ``createDataFrame`` takes it: structs as tuples in the order of their fields."""
    if isinstance(value, msgspec.Struct):
        return tuple(cell(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, pydantic.BaseModel):
        return tuple(cell(getattr(value, name)) for name in type(value).model_fields)
    if dataclasses.is_dataclass(value):
        return tuple(cell(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, list | tuple | set):
        return [cell(each) for each in value]
    return {name: cell(each) for name, each in value.items()} if isinstance(value, dict) else value


def records(spark: SparkSession, cls: type, values: Sequence[bytes | None], version: int | None = None) -> DataFrame:
    event = event_type_of(cls)
    number = event.version if version is None else version
    rows = [(None, value, event.name, number, "t", 0, at, None) for at, value in enumerate(values)]
    columns = "key binary, value binary, type string, version int, topic string, partition int, offset bigint"
    return spark.createDataFrame(rows, columns + ", timestamp timestamp")


def read_batch(name: str, values: Sequence[bytes | None]) -> pa.RecordBatch:
    """Records of one type and version 1, as the source's reader gives them."""
    rows = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.nulls(rows, pa.binary()), "value": pa.array(values, pa.binary()), "type": [name] * rows,
            "version": pa.array([1] * rows, pa.int32()), "topic": ["t"] * rows,
            "partition": pa.array([0] * rows, pa.int32()), "offset": list(range(rows)),
            "timestamp": pa.nulls(rows, pa.timestamp("us", "UTC")),
        }
    )  # fmt: skip


def frame(spark: SparkSession, objects: list[Any]) -> DataFrame:
    return spark.createDataFrame([cell(each) for each in objects], kes_spark.schema_of(type(objects[0])))
