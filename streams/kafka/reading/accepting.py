"""Messages of confluent-kafka made into records, 0.5 us each on top of librdkafka's own. A leaf (``sak/leaves.py``)."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import Message

from streams.kafka.reading.received import received
from streams.records import IncomingRecord
from streams.sak import leaves

CLASSES: Final = (IncomingRecord,)
"""Made by allocating and filling in when this is compiled."""


def accept(
    messages: list[Any],
    start: int,
    topic: str,
    positions: dict[int, int],
    batches: dict[int, list[IncomingRecord]],
    at_end: set[int],
) -> int:
    """Make records of the messages from place ``start`` on, up to the first that is an error, and return its place.

    Adds them to ``batches``, moves ``positions``, and takes partitions that bring something out of ``at_end``. Left out
    is what lies below its partition's position, or is of a partition without one. Runs of one partition at a time,
    since that is how they come.

    Each message is taken out of its list, so that it is gone before the next one makes its headers: messages and
    headers of a whole poll are more objects than the garbage collector's threshold (700), and it would go through them
    at each poll.
    """
    # Local names of the methods: each look-up takes as long as the call, in compiled code.
    error_of, partition_of, offset_of, headers_of = Message.error, Message.partition, Message.offset, Message.headers
    key_of, value_of, timestamp_of = Message.key, Message.value, Message.timestamp
    current: Any = positions  # a partition: at first something that none is
    position = 0
    records: Any = None  # of the current partition
    headers: Any = None
    listed: Any = None  # those of the record before, as they came
    place = start
    for place in range(start, len(messages)):
        message: Message = messages[place]
        if error_of(message) is not None:
            break
        messages[place] = None
        partition: Any = partition_of(message)
        if partition is not current and partition != current:
            if records is not None:
                positions[current] = position
            following = positions.get(partition)
            if following is None:  # a left-over of a removed one
                current, records = positions, None
                continue
            current, position = partition, following
            records = batches.setdefault(partition, [])
            at_end.discard(partition)
        offset: Any = offset_of(message)
        at = offset
        if at < position:
            continue
        position = at + 1
        found = headers_of(message)
        if found != listed:
            listed, headers = found, received(found)
        timestamp = timestamp_of(message)
        records.append(
            IncomingRecord(topic, partition, offset, key_of(message), value_of(message), headers, timestamp[1])
        )
    else:
        place = len(messages)
    if records is not None:
        positions[current] = position
    return place


leaves.use(globals())
