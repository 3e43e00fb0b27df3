"""Find leaders, coordinators and the controller of a cluster. Plain sockets, one request each.

All ask the node at a port of this machine, and return nothing if it does not answer, or does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from streams.broker.probe import ask

T = TypeVar("T")

_METADATA, _FIND_COORDINATOR, _DESCRIBE_QUORUM = 3, 10, 55
GROUP, TRANSACTION = 0, 1
"""Kinds of coordinators."""


@dataclass(frozen=True, slots=True)
class PartitionReplicas:
    """Numbers of nodes; ``leader`` is -1 when there is none."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


def partitions(port: int, timeout: float = 2.0) -> Mapping[tuple[str, int], PartitionReplicas] | None:
    """Return (topic, partition) -> its state, for all topics, Kafka's own too."""
    return _asked(port, _METADATA, 1, struct.pack(">i", -1), timeout, _all_partitions)


def coordinator(port: int, kind: int, name: str, timeout: float = 2.0) -> int | None:
    """Return the number of the node that coordinates this group or transactional id."""
    key = name.encode()
    body = struct.pack(f">h{len(key)}sb", len(key), key, kind)
    return _asked(port, _FIND_COORDINATOR, 1, body, timeout, _coordinator)


def controller(port: int, timeout: float = 2.0) -> int | None:
    """Return the number of the node that leads the metadata quorum. (Metadata's "controller" is any node.)"""
    topic = b"__cluster_metadata"
    body = b"\x02" + bytes([len(topic) + 1]) + topic + b"\x02" + struct.pack(">i", 0) + b"\0\0\0"
    return _asked(port, _DESCRIBE_QUORUM, 0, body, timeout, _quorum_leader, flexible=True)


class _Fields:
    """Reads an answer's fields one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def text(self, *, compact: bool = False) -> str:
        # One byte is enough for compact lengths here: the only text is the name of the metadata topic.
        size = max(self.take(">B") - 1 if compact else self.take(">h"), 0)
        if self._at + size > len(self._data):
            raise struct.error("a text ends behind the answer")
        self._at += size
        return self._data[self._at - size : self._at].decode(errors="replace")

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.take(">i") for _ in range(self.take(">i")))


def _all_partitions(fields: _Fields) -> Mapping[tuple[str, int], PartitionReplicas] | None:
    for _ in range(fields.take(">i")):  # brokers
        fields.take(">i")
        fields.text()
        fields.take(">i")
        fields.text()
    fields.take(">i")  # what Metadata calls the controller
    states: dict[tuple[str, int], PartitionReplicas] = {}
    for _ in range(fields.take(">i")):
        fields.take(">h")
        topic = fields.text()
        fields.take(">b")
        for _ in range(fields.take(">i")):
            fields.take(">h")
            number, leader = fields.take(">i"), fields.take(">i")
            states[topic, number] = PartitionReplicas(leader, fields.numbers(), fields.numbers())
    return states


def _coordinator(fields: _Fields) -> int | None:
    fields.take(">i")  # throttle time
    error = fields.take(">h")
    fields.text()
    node = fields.take(">i")
    return None if error or node < 0 else node


def _quorum_leader(fields: _Fields) -> int | None:
    fields.take(">b")  # no tags in the header
    if fields.take(">h") or fields.take(">B") != 2:
        return None
    fields.text(compact=True)
    if fields.take(">B") != 2:
        return None
    fields.take(">i")
    error, leader = fields.take(">h"), fields.take(">i")
    return None if error or leader < 0 else leader


def _asked(
    port: int,
    api: int,
    version: int,
    body: bytes,
    timeout: float,
    parse: Callable[[_Fields], T],
    flexible: bool = False,
) -> T | None:
    try:
        return parse(_Fields(ask(port, api, version, body, timeout, flexible=flexible), 4))
    except (OSError, struct.error):
        return None
