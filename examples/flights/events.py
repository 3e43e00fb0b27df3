"""What happens in the demo, as types: the flights that come in, and what the two event sources say about them.

Times named ``*_at`` are seconds since the epoch (UTC). Days are New York's calendar, as ``2013-01-31``. A flight is
named once and for all by ``flight_id``: scheduled day, airline with number, origin (``20130131-UA1545-EWR``); no two
rows of the file share one, so every event that comes out can be traced to the flight that caused it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from streams import event_type

FLIGHTS_TOPIC: Final = "flights"
FACTS_TOPIC: Final = "flight-facts"
BOARDS_TOPIC: Final = "flight-boards"

AIRCRAFT_GROUP: Final = "aircraft"
BOARDS_GROUP: Final = "boards"

FLIGHTS_PARTITIONS: Final = 8
FACTS_PARTITIONS: Final = 4
BOARDS_PARTITIONS: Final = 1

TURNAROUND_LIMIT_SECONDS: Final = 24 * 3600
"""An aircraft that is back in New York later than this did something else in between."""
LATE_DEPARTURE_MINUTES: Final = 15
"""The trade's own limit: a departure is late from the fifteenth minute on."""


@event_type("FlightDeparted")
class FlightDeparted(msgspec.Struct, frozen=True, kw_only=True):
    """Off the gate. ``delay_minutes`` is negative when early.

    A departure that no ``FlightArrived`` follows is a flight that was diverted: the file does not say when, nor where,
    it came down, so nothing is claimed about it, and the aircraft's state keeps it as not accounted for.
    """

    flight_id: str
    tail: str
    carrier: str
    origin: str
    destination: str
    departed_at: int
    delay_minutes: int


@event_type("FlightArrived")
class FlightArrived(msgspec.Struct, frozen=True, kw_only=True):
    """At the gate of the destination.

    ``day`` is the day in New York at that moment, ``air_minutes`` the time in the air.
    """

    flight_id: str
    tail: str
    carrier: str
    destination: str
    arrived_at: int
    day: str
    delay_minutes: int
    air_minutes: int


@event_type("FlightCancelled")
class FlightCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Never left. ``tail`` is ``None`` when no aircraft had been chosen yet; the key is ``flight_key`` then."""

    flight_id: str
    tail: str | None
    carrier: str
    flight: int
    origin: str
    destination: str
    scheduled_at: int


@event_type("Turnaround")
class Turnaround(msgspec.Struct, frozen=True, kw_only=True):
    """An aircraft left New York again, ``minutes`` after it had landed at ``airport``.

    ``flight_id`` is the new departure.
    """

    flight_id: str
    tail: str
    carrier: str
    airport: str
    minutes: int


@event_type("DelayRecovered")
class DelayRecovered(msgspec.Struct, frozen=True, kw_only=True):
    """A flight that had left late was at ``airport`` on time; ``minutes`` were made up on the way."""

    flight_id: str
    tail: str
    carrier: str
    airport: str
    minutes: int


@event_type("BoardPublished")
class BoardPublished(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the boards. ``board`` is ``airline:UA`` or ``airport:BOS``. Averages are the reader's business."""

    board: str
    turnarounds: int
    turnaround_minutes: int
    fastest_turnaround: int | None
    recovered: int
    recovered_minutes: int


def flight_key(carrier: str, flight: int) -> str:
    """The key of a cancelled flight without an aircraft. Tail numbers have no hyphen, so the two never meet."""
    return f"{carrier}-{flight}"


def airline_board(carrier: str) -> str:
    """The key under which facts about an airline travel."""
    return f"airline:{carrier}"


def airport_board(airport: str) -> str:
    """The key under which facts about an airport travel."""
    return f"airport:{airport}"
