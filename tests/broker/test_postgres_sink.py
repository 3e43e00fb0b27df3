"""A sink on real Kafka and real PostgreSQL: workers and servers killed, frozen, cut off; every row is compared."""

from __future__ import annotations

import importlib
import random
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from streams import SKIP, EventSource, EventSourceConfig, PostgresSink, Relay, RelayConfig, SinkItem
from streams.errors import ConfigError, EventFailure, TopicReplaced
from streams.outbox.relay import apply
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.engine_kit import Lab, Running
from tests.broker.examples_kit import Make, example
from tests.broker.outbox_kit import PostgresServer
from tests.vocabulary import Added

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


class Round:
    """The program, the outbox beside its table, and a relay: what goes in must come out once."""

    def __init__(self, make: Make, module: ModuleType, servers: str, database: str) -> None:
        self.database, self.module = database, module
        self.config = RelayConfig(name=f"{module.GROUP}-relay", database=database, bootstrap_servers=servers)
        apply(self.config, 2)
        with psycopg.connect(database) as db:
            db.execute(module.TABLE)
        self.example = make(module, module.OUTPUT, SINK_GROUP=module.GROUP, SINK_DATABASE=database)
        self.sent: dict[str, int] = defaultdict(int)

    def send_some(self, rng: random.Random, count: int) -> None:
        """Send so many events, and wait until a part of them is written."""
        wanted = self.rows() + rng.randrange(20, count // 2)
        events = []
        for _ in range(count):
            key = f"key-{rng.randrange(40)}"
            self.sent[key] += 1
            events.append((key, self.module.Happened(key, self.sent[key])))
        self.example.send(events)
        wait_until(lambda: self.rows() > wanted, "some are written", 90)

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def rows(self) -> int:
        with psycopg.connect(self.database) as db:
            row = db.execute("SELECT count(*) FROM written").fetchone()
        assert row is not None
        return int(row[0])

    def check(self) -> None:
        """Each event is in the table once; its record is in the output once, in the order of its key."""
        with psycopg.connect(self.database) as db:
            places = [place for (place,) in db.execute("SELECT place FROM written").fetchall()]
            waiting = db.execute("SELECT (SELECT count(*) FROM kes_outbox) + (SELECT count(*) FROM kes_outbox_parked)")
            assert waiting.fetchone() == (0,)
        assert len(places) == len(set(places)) == self.total
        found: dict[str, list[int]] = defaultdict(list)
        for event in self.example.events(self.module.OUTPUT, self.module.Written):
            found[event.key].append(event.count)
        assert found == {key: list(range(1, count + 1)) for key, count in self.sent.items()}


@pytest.fixture
def round_trip(
    example: Make,
    kafka_broker: BrokerAddress,
    postgres: PostgresServer,
    topic_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Round:
    monkeypatch.setenv("SINK_GROUP", topic_prefix + "sink")
    database = postgres.make_database()
    monkeypatch.setenv("SINK_DATABASE", database)
    module = importlib.reload(importlib.import_module("tests.broker.sink_program"))
    return Round(example, module, kafka_broker.bootstrap_servers, database)


def test_from_kafka_through_a_database_to_kafka_with_workers_killed(
    round_trip: Round, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with Relay(round_trip.config), round_trip.example.run(tmp_path) as workers:
        for strike in (signal.SIGKILL, signal.SIGKILL, None):
            round_trip.send_some(rng, 700)
            if strike is not None:
                workers.signal(rng.randrange(2), strike)
        round_trip.example.until_handled(round_trip.total, workers)
        output = round_trip.module.OUTPUT
        round_trip.example.until_outputs(output, round_trip.total, workers)
    round_trip.check()


@pytest.mark.nightly
@pytest.mark.slow
def test_with_servers_killed_and_a_worker_frozen(
    round_trip: Round, postgres: PostgresServer, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with Relay(round_trip.config), round_trip.example.run(tmp_path) as workers:
        for number in range(6):
            round_trip.send_some(rng, 500)
            match number % 3:
                case 0:
                    postgres.kill()
                case 1:
                    workers.signal(0, signal.SIGSTOP)
                    wait_until(lambda: round_trip.rows() == round_trip.total, "the other one goes on", 90)
                    workers.signal(0, signal.SIGCONT)
                case _:
                    with psycopg.connect(round_trip.database, autocommit=True) as db:
                        db.execute(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kes-sink'"
                        )
        round_trip.example.until_handled(round_trip.total, workers)
        output = round_trip.module.OUTPUT
        round_trip.example.until_outputs(output, round_trip.total, workers)
    round_trip.check()


Handle = Callable[[psycopg.AsyncConnection[Any], Sequence[SinkItem[Added]]], Awaitable[None]]


async def write(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[Added]]) -> None:
    for item in items:
        await db.execute("INSERT INTO names VALUES (%s)", [item.event.name])
        if item.event.deed == "raise":
            raise LookupError("no such name")


def sink_of(lab: Lab, database: str, handle: Handle = write, **settings: Any) -> EventSource[None]:
    source = EventSource(lab.config(**settings))
    PostgresSink(source, database, name="names").register_event_type(Added)(handle)
    return source


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    database = postgres.make_database()
    with psycopg.connect(database) as db:
        db.execute("CREATE TABLE names (name text)")
    return database


def names_in(database: str) -> list[str]:
    with psycopg.connect(database) as db:
        return [name for (name,) in db.execute("SELECT name FROM names")]


async def test_a_topic_that_was_made_again_is_refused(lab: Lab, database: str) -> None:
    await lab.create()
    await lab.add("a", "b")
    async with Running(sink_of(lab, database)) as run:
        await run.until_handled(2)
    with psycopg.connect(database) as db:
        db.execute("UPDATE kes_inbox SET topic_id = 'another'")
    await lab.add("c")
    async with Running(sink_of(lab, database)) as run:
        failure = await run.failure()
    assert isinstance(failure, EventFailure)
    assert isinstance(failure.__cause__, TopicReplaced)
    assert "DELETE FROM kes_inbox WHERE sink = 'names'" in str(failure.__cause__)
    assert names_in(database) == ["a", "b"]


async def test_a_handler_that_raises_leaves_out_its_own_event_only(lab: Lab, database: str) -> None:
    """Of those in a batch. Until its policy has decided nothing behind it is written: the fence would pass it."""
    await lab.create()
    names = [f"n{number}" for number in range(40)]
    for name in names:
        await lab.add(name, deed="raise" if name in ("n7", "n21") else "")
    async with Running(sink_of(lab, database)) as run:
        assert isinstance((await run.failure()).__cause__, LookupError)
    assert names_in(database) == names[:7]
    async with Running(sink_of(lab, database, error_policy=SKIP)) as run:
        await run.until_handled(40)
    assert names_in(database) == [name for name in names if name not in ("n7", "n21")]
    with psycopg.connect(database) as db:
        assert db.execute("SELECT next_offset FROM kes_inbox").fetchall() == [(40,)]


async def test_a_deadlock_is_done_again(lab: Lab, database: str) -> None:
    await lab.create()
    await lab.add("a")
    failures = [psycopg.errors.DeadlockDetected("deadlock"), psycopg.OperationalError("cut off")]

    async def once(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[Added]]) -> None:
        await write(db, items)
        if failures:
            raise failures.pop()

    async with Running(sink_of(lab, database, once)) as run:
        await run.until_handled(1)
    assert names_in(database) == ["a"]


def test_settings_of_a_sink_are_checked() -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1, bootstrap_servers="x:1"))
    for options, reason in (
        ({"name": ""}, "the name of a sink is"),
        ({"name": "x", "retry_seconds": -1}, "retry_seconds"),
    ):
        with pytest.raises(ConfigError, match=reason):
            PostgresSink(source, "postgresql://x/y", **options)  # type: ignore[arg-type]
