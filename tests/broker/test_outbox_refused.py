"""Rows that Kafka refuses, and positions or databases that were set back: parked, healed, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from streams import Outbox, Record, Relay
from streams.cli.main import main
from streams.errors import OffsetError, OutboxError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.model.topics import TopicSpec
from streams.outbox.positions import positions_name
from streams.outbox.relay import apply
from streams.outbox.shard import RelayEvent, RowParked
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.client_kit import trim
from tests.broker.outbox_kit import Ledger, PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def ledger(each_postgres: PostgresServer, kafka_broker: BrokerAddress, topic_prefix: str) -> Ledger:
    return Ledger(each_postgres, kafka_broker.bootstrap_servers, topic_prefix)


def stash(ledger: Ledger, *records: Record) -> None:
    with psycopg.connect(ledger.database) as db:
        Outbox().stash_many(db, records)


def values(ledger: Ledger, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    return [(record.key, record.value) for record in ledger.read(topic)]


def parked(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["outbox", "parked", "list", "--database", ledger.database, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_refused_row_is_parked_its_key_waits_and_all_goes_on_when_it_is_taken(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"{ledger.topic}-later"
    stash(
        ledger,
        Record(missing, b"1", b"a"),
        Record(ledger.topic, b"2", b"a", partition=0),
        Record(ledger.topic, b"3", b"b", partition=0),
        Record(ledger.topic, b"4", b"c", partition=7),
        Record(ledger.topic, b"5", b"c", partition=0),
    )
    events: list[RelayEvent] = []
    relay = Relay(ledger.config)
    relay.on_event(events.append)
    with relay:
        wait_until(lambda: len(parked(ledger, capsys)) == 2, "two rows are parked")
        wait_until(lambda: values(ledger, ledger.topic) == [(b"b", b"3")], "the other key goes on")
        by_key = {row["key"]: row for row in parked(ledger, capsys)}
        assert missing in by_key["b'a'"]["error"]
        assert "the topic has 3 partitions" in by_key["b'c'"]["error"]
        assert {event.id for event in events if isinstance(event, RowParked)} == {1, 4}
        capsys.readouterr()
        assert main(["outbox", "parked", "show", "4", "--database", ledger.database, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert {name: shown[name] for name in ("id", "topic", "partition", "key", "value")} == {
            "id": 4, "topic": ledger.topic, "partition": 7, "key": "c", "value": 4,
        }  # fmt: skip
        admin = TopicAdmin(ledger.settings)
        admin.create([TopicSpec(name=missing, partitions=1, replication_factor=1)])
        admin.close()
        assert main(["outbox", "parked", "retry", "--database", ledger.database]) == 0
        wait_until(lambda: (b"a", b"2") in values(ledger, ledger.topic), "key a goes on")
        assert values(ledger, missing) == [(b"a", b"1")]
        wait_until(lambda: [row["id"] for row in parked(ledger, capsys)] == [4], "one is parked again")
        assert parked(ledger, capsys)[0]["attempts"] == 2
        assert main(["outbox", "parked", "drop", "4", "--yes", "--database", ledger.database]) == 0
        assert main(["outbox", "parked", "drop", "4", "--yes", "--database", ledger.database]) == 1
        assert main(["outbox", "parked", "show", "4", "--database", ledger.database]) == 1
        ledger.until_empty()
    assert sorted(values(ledger, ledger.topic), key=str) == [(b"a", b"2"), (b"b", b"3"), (b"c", b"5")]


def test_a_row_that_its_topic_finds_too_large_holds_up_no_other(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    small = f"{ledger.topic}-small"
    admin = TopicAdmin(ledger.settings)
    admin.create([TopicSpec(name=small, partitions=1, replication_factor=1, configs={"max.message.bytes": "2000"})])
    admin.close()
    many = [Record(small, b"%d" % number * 300, b"k%d" % number) for number in range(20)]
    stash(ledger, *many[:10], Record(small, b"x" * 5_000, b"large"), *many[10:])
    with Relay(ledger.config):
        wait_until(lambda: ledger.waiting() == 1, "all others are sent")
        assert [row["key"] for row in parked(ledger, capsys)] == ["b'large'"]
    assert len(values(ledger, small)) == 20


def test_odd_rows_are_sent_as_they_are(ledger: Ledger) -> None:
    long = bytes(100 * 1024)
    odd = [Record(ledger.topic, b"1", b""), Record(ledger.topic, b"2", long), Record(ledger.topic, None, b"none")]
    stash(ledger, *odd, Record(ledger.topic, b"", None))
    with psycopg.connect(ledger.database) as db:  # by hand: no lock, no wake-up, a time that is no record's
        db.execute(
            "INSERT INTO kes_outbox (topic, key, value, stashed_at) VALUES (%s, 'hand', '3', 'infinity')",
            [ledger.topic],
        )
    with Relay(ledger.config):
        ledger.until_empty()
    found = sorted(values(ledger, ledger.topic), key=str)
    assert found == sorted([(b"", b"1"), (long, b"2"), (b"none", None), (None, b""), (b"hand", b"3")], key=str)


def fails(ledger: Ledger) -> BaseException:
    """The error that stops a relay."""
    with pytest.raises((OffsetError, OutboxError, TopicError)) as caught, Relay(ledger.config) as relay:
        relay.wait(60)
    return caught.value


def set_back(ledger: Ledger, statement: str) -> None:
    with psycopg.connect(ledger.database) as db:
        db.execute(statement.encode())


def test_positions_or_a_database_that_were_set_back_stop_the_relay_by_name(ledger: Ledger) -> None:
    config = ledger.config
    for number in range(3):
        stash(ledger, Record(ledger.topic, b"%d" % number, b"a"))
        with Relay(config):
            ledger.until_empty()
    set_back(ledger, "UPDATE kes_outbox_shards SET serial = serial + 1")
    assert "the topic was deleted, trimmed or restored" in str(fails(ledger))
    set_back(ledger, "UPDATE kes_outbox_shards SET serial = serial - 1")
    admin = TopicAdmin(ledger.settings)
    admin.delete([positions_name(config.name)])
    assert "run `kes outbox apply`" in str(fails(ledger))
    apply(config, 2)
    admin.close()
    assert "it was recreated, or another cluster answers" in str(fails(ledger))


@pytest.mark.nightly
def test_a_positions_topic_that_is_trimmed_or_deleted_under_a_running_relay(ledger: Ledger) -> None:
    """What is trimmed a running relay does not need, and the next one misses it. Without the topic none sends a row."""
    topic = positions_name(ledger.config.name)
    admin = TopicAdmin(ledger.settings)
    with Relay(replace(ledger.config, batch_rows=1)) as relay:
        stash(ledger, *(Record(ledger.topic, b"%d" % number, b"a") for number in range(4)))
        ledger.until_empty()
        trim(admin, topic)
        stash(ledger, Record(ledger.topic, b"4", b"a"))
        ledger.until_empty()
        assert not relay.wait(0)
    assert "does not have all of the last 64 batches up to 5" in str(fails(ledger))
    assert main(["outbox", "purge", *names(ledger), "--after-restore", "send", "--yes"]) == 0

    def delete_under_it() -> None:
        with Relay(ledger.config) as relay:
            stash(ledger, Record(ledger.topic, b"5", b"a"))
            ledger.until_empty()
            admin.delete([topic])
            stash(ledger, Record(ledger.topic, b"6", b"a"))
            relay.wait(60)

    with pytest.raises(TopicError, match="run `kes outbox apply`"):
        delete_under_it()
    admin.close()
    assert ledger.waiting() == 1
    assert [value for _, value in values(ledger, ledger.topic)] == [b"%d" % number for number in range(6)]


def test_two_databases_under_one_name_are_refused(
    ledger: Ledger, each_postgres: PostgresServer, topic_prefix: str
) -> None:
    stash(ledger, Record(ledger.topic, b"1", b"a"))
    with Relay(ledger.config):
        ledger.until_empty()
    other = Ledger(each_postgres, ledger.config.bootstrap_servers, topic_prefix)
    assert other.config.name == ledger.config.name
    assert "each needs a name of its own" in str(fails(other))


def names(ledger: Ledger) -> list[str]:
    """The options of a command."""
    config = ledger.config
    return ["--name", config.name, "--database", config.database, "--bootstrap-servers", config.bootstrap_servers]


def test_the_command_applies_relays_and_shows(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    config, options = ledger.config, names(ledger)
    assert main(["outbox", "apply", *options, "--shards", "2"]) == 0
    assert "nothing" in capsys.readouterr().err
    assert main(["outbox", "apply", *options, "--shards", "3"]) == 1
    assert "has 2 shards, not 3" in capsys.readouterr().err
    assert main(["outbox", "sql"]) == 0
    assert "FUNCTION @schema@.kes_stash(" in capsys.readouterr().out
    stash(ledger, Record(ledger.topic, b"1", b"a"))
    assert main(["outbox", "status", "--database", config.database, "--json"]) == 0
    shards = json.loads(capsys.readouterr().out)
    assert [shard["waiting"] for shard in shards] in ([0, 1], [1, 0])
    assert [shard["owner"] for shard in shards] == [None, None]
    assert main(["outbox", "status", "--database", "postgresql://x:secret@127.0.0.1:1/y"]) == 1
    error = capsys.readouterr().err
    assert "the database does not answer" in error.replace("\n", " ")
    assert "secret" not in error


def test_a_relay_beside_another_takes_nothing_and_takes_over(ledger: Ledger) -> None:
    with Relay(ledger.config) as second:
        with Relay(ledger.config):
            stash(ledger, *(Record(ledger.topic, b"%d" % number, b"k%d" % number) for number in range(100)))
            ledger.until_empty()
        stash(ledger, *(Record(ledger.topic, b"%d" % number, b"k%d" % number) for number in range(100, 200)))
        ledger.until_empty()
        assert not second.wait(0)
    assert sorted(int(value or b"") for _, value in values(ledger, ledger.topic)) == list(range(200))
