"""The hot path of encoding: records that are like most, one ``join`` over a tuple each, with varints from a table.

Both functions end in front of the first record that is unusual: a topic that is new, no key or no value, 8 KiB or more,
a part of a wrong type, no room in the batch. ``record_batch`` does that one, and calls again. The first record of a
partition is usual: of live traffic it is every second one.

This module is a leaf (``sak/leaves.py``): functions over fields and lists, without classes and coroutines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from streams.kafka.writing.rows import LENGTHS, SMALL, Rows, TopicRows
from streams.records import HEADER_OVERHEAD, Change, Output
from streams.sak import leaves

CLASSES: Final = (Change, Output, Rows, TopicRows)
"""Whose fields are read by their places in memory when this is compiled."""
FIRST: Final = b"\0\0"
"""Begins the first record of a batch: no attributes, no time after its own."""
LATEST_MS: Final = (1 << 62) - 1
"""The latest time that a record may have."""


def add_outputs(
    topics: dict[str, TopicRows],
    encoded_headers: Callable[[Any], bytes],
    outputs: Sequence[Output],
    start: int,
    now_ms: int,
    largest: int,
) -> int:
    """Encode outputs from position ``start`` on; return the position of the first that is unusual. ``largest``: bytes
    of a record without headers, at most."""
    small, join = SMALL, b"".join
    name: object = None
    headers: object = topics  # at first something that no headers are
    encoded = b""
    places: dict[Any, int] = {}
    place: Callable[[Any], int] = places.__getitem__
    by_partition: dict[int, Rows] = {}
    room = most = partitions = 0
    position = start
    try:
        for position in range(start, len(outputs)):
            output: Output = outputs[position]
            if output.topic != name:
                name = output.topic
                topic: TopicRows = topics[output.topic]
                placement = topic.placement
                places, place, by_partition, room = topic.places, placement.place, topic.rows, placement.limit - LENGTHS
                partitions = placement.count
            if output.headers is not headers:
                headers = output.headers
                encoded = encoded_headers(output.headers)
                most = largest - HEADER_OVERHEAD * len(output.headers or ())
            key: Any = output.key
            value: Any = output.value
            if type(key) is not bytes or type(value) is not bytes:  # a buffer's length counts items
                break
            partition: Any = output.partition
            if partition == -1:
                partition = places.get(key)
                if partition is None:
                    partition = place(key)
            found = by_partition.get(partition)
            if found is None:
                if type(partition) is not int or not 0 <= partition < partitions:
                    break
                found = by_partition[partition] = Rows()  # without a record it is no batch
            rows: Rows = found
            row_list = rows.rows  # first of its fields: see sak/compiling.py
            count = rows.count
            stamp = output.timestamp_ms or now_ms
            if not count:  # time and position count from this record
                if type(stamp) is not int or not 0 <= stamp <= LATEST_MS:
                    break
                head = FIRST
            elif stamp is rows.stamp:  # the time of the call is one object; another one of equal value costs a head
                head = rows.head
            else:
                delta = stamp - rows.first_ms
                if delta < 0:  # would be looked up from the end of the table: a wrong time, without an error
                    break
                head = b"\0" + small[delta]
            record = join((head, small[count], small[len(key)], key, small[len(value)], value, encoded))
            size = len(record)
            length = small[size]
            size += len(length)
            if size > most or rows.size + size > room:
                break
            if stamp is not rows.stamp:
                rows.stamp, rows.head = stamp, head
                if not count:
                    rows.first_ms = rows.last_ms = stamp
                elif stamp > rows.last_ms:
                    rows.last_ms = stamp
            row_list.append(length)
            row_list.append(record)
            rows.count = count + 1
            rows.size += size
        else:
            position = len(outputs)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        pass  # unusual; whatever can fail stands before the first change of the batch, so nothing of it is in there
    return position


def add_changes(rows: Rows, changes: Sequence[Change], start: int, now_ms: int, limit: int) -> int:
    """Encode the changelog records of a partition's changes; return the position of the first that is unusual."""
    row_list = rows.rows  # first of its fields
    count, size = rows.count, rows.size
    delta = now_ms - rows.first_ms if count else 0
    if not 0 <= delta < len(SMALL):
        return start
    small, join = SMALL, b"".join
    head = b"\0" + small[delta]
    room = limit - LENGTHS
    position = start
    try:
        for position in range(start, len(changes)):
            change: Change = changes[position]
            key: Any = change.key
            value: Any = change.value
            # A change with a type has a header, and one without a value is a deletion: both go the slow way.
            if change.type or type(key) is not bytes or type(value) is not bytes:
                break
            record = join((head, small[count], small[len(key)], key, small[len(value)], value, b"\0"))
            length = small[len(record)]
            if size + len(record) > room:
                break
            row_list.append(length)
            row_list.append(record)
            count += 1
            size += len(length) + len(record)
        else:
            position = len(changes)
    except (LookupError, TypeError):
        pass  # as above
    if position > start:
        if not rows.count:
            rows.first_ms = now_ms
        rows.count, rows.size = count, size
        if now_ms > rows.last_ms:
            rows.last_ms = now_ms
    return position


leaves.use(globals())
