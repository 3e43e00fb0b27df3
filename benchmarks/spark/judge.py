"""What a topic must hold, told by a plain consumer that shares nothing with the sides under test."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, Message, TopicPartition

TYPE: Final = "Deposited"
HEADERS: Final = [("__grt__", TYPE.encode())]


class Content(msgspec.Struct, frozen=True):
    """What rows are, in three figures: how many, and the sums of the CRC-32 of their keys and values."""

    rows: int
    keys: int
    values: int


class Topics:
    """Reads whole topics with a plain consumer of committed records."""

    def __init__(self, servers: str) -> None:
        self._settings: dict[str, Any] = {
            "bootstrap.servers": servers,
            "group.id": "judge",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.queue.backoff.ms": 5,
            "log_level": 2,
        }

    def verdict(self, topic: str, partitions: int, due: Content, *, in_order: bool) -> str:
        """What is wrong with a topic, or nothing. ``in_order``: the numbers of each key's rows must rise."""
        return judged(self._messages(topic, partitions), due, in_order=in_order)

    def _messages(self, topic: str, partitions: int) -> Iterable[Message]:
        consumer = Consumer(self._settings)
        try:
            consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
            ended = 0
            while ended < partitions:
                for message in consumer.consume(5_000, 0.2):
                    if message.error() is None:
                        yield message
                    else:
                        ended += 1
        finally:
            consumer.close()


def judged(messages: Iterable[Message], due: Content, *, in_order: bool) -> str:
    """What is wrong with these records, or nothing."""
    rows = keys = values = wrong_headers = out_of_order = 0
    last: dict[bytes, int] = {}
    for message in messages:
        key, value = bytes(message.key() or b""), bytes(message.value() or b"")
        rows += 1
        keys += zlib.crc32(key)
        values += zlib.crc32(value)
        wrong_headers += message.headers() != HEADERS
        if in_order:
            number = int(value[value.index(b":") + 1 : value.index(b",")])
            out_of_order += number <= last.get(key, -1)
            last[key] = number
    if rows != due.rows:
        return f"{rows} rows instead of {due.rows}"
    if (keys, values) != (due.keys, due.values):
        return "other keys or values than were written"
    if wrong_headers:
        return f"{wrong_headers} rows with wrong headers"
    return f"{out_of_order} rows out of their key's order" if out_of_order else ""
