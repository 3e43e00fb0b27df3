"""The relay on real Kafka and real PostgreSQL: killed and frozen at each point, servers killed. Oracle: the ledger."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from streams import Relay
from streams.broker.kafka_broker import KafkaBroker
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.battery_kit import let_pass, wait_until
from tests.broker.gate import gate
from tests.broker.outbox_kit import Ledger, PostgresServer, RelayProcess
from tests.broker.outbox_program import POINTS

Start = Callable[..., RelayProcess]

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.fixture
def ledger(each_postgres: PostgresServer, kafka_broker: BrokerAddress, topic_prefix: str) -> Ledger:
    return Ledger(each_postgres, kafka_broker.bootstrap_servers, topic_prefix)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a relay process of a ledger; all are killed at the end."""
    relays: list[RelayProcess] = []

    def make(ledger: Ledger, fault: str = "") -> RelayProcess:
        relays.append(relay := RelayProcess(ledger.config, tmp_path, fault))
        return relay

    yield make
    for relay in relays:
        relay.kill()


@pytest.mark.parametrize("point", gate(POINTS, "commit.after", "delete.before", "send.after"))
def test_a_relay_that_is_killed(ledger: Ledger, start: Start, seed: int, point: str) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 3) if point.partition(".")[0] in ("about", "claim", "ring") else rng.randrange(2, 9)
    with ledger.writers(seed, 4, 60):
        first = start(ledger, f"{point}:{count}:kill")
        wait_until(first.has_struck, f"the relay is killed: {first.log.read_text()}")
        second = start(ledger)
    ledger.until_empty(first, second)
    assert second.end() == 0
    assert ledger.check() > 200


@pytest.mark.parametrize(
    "point", gate(["fetch.after", "send.after", "commit.before", "commit.after", "note.before"], "commit.before")
)
def test_a_relay_that_is_frozen_and_goes_on_beside_its_successor(
    ledger: Ledger, start: Start, seed: int, point: str
) -> None:
    with ledger.writers(seed, 4, 60):
        frozen = start(ledger, f"{point}:3:freeze")
        wait_until(frozen.has_struck, "the relay is frozen")
        second = start(ledger)
    ledger.until_empty(frozen, second)  # the database has ended the session of the frozen one
    ledger.write(random.Random(seed), 20)
    frozen.process.send_signal(signal.SIGCONT)
    ledger.write(random.Random(seed + 1), 20)
    ledger.until_empty(frozen, second)
    assert (frozen.end(), second.end()) == (0, 0)
    assert ledger.check() > 200


def test_a_database_that_is_killed(ledger: Ledger, each_postgres: PostgresServer, start: Start, seed: int) -> None:
    relay = start(ledger)
    ledger.write(random.Random(seed), 20)
    ledger.until_empty(relay)  # it runs
    for number in range(2):
        ledger.write(random.Random(seed + number), 40)
        each_postgres.kill()
    ledger.until_empty(relay)
    assert relay.end() == 0
    assert ledger.check() > 100


@pytest.mark.nightly  # once in some forty kills the broker that comes back never ends the transaction under way
def test_a_broker_that_is_killed(
    postgres: PostgresServer, broker: KafkaBroker, topic_prefix: str, start: Start, seed: int
) -> None:
    ledger = Ledger(postgres, broker.bootstrap_servers, topic_prefix)
    relay = start(ledger)
    with ledger.writers(seed, 2, 60):
        wait_until(lambda: "BatchRelayed" in relay.log.read_text(), "it relays")
        broker.kill()
        broker.restart()
    ledger.until_empty(relay, seconds=120)
    assert relay.end() == 0
    assert ledger.check() > 100


def test_sessions_that_the_operator_ends(ledger: Ledger, start: Start, seed: int) -> None:
    relay = start(ledger)
    with ledger.writers(seed, 4, 60), psycopg.connect(ledger.database, autocommit=True) as db:
        wait_until(lambda: "BatchRelayed" in relay.log.read_text(), "it relays")  # a start without a database fails
        for _ in range(6):
            let_pass(random.Random(seed).random() * 0.4)
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kes-outbox'")
    ledger.until_empty(relay)
    assert relay.end() == 0
    assert ledger.check() > 200


@pytest.mark.nightly
@pytest.mark.slow
def test_three_relays_that_are_killed_at_random(ledger: Ledger, start: Start, seed: int) -> None:
    rng = random.Random(seed)
    relays = [start(ledger) for _ in range(3)]
    with ledger.writers(seed, 8, 300):
        for _ in range(20):
            let_pass(rng.random())
            victim = rng.randrange(3)
            relays[victim].kill()
            relays[victim] = start(ledger)
    ledger.until_empty(*relays, seconds=120)
    assert [relay.end() for relay in relays] == [0, 0, 0]
    assert ledger.check() > 2_000


@pytest.mark.nightly
@pytest.mark.parametrize("is_frozen", [False, True], ids=["idle", "frozen"])
def test_a_relay_that_is_silent_for_longer_than_kafka_keeps_its_id(
    postgres: PostgresServer, own_broker: OwnBroker, topic_prefix: str, start: Start, seed: int, is_frozen: bool
) -> None:
    forgetful = {
        "transactional.id.expiration.ms": "1000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
    }
    ledger = Ledger(postgres, own_broker(properties=forgetful).bootstrap_servers, topic_prefix)

    def is_forgotten() -> bool:
        last = {record.key: record.value for record in ledger.read("__transaction_state")}
        states = [value for key, value in last.items() if ledger.config.name.encode() in (key or b"")]
        return bool(states) and not any(states)

    relay = start(ledger, "commit.before:3:freeze" if is_frozen else "")
    ledger.write(random.Random(seed), 60)
    if is_frozen:
        wait_until(relay.has_struck, "the relay is frozen")
        second = start(ledger)
        ledger.until_empty(relay, second)
        assert second.end() == 0
    ledger.until_empty(relay)
    wait_until(is_forgotten, "no id is known any more", 60)
    relay.process.send_signal(signal.SIGCONT)
    ledger.write(random.Random(seed + 1), 30)
    ledger.until_empty(relay)
    assert relay.end() == 0
    assert ledger.check() > 50


@pytest.mark.nightly
def test_a_server_whose_table_of_locks_is_full_holds_up_and_goes_on(ledger: Ledger, start: Start, seed: int) -> None:
    """By transactions with very many keys: writers get the error of PostgreSQL, relays wait."""
    relay = start(ledger)
    ledger.write(random.Random(seed), 20)
    with psycopg.connect(ledger.database, autocommit=True) as greedy:
        with pytest.raises(psycopg.errors.OutOfMemory, match="shared memory"):
            greedy.execute("SELECT pg_advisory_lock_shared(1, n) FROM generate_series(1, 1000000) n")
        with pytest.raises(psycopg.OperationalError, match="shared memory"):
            ledger.write(random.Random(seed), 200)
        greedy.execute("SELECT pg_advisory_unlock_all()")
    ledger.write(random.Random(seed), 20)
    ledger.until_empty(relay)
    assert relay.end() == 0
    assert ledger.check() > 30


def test_an_embedded_relay_is_awake_without_notifications_and_wakes_from_its_sleep(ledger: Ledger, seed: int) -> None:
    with Relay(ledger.config), psycopg.connect(ledger.database, autocommit=True) as watch:
        watch.execute("LISTEN kes_outbox")
        asleep = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid IN (2048, 2049) AND granted
            AND mode = 'ExclusiveLock' AND classid = 'kes_outbox'::regclass
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

        def is_asleep() -> bool:
            return watch.execute(asleep).fetchone() == (2,)

        wait_until(is_asleep, "both shards sleep")
        assert list(watch.notifies(timeout=0)) == []
        ledger.write(random.Random(seed), 30)
        ledger.until_empty()
        notices = len(list(watch.notifies(timeout=0.2)))
        assert 1 <= notices < 30
        wait_until(is_asleep, "both shards sleep again")
    assert ledger.check() > 20
