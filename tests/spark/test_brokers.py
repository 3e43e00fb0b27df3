"""A sink's transactions on several brokers, one of which dies and comes back, and on brokers that want to know who is
there. Without Spark."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from streams.broker import KafkaBroker, KafkaCluster
from streams.errors import ConfigError, StreamsError
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.spark.writing.sink_transaction import write_once
from streams.spark.writing.write_options import stream_write_options
from tests.broker.test_wire_security import mutual, sasl
from tests.broker.wire_kit import create, set_transaction_version
from tests.spark.log_kit import Log
from tests.spark.test_transaction import Topic, of_sink, values

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

__all__ = ["mutual", "sasl"]
"""The fixtures of brokers with TLS and SASL."""

KEYS = [b"%d" % number for number in range(60)]
SERVERS = "bootstrap.servers"


def write_through(topic: Topic, batch: int, deadline: float) -> None:
    """As a query that is started again when its batch has failed."""
    while True:
        try:
            topic.write(batch, {"key": KEYS, "value": [b"%d %s" % (batch, key) for key in KEYS]})
            return
        except StreamsError:
            assert time.monotonic() < deadline, "batches go on"


@pytest.mark.parametrize("who", ["coordinator", "leader"])
def test_one_of_three_brokers_dies_and_comes_back(topic_prefix: str, who: str) -> None:
    """Leaders and coordinators move in the middle of transactions. Each batch is there once."""
    with KafkaCluster() as cluster:
        topic = of_sink(Topic(Log(cluster.bootstrap_servers), topic_prefix + "t"), "sink")
        spec = TopicSpec(name=topic.name, partitions=6, replication_factor=3)
        create(ClientSettings(cluster.bootstrap_servers), spec)
        assert topic.write(0, {"key": KEYS, "value": [b"0 %s" % key for key in KEYS]})
        coordinator = cluster.transaction_coordinator(topic.target.identity)
        victim = cluster.node(coordinator if who == "coordinator" else (coordinator + 1) % 3)
        batch = 0
        for step in (victim.kill, victim.restart):
            changing = threading.Thread(target=step)
            changing.start()
            deadline = time.monotonic() + 120
            last = batch + 15
            while changing.is_alive() or batch < last:
                batch += 1
                write_through(topic, batch, deadline)
            changing.join()
        found = values(topic.records())
    assert found == sorted(b"%d %s" % (number, key) for number in range(batch + 1) for key in KEYS)


async def test_transactions_of_version_1(topic_prefix: str) -> None:
    """Where an end leaves the epoch alone, and the driver of a batch is fenced by the next one's alone."""
    with KafkaBroker() as broker:
        await set_transaction_version(broker.bootstrap_servers, 1)
        log = Log(broker.bootstrap_servers)
        log.create(topic_prefix + "t", 3)
        topic = of_sink(Topic(log, topic_prefix + "t"), "sink")
        for batch in range(5):
            await asyncio.to_thread(topic.write, batch, {"key": KEYS, "value": [b"%d" % batch] * len(KEYS)})
        with pytest.raises(StreamsError, match="60 rows were staged, 1 were found"):
            await asyncio.to_thread(
                write_once, topic.target, topic.ask(5, 60), lambda: topic.made({"value": [b"x"]})[0], size=0
            )
        assert await asyncio.to_thread(topic.write, 5, {"value": [b"5"]})
        assert values(topic.records()) == [*sorted([b"%d" % batch for batch in range(5)] * len(KEYS)), b"5"]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "MUTUAL"])
def test_each_way_to_authenticate(request: pytest.FixtureRequest, mechanism: str) -> None:
    """For the tasks' question, the driver's batches and its marker."""
    broker: KafkaBroker = request.getfixturevalue("mutual" if mechanism == "MUTUAL" else "sasl")
    settings = broker.client_settings("alice", "" if mechanism == "MUTUAL" else mechanism)
    topic = of_sink(Topic(Log(broker.plain_bootstrap_servers), "t"), mechanism)
    given = {SERVERS: broker.bootstrap_servers, "topic": "t", "sink": mechanism}
    if settings.pop("oauth_cb", None):
        given["tokenCallback"] = "tests.spark.tokens:alice"
    options = stream_write_options(given | {f"kafka.{name}": value for name, value in settings.items()})
    before = values(topic.records())
    topic.target.kafka.update(options.kafka)
    value = mechanism.encode()
    assert topic.write(0, {"value": [value] * 100})
    assert not topic.write(0, {"value": [value] * 100})
    topic.target.kafka.clear()
    topic.target.kafka[SERVERS] = broker.plain_bootstrap_servers
    assert values(topic.records()) == sorted([*before, *[value] * 100])


def test_wrong_credentials_are_named_without_secrets(sasl: KafkaBroker) -> None:
    made, rows = Topic(Log(sasl.plain_bootstrap_servers), "t").made({"value": [b"x"]})
    topic = Topic(Log(sasl.bootstrap_servers), "t")
    topic.target.kafka.update(sasl.client_settings("alice", "PLAIN") | {"sasl.password": "hunter2"})
    with pytest.raises(ConfigError, match="refuses the credentials") as raised:
        write_once(topic.target, topic.ask(0, rows), lambda: made, size=0)
    assert "hunter2" not in str(raised.value)
