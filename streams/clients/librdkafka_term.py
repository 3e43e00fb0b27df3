"""One Consumer of a group member, from its subscription to its end, and the group metadata that it shows."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from confluent_kafka import KafkaError

from streams.clients.connection import ConnectionLog


class Metadata(msgspec.Struct, frozen=True):
    """Fields of librdkafka's group metadata bytes."""

    generation: int
    member_id: str
    data: bytes
    instance_id: str | None = None

    @property
    def is_member(self) -> bool:
        """Check whether the broker would fence these: generations and epochs of members begin at 1."""
        return self.generation >= 1 and bool(self.member_id)


def parse_metadata(data: bytes) -> Metadata:
    """Read ``CGMDv2`` bytes. ``ValueError``: another version, with other rules."""
    magic, rest = data[:7], data[11:].split(b"\0")
    if magic != b"CGMDv2:" or len(rest) < 3:
        raise ValueError(f"group metadata of an unknown version: {data[:16]!r}")
    instance = rest[3].decode("ascii") if len(rest) > 3 and not rest[2] else None  # after a 0; a 1: there is none
    return Metadata(struct.unpack_from("=i", data, 7)[0], rest[1].decode("ascii"), data, instance)


class GroupLog(ConnectionLog):
    """Remembers a fatal error: librdkafka reports it in several places, in each of them once."""

    fatal: KafkaError | None = None

    def on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal = self.fatal or error
        else:
            super().on_error(error)


class Term:
    """One Consumer, from its subscription to its end. ``held``: what librdkafka believes the group gave it."""

    def __init__(self, consumer: Any, log: GroupLog) -> None:
        self.consumer, self.log = consumer, log
        self.held: frozenset[int] = frozenset()
        self.over = False
        self.unsubscribed = False
        self.stale_since: float | None = None  # the membership was found void; ``held`` has still to be given up

    @property
    def is_stale(self) -> bool:
        """Check whether librdkafka still holds what the membership has lost."""
        return self.stale_since is not None

    @property
    def reason(self) -> str:
        """Reason of the loss of the membership, as far as it is known."""
        if self.log.down:
            return f"the coordinator did not answer for a session timeout ({self.log.reason})"
        return "the group does not know this member any more"

    def metadata(self) -> Metadata:
        """The group metadata now. 5 us, and a question to librdkafka's main thread."""
        return parse_metadata(self.consumer.consumer_group_metadata())
