"""Database and positions topic that were set back, on real servers: refused by name, and each way out."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from streams import Outbox, Record, Relay, RelayConfig
from streams.cli.main import main
from streams.core.outbox import RING
from streams.errors import OffsetError, OutboxError
from streams.kafka.questions.admin import TopicAdmin
from streams.model.topics import TopicSpec
from streams.outbox.positions import positions_name
from streams.outbox.purge import purge
from streams.outbox.relay import apply
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.gate import gate
from tests.broker.outbox_kit import Ledger, PostgresServer, Standby

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def ledger(postgres: PostgresServer, kafka_broker: BrokerAddress, topic_prefix: str) -> Ledger:
    return Ledger(postgres, kafka_broker.bootstrap_servers, topic_prefix)


def stash(database: str, topic: str, *values: str) -> None:
    with psycopg.connect(database) as db:
        Outbox().stash_many(db, [Record(topic, value.encode(), b"a") for value in values])


def relay_until_empty(config: RelayConfig, database: str) -> None:
    def is_empty() -> bool:
        with psycopg.connect(database) as db:
            return db.execute("SELECT count(*) FROM kes_outbox").fetchone() == (0,)

    with Relay(config) as relay:
        wait_until(lambda: not relay.wait(0) and is_empty(), "all rows are sent")


def refusal(config: RelayConfig) -> str:
    """The error that stops a relay."""
    with pytest.raises(OffsetError) as caught, Relay(config) as relay:
        relay.wait(60)
    return str(caught.value)


def sent(ledger: Ledger) -> Counter[str]:
    return Counter(record.value.decode() for record in ledger.read(ledger.topic))


def command(config: RelayConfig, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """What `kes outbox purge` shows of each shard; none if it fails."""
    names = ["--name", config.name, "--database", config.database, "--bootstrap-servers", config.bootstrap_servers]
    capsys.readouterr()
    if main(["outbox", "purge", "--json", "--yes", *options, *names]) != 0:
        return []
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("way", gate(["drop", "send"], "drop"))
def test_a_restored_backup_is_refused_and_goes_on_as_decided(
    ledger: Ledger, postgres: PostgresServer, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(ledger.config, batch_rows=1)
    stash(ledger.database, ledger.topic, "early-1", "early-2")
    backup = postgres.dumped(ledger.database)
    stash(ledger.database, ledger.topic, *(f"row-{number}" for number in range(RING)))
    relay_until_empty(config, ledger.database)
    old = replace(config, database=postgres.make_database())
    postgres.restore(old.database, backup)
    assert "ends with batch 66, and the database has noted batch 0: the database was set back by" in refusal(old)
    assert command(old, capsys) == []
    assert "kes outbox purge --after-restore" in capsys.readouterr().err.replace("\n", " ")
    stash(old.database, ledger.topic, "after")  # with an id that was used before
    assert sum(shard["dropped"] for shard in command(old, capsys, "--after-restore", way)) == (
        2 if way == "drop" else 0
    )
    relay_until_empty(old, old.database)
    expected = Counter({"early-1": 1, "early-2": 1, "after": 1} | {f"row-{number}": 1 for number in range(RING)})
    assert sent(ledger) == expected + Counter({} if way == "drop" else {"early-1": 1, "early-2": 1})


def test_a_topic_that_was_emptied_or_recreated_is_left_behind_by_the_command(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(ledger.config, batch_rows=1)
    stash(ledger.database, ledger.topic, "1", "2", "3")
    relay_until_empty(config, ledger.database)
    with psycopg.connect(ledger.database) as db:  # as if the topic had lost its last batches
        db.execute("UPDATE kes_outbox_shards SET serial = serial + 5")
    assert "the topic was deleted, trimmed or restored" in refusal(config)
    assert command(config, capsys, "--after-restore", "drop") == []
    assert "does not tell which rows may be dropped" in capsys.readouterr().err.replace("\n", " ")
    assert max(shard["serial"] for shard in command(config, capsys, "--after-restore", "send")) == 8
    stash(ledger.database, ledger.topic, "4")
    relay_until_empty(config, ledger.database)
    admin = TopicAdmin(ledger.settings)
    admin.delete([positions_name(config.name)])
    admin.close()
    apply(config, 2)
    assert "it was recreated, or another cluster answers" in refusal(config)
    assert command(config, capsys) == []
    assert max(shard["serial"] for shard in command(config, capsys, "--after-restore", "send")) == 9
    stash(ledger.database, ledger.topic, "5")
    relay_until_empty(config, ledger.database)
    assert sent(ledger) == Counter("12345")
    with pytest.raises(OutboxError, match="the database does not answer"):
        purge(replace(config, database="postgresql://x@127.0.0.1:1/y"))


def test_rows_that_are_in_kafka_are_deleted_and_relays_beside_it_are_not_disturbed(
    ledger: Ledger, postgres: PostgresServer, topic_prefix: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    again = """INSERT INTO kes_outbox (id, tag, topic, key, value) OVERRIDING SYSTEM VALUE
        SELECT id, tag, topic, key, value FROM kept"""
    stash(ledger.database, ledger.topic, *"123")
    with psycopg.connect(ledger.database) as db:
        db.execute("CREATE TABLE kept AS SELECT * FROM kes_outbox")
    relay_until_empty(ledger.config, ledger.database)
    with psycopg.connect(ledger.database) as db:
        db.execute(again)  # as a failover that loses the deletion
    stash(ledger.database, ledger.topic, "4")
    assert sum(shard["deleted"] for shard in command(ledger.config, capsys)) == 3
    assert ledger.waiting() == 1
    with psycopg.connect(ledger.database) as db:
        db.execute("DELETE FROM kes_outbox")
    assert sent(ledger) == Counter("123")
    other = Ledger(postgres, ledger.config.bootstrap_servers, f"{topic_prefix}other-")
    with Relay(other.config) as relay:
        with other.writers(seed, 2, 30):
            for _ in range(3):
                assert [shard["dropped"] for shard in command(other.config, capsys)] == [0, 0]
                assert not relay.wait(0.2)
        other.until_empty()
    assert other.check() > 30


@pytest.mark.nightly
def test_a_standby_that_is_promoted_without_the_last_deletes(
    kafka_broker: BrokerAddress, topic_prefix: str, seed: int
) -> None:
    with contextlib.closing(PostgresServer()) as primary, contextlib.closing(Standby(primary)) as standby:
        ledger = Ledger(primary, kafka_broker.bootstrap_servers, topic_prefix)
        relay_until_empty(ledger.config, ledger.database)  # it has run once
        lost = f"{ledger.topic}-lost"
        admin = TopicAdmin(ledger.settings)
        admin.create([TopicSpec(name=lost, partitions=1, replication_factor=1)])
        admin.close()
        ledger.write(random.Random(seed), 150)
        rows = ledger.waiting()
        standby.catch_up()
        standby.stop()
        with Relay(replace(ledger.config, database=standby.address_of_both(ledger.database), batch_rows=20)) as relay:
            stash(ledger.database, lost, "sent, and lost by the database")
            ledger.until_empty()
            primary.kill_for_good()
            standby.start()
            standby.promote()
            ledger.database = standby.address(ledger.database)
            ledger.write(random.Random(seed + 1), 40)
            ledger.until_empty()
            assert not relay.wait(0)
        assert ledger.check() > rows
        assert len(ledger.read(lost)) == 1
