"""Questions to the broker at a port of this machine, each on a plain socket, and ports that a broker can have for long.

A question returns nothing if no broker answers there, or if it does not know.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from streams.kafka.wire.codec import MalformedAnswer, decode_answer, encode
from streams.kafka.wire.message import AnswerT, Request, is_flexible
from streams.kafka.wire.schemas.describe_quorum import DescribeQuorumRequest
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest, MetadataResponse

HOST = "127.0.0.1"
GROUP, TRANSACTION = 0, 1
"""Kinds of coordinators."""

_CORRELATION, _NAME = 7, b"probe"
_LONGEST_ANSWER = 16 << 20

# Below the ranges that Linux (32768) and macOS (49152) take the ports of outgoing connections from. A client that
# tries again and again to reach a stopped broker on a port of that range is in the end given that very port for its
# own side, is connected to itself, and the broker cannot have its port back.
_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True)
class ClusterMembers:
    """A Metadata answer: numbers of the brokers that are alive, and the controller's (-1: none yet)."""

    brokers: tuple[int, ...]
    controller: int


@dataclass(frozen=True, slots=True)
class PartitionReplicas:
    """Numbers of nodes; ``leader`` is -1 when there is none."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


def metadata(port: int, timeout: float = 2.0) -> ClusterMembers | None:
    """Return the metadata of the broker."""
    answer = _metadata(port, [], timeout)
    if answer is None:
        return None
    return ClusterMembers(tuple(broker.node_id for broker in answer.brokers), answer.controller_id)


def partitions(port: int, timeout: float = 2.0) -> Mapping[tuple[str, int], PartitionReplicas] | None:
    """Return (topic, partition) -> its state, for all topics, Kafka's own too."""
    answer = _metadata(port, None, timeout)
    if answer is None:
        return None
    return {
        (topic.name or "", entry.partition_index): PartitionReplicas(
            entry.leader_id, tuple(entry.replica_nodes), tuple(entry.isr_nodes)
        )
        for topic in answer.topics
        for entry in topic.partitions
    }


def coordinator(port: int, kind: int, name: str, timeout: float = 2.0) -> int | None:
    """Return the number of the node that coordinates this group or transactional id."""
    answer = _asked(port, FindCoordinatorRequest(key=name, key_type=kind), 1, timeout)
    return None if answer is None or answer.error_code or answer.node_id < 0 else answer.node_id


def controller(port: int, timeout: float = 2.0) -> int | None:
    """Return the number of the node that leads the metadata quorum. (Metadata's "controller" is any node.)"""
    topic_of = DescribeQuorumRequest.TopicData
    topic = topic_of(topic_name="__cluster_metadata", partitions=[topic_of.PartitionData(partition_index=0)])
    answer = _asked(port, DescribeQuorumRequest(topics=[topic]), 0, timeout)
    if answer is None or answer.error_code or not answer.topics:
        return None
    [entry] = answer.topics[0].partitions
    return None if entry.error_code or entry.leader_id < 0 else entry.leader_id


def _metadata(
    port: int, topics: list[MetadataRequest.MetadataRequestTopic] | None, timeout: float
) -> MetadataResponse | None:
    """Ask for these topics; ``None``: for all."""
    return _asked(port, MetadataRequest(topics=topics), 1, timeout)


def _asked(port: int, request: Request[AnswerT], version: int, timeout: float) -> AnswerT | None:
    """Send one request; ``None``: the answer does not come, or is not a broker's."""
    head = struct.pack(">hhih", request.API_KEY, version, _CORRELATION, len(_NAME)) + _NAME
    tags = b"\0" if is_flexible(type(request), version) else b""
    frame = head + tags + encode(request, version)
    try:
        with socket.create_connection((HOST, port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(struct.pack(">i", len(frame)) + frame)
            size = int.from_bytes(_read(connection, 4), "big", signed=True)
            if not 12 <= size <= _LONGEST_ANSWER:
                return None
            data = _read(connection, size)
        answer = decode_answer(request, version, data)
        # Read and written again it is the same: else bytes of another server would pass for an answer.
        return answer if data == struct.pack(">i", _CORRELATION) + tags + encode(answer, version) else None
    except (OSError, MalformedAnswer):
        return None


def _read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed half way")
        parts += part
    return parts


def is_free(port: int) -> bool:
    """Check whether a server could listen on this machine's ``port`` now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
            server.listen(1)
        except OSError:
            return False
    return True


def free_port(avoid: frozenset[int] = frozenset()) -> int:
    """A port that is free now; it may be taken by another process a moment later."""
    for port in random.sample(_PORTS, 200):
        if port not in avoid and is_free(port):
            return port
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])
