"""One Spark session and one broker for all of the Spark tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from streams.sak.spark_jar import JAR, build
from streams.testing.fixtures import BrokerAddress
from tests.spark.log_kit import Log
from tests.spark.proof_kit import Trial

MakeTopic = Callable[..., str]
Read = Callable[..., DataFrame]


@pytest.fixture(scope="session")
def kes_jar(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The tasks' half of the sink in Java, built from the sources; ``None`` where there is no JDK."""
    path = tmp_path_factory.mktemp("jar") / JAR.name
    return None if build(path) else path


@pytest.fixture(scope="session")
def spark(kes_jar: Path | None) -> Iterator[SparkSession]:
    """With that jar where it can be built. Its tasks encode in Python all the same, unless a test says otherwise."""
    settings = {"spark.master": "local[2,2]", "spark.kes.tasks": "python", "spark.jars": str(kes_jar or "")}
    session = kes_spark.local_session("tests", cores=2, settings=settings)
    yield session
    session.stop()


@pytest.fixture
def make_topic(log: Log, topic_prefix: str) -> MakeTopic:
    """``make_topic("name", partitions)`` makes a topic of this test alone, and gives its full name."""

    def make(name: str = "events", partitions: int = 1) -> str:
        topic = topic_prefix + name
        log.create(topic, partitions)
        return topic

    return make


@pytest.fixture(scope="session")
def servers(kafka_broker: BrokerAddress) -> str:
    return kafka_broker.bootstrap_servers


@pytest.fixture(scope="session")
def log(servers: str) -> Log:
    return Log(servers)


@pytest.fixture
def read(spark: SparkSession, servers: str) -> Read:
    """``read(topic, **options)``: the topic as ``format("grt")`` gives it."""

    def load(topic: str, **options: str) -> DataFrame:
        reader = spark.read.format("grt").option("kafka.bootstrap.servers", servers)
        return reader.option("subscribe", topic).options(**options).load()

    return load


@pytest.fixture
def make_trial(request: pytest.FixtureRequest, topic_prefix: str, tmp_path: Path) -> Iterator[Callable[[str], Trial]]:
    """``make_trial(servers)``: a job under test, with the events of the proof's short form or (mark soak) its long one.

    ``KES_PROOF_REPORT`` names a file that gets a line of JSON for each: what was done, and what the oracle saw.
    """
    long = request.node.get_closest_marker("soak") is not None
    events = int(os.environ.get("KES_PROOF_EVENTS") or 200_000) if long else 12_000
    began = time.monotonic()
    trials: list[Trial] = []

    def make(servers: str) -> Trial:
        trials.append(Trial(servers, tmp_path, topic_prefix, events))
        return trials[-1]

    yield make
    seconds, load = round(time.monotonic() - began), round(os.getloadavg()[1], 1)
    for trial in trials:
        trial.close()
        line = json.dumps({"what": request.node.name, **trial.seen, "seconds": seconds, "load": load})
        print(line)
        if name := os.environ.get("KES_PROOF_REPORT"):
            with Path(name).open("a") as file:
                file.write(line + "\n")


@pytest.fixture
def trial(servers: str, make_trial: Callable[[str], Trial]) -> Trial:
    return make_trial(servers)
