"""Structures with a real broker and real processes: killed while windows close and entries expire."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.testing.fixtures import BrokerAddress
from streams.testing.oracle import ReplayOracle
from tests.broker import clicks
from tests.broker.battery_kit import BROKER_ENDS_SECONDS, Worker, let_pass, wait_until
from tests.broker.gate import nightly

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

CLICKS, KILLS = 4_000, 3


class ClicksWorker(Worker):
    program = Path(__file__).with_name("clicks.py")


def made_of(seed: int) -> Iterator[tuple[int, int, clicks.Clicked]]:
    """(partition, time, click): mostly forward, some late, with pauses."""
    rng, now_ms = random.Random(seed), round(time.time() * 1000) - 7 * 86_400_000
    for _ in range(CLICKS):
        now_ms += rng.choice((0, 50, 500, 2_000)) if rng.random() < 0.995 else 90_000
        user = rng.randrange(30)
        at_ms = now_ms - (rng.randrange(150_000) if rng.random() < 0.1 else 0)
        yield user % clicks.PARTITIONS, at_ms, clicks.Clicked(f"user-{user}", rng.randrange(1, 60))


@pytest.mark.parametrize("engine", ["", nightly("SQLite"), nightly("RocksDB")], ids=["memory", "SQLite", "RocksDB"])
def test_killed_while_windows_close(
    kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path, seed: int, engine: str
) -> None:
    """Two members with folders and standbys, one after the other killed under load: every minute and visit is reported
    once, and state and outputs are those of a plain run over the same records."""
    bootstrap, group = kafka_broker.bootstrap_servers, f"{topic_prefix}site"
    admin = TopicAdmin(ClientSettings(bootstrap, {}, client_id="site"))
    names = (clicks.topic_of(group), clicks.output_of(group))
    admin.create([TopicSpec(name=name, partitions=clicks.PARTITIONS, replication_factor=1) for name in names], 30.0)

    def handled() -> int:
        try:
            return sum(admin.committed(group, clicks.topic_of(group), 5.0).values())
        except BrokerUnavailable:  # a killed member's transaction is open, with offsets in it
            return -1

    def start(name: str) -> ClicksWorker:
        return ClicksWorker(bootstrap, group, name, tmp_path, SITE_FOLDER=str(tmp_path / name), SITE_ENGINE=engine)

    def joined() -> list[str]:
        return [name for name, member in sorted(members.items()) if member.times("generation")]

    rng, members = random.Random(seed), {name: start(name) for name in ("one", "two")}
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    made = list(made_of(seed))

    def send(part: int) -> None:
        share = len(made) // (KILLS + 1)
        for partition, at_ms, click in made[part * share : (part + 1) * share]:
            value, headers = msgspec.json.encode(click), [("__grt__", b"Clicked")]
            producer.produce(names[0], value, click.user, partition, headers=headers, timestamp=at_ms)
        assert producer.flush(60) == 0

    try:
        done = 0
        for kill in range(KILLS):
            done = max(done, handled())  # -1 while offsets are in doubt
            send(kill)
            wait_until(lambda done=done: handled() > done, "some are handled")
            wait_until(lambda: bool(joined()), "a member works")
            let_pass(rng.uniform(0.0, 0.3))
            name = rng.choice(joined())
            members[name].kill()
            members[name] = start(name)
        send(KILLS)
        wait_until(lambda: handled() >= CLICKS, "all are handled")
        assert all(member.stop() == 0 for member in members.values()), members["one"].last_words()
    finally:
        for member in members.values():
            member.kill()
        admin.close()
    oracle = ReplayOracle(bootstrap, group_id=group, topic=names[0], outputs=[names[1]], fold=clicks.fold(group))
    deadline = time.monotonic() + BROKER_ENDS_SECONDS
    report = oracle.check()
    while any("a transaction hangs" in text for text in report.differences) and time.monotonic() < deadline:
        let_pass(1.0)
        report = oracle.check()
    assert not report.differences, report
    assert report.inputs == CLICKS
    assert report.outputs > CLICKS / 10
