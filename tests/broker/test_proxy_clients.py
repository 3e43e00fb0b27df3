"""Real clients and a real broker on both sides of the proxy; what each rule does, on a line of our own:
``tests/unit/test_proxy.py``, and under load: ``test_battery_proxy.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.testing.faults import KafkaProxy
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import read_topic

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

GUIDE = Path(__file__).parents[2] / "docs/guides/testing-with-faults.md"

Make = Callable[..., Producer]


@pytest.fixture
def topic(kafka_broker: BrokerAddress, topic_prefix: str) -> str:
    admin = TopicAdmin(ClientSettings(kafka_broker.bootstrap_servers))
    admin.create([TopicSpec(name=topic_prefix + "t", partitions=1, replication_factor=1)])
    admin.close()
    return topic_prefix + "t"


@pytest.fixture
def proxy(kafka_broker: BrokerAddress) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka_broker.bootstrap_servers) as proxy:
        yield proxy


@pytest.fixture
def make(proxy: KafkaProxy, topic_prefix: str) -> Make:
    def build(**settings: Any) -> Producer:
        config = {
            "bootstrap.servers": proxy.bootstrap_servers,
            "client.id": "victim",
            "log_level": 0,
            "retry.backoff.max.ms": 100,
            "reconnect.backoff.max.ms": 100,
            "transactional.id": topic_prefix + "tx",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        producer = Producer({name: value for name, value in config.items() if value is not None})
        if config["transactional.id"]:
            producer.init_transactions(20)
        return producer

    return build


def visible(broker: BrokerAddress, topic: str) -> list[bytes | None]:
    """All that is committed, once no transaction is open; asked of the broker itself, not of the proxy."""
    return [record.value for record in read_topic(ClientSettings(broker.bootstrap_servers), topic)[0]]


def test_clients_stay_on_the_proxy(kafka_broker: BrokerAddress, proxy: KafkaProxy, make: Make, topic: str) -> None:
    producer = make()
    brokers = producer.list_topics(timeout=10).brokers
    assert {f"{broker.host}:{broker.port}" for broker in brokers.values()} == {proxy.bootstrap_servers}
    assert set(proxy.nodes.values()) == {kafka_broker.bootstrap_servers}
    producer.begin_transaction()
    producer.produce(topic, b"one")
    producer.commit_transaction(20)
    assert {"Metadata", "FindCoordinator", "InitProducerId", "Produce", "EndTxn"} <= set(proxy.passed)
    assert visible(kafka_broker, topic) == [b"one"]


def test_cut_off_client_and_its_late_request(
    kafka_broker: BrokerAddress, proxy: KafkaProxy, make: Make, topic: str
) -> None:
    """What was on its way when the line broke arrives when it is mended; it is fenced if others went on meanwhile."""
    old = make()
    old.begin_transaction()
    old.produce(topic, b"of the old one")
    assert old.flush(20) == 0
    proxy.cut_off(client="victim")
    with pytest.raises(KafkaException):
        old.commit_transaction(1)  # on its way, from now on
    new = make(client_id="successor")
    new.begin_transaction()
    new.produce(topic, b"of the new one")
    new.commit_transaction(20)
    proxy.restore()
    with pytest.raises(KafkaException) as caught:
        old.commit_transaction(20)
    assert caught.value.args[0].fatal() or caught.value.args[0].txn_requires_abort()
    assert visible(kafka_broker, topic) == [b"of the new one"]


def test_example_of_the_guide(kafka_broker: BrokerAddress, tmp_path: Path) -> None:
    """The test in the guide is a test that runs, in a project of its own."""
    (block, *_) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "test_mine.py").write_text(block)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["streams.testing.fixtures"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "KES_BOOTSTRAP_SERVERS": kafka_broker.bootstrap_servers},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
