"""What nodes of a cluster are asked, against answers that another implementation of the protocol has written."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streams.broker import probe
from streams.broker.probe import ClusterMembers, PartitionReplicas, free_port, is_free, metadata

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # how kafka-python reads its own tables
    from kafka.protocol.admin import DescribeQuorumResponse
    from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse, MetadataResponse

Answering = Callable[..., int]
CORRELATION = 7


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts a node that answers every request with these bytes: returns its port. ``asked`` keeps the requests."""
    with contextlib.ExitStack() as open_ones:

        def start(answer: bytes, framed: bool = True) -> int:
            server = open_ones.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        with connection:
                            asked.append(connection.recv(4096))
                            connection.sendall(struct.pack(">i", len(answer)) * framed + answer)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            open_ones.callback(thread.join, 5)
            open_ones.callback(server.shutdown, socket.SHUT_RDWR)
            return int(server.getsockname()[1])

        asked.clear()
        yield start


asked: list[bytes] = []


def encoded(message: Any) -> bytes:
    message.with_header(correlation_id=CORRELATION)
    return bytes(message.encode(header=True))


def test_partitions(answering: Answering) -> None:
    broker, topic = MetadataResponse.MetadataResponseBroker, MetadataResponse.MetadataResponseTopic
    replicas = {0: (3, (3, 2), (3,)), 1: (-1, (2, 3), ())}
    partitions = [
        topic.MetadataResponsePartition(
            version=1, partition_index=number, leader_id=leader, replica_nodes=list(nodes), isr_nodes=list(in_sync)
        )
        for number, (leader, nodes, in_sync) in replicas.items()
    ]
    brokers = [broker(version=1, node_id=node, host="h", port=9, rack=rack) for node, rack in ((2, None), (3, "a"))]
    topics = [topic(version=1, name="t", is_internal=False, partitions=partitions)]
    answer = MetadataResponse(version=1, brokers=brokers, controller_id=2, topics=topics)
    found = probe.partitions(answering(encoded(answer)))
    assert found == {("t", number): PartitionReplicas(*at) for number, at in replicas.items()}


@pytest.mark.parametrize(("error", "node", "found"), [(0, 3, 3), (15, -1, None), (14, 2, None)])
def test_coordinator(answering: Answering, error: int, node: int, found: int | None) -> None:
    answer = FindCoordinatorResponse(
        version=1, error_code=error, error_message="why" if error else None, node_id=node, host="h", port=1
    )
    assert probe.coordinator(answering(encoded(answer)), probe.TRANSACTION, "tx") == found
    request = FindCoordinatorRequest.decode(asked[0][4:], version=1, header=True)
    assert (request.key, request.key_type) == ("tx", 1)


@pytest.mark.parametrize(
    ("error", "partition_error", "leader", "found"), [(0, 0, 2, 2), (41, 0, 2, None), (0, 6, 2, None), (0, 0, -1, None)]
)
def test_controller(answering: Answering, error: int, partition_error: int, leader: int, found: int | None) -> None:
    topic_of = DescribeQuorumResponse.TopicData
    entry = topic_of.PartitionData(
        version=0, error_code=partition_error, leader_id=leader, current_voters=[], observers=[]
    )
    topics = [topic_of(version=0, topic_name="__cluster_metadata", partitions=[entry])]
    answer = encoded(DescribeQuorumResponse(version=0, error_code=error, topics=topics))
    assert probe.controller(answering(answer)) == found


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\x07", bytes(40), struct.pack(">iiih", 7, 0, 0, 30_000)])
def test_what_is_no_answer(answering: Answering, answer: bytes) -> None:
    port = answering(answer)
    assert probe.controller(port) is None
    assert probe.coordinator(port, probe.GROUP, "g") is None
    assert not probe.partitions(port)


def test_metadata_answer_is_read(answering: Answering) -> None:
    broker = struct.pack(">ih4sih2s", 3, 4, b"host", 9092, 2, b"r1")
    alone = struct.pack(">ih4sih", 4, 4, b"host", 9092, -1)
    body = struct.pack(">ii", 7, 2) + broker + alone + struct.pack(">ii", 3, 0)
    assert metadata(answering(body)) == ClusterMembers((3, 4), 3)


@pytest.mark.parametrize(
    ("body", "framed"),
    [
        (b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (struct.pack(">iii", 8, 0, 1), True),  # another correlation id
        (struct.pack(">iii", 7, 5, 1), True),  # brokers promised, none there
        (b"x" * 20, True),
        (struct.pack(">i", 500) + b"short", False),
        (struct.pack(">i", -1), False),
    ],
)
def test_other_servers_are_not_taken_for_a_broker(answering: Answering, body: bytes, framed: bool) -> None:
    assert metadata(answering(body, framed)) is None


def test_free_ports() -> None:
    port = free_port()
    assert is_free(port)
    assert probe.controller(port) is None
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        assert metadata(port, timeout=0.2) is None
