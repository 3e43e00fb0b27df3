"""The flights example without Kafka: what an event does to an aircraft and to a board."""

from __future__ import annotations

from typing import Any

import msgspec

from examples.flights.aircraft import Aircraft, Landing, arrive, cancel, depart
from examples.flights.boards import Board, add_recovered, add_turnaround, publish
from examples.flights.events import (
    TURNAROUND_LIMIT_SECONDS,
    DelayRecovered,
    FlightArrived,
    FlightCancelled,
    FlightDeparted,
    Turnaround,
    flight_key,
)

MORNING = 1_357_030_000


def departed(flight_id: str = "1", at: int = MORNING, delay: int = 0, **more: Any) -> FlightDeparted:
    return FlightDeparted(
        flight_id=flight_id,
        tail="N1",
        carrier="UA",
        origin=more.get("origin", "EWR"),
        destination=more.get("destination", "BOS"),
        departed_at=at,
        delay_minutes=delay,
    )


def arrived(flight_id: str = "1", at: int = MORNING + 3600, delay: int = 0, **more: Any) -> FlightArrived:
    return FlightArrived(
        flight_id=flight_id,
        tail="N1",
        carrier="UA",
        destination=more.get("destination", "BOS"),
        arrived_at=at,
        day=more.get("day", "2013-01-01"),
        delay_minutes=delay,
        air_minutes=more.get("air", 40),
    )


def vars_of(aircraft: Aircraft) -> dict[str, Any]:
    return msgspec.structs.asdict(aircraft)


def test_first_departure_is_no_turnaround() -> None:
    aircraft = Aircraft()
    assert depart(aircraft, departed()) is None
    assert (aircraft.flights, aircraft.arrived, aircraft.last_airport) == (1, 0, "EWR")
    assert aircraft.open_flights == {"1": 0}


def test_turnaround_counts_from_the_landing() -> None:
    aircraft = Aircraft()
    depart(aircraft, departed())
    arrive(aircraft, arrived(at=MORNING + 3600))
    assert vars_of(aircraft)["landing"] == Landing("BOS", MORNING + 3600)
    assert depart(aircraft, departed("2", at=MORNING + 3600 + 5 * 3600)) == Turnaround(
        flight_id="2", tail="N1", carrier="UA", airport="BOS", minutes=300
    )
    assert vars_of(aircraft)["landing"] is None
    assert aircraft.last_airport == "EWR"


def test_a_day_on_the_ground_is_no_turnaround() -> None:
    for seconds, told in ((TURNAROUND_LIMIT_SECONDS - 60, True), (TURNAROUND_LIMIT_SECONDS, False)):
        aircraft = Aircraft(landing=Landing("BOS", MORNING))
        assert (depart(aircraft, departed(at=MORNING + seconds)) is not None) is told


def test_one_landing_gives_one_turnaround() -> None:
    # Some rows of the file overlap: two departures in a row, the arrivals later.
    aircraft = Aircraft(landing=Landing("BOS", MORNING - 3600))
    assert depart(aircraft, departed("1")) is not None
    assert depart(aircraft, departed("2", at=MORNING + 60)) is None
    arrive(aircraft, arrived("1"))
    arrive(aircraft, arrived("2"))
    assert aircraft.open_flights == {}
    assert (aircraft.flights, aircraft.arrived) == (2, 2)


def test_late_departure_and_arrival_on_time_is_told() -> None:
    aircraft = Aircraft()
    depart(aircraft, departed(delay=15))
    assert arrive(aircraft, arrived(delay=0)) == DelayRecovered(
        flight_id="1", tail="N1", carrier="UA", airport="BOS", minutes=15
    )
    depart(aircraft, departed("2", delay=20))
    recovered = arrive(aircraft, arrived("2", delay=-5))
    assert recovered is not None
    assert recovered.minutes == 25


def test_what_is_no_recovered_delay() -> None:
    for left, came in ((14, 0), (15, 1), (-3, -10), (60, 30)):
        aircraft = Aircraft()
        depart(aircraft, departed(delay=left))
        assert arrive(aircraft, arrived(delay=came)) is None, (left, came)
    assert arrive(Aircraft(), arrived(delay=0)) is None  # the departure was never seen


def test_early_arrivals_do_not_make_up_for_late_ones() -> None:
    aircraft = Aircraft()
    arrive(aircraft, arrived("1", delay=30))
    arrive(aircraft, arrived("2", delay=-20))
    assert aircraft.minutes_late == 30


def test_longest_day_goes_by_the_day_of_landing() -> None:
    aircraft = Aircraft()
    arrive(aircraft, arrived("1", day="2013-01-01", air=100))
    arrive(aircraft, arrived("2", day="2013-01-01", air=150))
    # Left on the first, lands on the second: all of it belongs to the second.
    arrive(aircraft, arrived("3", day="2013-01-02", air=200))
    assert (aircraft.longest_day, aircraft.longest_day_minutes) == ("2013-01-01", 250)
    arrive(aircraft, arrived("4", day="2013-01-02", air=50))
    assert (aircraft.longest_day, aircraft.longest_day_minutes) == ("2013-01-01", 250)  # the first of equals
    arrive(aircraft, arrived("5", day="2013-01-02", air=1))
    assert (aircraft.longest_day, aircraft.longest_day_minutes) == ("2013-01-02", 251)


def test_a_diverted_flight_stays_open() -> None:
    aircraft = Aircraft()
    depart(aircraft, departed("1", delay=40))
    depart(aircraft, departed("2", at=MORNING + 36_000))
    arrive(aircraft, arrived("2", at=MORNING + 40_000))
    assert aircraft.open_flights == {"1": 40}
    assert (aircraft.flights, aircraft.arrived) == (2, 1)


def test_cancelled_leaves_the_aircraft_where_it_is() -> None:
    aircraft = Aircraft(landing=Landing("BOS", MORNING), last_airport="BOS")
    cancel(aircraft, cancelled(tail="N1"))
    assert (aircraft.cancelled, aircraft.last_airport, aircraft.landing) == (1, "BOS", Landing("BOS", MORNING))


def test_key_without_an_aircraft_is_no_tail_number() -> None:
    event = cancelled(tail=None)
    assert flight_key(event.carrier, event.flight) == "UA-1545"


def cancelled(tail: str | None) -> FlightCancelled:
    return FlightCancelled(
        flight_id="1", tail=tail, carrier="UA", flight=1545, origin="EWR", destination="BOS", scheduled_at=MORNING
    )


def turnaround(minutes: int) -> Turnaround:
    return Turnaround(flight_id="1", tail="N1", carrier="UA", airport="BOS", minutes=minutes)


def test_board_sums_and_keeps_the_fastest() -> None:
    board = Board()
    for minutes in (90, 30, 60):
        add_turnaround(board, turnaround(minutes))
    add_recovered(board, DelayRecovered(flight_id="1", tail="N1", carrier="UA", airport="BOS", minutes=20))
    line = publish("airline:UA", board)
    assert line is not None
    assert (line.turnarounds, line.turnaround_minutes, line.fastest_turnaround) == (3, 180, 30)
    assert (line.recovered, line.recovered_minutes) == (1, 20)


def test_a_board_is_published_only_when_it_changed() -> None:
    board = Board()
    assert publish("airline:UA", board) is None
    add_turnaround(board, turnaround(1))
    assert publish("airline:UA", board) is not None
    assert publish("airline:UA", board) is None
    add_turnaround(board, turnaround(1))
    assert publish("airline:UA", board) is not None


def test_a_new_state_shares_nothing_with_another() -> None:
    first = Aircraft()
    depart(first, departed())
    assert Aircraft().open_flights == {}
