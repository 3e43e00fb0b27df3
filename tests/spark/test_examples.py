"""The recipes of ``examples/spark``, each on a small bank with a broker of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from examples import bank_feed
from examples.bank import Balance, Deposited
from examples.flights import aircraft, ingest
from examples.flights.cluster import Cluster
from examples.flights.events import FLIGHTS_TOPIC, FlightArrived, FlightCancelled, FlightDeparted
from examples.flights.verify import time_of
from examples.spark import flights_stream, log_to_parquet, new_version, reconcile, reprocess, restore, two_topics
from examples.spark.common import read
from examples.topics import create_topics
from streams.broker import KafkaBroker

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
DEPOSITS = 3_000
RECIPES = sorted(
    path.stem for path in (ROOT / "examples" / "spark").glob("*.py") if path.stem not in ("__init__", "common")
)


@dataclass(frozen=True)
class Bank:
    """``paid``: account to what all its deposits add up to. The event source has handled them all, and was stopped."""

    servers: str
    paid: Counter[str]


@pytest.fixture(scope="module")
def bank() -> Iterator[Bank]:
    """A broker of its own, ``bank-events`` with deposits, and what ``examples.bank`` has made of them."""
    with KafkaBroker() as broker:
        servers = broker.bootstrap_servers
        create_topics(servers, {"bank-events": 10, "bank-balances": 10})
        paid = bank_feed.pay_in(servers, DEPOSITS, seed=5)
        source = start("-m", "streams", "run", "examples.bank:source", servers=servers)
        try:
            count, last = bank_feed.watch(servers, DEPOSITS, dict.fromkeys(range(10), 0))
            assert (count, last) == (DEPOSITS, paid)
        finally:
            source.send_signal(signal.SIGTERM)
            assert source.wait(60) == 0
        yield Bank(servers, paid)


def start(*arguments: str, servers: str) -> subprocess.Popen[bytes]:
    """Python in the checkout, as leader of a process group of its own, with the broker in its environment."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "KES_BOOTSTRAP_SERVERS": servers},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and everything that it started in its group (Spark's Java); waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_what_the_recipe_says_of_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = importlib.import_module(f"examples.spark.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        recipe.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m examples.spark.{name}" in shown
    assert "--servers" in shown


def contents(records: DataFrame) -> list[tuple[object, ...]]:
    """Records without their offsets (of which transaction markers take some), in the order of their partitions."""
    rows = records.orderBy("partition", "offset").collect()
    return [(row.partition, row.key, row.value, row.timestamp, tuple(map(tuple, row.headers or []))) for row in rows]


@pytest.mark.nightly
def test_restore_brings_back_every_record_as_it_was_and_only_once(
    spark: SparkSession, bank: Bank, tmp_path: Path
) -> None:
    restore.save(spark, bank.servers, "bank-events", tmp_path / "saved")
    before = contents(read(spark, bank.servers, "bank-events"))
    create_topics(bank.servers, {"bank-events-restored": 10})
    for written in (True, False):
        result = restore.load(spark, bank.servers, "bank-events-restored", tmp_path / "saved")
        assert (result.written, result.rows) == (written, len(before))
    assert len(before) >= DEPOSITS
    assert contents(read(spark, bank.servers, "bank-events-restored")) == before


@pytest.mark.nightly
def test_a_new_version_has_no_seam(spark: SparkSession, bank: Bank, tmp_path: Path) -> None:
    create_topics(bank.servers, {new_version.NEW: 10})
    first = new_version.backfill(spark, bank.servers, tmp_path)
    bank_feed.pay_in(bank.servers, 300, seed=6)
    for _ in range(2):  # a second run of everything changes nothing
        again = new_version.backfill(spark, bank.servers, tmp_path)
        assert (again.written, again.rows) == (False, first.rows)
        new_version.follow(spark, bank.servers, tmp_path, for_ever=False).awaitTermination()
    old = kes_spark.events(read(spark, bank.servers, new_version.OLD), Deposited, on_error="fail")
    new = kes_spark.events(read(spark, bank.servers, new_version.NEW), new_version.DepositedInCurrency, on_error="fail")
    history = by_account(old)
    assert sum(map(len, history.values())) == first.rows + 300
    assert by_account(new) == history
    assert {row.currency for row in new.select("currency").distinct().collect()} == {"EUR"}


@pytest.mark.nightly
def test_a_changed_handler_is_compared_with_production_and_published_once(
    spark: SparkSession, bank: Bank, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", bank.servers)
    history = reprocess.handled(spark, bank.servers)
    assert history.count() == DEPOSITS
    for again in (False, True):
        reprocess.run(spark, bank.servers, "bonus-1")
        assert ("since an earlier run" in capsys.readouterr().out) is again
    balances = read(spark, bank.servers, reprocess.BALANCES)
    with reprocess.changed(history) as replayed, reprocess.against_production(balances, replayed) as found:
        first_bonus = kes_spark.sequence(kes_spark.events(history, Deposited)).where("cents >= 9000")
        assert (found.missing, found.extra) == (0, 0)
        assert 0 < found.different < DEPOSITS
        assert {row.key.decode() for row in found.differences.select("key").distinct().collect()} == {
            row.account for row in first_bonus.select("account").distinct().collect()
        }
    bank_feed.pay_in(bank.servers, 200, seed=9)
    every = read(spark, bank.servers, reprocess.EVENTS).count()
    changed = start("-m", "streams", "run", "examples.spark.reprocess:source", servers=bank.servers)
    try:
        deadline = time.monotonic() + 120
        while read(spark, bank.servers, reprocess.NEW_BALANCES).count() < every:
            assert changed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        changed.send_signal(signal.SIGTERM)
        assert changed.wait(60) == 0
    finally:
        kill(changed)
    new = kes_spark.events(read(spark, bank.servers, reprocess.NEW_BALANCES), Balance, on_error="fail")
    assert new.count() == every
    deposits = kes_spark.events(read(spark, bank.servers, reprocess.EVENTS), Deposited, on_error="fail")
    bonus = f.when(f.col("cents") >= 9_000, f.floor(f.col("cents") / 100)).otherwise(0)
    paid = deposits.groupBy("account").agg(f.sum(f.col("cents") + bonus).alias("cents"))
    last = new.groupBy("account").agg(f.max_by("cents", "_meta.offset").alias("cents"))
    assert {tuple(row) for row in last.collect()} == {tuple(row) for row in paid.collect()}


@pytest.mark.nightly
def test_two_topics_and_the_dead_letters_in_one_transaction(spark: SparkSession, bank: Bank, tmp_path: Path) -> None:
    topics = (two_topics.LARGE, two_topics.SMALL, two_topics.REFUSED)
    create_topics(bank.servers, dict.fromkeys(topics, 10))
    spend_badly(bank.servers)
    source = kes_spark.events(read(spark, bank.servers, two_topics.SOURCE), Deposited, on_error="deadletter")
    paid = totals(source)
    for times, each_batch in ((1, False), (1, False), (2, True), (2, True)):  # a second run of either adds nothing
        out = tmp_path / str(each_batch)
        two_topics.start(spark, bank.servers, out, each_batch=each_batch, at_most=2_000).awaitTermination()
        large, small, refused = (read(spark, bank.servers, topic) for topic in topics)
        both = kes_spark.events(large, two_topics.LargeDeposit, on_error="fail").unionByName(
            kes_spark.events(small, Deposited, on_error="fail")
        )
        assert totals(both) == {account: (times * count, times * cents) for account, (count, cents) in paid.items()}
        reasons = [
            header.value.decode() for row in refused.collect() for header in row.headers if "message" in header.key
        ]
        assert len(reasons) == 3 * times
    assert {reason.partition(": ")[2].split()[0].strip(":") for reason in reasons} == {"corrupt", "unknown", "no"}
    smallest = kes_spark.events(large, two_topics.LargeDeposit).agg(f.min("cents")).collect()
    assert smallest[0][0] >= 5_000


def totals(deposits: DataFrame) -> dict[str, tuple[int, int]]:
    rows = deposits.groupBy("account").agg(f.count("*").alias("count"), f.sum("cents").alias("cents")).collect()
    return {row.account: (row["count"], row.cents) for row in rows}


@pytest.mark.nightly
def test_the_log_as_parquet_has_every_record_once(spark: SparkSession, bank: Bank, tmp_path: Path) -> None:
    for at_most in (1_000, 50):  # the second time there is nothing new
        log_to_parquet.start(spark, bank.servers, tmp_path, at_most=at_most).awaitTermination()
    kept = spark.read.parquet(str(tmp_path / "events"))
    raw = read(spark, bank.servers, log_to_parquet.TOPICS)
    assert kept.select(*log_to_parquet.NATURAL_KEY).exceptAll(raw.select(*log_to_parquet.NATURAL_KEY)).isEmpty()
    assert kept.count() == raw.count()
    typed = kept.where("type = 'Deposited' and _error is null").select("Deposited.*")
    assert totals(typed) == totals(kes_spark.events(raw, Deposited, on_error="deadletter"))


def test_stores_and_log_are_compared_at_one_point(spark: SparkSession, bank: Bank) -> None:
    bank_feed.pay_in(bank.servers, 100, seed=8)  # nobody handles these, so the stores are behind them, rightly
    assert reconcile.differences(spark, bank.servers) == []
    account, cents = next(iter(sorted(bank.paid.items())))
    entry = read(spark, bank.servers, reconcile.CHANGELOG).where(f.col("key") == account.encode()).first()
    assert entry is not None
    producer = Producer({"bootstrap.servers": bank.servers})
    producer.produce(reconcile.CHANGELOG, b'{"cents":1}', account.encode(), entry.partition)
    assert producer.flush(30) == 0
    assert [tuple(row) for row in reconcile.differences(spark, bank.servers)] == [(account, 1, cents)]


def spend_badly(servers: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for value, headers in ((b"{", [("__grt__", b"Deposited")]), (b"{}", [("__grt__", b"Stolen")]), (b"{}", [])):
        producer.produce(two_topics.SOURCE, value, b"ada", headers=headers)
    assert producer.flush(30) == 0


def by_account(deposits: DataFrame) -> dict[str, list[tuple[int, object]]]:
    found: dict[str, list[tuple[int, object]]] = {}
    for row in deposits.orderBy("_meta.partition", "_meta.offset").collect():
        found.setdefault(row.account, []).append((row.cents, row._meta.timestamp))
    return found


Flight = FlightDeparted | FlightArrived | FlightCancelled


@pytest.fixture
def flights_broker() -> Iterator[str]:
    try:
        ingest.dataset_file("flights.csv.zip")
    except ingest.DataMissing as missing:
        pytest.skip(str(missing))
    with KafkaBroker() as broker:
        cluster = Cluster(broker.bootstrap_servers)
        cluster.create_topics()
        cluster.close()
        yield broker.bootstrap_servers


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_flights_of_each_day_once_in_order_and_what_the_event_source_says_of_them(
    spark: SparkSession, flights_broker: str, tmp_path: Path
) -> None:
    days = tmp_path / "days"
    for number in (1, 3, 3):  # the third run finds nothing new
        files = flights_stream.deliver(days, number)
        assert len(files) == number
        flights_stream.send(spark, flights_broker, days, tmp_path / "checkpoint")
    flights = flights_in_order(read(spark, flights_broker, FLIGHTS_TOPIC))
    rows = spark.read.csv(str(days), header=True, schema=ingest.COLUMNS, nullValue="NA", pathGlobFilter="*.csv")
    left, cancelled = rows.where("dep_delay IS NOT NULL"), rows.where("dep_delay IS NULL")
    wanted = [left.count(), left.where("arr_delay IS NOT NULL").count(), cancelled.count()]
    found = [
        sum(isinstance(flight, kind) for flight in flights) for kind in (FlightDeparted, FlightArrived, FlightCancelled)
    ]
    assert found == wanted
    in_order_within_each_day(flights)

    flights_stream.fold(flights_broker, tmp_path / "workers.log")
    facts = flights_stream.facts(spark, flights_broker)
    told = sorted((row.fact, row.flight_id, row.airport, row.minutes) for row in facts.collect())
    assert told == sorted(folded(flights))
    airlines = flights_stream.on_the_ground(facts)
    assert sum(count for count, _ in airlines.values()) == sum(fact == "Turnaround" for fact, *_ in told) > 0
    flights_stream.draw(airlines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def flights_in_order(records: DataFrame) -> list[Flight]:
    """All events, as objects; those of one partition in the order of their offsets."""
    classes = {cls.__name__: cls for cls in (FlightDeparted, FlightArrived, FlightCancelled)}
    rows = kes_spark.events(records, list(classes.values()), on_error="fail")
    return [
        classes[row._meta.type](**row[row._meta.type].asDict())
        for row in rows.orderBy("_meta.partition", "_meta.offset").collect()
    ]


def in_order_within_each_day(flights: list[Flight]) -> None:
    last: dict[tuple[str, str], int] = {}
    for flight in flights:
        key = flight.tail or flight.flight_id, flight.flight_id[:8]
        assert last.get(key, 0) <= time_of(flight), flight
        last[key] = time_of(flight)


def folded(flights: list[Flight]) -> list[tuple[str, str, str, int]]:
    """What the event source must have told, from the same functions without Kafka."""
    states: dict[str, aircraft.Aircraft] = {}
    told = []
    for flight in flights:
        if isinstance(flight, FlightCancelled):
            continue
        state = states.setdefault(flight.tail, aircraft.Aircraft())
        fact = aircraft.depart(state, flight) if isinstance(flight, FlightDeparted) else aircraft.arrive(state, flight)
        if fact is not None:
            told.append((type(fact).__name__, fact.flight_id, fact.airport, fact.minutes))
    return told
