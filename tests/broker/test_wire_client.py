"""Our client of a cluster on real brokers: three of them, one of which stands still or is gone; what none may miss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streams.broker import KafkaCluster
from streams.kafka.wire.client import GROUP, TRANSACTION, WireClient
from streams.kafka.wire.codes import is_retriable, raise_for
from streams.kafka.wire.schemas.describe_groups import DescribeGroupsRequest
from streams.kafka.wire.schemas.list_groups import ListGroupsRequest
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.testing.fixtures import BrokerAddress
from tests.broker.kafka_versions import kafka_of
from tests.unit.waiting import PATIENCE

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

ANSWER_SECONDS = 2.0
"""Seconds for one broker, as the questions of a take-over have them."""


@contextmanager
def client_of(servers: str) -> Iterator[WireClient]:
    client = WireClient(servers, "test")
    client.start()
    try:
        yield client
    finally:
        client.close(5.0)


def ask(client: WireClient, request: Any, node: int | None = None, seconds: float = PATIENCE) -> Any:
    """Ask with ``ANSWER_SECONDS`` for each try, and again what a coordinator cannot answer while it loads: the first
    question for one creates the topic of them all."""
    deadline = time.monotonic() + seconds

    async def attempt() -> Any:
        limit = min(deadline, time.monotonic() + ANSWER_SECONDS)
        answer = await client.send(request, node, limit)
        if is_retriable(code := getattr(answer, "error_code", 0)):
            raise_for(code)
        return answer

    return client.ask("asking", deadline, attempt)


def coordinator(client: WireClient, kind: int, key: str, seconds: float = PATIENCE) -> int:
    deadline = time.monotonic() + seconds

    async def attempt() -> int:
        return await client.coordinator(kind, key, min(deadline, time.monotonic() + ANSWER_SECONDS))

    return client.ask("asking", deadline, attempt)


def described(client: WireClient, group: str) -> int:
    """Describe a group; the broker that does, once the coordinator has moved."""
    deadline = time.monotonic() + PATIENCE

    async def attempt() -> int:
        limit = min(deadline, time.monotonic() + ANSWER_SECONDS)
        node = await client.coordinator(GROUP, group, limit)
        answer = await client.send(DescribeGroupsRequest(groups=[group]), node, limit)
        if is_retriable(code := answer.groups[0].error_code):  # not: there is no such group
            raise_for(code)
        return node

    return client.ask("asking", deadline, attempt)


def every_question(client: WireClient) -> None:
    """Ask every broker what only it knows."""
    metadata = ask(client, MetadataRequest(topics=[], allow_auto_topic_creation=False))
    numbers = [broker.node_id for broker in metadata.brokers]
    for number in numbers:
        assert ask(client, ListGroupsRequest(), number).error_code == 0
        assert described(client, "nobody") in numbers
    assert {*client.brokers()} == {*numbers}


def test_questions_to_a_broker(kafka_broker: BrokerAddress) -> None:
    with client_of(kafka_broker.bootstrap_servers) as client:
        every_question(client)
        assert ask(client, ListTransactionsRequest(), coordinator(client, TRANSACTION, "nobody")).error_code == 0


def test_one_of_three_stands_still_or_is_gone() -> None:
    with KafkaCluster(3, properties={"broker.session.timeout.ms": "3000"}) as cluster:
        servers = cluster.bootstrap_servers
        with client_of(servers) as known:
            every_question(known)
            number = cluster.group_coordinator("g")
            assert coordinator(known, GROUP, "g") == number
            node = cluster.node(number)
            node.freeze()
            try:
                before = time.monotonic()
                # One that knows all brokers, and one that has none but the configured addresses.
                with client_of(servers) as new:
                    for client in (known, new):
                        ask(client, MetadataRequest(topics=[], allow_auto_topic_creation=False))
                    took = time.monotonic() - before
                    print(f"answers beside a frozen broker after {took:.2f} s")
                    assert took < PATIENCE / 2
                    assert described(new, "g") != number
            finally:
                node.thaw()
            cluster.wait_in_sync()
            node.kill()
            before = time.monotonic()
            ask(known, MetadataRequest(topics=[], allow_auto_topic_creation=False))
            assert time.monotonic() - before < PATIENCE / 2
            node.restart()
            cluster.wait_in_sync()
            every_question(known)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("version", ["2.8.2", "3.0.2", "3.9.1", "4.0.1", "4.1.1"])
def test_questions_to_another_kafka(version: str) -> None:
    with kafka_of(version) as broker, client_of(broker.bootstrap_servers) as client:
        every_question(client)
