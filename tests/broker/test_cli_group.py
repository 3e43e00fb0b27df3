"""``kes group`` as a process, against a real broker: members of ours, of others, and of the broker's own protocol."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.testing.fixtures import BrokerAddress
from tests.broker import bank
from tests.broker.battery_kit import Bank, wait_until
from tests.broker.embedded_kit import make_topic, produce
from tests.broker.gate import nightly
from tests.broker.kes_kit import Kes

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


class KesGroup(Kes):
    """``kes group``, and what it shows."""

    def data(self, name: str) -> dict[str, Any] | None:
        """What is shown; ``None``: there is no such group (yet)."""
        code, out, err = self(name, "--json")
        if code == 1 and "there is no group" in err:
            return None
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def until(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What is shown once the condition holds."""
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            seen = self.data(name)
            found.extend([seen] if seen is not None else [])
            return seen is not None and condition(seen)

        wait_until(holds, f"kes group {name}")
        return found[-1]


@pytest.fixture
def kes(kafka_broker: BrokerAddress, tmp_path: Path) -> KesGroup:
    return KesGroup(kafka_broker.bootstrap_servers, tmp_path, "group")


@pytest.fixture
def group(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Bank]:
    bank_group = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield bank_group
    bank_group.close()


def owned(found: dict[str, Any]) -> dict[str, int]:
    return {member["instance"]: sum(map(len, member["owned"].values())) for member in found["members"]}


@pytest.fixture
def watching(kes: KesGroup, group: Bank) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """``kes group --watch``, and the lines that it has written; killed at the end, if it still runs."""
    watch = kes.start(group.group, "--watch", "--interval", "0.2")
    seen: list[str] = []
    reading = threading.Thread(target=lambda: seen.extend(watch.stdout or ()), daemon=True)
    reading.start()
    yield watch, seen
    if watch.poll() is None:
        watch.kill()
    watch.wait(20)
    reading.join(20)
    for stream in (watch.stdout, watch.stderr):
        assert stream is not None
        stream.close()


def test_members_of_ours_come_move_and_die(
    kes: KesGroup, group: Bank, watching: tuple[subprocess.Popen[str], list[str]]
) -> None:
    code, out, err = kes(group.group)
    assert (code, out) == (1, "")
    assert "there is no group" in err
    assert "Traceback" not in err

    watch, seen = watching
    wait_until(lambda: any("no such group" in line for line in seen), "the watch has begun")
    group.deposit(500, 50, 1)
    group.start("first", BANK_SESSION_SECONDS="3")
    group.wait_handled()
    # A transaction that is not settled yet may hold the offsets up.
    found = kes.until(group.group, lambda found: found["lag"] == 0 and owned(found) == {"first": bank.PARTITIONS})
    assert found["kind"] == "classic"
    assert {row["owners"][0] for row in found["partitions"]} == {"first"}
    assert sum(row["committed"] for row in found["partitions"]) >= 500
    assert abs(time.time() - found["members"][0]["since"]) < 120

    second = group.start("second", BANK_SESSION_SECONDS="3")
    kes.until(group.group, lambda found: owned(found) == {"first": 2, "second": 2})
    wait_until(lambda: any("2 members" in line for line in seen), "the watch shows both")
    second.kill()
    kes.until(group.group, lambda found: owned(found) == {"first": bank.PARTITIONS})
    group.stop_all()
    found = kes.until(group.group, lambda found: found["state"] == "Empty")
    assert found["members"] == []
    assert all(row["owners"] == [] for row in found["partitions"])

    wait_until(lambda: any("empty, 0 members" in line for line in seen[-20:]), "the watch shows the empty group")
    watch.send_signal(signal.SIGINT)
    assert watch.wait(60) == 0
    assert "".join(seen).count(f"{group.group}: ") < 40, "a block for each change, not for each look"


@contextmanager
def consumers(broker: str, count: int, **settings: str) -> Iterator[None]:
    """Plain consumers of librdkafka that are polled."""
    topic, name = settings.pop("topic"), settings.pop("group")
    made = [
        Consumer(
            {"bootstrap.servers": broker, "group.id": name, "client.id": f"plain-{n}", "auto.offset.reset": "earliest",
             "enable.auto.commit": True, **{key.replace("_", "."): value for key, value in settings.items()}}
        )
        for n in range(count)
    ]  # fmt: skip
    done = threading.Event()

    def poll(consumer: Consumer) -> None:
        consumer.subscribe([topic])
        while not done.is_set():
            consumer.poll(0.05)
        consumer.close()

    threads = [threading.Thread(target=poll, args=(consumer,)) for consumer in made]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize(("protocol", "kind"), [nightly("classic", "classic"), ("consumer", "consumer")])
def test_groups_of_other_consumers(
    kes: KesGroup, kafka_broker: BrokerAddress, topic_prefix: str, protocol: str, kind: str
) -> None:
    topic, name = f"{topic_prefix}in", f"{topic_prefix}group"
    make_topic(kafka_broker.bootstrap_servers, topic, 6)
    produce(kafka_broker.bootstrap_servers, topic, ["x"])
    with consumers(kafka_broker.bootstrap_servers, 2, topic=topic, group=name, group_protocol=protocol):
        found = kes.until(name, lambda found: owned(found) == {"plain-0": 3, "plain-1": 3})
        assert found["kind"] == kind
        assert [row["topic"] for row in found["partitions"]] == [topic] * 6
        assert not any(member["problem"] for member in found["members"])
        code, out, _ = kes(name)
        assert code == 0
        assert "plain-0" in out
    kes.until(name, lambda found: found["members"] == [])
