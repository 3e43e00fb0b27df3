"""The flights example without Kafka: what an event does to an aircraft and to a board."""

from __future__ import annotations

from typing import Any

import pytest

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
HOUR = 3_600


def left(flight_id: str = "1", at: int = MORNING, delay: int = 0) -> FlightDeparted:
    return FlightDeparted(
        flight_id=flight_id,
        tail="N1",
        carrier="UA",
        origin="EWR",
        destination="BOS",
        departed_at=at,
        delay_minutes=delay,
    )


def came(
    flight_id: str = "1", at: int = MORNING + HOUR, delay: int = 0, day: str = "2013-01-01", air: int = 40
) -> FlightArrived:
    return FlightArrived(
        flight_id=flight_id,
        tail="N1",
        carrier="UA",
        destination="BOS",
        arrived_at=at,
        day=day,
        delay_minutes=delay,
        air_minutes=air,
    )


CANCELLED = FlightCancelled(
    flight_id="1", tail=None, carrier="UA", flight=1545, origin="EWR", destination="BOS", scheduled_at=MORNING
)


def turnaround(minutes: int, flight_id: str = "2") -> Turnaround:
    return Turnaround(flight_id=flight_id, tail="N1", carrier="UA", airport="BOS", minutes=minutes)


def recovered(minutes: int, flight_id: str = "1") -> DelayRecovered:
    return DelayRecovered(flight_id=flight_id, tail="N1", carrier="UA", airport="BOS", minutes=minutes)


LANDED = came("0", MORNING)
FIRST, SECOND = "2013-01-01", "2013-01-02"
FOLDS: list[Any] = [
    pytest.param([left()], [], {"flights": 1, "arrived": 0, "last_airport": "EWR", "open_flights": {"1": 0}}, id="one"),
    pytest.param([left(), came()], [], {"landing": Landing("BOS", MORNING + HOUR), "open_flights": {}}, id="a landing"),
    pytest.param(
        [left(), came(), left("2", MORNING + 6 * HOUR)],
        [turnaround(300)],
        {"landing": None, "last_airport": "EWR"},
        id="a turnaround counts from the landing",
    ),
    pytest.param([LANDED, left("2", MORNING + TURNAROUND_LIMIT_SECONDS - 60)], [turnaround(1439)], {}, id="a day"),
    pytest.param([LANDED, left("2", MORNING + TURNAROUND_LIMIT_SECONDS)], [], {}, id="a longer day is none"),
    pytest.param(  # some rows of the file overlap: two departures in a row, the arrivals later
        [LANDED, left("2", MORNING + HOUR), left("3", MORNING + HOUR + 60), came("2"), came("3")],
        [turnaround(60)],
        {"open_flights": {}, "flights": 2, "arrived": 3},
        id="one landing gives one turnaround",
    ),
    pytest.param([left(delay=15), came()], [recovered(15)], {}, id="late at first"),
    pytest.param([left(delay=20), came(delay=-5)], [recovered(25)], {}, id="and early then"),
    pytest.param([left(delay=14), came()], [], {}, id="not late enough"),
    pytest.param([left(delay=15), came(delay=1)], [], {}, id="still late"),
    pytest.param([left(delay=-3), came(delay=-10)], [], {}, id="never late"),
    pytest.param([came()], [], {}, id="the departure was never seen"),
    pytest.param([came("1", delay=30), came("2", delay=-20)], [], {"minutes_late": 30}, id="early is no gain"),
    pytest.param(  # the third left on the first, and lands on the second: all of it belongs to the second
        [came(day=FIRST, air=100), came(day=FIRST, air=150), came(day=SECOND, air=200), came(day=SECOND, air=50)],
        [],
        {"longest_day": FIRST, "longest_day_minutes": 250},
        id="the longest day, and the first of equals",
    ),
    pytest.param(
        [came(day=FIRST, air=250), came(day=SECOND, air=250), came(day=SECOND, air=1)],
        [],
        {"longest_day": SECOND, "longest_day_minutes": 251},
        id="a longer one",
    ),
    pytest.param(
        [left("1", delay=40), left("2", MORNING + 10 * HOUR), came("2", MORNING + 11 * HOUR)],
        [],
        {"open_flights": {"1": 40}, "flights": 2, "arrived": 1},
        id="a diverted flight stays open",
    ),
    pytest.param(
        [LANDED, CANCELLED],
        [],
        {"cancelled": 1, "last_airport": "BOS", "landing": Landing("BOS", MORNING)},
        id="cancelled: it stays where it is",
    ),
]


@pytest.mark.parametrize(("events", "told", "state"), FOLDS)
def test_what_events_do_to_an_aircraft(events: list[Any], told: list[Any], state: dict[str, Any]) -> None:
    aircraft = Aircraft()
    folds: Any = {FlightDeparted: depart, FlightArrived: arrive, FlightCancelled: cancel}
    found = [folds[type(event)](aircraft, event) for event in events]
    assert [fact for fact in found if fact is not None] == told
    assert {name: getattr(aircraft, name) for name in state} == state
    assert Aircraft().open_flights == {}, "a new state shares nothing with another"


def test_key_without_an_aircraft_is_no_tail_number() -> None:
    assert flight_key(CANCELLED.carrier, CANCELLED.flight) == "UA-1545"


def test_a_board_sums_keeps_the_fastest_and_is_published_only_when_it_changed() -> None:
    board = Board()
    assert publish("airline:UA", board) is None
    for minutes in (90, 30, 60):
        add_turnaround(board, turnaround(minutes))
    add_recovered(board, recovered(20))
    line = publish("airline:UA", board)
    assert line is not None
    assert (line.turnarounds, line.turnaround_minutes, line.fastest_turnaround) == (3, 180, 30)
    assert (line.recovered, line.recovered_minutes) == (1, 20)
    assert publish("airline:UA", board) is None
    add_turnaround(board, turnaround(1))
    assert publish("airline:UA", board) is not None
