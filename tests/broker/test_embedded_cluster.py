"""Three nodes: any one may be killed, stopped or frozen, and what was acknowledged stays."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from streams.broker import KafkaCluster
from streams.broker.probe import free_port
from streams.errors import ConfigError, EmbeddedBrokerError
from streams.testing.faults import KafkaProxy
from tests.broker.embedded_kit import consume, make_topic, produce
from tests.broker.gate import gate
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster


def in_sync(cluster: KafkaCluster, topic: str) -> int:
    """Replicas of partition 0 that have everything; 0 while the broker that is asked has not heard of a new topic."""
    known = cluster.partitions().get((topic, 0))
    return 0 if known is None else len(known.in_sync)


@pytest.mark.nightly
def test_three_nodes_that_copy_everything(cluster: KafkaCluster, topic_prefix: str) -> None:
    make_topic(cluster.bootstrap_servers, topic_prefix + "t", 3)
    deadline = time.monotonic() + 20  # the node that is asked may not have heard of it yet
    states: dict[tuple[str, int], Any] = {}
    while len(states) < 3 and time.monotonic() < deadline:
        states = {place: state for place, state in cluster.partitions().items() if place[0] == topic_prefix + "t"}
    assert len(states) == 3
    assert {state.leader for state in states.values()} == {1, 2, 3}
    assert all(sorted(state.replicas) == [1, 2, 3] for state in states.values())
    assert [cluster.leader_of(topic_prefix + "t", number) for number in range(3)] == [
        states[topic_prefix + "t", number].leader for number in range(3)
    ]
    for found in (
        cluster.controller(),
        cluster.group_coordinator("some-group"),
        cluster.transaction_coordinator("some-id"),
    ):
        assert found in cluster.nodes

    def copies() -> list[int]:
        """Of Kafka's own topic for transactions, once all nodes know it."""
        return [
            len(state.replicas) for (name, _), state in cluster.partitions().items() if name == "__transaction_state"
        ]

    wait_until(lambda: copies() == [3, 3, 3])


@pytest.mark.parametrize("who", gate(["leader", "controller", "group coordinator"], "leader"))
def test_killed_node_is_replaced_and_comes_back(cluster: KafkaCluster, topic_prefix: str, who: str) -> None:
    topic = topic_prefix + "t"
    make_topic(cluster.bootstrap_servers, topic, 3)
    produce(cluster.bootstrap_servers, topic, [f"before {number}" for number in range(30)], 3)
    cluster.wait_in_sync()
    finders: dict[str, Callable[[], int]] = {
        "leader": partial(cluster.leader_of, topic, 0),
        "controller": cluster.controller,
        "group coordinator": partial(cluster.group_coordinator, "g"),
    }
    find = finders[who]
    victim = find()
    cluster.node(victim).kill()
    assert not cluster.node(victim).is_running
    assert find() != victim, "another one took over"
    produce(cluster.bootstrap_servers, topic, [f"during {number}" for number in range(30)], 3)
    cluster.node(victim).restart()
    cluster.wait_in_sync()
    expected = sorted(f"{word} {number}" for word in ("before", "during") for number in range(30))
    assert sorted(consume(cluster.bootstrap_servers, topic, 60)) == expected


@pytest.mark.nightly
def test_proxy_before_a_cluster(cluster: KafkaCluster, topic_prefix: str) -> None:
    """Clients stay on it, also when leaders change and a broker tells them where the new one is."""
    topic = topic_prefix + "t"
    make_topic(cluster.bootstrap_servers, topic, 3)
    with KafkaProxy(cluster.bootstrap_servers.partition(",")[0]) as proxy:
        producer = Producer(
            {
                "bootstrap.servers": proxy.bootstrap_servers,
                "enable.idempotence": True,
                "message.timeout.ms": 20_000,
                "log_level": 0,
            }
        )
        told: dict[str, int] = {}

        def send(name: str, partition: int) -> None:
            producer.produce(
                topic,
                name.encode(),
                partition=partition,
                on_delivery=lambda error, _: told.update({name: error is None}),
            )

        for number in range(3):
            send(f"first {number}", number)
        assert producer.flush(30) == 0
        assert set(proxy.nodes) == {1, 2, 3}, "all brokers, though the proxy was told of one"
        leader = cluster.leader_of(topic, 0)
        other = next(number for number in range(3) if cluster.leader_of(topic, number) != leader)
        proxy.cut_off(node=leader)
        send("cut off", 0)
        send("passes", other)
        wait_until(lambda: (producer.poll(0.05), "passes" in told)[1], seconds=15)
        assert "cut off" not in told
        proxy.restore()
        assert producer.flush(30) == 0
        cluster.wait_in_sync()
        cluster.node(leader).shut_down()
        send("after the leader went", 0)
        assert producer.flush(30) == 0
        proxy.cut_off()
        send("nobody", 0)
        assert producer.flush(3) == 1, "there is no way around the proxy"
        proxy.restore()
        assert producer.flush(30) == 0
        assert all(told.values()), told
    cluster.node(leader).restart()
    cluster.wait_in_sync()


def test_before_the_start_and_wrong_arguments() -> None:
    for wrong in ({"nodes": 0}, {"heap_mb": 10}, {"start_timeout": 0}, {"properties": {"node.id": "4"}}):
        with pytest.raises(ConfigError):
            KafkaCluster(**wrong)
    cluster = KafkaCluster()
    cluster.stop()
    with pytest.raises(EmbeddedBrokerError, match=r"start\(\)"):
        _ = cluster.bootstrap_servers


@pytest.mark.nightly
def test_unknown_node(cluster: KafkaCluster) -> None:
    with pytest.raises(ConfigError, match="no node 4"):
        cluster.node(4)
    with pytest.raises(EmbeddedBrokerError, match="started already"):
        cluster.start()


@pytest.mark.nightly
def test_named_data_are_kept(tmp_path: Path) -> None:
    with KafkaCluster(nodes=1, data_dir=tmp_path) as cluster:
        make_topic(cluster.bootstrap_servers, "kept", 3)
        produce(cluster.bootstrap_servers, "kept", ["one"])
    with KafkaCluster(nodes=1, data_dir=tmp_path) as cluster:
        assert consume(cluster.bootstrap_servers, "kept", 1) == ["one"]


def test_taken_port_is_found_at_the_start_and_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port()
    offered: list[int] = []

    def port(avoid: frozenset[int] = frozenset()) -> int:
        offered.append(taken if not offered else free_port(avoid))
        return offered[-1]

    monkeypatch.setattr("streams.broker.kafka_cluster.free_port", port)
    with socket.create_server(("127.0.0.1", taken)), KafkaCluster(nodes=1) as cluster:
        assert str(taken) not in cluster.bootstrap_servers
