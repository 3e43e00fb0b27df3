"""The demo's checks must be able to fail: each kind of loss, duplicate and wrong number is found."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message
from rich.console import Console

from examples.flights import results, verify, view
from examples.flights.aircraft import Aircraft
from examples.flights.cluster import Reach
from examples.flights.events import BoardPublished, FlightArrived, FlightCancelled, FlightDeparted, Turnaround
from examples.flights.expected import Expected, Fact
from examples.flights.fleet import passed
from examples.pipeline import work
from streams.codecs import RESERVED_KEY_PREFIX
from streams.testing.event_factory import EventFactory


def record(key: str | bytes | None, value: Any, type_: str | None = None) -> Message:
    """A record as a client gives it."""
    encoded = value if value is None or isinstance(value, bytes) else msgspec.json.encode(value)
    headers: list[Any] = [("__grt__", (type_ or type(value).__name__).encode())]
    name = key.encode() if isinstance(key, str) else key
    return Message(topic="t", partition=0, offset=7, key=name, value=encoded, headers=headers)


make = EventFactory()
DEPARTED = make(FlightDeparted, flight_id="1", tail="N1", departed_at=100)
ARRIVED = make(FlightArrived, flight_id="1", tail="N1", arrived_at=200)
CANCELLED = make(FlightCancelled, flight_id="2", tail=None, carrier="UA", flight=5, scheduled_at=50)
FLIGHTS = [record("N1", DEPARTED), record("UA-5", CANCELLED), record("N1", ARRIVED)]
TURNAROUND = make(Turnaround, flight_id="1", carrier="UA", airport="BOS", minutes=30)
BOARD = make(BoardPublished, board="airline:UA", turnarounds=1)
KNOWN = {
    "flights": 1, "arrived": 1, "cancelled": 0, "minutes_late": 3,
    "last_airport": "BOS", "longest_day": "2013-01-01", "longest_day_minutes": 40,
}  # fmt: skip
TRUTH = Expected(
    flights=2,
    events={"FlightDeparted": 1, "FlightArrived": 1, "FlightCancelled": 1},
    aircraft={"N1": KNOWN},
    facts=frozenset({Fact("Turnaround", "1", "airline:UA", 30), Fact("Turnaround", "1", "airport:BOS", 30)}),
    boards={"airline:UA": {name: getattr(BOARD, name) for name in verify.BOARD_FIELDS}},
    hours={("UA", 5): (1, 0)},
)
FACTS = [record("airline:UA", TURNAROUND), record("airport:BOS", TURNAROUND)]
STATE = Aircraft(**KNOWN)


AIRCRAFT = [
    record("N1", Aircraft(flights=9)),  # the last value counts, and nothing of the toolkit's own
    record(RESERVED_KEY_PREFIX + b"offset", b"not for us"),
    *(record("N2", STATE), record("N2", None), record("N1", STATE)),
]


@pytest.mark.parametrize(
    ("check", "records", "compared"),
    [
        (verify.check_flights, FLIGHTS, 3),  # one number: that of the events
        (verify.check_facts, FACTS, 2),
        (verify.check_aircraft, AIRCRAFT, len(verify.STATE_FIELDS) + 1),
    ],
)
def test_what_is_right(check: Any, records: list[Message], compared: int) -> None:
    found = check(records, TRUTH)
    assert (found.wrong, found.compared) == (0, compared)
    assert found.records == len(records) or records is AIRCRAFT


NOT_OURS = "t[0]@7 is no event of this demo"
STRAY = [msgspec.structs.replace(STATE, minutes_late=4), msgspec.structs.replace(STATE, open_flights={"1": 0})]


@pytest.mark.parametrize(
    ("check", "records", "says"),
    [
        (verify.check_flights, FLIGHTS[:2], "number of FlightArrived"),
        (verify.check_flights, [*FLIGHTS, FLIGHTS[0]], "FlightDeparted of 1 is there twice"),
        (verify.check_flights, [FLIGHTS[2], FLIGHTS[1], FLIGHTS[0]], "comes after a later event of N1"),
        (verify.check_flights, [*FLIGHTS, record("N1", DEPARTED, "Unheard")], NOT_OURS),
        (verify.check_flights, [*FLIGHTS, record("N1", b"{", "FlightDeparted")], NOT_OURS),
        (verify.check_flights, [*FLIGHTS, record("N1", None, "FlightDeparted")], NOT_OURS),
        (verify.check_facts, FACTS[:1], "for airport:BOS (30 min) was lost"),
        (verify.check_facts, [*FACTS, FACTS[0]], "for airline:UA is there 2 times"),
        (verify.check_facts, [*FACTS, record("airport:ORD", TURNAROUND)], "for airport:ORD (30 min) is not in the"),
        (
            verify.check_facts,
            [FACTS[0], record("airport:BOS", msgspec.structs.replace(TURNAROUND, minutes=31))],
            "(31 min) is not in",
        ),
        (verify.check_facts, [*FACTS, record("airline:UA", DEPARTED)], "is no event of this demo"),
        (verify.check_aircraft, [], "N1 is in the file and not in Kafka"),
        (verify.check_aircraft, [record("N1", STATE), record("N2", STATE)], "N2 is in Kafka and not in the file"),
        (verify.check_aircraft, [record("N1", STRAY[0])], "N1, minutes_late: Kafka says 4"),
        (verify.check_aircraft, [record("N1", STRAY[1])], "flights without an arrival"),
    ],
)
def test_what_is_wrong_is_found(check: Any, records: list[Message], says: str) -> None:
    found = check(records, TRUTH)
    assert found.wrong > 0
    assert says in " ".join(found.differences)


def test_boards() -> None:
    check, lines = verify.check_boards([record("airline:UA", BOARD)], TRUTH)
    assert (check.wrong, lines) == (0, {"airline:UA": BOARD})
    wrong, _ = verify.check_boards([record("airline:UA", msgspec.structs.replace(BOARD, turnarounds=2))], TRUTH)
    assert "airline:UA, turnarounds: Kafka says 2, the file says 1" in wrong.differences


def test_hours() -> None:
    assert verify.check_hours({("UA", 5): (1, 0)}, TRUTH).wrong == 0
    assert verify.check_hours({}, TRUTH).wrong == 1
    assert verify.check_hours({("UA", 5): (1, 0), ("AA", 6): (1, 0)}, TRUTH).wrong == 1


def test_all_differences_are_counted_and_few_are_kept() -> None:
    check = verify.Check("c")
    for number in range(100):
        check.equal("n", number, -1)
    assert (check.compared, check.wrong, len(check.differences)) == (100, 100, verify.SHOWN)


def test_passed_needs_every_partition_and_the_marker_behind_events_is_not_shown() -> None:
    last = {0: 9, 1: 4}
    reach = Reach(committed={0: 11, 1: 3}, stable={0: 11, 1: 6, 2: 0}).up_to(last)
    assert (reach.done, reach.total, reach.lag) == (13, 15, 2)
    for committed, has_passed in (({0: 10, 1: 5}, True), ({0: 9, 1: 5}, False), ({0: 10}, False)):
        assert passed(Reach(committed=committed, stable={0: 12, 1: 6}), last) == has_passed
    assert Reach(committed={0: 10}, stable={0: 12, 1: 6}).lag == 8


def test_the_lag_of_the_pipeline_comes_to_nothing_although_markers_stand_behind_the_last_flights() -> None:
    stable, shown = {0: 12, 1: 6}, list[tuple[int, int, int]]()
    cluster: Any = SimpleNamespace(last_records=lambda topic: {0: 9, 1: 4})
    workers: Any = SimpleNamespace(running=True, transactions=0, pids=[1], number=1, restarts=0)
    board: Any = SimpleNamespace(rows=lambda rows: shown.append((rows[1].done, rows[1].total, rows[1].lag)))
    made = work.Work(cluster, None, workers, SimpleNamespace(arrived=1, total=1), board)  # type: ignore[arg-type]
    for committed in ({0: 4}, {0: 10, 1: 5}, {0: 11, 1: 6}):
        cluster.reach = lambda group, committed=committed: Reach(committed=committed, stable=stable)
        made._shown = 0.0
        made._look(kill_a_worker=False)
    assert shown == [(4, 15, 11), (15, 15, 0), (15, 15, 0)]


def test_no_row_claims_what_is_not_known_and_no_finished_download_stands_still() -> None:
    assert view.line(view.Row("events produced", 70_000)) == "events produced 70,000"
    assert view.line(view.Row("events produced", 70_000, rate=0.0)) == "events produced 70,000"
    assert view.line(view.Row("aircraft", 5, 10, 2.0)) == "aircraft 5 of 10, 2/s"
    said = io.StringIO()
    shown = view.View(Console(file=said))
    shown.downloading("Kafka", 20_000_000, 45_000_000)
    assert shown._phase == "Kafka: 20.0 of 45.0 MB"
    shown.downloading("Kafka", 45_000_000, 45_000_000)
    assert shown._phase == "Kafka is there; starting it"


def test_one_wrong_check_makes_the_report_wrong() -> None:
    good, bad = verify.Check("a", compared=1), verify.Check("b", compared=1, wrong=1, differences=["b is off"])
    known: Any = dict.fromkeys(results.Report.__struct_fields__) | {"checks": [good]}
    report = results.Report(**known)
    assert report.right
    assert not msgspec.structs.replace(report, checks=[good, bad]).right
