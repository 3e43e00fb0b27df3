"""The headers of rows to write: their columns ``type``, ``version`` and ``headers``, as the end of each record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as _compute

from streams.errors import RecordRefused
from streams.kafka.writing.record_batch import encode_headers
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers
from streams.spark.writing.placing import Numbers

pc: Any = _compute  # its functions are made at run time
_Pairs = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class HeaderColumn:
    """The encoded headers of each row: one for all, or by the row's index in ``different``."""

    different: list[bytes]
    of_row: Numbers | None

    def sorted_by(self, order: Numbers) -> HeaderColumn:
        return self if self.of_row is None else HeaderColumn(self.different, self.of_row[order])

    @property
    def encoded(self) -> Any:
        """Return an Arrow scalar, or a column."""
        if self.of_row is None:
            return pa.scalar(self.different[0], pa.large_binary())
        return pa.array(self.different, pa.large_binary()).take(pa.array(self.of_row))

    @property
    def lengths(self) -> Numbers | int:
        """Return the number of bytes."""
        lengths = np.array([len(encoded) for encoded in self.different])
        return int(lengths[0]) if self.of_row is None else lengths[self.of_row]


def headers_of(rows: Any, doing: str) -> HeaderColumn:
    """Encode the headers of rows (``pyarrow.RecordBatch``); the same ones once. Raises ``RecordRefused``."""
    names = rows.schema.names
    pairs: tuple[list[Any], Numbers | None] = [()], None
    if "headers" in names:
        _check(rows.column("headers"), doing)
        pairs = _different_pairs(rows.column("headers"))
    columns = [pairs, *(_different(rows.column(name) if name in names else None) for name in ("type", "version"))]
    varying = [(len(values), of_row) for values, of_row in columns if of_row is not None]
    if not varying:
        return HeaderColumn([encode_headers(_merged(*(values[0] for values, _ in columns)))], None)
    codes = np.zeros(rows.num_rows, np.int64)
    for count, of_row in varying:
        codes = codes * count + of_row
    _, examples, of_row = np.unique(codes, return_index=True, return_inverse=True)
    different = [
        encode_headers(_merged(*(values[0 if column is None else column[row]] for values, column in columns)))
        for row in examples
    ]
    return HeaderColumn(different, of_row)


def _different(column: Any) -> tuple[list[Any], Numbers | None]:
    """Return the values of a column, and the index of each row's; ``None``: all rows have the same."""
    if column is None:
        return [None], None
    encoded = column.dictionary_encode()
    values = [None, *encoded.dictionary.to_pylist()]
    if column.null_count in (0, len(column)) and len(values) <= 2:
        return values[-1:], None
    return values, pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy() + 1


def _different_pairs(column: Any) -> tuple[list[Any], Numbers | None]:
    """Return the lists of a column ``headers`` as ``_different`` does values."""
    if not column.null_count and _alike(column):
        return [_pairs(column[0].as_py())], None
    known: dict[_Pairs, int] = {}
    of_row = [known.setdefault(_pairs(headers), len(known)) for headers in column.to_pylist()]
    return list(known), np.array(of_row)


def _pairs(headers: list[dict[str, Any]] | None) -> _Pairs:
    return tuple((header["key"], header["value"]) for header in headers or ())


def _alike(column: Any) -> bool:
    """Check whether all rows of a list column without nulls are the same: as long, and each like the one before it."""
    if len(pc.list_value_length(column).unique()) != 1:
        return False
    headers = column.flatten()
    width = len(headers) // len(column)
    return bool(headers.slice(width).equals(headers.slice(0, len(headers) - width)))


def _check(column: Any, doing: str) -> None:
    headers = column.flatten()
    if headers.null_count or headers.field(0).null_count:
        raise RecordRefused(
            f"{doing}: a row's column headers has a header that is null, or whose key is; nothing was written"
        )


def type_headers(kind: str | None, version: int | None) -> Headers:
    """The headers of an event of this type and version, version 1 without one of its own."""
    if kind is None:
        return []
    headers: Headers = [(TYPE_HEADER, kind.encode())]
    if version is not None and version != 1:
        headers.append((VERSION_HEADER, b"%d" % version))
    return headers


def _merged(pairs: _Pairs, kind: str | None, version: int | None) -> Headers:
    """The row's own headers; its columns ``type`` and ``version`` win over headers of the same meaning.

    A version that is null (no such column, or a header that is no number) leaves the row's header as it is: without it
    the record would be one of version 1.
    """
    ours = type_headers(kind, version)
    replaced = {TYPE_HEADER} if ours else set()
    if ours and version is not None:
        replaced.add(VERSION_HEADER)
    return [*ours, *(pair for pair in pairs if pair[0] not in replaced)]
