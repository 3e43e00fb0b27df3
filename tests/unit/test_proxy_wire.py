"""The proxy without a broker: frames taken apart, and addresses exchanged."""

from __future__ import annotations

import contextlib
import random
import struct
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from streams.testing.proxy_wire import (
    Address,
    Api,
    MalformedFrame,
    api_name,
    reply_correlation,
    request_header,
    with_addresses,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # how kafka-python reads its own tables
    from kafka.protocol.admin import DescribeClusterResponse as Describe
    from kafka.protocol.consumer import FetchResponse as Fetch
    from kafka.protocol.metadata import FindCoordinatorResponse as Find
    from kafka.protocol.metadata import MetadataRequest
    from kafka.protocol.metadata import MetadataResponse as Metadata
    from kafka.protocol.producer import ProduceResponse as Produce

CORRELATION = 77


def encoded(message: Any) -> bytes:
    message.with_header(correlation_id=CORRELATION)
    return bytes(message.encode(header=True))


def renamed(node: int, address: Address) -> Address:
    """A host of another length, so that every length around it changes."""
    return f"{address[0]}.behind-a-proxy-with-a-name-that-is-longer-than-before", address[1] + node


@pytest.mark.parametrize("version", range(MetadataRequest.min_version, MetadataRequest.max_version + 1))
@pytest.mark.parametrize("client_id", ["bank.member-0", "", "käse"])
def test_request_header(version: int, client_id: str) -> None:
    request = MetadataRequest(version=version, topics=[])
    request.with_header(correlation_id=CORRELATION, client_id=client_id)
    header = request_header(bytes(request.encode(header=True)))
    found = (header.name, header.version, header.correlation, header.client_id)
    assert found == ("Metadata", version, CORRELATION, client_id)


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
        with pytest.raises(MalformedFrame):
            with_addresses(Api.Metadata, 9, encoded(metadata(9))[:cut], renamed)


def test_random_bytes_raise_nothing_else() -> None:
    rng = random.Random(4)
    for _ in range(5_000):
        reply = rng.randbytes(rng.randrange(60))
        api, version = rng.choice([Api.Metadata, Api.FindCoordinator, Api.Produce, Api.Fetch]), rng.randrange(19)
        with contextlib.suppress(MalformedFrame):
            with_addresses(api, version, reply, renamed)


def test_names() -> None:
    assert [api_name(26), api_name(4711)] == ["EndTxn", "4711"]


# -- addresses in replies; what they should be is encoded and decoded by another implementation ------------------------


def brokers(kind: Any, version: int, name: str, count: int = 2, **more: Any) -> list[Any]:
    nodes = range(1, count + 1)
    return [kind(version=version, **{name: node}, host=f"kafka-{node}", port=9092, **more) for node in nodes]


def metadata(version: int) -> Any:
    rack = {"rack": "rack-a"} if version >= 1 else {}
    nodes = brokers(Metadata.MetadataResponseBroker, version, "node_id", **rack)
    return Metadata(version=version, throttle_time_ms=5, brokers=nodes, cluster_id="c", controller_id=2, topics=[])


def coordinator(version: int) -> Any:
    if version < 4:
        return Find(version=version, error_code=0, node_id=3, host="kafka-3", port=9094)
    there, none = {"node_id": 3, "host": "kafka-3", "port": 9094}, {"node_id": -1, "host": "", "port": -1}
    found = [
        Find.Coordinator(version=version, key="a", error_code=0, **there),
        Find.Coordinator(version=version, key="b", error_code=15, error_message="no", **none),
    ]
    return Find(version=version, coordinators=found)


def cluster(version: int) -> Any:
    nodes = brokers(Describe.DescribeClusterBroker, version, "broker_id", rack="rack-a")
    return Describe(version=version, cluster_id="c", controller_id=1, brokers=nodes, authorized_operations={3, 5})


def produced(version: int) -> Any:
    topic = Produce.TopicProduceResponse
    partition, why = topic.PartitionProduceResponse, dict[str, Any]()
    if version >= 8:
        refused = partition.BatchIndexAndErrorMessage(version=version, batch_index=3, batch_index_error_message="no")
        why = {"record_errors": [refused], "error_message": "not here"}
    answer = partition(version=version, index=4, error_code=6, base_offset=-1, **why)
    return Produce(
        version=version,
        responses=[topic(version=version, name="t", partition_responses=[answer])],
        throttle_time_ms=9,
        node_endpoints=brokers(Produce.NodeEndpoint, version, "node_id", rack="r") if version >= 10 else [],
    )


def fetched(version: int, leaders: int = 3) -> Any:
    topic = Fetch.FetchableTopicResponse
    aborted = topic.PartitionData.AbortedTransaction(version=version, producer_id=1, first_offset=2)
    partitions = [
        topic.PartitionData(
            version=version,
            partition_index=number,
            high_watermark=10,
            aborted_transactions=[aborted] if number else None,
            records=b"x" * 300 * number,
        )
        for number in range(3)
    ]
    return Fetch(
        version=version,
        responses=[topic(version=version, topic="t", partitions=partitions)],
        node_endpoints=brokers(Fetch.NodeEndpoint, version, "node_id", leaders) if version >= 16 else [],
    )


def versions(kind: Any, first: int = 0) -> range:
    return range(max(first, kind.min_version), kind.max_version + 1)


def addresses(message: Any) -> Iterator[dict[str, Any]]:
    """Whatever has a host, anywhere in a message."""
    for each in message.values() if isinstance(message, dict) else message if isinstance(message, list) else ():
        yield from addresses(each)
    if isinstance(message, dict) and message.get("host"):
        yield message


@pytest.mark.parametrize(
    ("api", "kind", "reply", "version"),
    [
        *((Api.Metadata, Metadata, metadata, version) for version in versions(Metadata)),
        *((Api.FindCoordinator, Find, coordinator, version) for version in versions(Find)),
        *((Api.DescribeCluster, Describe, cluster, version) for version in versions(Describe)),
        *((Api.Produce, Produce, produced, version) for version in versions(Produce, 3)),
        *((Api.Fetch, Fetch, fetched, version) for version in (4, 12, 15, 16, Fetch.max_version)),
        *((Api.Fetch, Fetch, partial(fetched, leaders=1), version) for version in (16, Fetch.max_version)),
    ],
)
def test_addresses_and_nothing_else_are_exchanged(api: Api, kind: Any, reply: Any, version: int) -> None:
    original = encoded(reply(version))
    expected = kind.decode(original, version=version, header=True).to_dict()
    for at in addresses(expected):
        node = at["broker_id"] if "broker_id" in at else at["node_id"]
        at["host"], at["port"] = renamed(node, (at["host"], at["port"]))
    has_some = version >= {Api.Produce: 10, Api.Fetch: 16}.get(api, 0)
    assert bool(list(addresses(expected))) == has_some
    data = with_addresses(api, version, original, renamed)
    assert (data == original) != has_some
    assert kind.decode(data, version=version, header=True).to_dict() == expected


@pytest.mark.parametrize(
    ("api", "version", "reply"),
    [(Api.Fetch, Fetch.max_version, encoded(fetched(Fetch.max_version, 0))), (Api.EndTxn, 1, b"whatever it is")],
)
def test_other_replies_stay_as_they_are(api: Api, version: int, reply: bytes) -> None:
    assert with_addresses(api, version, reply, renamed) == reply
