"""One Spark session and one broker for all of the Spark tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from streams.testing.fixtures import BrokerAddress
from tests.spark.proof_kit import Trial

MakeTopic = Callable[..., str]
Read = Callable[..., DataFrame]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = kes_spark.local_session("tests", cores=2, settings={"spark.master": "local[2,2]"})
    yield session
    session.stop()


@pytest.fixture
def make_topic(kafka_broker: BrokerAddress, topic_prefix: str) -> MakeTopic:
    """``make_topic("name", partitions)`` makes a topic of this test alone, and gives its full name."""
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})

    def make(name: str = "events", partitions: int = 1) -> str:
        topic = topic_prefix + name
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
        return topic

    return make


@pytest.fixture
def read(spark: SparkSession, kafka_broker: BrokerAddress) -> Read:
    """``read(topic, **options)``: the topic as ``format("grt")`` gives it."""

    def load(topic: str, **options: str) -> DataFrame:
        reader = spark.read.format("grt").option("kafka.bootstrap.servers", kafka_broker.bootstrap_servers)
        return reader.option("subscribe", topic).options(**options).load()

    return load


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> Iterator[Trial]:
    """A job under test with as many events as the module's ``EVENTS`` say."""
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, request.module.EVENTS)
    yield trial
    trial.close()
