"""The proxy without a broker: frames taken apart, and addresses exchanged."""

from __future__ import annotations

import contextlib
import random
import struct
import warnings
from typing import Any

import pytest

from streams.testing.proxy_wire import (
    Address,
    Api,
    MalformedFrame,
    api_name,
    reply_correlation,
    request_header,
    varint,
    with_addresses,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # how kafka-python reads its own tables
    from kafka.protocol.admin import DescribeClusterResponse
    from kafka.protocol.consumer import FetchResponse
    from kafka.protocol.metadata import FindCoordinatorResponse, MetadataRequest, MetadataResponse
    from kafka.protocol.producer import ProduceResponse

CORRELATION = 77


def encoded(message: Any) -> bytes:
    message.with_header(correlation_id=CORRELATION)
    return bytes(message.encode(header=True))


def renamed(node: int, address: Address) -> Address:
    """A host of another length, so that every length around it changes."""
    return f"{address[0]}.behind-a-proxy-with-a-name-that-is-longer-than-before", address[1] + node


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(MetadataRequest.min_version, MetadataRequest.max_version + 1))
@pytest.mark.parametrize("client_id", ["bank.member-0", "", "käse"])
def test_request_header(version: int, client_id: str) -> None:
    request = MetadataRequest(version=version, topics=[])
    request.with_header(correlation_id=CORRELATION, client_id=client_id)
    header = request_header(bytes(request.encode(header=True)))
    assert (header.name, header.version, header.correlation, header.client_id) == (
        "Metadata",
        version,
        CORRELATION,
        client_id,
    )


def test_request_without_client_id() -> None:
    assert request_header(struct.pack(">hhih", 26, 1, 9, -1)).client_id == ""


@pytest.mark.parametrize("frame", [b"", b"\x00\x03", struct.pack(">hhih", 3, 1, 1, 30000) + b"short"])
def test_malformed_request(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        request_header(frame)


def test_malformed_reply() -> None:
    with pytest.raises(MalformedFrame):
        reply_correlation(b"\x00")
    for cut in range(5, 30):
        reply = encoded(metadata(9))
        with pytest.raises(MalformedFrame):
            with_addresses(Api.Metadata, 9, reply[:cut], renamed)


def test_random_bytes_raise_nothing_else() -> None:
    rng = random.Random(4)
    for _ in range(5_000):
        reply = rng.randbytes(rng.randrange(60))
        api, version = rng.choice([Api.Metadata, Api.FindCoordinator, Api.Produce, Api.Fetch]), rng.randrange(19)
        with contextlib.suppress(MalformedFrame):
            with_addresses(api, version, reply, renamed)


def test_names() -> None:
    assert api_name(26) == "EndTxn"
    assert api_name(4711) == "4711"


def test_varint() -> None:
    assert [varint(number) for number in (0, 127, 128, 300)] == [b"\x00", b"\x7f", b"\x80\x01", b"\xac\x02"]


# -- addresses in replies; what they should be is encoded and decoded by another implementation ------------------------


def metadata(version: int) -> Any:
    broker = MetadataResponse.MetadataResponseBroker
    racks = [None, "rack-a"] if version >= 1 else [None, None]
    return MetadataResponse(
        version=version,
        throttle_time_ms=5,
        brokers=[
            broker(version=version, node_id=node, host=f"kafka-{node}", port=9092, rack=rack)
            for node, rack in enumerate(racks, start=1)
        ],
        cluster_id="cluster",
        controller_id=2,
        topics=[],
    )


@pytest.mark.parametrize("version", range(MetadataResponse.min_version, MetadataResponse.max_version + 1))
def test_metadata(version: int) -> None:
    reply = encoded(metadata(version))
    seen = MetadataResponse.decode(
        with_addresses(Api.Metadata, version, reply, renamed), version=version, header=True
    ).to_dict()
    expected = MetadataResponse.decode(reply, version=version, header=True).to_dict()
    for broker in expected["brokers"]:
        broker["host"], broker["port"] = renamed(broker["node_id"], (broker["host"], broker["port"]))
    assert len(expected["brokers"]) == 2
    assert seen == expected


@pytest.mark.parametrize("version", range(FindCoordinatorResponse.min_version, FindCoordinatorResponse.max_version + 1))
def test_find_coordinator(version: int) -> None:
    if version >= 4:
        coordinator = FindCoordinatorResponse.Coordinator
        reply = FindCoordinatorResponse(
            version=version,
            coordinators=[
                coordinator(version=version, key="a", node_id=3, host="kafka-3", port=9094, error_code=0),
                coordinator(version=version, key="b", node_id=-1, host="", port=-1, error_code=15, error_message="no"),
            ],
        )
    else:
        reply = FindCoordinatorResponse(version=version, error_code=0, node_id=3, host="kafka-3", port=9094)
    data = with_addresses(Api.FindCoordinator, version, encoded(reply), renamed)
    seen = FindCoordinatorResponse.decode(data, version=version, header=True)
    first = seen.coordinators[0] if version >= 4 else seen
    assert (first.host, first.port) == renamed(3, ("kafka-3", 9094))
    if version >= 4:
        none = seen.coordinators[1]
        assert (none.node_id, none.host, none.port, none.error_message) == (-1, "", -1, "no")


@pytest.mark.parametrize("version", range(DescribeClusterResponse.min_version, DescribeClusterResponse.max_version + 1))
def test_describe_cluster(version: int) -> None:
    broker = DescribeClusterResponse.DescribeClusterBroker
    reply = DescribeClusterResponse(
        version=version,
        cluster_id="cluster",
        controller_id=1,
        brokers=[broker(version=version, broker_id=1, host="kafka-1", port=9092, rack="rack-a")],
        authorized_operations={3, 5},
    )
    data = with_addresses(Api.DescribeCluster, version, encoded(reply), renamed)
    seen = DescribeClusterResponse.decode(data, version=version, header=True)
    assert (seen.brokers[0].host, seen.brokers[0].port) == renamed(1, ("kafka-1", 9092))
    assert (seen.brokers[0].rack, seen.authorized_operations) == ("rack-a", {3, 5})


@pytest.mark.parametrize("version", range(3, ProduceResponse.max_version + 1))
def test_produce(version: int) -> None:
    topic, partition = ProduceResponse.TopicProduceResponse, ProduceResponse.TopicProduceResponse
    partition = topic.PartitionProduceResponse
    refused = {"batch_index": 3, "batch_index_error_message": "no"} if version >= 8 else None
    reply = ProduceResponse(
        version=version,
        responses=[
            topic(
                version=version,
                name="t",
                partition_responses=[
                    partition(
                        version=version,
                        index=4,
                        error_code=6,
                        base_offset=-1,
                        record_errors=[
                            partition.BatchIndexAndErrorMessage(version=version, **refused),
                        ]
                        if refused
                        else [],
                        error_message="not here" if version >= 8 else None,
                    )
                ],
            )
        ],
        throttle_time_ms=9,
        node_endpoints=[ProduceResponse.NodeEndpoint(version=version, node_id=2, host="kafka-2", port=9093, rack="r")]
        if version >= 10
        else [],
    )
    original = encoded(reply)
    data = with_addresses(Api.Produce, version, original, renamed)
    if version < 10:
        assert data == original
        return
    seen = ProduceResponse.decode(data, version=version, header=True)
    assert (seen.node_endpoints[0].host, seen.node_endpoints[0].port) == renamed(2, ("kafka-2", 9093))
    assert seen.responses[0].partition_responses[0].error_message == "not here"
    assert seen.throttle_time_ms == 9


@pytest.mark.parametrize("version", [4, 12, 15, 16, FetchResponse.max_version])
@pytest.mark.parametrize("leaders", [0, 1, 3])
def test_fetch(version: int, leaders: int) -> None:
    topic = FetchResponse.FetchableTopicResponse
    partition = topic.PartitionData
    aborted = partition.AbortedTransaction(version=version, producer_id=1, first_offset=2)
    reply = FetchResponse(
        version=version,
        responses=[
            topic(
                version=version,
                topic="t",
                partitions=[
                    partition(
                        version=version,
                        partition_index=number,
                        high_watermark=10,
                        aborted_transactions=[aborted] if number else None,
                        records=b"x" * 300 * number,
                    )
                    for number in range(3)
                ],
            )
        ],
        node_endpoints=[
            FetchResponse.NodeEndpoint(version=version, node_id=node, host=f"kafka-{node}", port=9093)
            for node in range(leaders)
        ]
        if version >= 16
        else [],
    )
    original = encoded(reply)
    data = with_addresses(Api.Fetch, version, original, renamed)
    if version < 16 or not leaders:
        assert data == original
        return
    seen = FetchResponse.decode(data, version=version, header=True)
    for node, endpoint in enumerate(seen.node_endpoints):
        assert (endpoint.host, endpoint.port) == renamed(node, (f"kafka-{node}", 9093))
    assert bytes(seen.responses[0].partitions[2].records) == b"x" * 600


def test_other_replies_stay_as_they_are() -> None:
    assert with_addresses(Api.EndTxn, 1, b"whatever it is", renamed) == b"whatever it is"
