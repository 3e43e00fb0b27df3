"""Kafka's wire protocol as far as a proxy has to read it: request headers, and the answers that name brokers.

Everything else passes byte for byte. A frame is given here without the four bytes of its length.

Layouts are those of the protocol's "flexible" versions (compact lengths, tagged fields) and of the ones before them;
``FLEXIBLE_FROM`` has the version at which an answer changes from one to the other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

Address = tuple[str, int]
"""(host, port)"""

Rename = Callable[[int, Address], Address]
"""(node number, its address) -> the address that clients shall get."""


class Api(IntEnum):
    """Request kinds by their names in the protocol; those that no rule is likely to name are left out."""

    Produce = 0
    Fetch = 1
    ListOffsets = 2
    Metadata = 3
    OffsetCommit = 8
    OffsetFetch = 9
    FindCoordinator = 10
    JoinGroup = 11
    Heartbeat = 12
    LeaveGroup = 13
    SyncGroup = 14
    DescribeGroups = 15
    ListGroups = 16
    SaslHandshake = 17
    ApiVersions = 18
    CreateTopics = 19
    DeleteTopics = 20
    DeleteRecords = 21
    InitProducerId = 22
    OffsetForLeaderEpoch = 23
    AddPartitionsToTxn = 24
    AddOffsetsToTxn = 25
    EndTxn = 26
    TxnOffsetCommit = 28
    DescribeConfigs = 32
    CreatePartitions = 37
    DeleteGroups = 42
    IncrementalAlterConfigs = 44
    OffsetDelete = 47
    DescribeQuorum = 55
    DescribeCluster = 60
    DescribeProducers = 61
    DescribeTransactions = 65
    ListTransactions = 66
    ConsumerGroupHeartbeat = 68
    ConsumerGroupDescribe = 69
    GetTelemetrySubscriptions = 71
    PushTelemetry = 72
    DescribeTopicPartitions = 75


def api_name(key: int) -> str:
    """``EndTxn`` for 26; the number as text for one that is not in ``Api``."""
    try:
        return Api(key).name
    except ValueError:
        return str(key)


class MalformedFrame(ValueError):
    """A frame that is not of Kafka's protocol, or of a layout that is not known here."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fields in front of every request. ``client_id`` is empty for a client that gives none."""

    api: int
    version: int
    correlation: int
    client_id: str

    @property
    def name(self) -> str:
        """Name of the request."""
        return api_name(self.api)


def request_header(frame: bytes) -> RequestHeader:
    """Parse the header of a request. Raises ``MalformedFrame``."""
    try:
        api, version, correlation, length = struct.unpack_from(">hhih", frame)
    except struct.error as error:
        raise MalformedFrame(f"a request of {len(frame)} bytes has no header") from error
    if length > len(frame) - 10:
        raise MalformedFrame(f"a client id of {length} bytes in a request of {len(frame)}")
    client_id = frame[10 : 10 + max(length, 0)].decode("utf-8", "replace")
    return RequestHeader(api, version, correlation, client_id)


def reply_correlation(frame: bytes) -> int:
    """The number of the request that this answers. Raises ``MalformedFrame``."""
    if len(frame) < 4:
        raise MalformedFrame(f"a reply of {len(frame)} bytes")
    return int.from_bytes(frame[:4], "big", signed=True)


FLEXIBLE_FROM: Final = {Api.Metadata: 9, Api.FindCoordinator: 3, Api.DescribeCluster: 0, Api.Produce: 9, Api.Fetch: 12}
"""The requests whose answers may name brokers, and the first version of each with compact lengths and tags."""


def with_addresses(api: int, version: int, reply: bytes, rename: Rename) -> bytes:
    """The reply with every broker address renamed. Raises ``MalformedFrame`` if its layout is another one."""
    if api not in FLEXIBLE_FROM:
        return reply
    walk = _Walk(reply, flexible=version >= FLEXIBLE_FROM[Api(api)], rename=rename)
    try:
        walk.skip(4)  # correlation
        walk.tags()
        _LAYOUTS[Api(api)](walk, version)
        return walk.result()
    except (IndexError, struct.error) as error:
        raise MalformedFrame(f"{api_name(api)} v{version}: the reply ends at an unexpected place") from error


class _Walk:
    """Goes through one reply from its start, and notes what is to be replaced."""

    def __init__(self, data: bytes, *, flexible: bool, rename: Rename) -> None:
        self.data, self.at, self.flexible, self.rename = data, 0, flexible, rename
        self._edits: list[tuple[int, int, bytes]] = []

    def result(self) -> bytes:
        """The data with the replacements made."""
        parts, done = [], 0
        for start, end, replacement in self._edits:
            parts += [self.data[done:start], replacement]
            done = end
        return b"".join([*parts, self.data[done:]])

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise IndexError

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return int(value)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            if shift > 28:
                raise MalformedFrame("a length of more than five bytes")

    def _length(self, layout: str) -> int:
        """Read the length of a text, an array or bytes; -1: null."""
        return self.varint() - 1 if self.flexible else self.number(layout)

    def text(self) -> str:
        size = max(self._length(">h"), 0)
        start = self.at
        self.skip(size)
        return self.data[start : self.at].decode("utf-8", "replace")

    def octets(self) -> None:
        self.skip(max(self._length(">i"), 0))

    def times(self) -> range:
        """Read the length of an array, as a range over its elements."""
        return range(max(self._length(">i"), 0))

    def tags(self, known: Callable[[int, _Walk], None] | None = None) -> None:
        """Read tagged fields; the fields that ``known`` looks at may change their size."""
        if not self.flexible:
            return
        for _ in range(self.varint()):
            tag = self.varint()
            start = self.at
            size = self.varint()
            content = self.at
            self.skip(size)
            if known is not None:
                inner = _Walk(self.data[content : self.at], flexible=True, rename=self.rename)
                known(tag, inner)
                changed = inner.result()
                self._edits.append((start, self.at, varint(len(changed)) + changed))

    def address(self) -> None:
        """Node number, host, port."""
        node = self.number(">i")
        start = self.at
        host = self.text()
        port = self.number(">i")
        if not host or port < 0:  # "there is none"
            return
        new_host, new_port = self.rename(node, (host, port))
        encoded = new_host.encode()
        length = varint(len(encoded) + 1) if self.flexible else struct.pack(">h", len(encoded))
        self._edits.append((start, self.at, length + encoded + struct.pack(">i", new_port)))


def varint(value: int) -> bytes:
    """An unsigned number in groups of seven bits, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _metadata(walk: _Walk, version: int) -> None:
    if version >= 3:
        walk.skip(4)  # throttle time
    for _ in walk.times():
        walk.address()
        if version >= 1:
            walk.text()  # rack
        walk.tags()


def _find_coordinator(walk: _Walk, version: int) -> None:
    if version >= 1:
        walk.skip(4)  # throttle time
    if version >= 4:
        for _ in walk.times():
            walk.text()  # key
            walk.address()
            walk.skip(2)  # error
            walk.text()  # its message
            walk.tags()
    else:
        walk.skip(2)
        if version >= 1:
            walk.text()
        walk.address()


def _describe_cluster(walk: _Walk, version: int) -> None:
    walk.skip(6)  # throttle time, error
    walk.text()  # its message
    if version >= 1:
        walk.skip(1)  # brokers or controllers
    walk.text()  # cluster id
    walk.skip(4)  # controller
    for _ in walk.times():
        walk.address()
        walk.text()  # rack
        if version >= 2:
            walk.skip(1)  # fenced
        walk.tags()


def _produce(walk: _Walk, version: int) -> None:
    if version < 10:  # no addresses before
        return
    for _ in walk.times():
        walk.skip(16) if version >= 13 else walk.text()  # topic id, or name
        for _ in walk.times():
            walk.skip(4 + 2 + 8 + 8 + 8)  # partition, error, offset, time, start of the log
            for _ in walk.times():  # refused records
                walk.skip(4)
                walk.text()
                walk.tags()
            walk.text()  # error message
            walk.tags()
        walk.tags()
    walk.skip(4)  # throttle time
    walk.tags(_node_endpoints)


def _fetch(walk: _Walk, version: int) -> None:
    if version < 16:  # no addresses before
        return
    walk.skip(4 + 2 + 4)  # throttle time, error, session
    for _ in walk.times():
        walk.skip(16)  # topic id
        for _ in walk.times():
            walk.skip(4 + 2 + 8 + 8 + 8)  # partition, error, high watermark, last stable offset, start of the log
            for _ in walk.times():  # aborted transactions
                walk.skip(16)
                walk.tags()
            walk.skip(4)  # preferred replica
            walk.octets()  # records
            walk.tags()
        walk.tags()
    walk.tags(_node_endpoints)


def _node_endpoints(tag: int, walk: _Walk) -> None:
    """Read the leader's address, which a NOT_LEADER reply may have (tagged field 0)."""
    if tag != 0:
        return
    for _ in walk.times():
        walk.address()
        walk.text()  # rack
        walk.tags()


_LAYOUTS: Final[dict[Api, Callable[[_Walk, int], None]]] = {
    Api.Metadata: _metadata,
    Api.FindCoordinator: _find_coordinator,
    Api.DescribeCluster: _describe_cluster,
    Api.Produce: _produce,
    Api.Fetch: _fetch,
}
