"""Relays that share the shards of an outbox, on real Kafka and real PostgreSQL: they come, go, die, and are cut off."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from streams import Outbox, Record, Relay, RelayConfig
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.outbox import relay as relay_module
from streams.outbox.relay import apply
from streams.outbox.shard import ShardAcquired, ShardReleased
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import let_pass, start_program, wait_until
from tests.broker.client_kit import read_topic
from tests.broker.outbox_kit import Ledger, PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


class Counting:
    """A relay in this process that knows which shards it has."""

    def __init__(self, config: RelayConfig) -> None:
        self.relay = Relay(config)
        self.shards: set[int] = set()
        self.relay.on_event(self._note)

    def _note(self, event: object) -> None:
        if isinstance(event, ShardAcquired):
            self.shards.add(event.shard)
        elif isinstance(event, ShardReleased):
            self.shards.discard(event.shard)


@pytest.fixture
def ledger(postgres: PostgresServer, kafka_broker: BrokerAddress, topic_prefix: str) -> Ledger:
    return Ledger(postgres, kafka_broker.bootstrap_servers, topic_prefix)


def test_relays_share_the_shards_evenly_and_move_them(ledger: Ledger, seed: int) -> None:
    first, second = Counting(ledger.config), Counting(ledger.config)
    with first.relay:
        with ledger.writers(seed, 3, 80):
            wait_until(lambda: first.shards == {0, 1}, "the first has all")
            with second.relay:
                wait_until(lambda: len(first.shards) == len(second.shards) == 1, "each has one")
                ledger.write(random.Random(seed), 20)
            wait_until(lambda: first.shards == {0, 1}, "the first has all again")
            assert second.shards == set()
        ledger.until_empty()  # behind the writers' end: a relay that stops sends no rows that came last
    assert ledger.check() > 200


class Supervised:
    """``kes outbox relay --workers 2`` as a process."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.log = folder / "kes.log"
        settings = folder / "relay.yaml"
        settings.write_text(f"name: {ledger.config.name}\nbatch_rows: 20\nsession_seconds: 60\n")
        addresses = {
            "KES_OUTBOX_DATABASE": ledger.database,
            "KES_BOOTSTRAP_SERVERS": ledger.config.bootstrap_servers,
        }
        words = ["-m", "streams", "outbox", "relay", "-f", str(settings), "--workers", "2"]
        self.process = start_program(self.log, *words, **addresses)

    def found(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text())

    def until(self, pattern: str, count: int) -> None:
        wait_until(lambda: len(self.found(pattern)) >= count, f"{pattern}: {self.log.read_text()}", 60)

    def is_settled(self) -> bool:
        """Check that no shard moves for two seconds."""
        before = len(self.found(r"shard \d: acquired"))
        let_pass(2.0)
        return 2 <= before == len(self.found(r"shard \d: acquired"))


@pytest.fixture
def supervised(ledger: Ledger, tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(ledger, tmp_path)
    yield supervised
    supervised.process.kill()
    supervised.process.wait()


def test_a_dead_worker_is_replaced_long_before_its_session_ends(
    ledger: Ledger, supervised: Supervised, seed: int
) -> None:
    supervised.until(r"shard \d: acquired", 2)
    supervised.until(r"the group knows it as", 2)
    with ledger.writers(seed, 2, 60):
        wait_until(lambda: ledger.waiting() > 0, "there is work")
        acquired = len(supervised.found(r"shard \d: acquired"))
        (worker, *_) = supervised.found(r"started \(process (\d+)")
        os.kill(int(worker), signal.SIGKILL)
        killed = time.monotonic()
        supervised.until(r"removed from the group by", 1)
        supervised.until(r"shard \d: acquired", acquired + 1)
        assert time.monotonic() - killed < 30  # on a busy machine; its session is 60 seconds
    ledger.until_empty()
    supervised.process.terminate()
    assert supervised.process.wait(60) == 0, supervised.log.read_text()
    assert ledger.check() > 50


def test_a_relay_without_its_database_leaves_the_group_until_it_is_back(
    ledger: Ledger, postgres: PostgresServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_PATIENCE_SECONDS", 1.0)
    name = conninfo_to_dict(ledger.database)["dbname"]
    one = Counting(ledger.config)
    with one.relay:
        wait_until(lambda: one.shards == {0, 1}, "it has all")
        group = one.relay._group
        assert group is not None
        with psycopg.connect(postgres.address(), autocommit=True) as db:
            db.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            wait_until(lambda: one.shards == set(), "it lets go")
            wait_until(lambda: not group.is_member, "it leaves the group")
            db.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
        wait_until(lambda: one.shards == {0, 1}, "it is back")
        ledger.write(random.Random(seed), 20)
        ledger.until_empty()
    assert ledger.check() > 10


def test_rows_of_sqlite_are_sent_once_in_their_order(
    kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> None:
    file, topic, servers = tmp_path / "shop.db", f"{topic_prefix}t", kafka_broker.bootstrap_servers
    names = {"name": f"{topic_prefix}relay", "database": f"sqlite:{file}", "bootstrap_servers": servers}
    config = RelayConfig(**names, batch_rows=7)
    assert apply(config, 2) != []
    assert apply(config, 2) == []
    settings = ClientSettings(servers)
    admin = TopicAdmin(settings)
    admin.create([TopicSpec(name=topic, partitions=2, replication_factor=1)])
    outbox, db = Outbox(), sqlite3.connect(file, timeout=30)
    for _ in range(2):  # two relays, one after the other
        with Relay(config):
            for number in range(60):
                with db:
                    key = b"k%d" % (number % 5)
                    outbox.stash_many(db, [Record(topic, msgspec.json.encode([number, at]), key) for at in range(3)])
            wait_until(lambda: db.execute("SELECT count(*) FROM kes_outbox").fetchone() == (0,), "all are sent")
    admin.close()
    db.close()
    values: dict[bytes | None, list[tuple[int, int]]] = defaultdict(list)
    for records in read_topic(settings, topic).values():
        for record in records:
            values[record.key].append(msgspec.json.decode(record.value or b"", type=tuple[int, int]))
    once = {b"k%d" % key: [(number, at) for number in range(key, 60, 5) for at in range(3)] for key in range(5)}
    assert values == {key: [*rows, *rows] for key, rows in once.items()}
