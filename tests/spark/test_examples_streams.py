"""The recipe that brings its own event source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("matplotlib")

import streams.spark as kes_spark
from examples.flights import aircraft, ingest
from examples.flights.cluster import Cluster
from examples.flights.events import FLIGHTS_TOPIC, FlightArrived, FlightCancelled, FlightDeparted
from examples.flights.verify import time_of
from examples.spark import flights_stream
from examples.spark.common import read
from streams.broker import KafkaBroker

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]

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
    timed = ingest.with_times(rows)
    wanted = [ingest.departures(timed), ingest.arrivals(timed), ingest.cancellations(timed)]
    found = [
        sum(isinstance(flight, kind) for flight in flights) for kind in (FlightDeparted, FlightArrived, FlightCancelled)
    ]
    assert found == [events.count() for events in wanted]
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
