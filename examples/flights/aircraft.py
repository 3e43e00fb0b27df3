"""The first event source: what every aircraft is doing, and what is worth telling about it.

The three functions ``depart``, ``arrive`` and ``cancel`` know nothing of Kafka: they change an ``Aircraft`` and return
what is to be told. The handlers below them read the state, call one of the three, write the state, and send what came
out; all of that is one transaction with the offset of the flight.

    kes run examples.flights.aircraft:source --workers 2
"""

from __future__ import annotations

import msgspec

from examples.flights.events import (
    AIRCRAFT_GROUP,
    FACTS_TOPIC,
    FLIGHTS_PARTITIONS,
    FLIGHTS_TOPIC,
    LATE_DEPARTURE_MINUTES,
    TURNAROUND_LIMIT_SECONDS,
    DelayRecovered,
    FlightArrived,
    FlightCancelled,
    FlightDeparted,
    Turnaround,
    airline_board,
    airport_board,
    flight_key,
)
from examples.flights.report import reporter
from streams import EventContext, EventSource, EventSourceConfig, Table

Fact = Turnaround | DelayRecovered


class Landing(msgspec.Struct, frozen=True):
    """Where and when an aircraft came down."""

    airport: str
    at: int


class Aircraft(msgspec.Struct, omit_defaults=True):
    """Everything that is kept about one aircraft (or about one flight number, if no aircraft was ever chosen for it).

    ``minutes_late`` adds up late arrivals; early ones do not make up for them. ``last_airport`` is where it was seen
    last. ``longest_day`` is the day with the most minutes in the air (the first of equals), by the day of landing: a
    flight across midnight counts for the day on which it ends. ``open_flights`` are departures without an arrival yet,
    with the delay they left with; a flight that was diverted stays there. ``landing`` is the last landing while the
    aircraft is on the ground.
    """

    flights: int = 0
    arrived: int = 0
    cancelled: int = 0
    minutes_late: int = 0
    last_airport: str | None = None
    today: str = ""
    today_minutes: int = 0
    longest_day: str = ""
    longest_day_minutes: int = 0
    open_flights: dict[str, int] = {}
    landing: Landing | None = None


def depart(aircraft: Aircraft, event: FlightDeparted) -> Turnaround | None:
    """The aircraft leaves; a turnaround if it was on the ground before, and not for longer than a day."""
    landing = aircraft.landing
    aircraft.flights += 1
    aircraft.last_airport = event.origin
    aircraft.open_flights[event.flight_id] = event.delay_minutes
    aircraft.landing = None
    if landing is None or event.departed_at - landing.at >= TURNAROUND_LIMIT_SECONDS:
        return None
    return Turnaround(
        flight_id=event.flight_id,
        tail=event.tail,
        carrier=event.carrier,
        airport=landing.airport,
        minutes=(event.departed_at - landing.at) // 60,
    )


def arrive(aircraft: Aircraft, event: FlightArrived) -> DelayRecovered | None:
    """The aircraft is there; worth telling if it had left late and is on time."""
    aircraft.arrived += 1
    aircraft.minutes_late += max(event.delay_minutes, 0)
    aircraft.last_airport = event.destination
    aircraft.landing = Landing(event.destination, event.arrived_at)
    if event.day != aircraft.today:
        aircraft.today, aircraft.today_minutes = event.day, 0
    aircraft.today_minutes += event.air_minutes
    if aircraft.today_minutes > aircraft.longest_day_minutes:
        aircraft.longest_day, aircraft.longest_day_minutes = aircraft.today, aircraft.today_minutes
    left_late_by = aircraft.open_flights.pop(event.flight_id, None)
    if left_late_by is None or left_late_by < LATE_DEPARTURE_MINUTES or event.delay_minutes > 0:
        return None
    return DelayRecovered(
        flight_id=event.flight_id,
        tail=event.tail,
        carrier=event.carrier,
        airport=event.destination,
        minutes=left_late_by - event.delay_minutes,
    )


def cancel(aircraft: Aircraft, event: FlightCancelled) -> None:
    """The flight never left; the aircraft stays where it is."""
    aircraft.cancelled += 1


source = EventSource(
    EventSourceConfig(
        group_id=AIRCRAFT_GROUP, topic=FLIGHTS_TOPIC, num_partitions=FLIGHTS_PARTITIONS, metrics_handler=reporter()
    ),
    store=Table.factory(key=str, value=Aircraft),
)
Context = EventContext[Table[str, Aircraft]]


def tell(ctx: Context, fact: Fact | None) -> None:
    """Send a fact twice: once to its airline's board, once to its airport's."""
    if fact is not None:
        ctx.forward(FACTS_TOPIC, fact, key=airline_board(fact.carrier))
        ctx.forward(FACTS_TOPIC, fact, key=airport_board(fact.airport))


@source.on
def on_departed(ctx: Context, event: FlightDeparted) -> None:
    aircraft = ctx.store.get(event.tail) or Aircraft()
    fact = depart(aircraft, event)
    ctx.store.put(event.tail, aircraft)
    tell(ctx, fact)


@source.on
def on_arrived(ctx: Context, event: FlightArrived) -> None:
    aircraft = ctx.store.get(event.tail) or Aircraft()
    fact = arrive(aircraft, event)
    ctx.store.put(event.tail, aircraft)
    tell(ctx, fact)


@source.on
def on_cancelled(ctx: Context, event: FlightCancelled) -> None:
    key = event.tail or flight_key(event.carrier, event.flight)
    aircraft = ctx.store.get(key) or Aircraft()
    cancel(aircraft, event)
    ctx.store.put(key, aircraft)


if __name__ == "__main__":
    source.run()
