"""``kes topics``, ``kes lag`` and ``kes run`` as processes, against a real broker and an event source that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.testing.fixtures import BrokerAddress
from tests.broker.embedded_kit import produce
from tests.broker.kes_kit import Kes

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

RECORDS = 200
SOURCE = """
from streams import EventSource, EventSourceConfig

source = EventSource(EventSourceConfig(group_id="{prefix}group", topic="{prefix}in", num_partitions={partitions}))


@source.register_default_handler
def pass_by(ctx, value):
    pass
"""


PICKY = """
from dataclasses import dataclass
from streams import EventSource, EventSourceConfig

source = EventSource(EventSourceConfig(group_id="{prefix}picky", topic="{prefix}in", num_partitions=2))

@dataclass
class Deposited:
    cents: int

@source.register_event_type(Deposited)
def on_deposited(ctx, event):
    pass
"""


@pytest.fixture
def kes(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Kes:
    (tmp_path / "copier.py").write_text(SOURCE.format(prefix=topic_prefix, partitions=2))
    return Kes(kafka_broker.bootstrap_servers, tmp_path)


@pytest.fixture
def running(kes: Kes) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start commands that go on; those that still run at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(kes.start(*arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


@pytest.mark.slow
def test_from_a_plan_to_no_lag(
    kes: Kes, running: Callable[..., subprocess.Popen[str]], topic_prefix: str, kafka_broker: BrokerAddress
) -> None:
    code, out, _ = kes("topics", "plan", "copier:source", "--output", f"{topic_prefix}out:2", "--json")
    assert code == 0
    assert {topic["state"] for topic in json.loads(out)["topics"]} == {"missing"}
    code, out, _ = kes("topics", "apply", "copier:source", "--output", f"{topic_prefix}out:2", "--json")
    assert code == 0
    assert {topic["state"] for topic in json.loads(out)["topics"]} == {"created"}
    code, _, err = kes("topics", "apply", "copier:source", "--output", f"{topic_prefix}out:3")
    assert code == 1
    assert f"topic {topic_prefix}out has 2 partitions, settings say 3" in err

    code, out, _ = kes("lag", "copier:source", "--json")
    assert (code, json.loads(out)["lag"]) == (0, 0)
    code, _, err = kes("lag", "--group", f"{topic_prefix}group", "--topic", f"{topic_prefix}in")
    assert code == 1
    assert f"the group '{topic_prefix}group' has no committed offset" in err
    produce(kafka_broker.bootstrap_servers, f"{topic_prefix}in", ["x"] * RECORDS, 2)

    watch = running("lag", "copier:source", "--watch", "--interval", "0.2", "--json")
    assert watch.stdout is not None
    first = json.loads(watch.stdout.readline())
    assert (first["lag"], first["partitions"][0]["committed"]) == (RECORDS, None)
    assert 0.0 < first["seconds"] < 60.0, "the age of the first record"
    source = running("run", "copier:source", "--instance-prefix", "copier")
    deadline = time.monotonic() + 60
    while (seen := json.loads(watch.stdout.readline()))["lag"] > 0:
        assert time.monotonic() < deadline, seen
    assert seen["seconds"] == 0.0
    watch.send_signal(signal.SIGINT)
    assert watch.wait(30) == 0
    code, out, _ = kes("lag", "--group", f"{topic_prefix}group", "--topic", f"{topic_prefix}in", "--json")
    assert code == 0
    assert [(entry["committed"], entry["stable"], entry["end"]) for entry in json.loads(out)["partitions"]] == [
        (RECORDS // 2, RECORDS // 2, RECORDS // 2)
    ] * 2
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers, "transactional.id": topic_prefix})
    producer.init_transactions()
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(f"{topic_prefix}in", b"x", partition=partition)
    producer.commit_transaction()
    seen = lag_of(kes, lambda found: all(one["committed"] == RECORDS // 2 + 1 for one in found["partitions"]))
    behind = [(entry["end"] - entry["committed"], entry["lag"]) for entry in seen["partitions"]]
    assert behind == [(1, 0)] * 2, "the marker of the transaction is left, and nothing else"
    source.send_signal(signal.SIGTERM)
    assert source.wait(30) == 0


def lag_of(kes: Kes, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        code, out, err = kes("lag", "copier:source", "--json")
        assert code == 0, err
        if wanted(found := json.loads(out)):
            return dict(found)
        assert time.monotonic() < deadline, found


@pytest.mark.nightly
def test_partitions_that_are_added_to_the_source(
    kes: Kes, running: Callable[..., subprocess.Popen[str]], topic_prefix: str, kafka_broker: BrokerAddress
) -> None:
    """They are named, a worker that is killed goes on all the same, and ``kes topics grow`` makes them ours."""
    assert kes("topics", "apply", "copier:source")[0] == 0
    topic, servers = f"{topic_prefix}in", kafka_broker.bootstrap_servers
    admin = TopicAdmin(ClientSettings(servers, {}, client_id="test"))
    source = running("run", "copier:source", "--instance-prefix", "copier", "--json")
    assert source.stdout is not None
    worker = json.loads(source.stdout.readline())["pid"]
    produce(servers, topic, ["x"] * 2, 2)
    lag_of(kes, lambda found: found["lag"] == 0)
    admin.grow(topic, 3)
    os.kill(worker, signal.SIGKILL)
    produce(servers, topic, ["x"] * 3, 3)
    found = lag_of(kes, lambda found: [entry["lag"] for entry in found["partitions"]] == [0, 0, 1])
    assert found["unread_partitions"] == [2]
    code, _, err = kes("topics", "grow", "copier:source", "--yes")
    assert code == 1
    assert "has members (copier-0): stop all of them first" in err
    source.send_signal(signal.SIGTERM)
    assert source.wait(30) == 0

    code, out, err = kes("topics", "grow", "copier:source", "--yes", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == {
        f"{topic_prefix}group.{topic}.{name}": 2 for name in ("changelog", "dead-letters")
    }
    (kes.folder / "copier.py").write_text(SOURCE.format(prefix=topic_prefix, partitions=3))
    source = running("run", "copier:source", "--instance-prefix", "copier")
    assert lag_of(kes, lambda found: found["lag"] == 0)["unread_partitions"] == []
    source.send_signal(signal.SIGTERM)
    assert source.wait(30) == 0
    admin.close()


def test_a_record_that_cannot_be_read_ends_the_run_at_once(
    kes: Kes, topic_prefix: str, kafka_broker: BrokerAddress
) -> None:
    """No restart: the bytes stay what they are."""
    (kes.folder / "picky.py").write_text(PICKY.format(prefix=topic_prefix))
    assert kes("topics", "apply", "picky:source")[0] == 0
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers, "log_level": 0})
    producer.produce(f"{topic_prefix}in", b'{"cents":"many"}', partition=1, headers=[("__grt__", b"Deposited")])
    assert producer.flush(30) == 0
    code, out, err = kes("run", "picky:source", "--workers", "2", "--instance-prefix", "w", "--json")
    assert code == 1
    said = [json.loads(line) for line in out.splitlines()]
    assert 65 in [line.get("code") for line in said]
    assert [line["starts"] for line in said if line["event"] == "started"] == [1, 1]
    failures = [line for line in err.splitlines() if "Deposited" in line]
    met_by = {line.split(" w-")[1][0] for line in failures}
    assert len(failures) == len(met_by)  # once by each worker that had the partition before all of them had stopped
    for line in failures:
        assert line.count(f"{topic_prefix}in[1]@0") == 1
        assert line.endswith("pass this record: kes skip MODULE:SOURCE 1@0")


def test_lag_in_a_topic_that_does_not_exist(kes: Kes) -> None:
    code, out, err = kes("lag", "--group", "nobody", "--topic", "no-such-topic")
    assert (code, out) == (1, "")
    assert "topic error: topic no-such-topic does not exist at" in err
    assert "Traceback" not in err
