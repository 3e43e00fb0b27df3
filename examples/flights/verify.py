"""The end of the demo: what is in Kafka against what Spark computed from the file. Every number, every event.

Kafka is read as any reader would read it (``read_committed``): the events that Spark produced, the facts, the last
line of each board, and each aircraft's state from the changelog of its event source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from examples.flights.aircraft import Aircraft
from examples.flights.cluster import CHANGELOGS, SOURCES, TOPICS, Cluster
from examples.flights.events import (
    BoardPublished,
    DelayRecovered,
    FlightArrived,
    FlightCancelled,
    FlightDeparted,
    Turnaround,
)
from examples.flights.expected import Expected, Fact
from streams.codecs import RESERVED_KEY_PREFIX
from streams.records import TYPE_HEADER

SHOWN = 5
"""Differences of one check that are kept in words; all are counted."""

STATE_FIELDS = (
    "flights",
    "arrived",
    "cancelled",
    "minutes_late",
    "last_airport",
    "longest_day",
    "longest_day_minutes",
)
BOARD_FIELDS = ("turnarounds", "turnaround_minutes", "fastest_turnaround", "recovered", "recovered_minutes")


class Read(Protocol):
    """A record as a client gives it."""

    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> Any: ...
    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...


class Check(msgspec.Struct):
    """One comparison: how many numbers or events were compared, how many were off, and the first few in words.

    ``records`` is how many records were read for it.
    """

    name: str
    compared: int = 0
    records: int = 0
    wrong: int = 0
    differences: list[str] = []

    def off(self, what: str) -> None:
        """Note a difference."""
        self.wrong += 1
        if len(self.differences) < SHOWN:
            self.differences.append(what)

    def equal(self, what: str, found: object, wanted: object) -> None:
        """Compare two numbers."""
        self.compared += 1
        if found != wanted:
            self.off(f"{what}: Kafka says {found!r}, the file says {wanted!r}")


def check_flights(records: Iterable[Read], expected: Expected) -> Check:
    """What Spark produced: each flight's events once, as many of each type as in the file, in time order per key."""
    check = Check("flights produced by Spark, once each and in order")
    decode = decoder_of(FlightDeparted, FlightArrived, FlightCancelled)
    seen: set[tuple[str, str]] = set()
    counts: Counter[str] = Counter()
    latest: dict[bytes, int] = {}
    for record in records:
        check.records += 1
        event = decode(record)
        if event is None:
            check.off(f"{describe(record)} is no event of this demo")
            continue
        name, key = type(event).__name__, record.key() or b""
        counts[name] += 1
        if (name, event.flight_id) in seen:
            check.off(f"{name} of {event.flight_id} is there twice")
        seen.add((name, event.flight_id))
        at = time_of(event)
        if at < latest.get(key, at):
            check.off(f"{name} of {event.flight_id} comes after a later event of {key.decode()}")
        latest[key] = at
    for name, wanted in expected.events.items():
        if counts[name] != wanted:
            check.off(f"number of {name}: Kafka says {counts[name]}, the file says {wanted}")
    check.compared = len(seen)
    return check


def time_of(event: FlightDeparted | FlightArrived | FlightCancelled) -> int:
    """When it happened, in seconds since the epoch."""
    match event:
        case FlightDeparted():
            return event.departed_at
        case FlightArrived():
            return event.arrived_at
        case FlightCancelled():
            return event.scheduled_at


def check_facts(records: Iterable[Read], expected: Expected) -> Check:
    """The output of the first event source: exactly the facts that the file implies, none lost, none twice."""
    check = Check("turnarounds and recovered delays, none lost and none twice")
    decode = decoder_of(Turnaround, DelayRecovered)
    found: Counter[Fact] = Counter()
    for record in records:
        check.records += 1
        event = decode(record)
        if event is None:
            check.off(f"{describe(record)} is no event of this demo")
            continue
        found[Fact(type(event).__name__, event.flight_id, (record.key() or b"").decode(), event.minutes)] += 1
    for fact, times in found.items():
        if fact not in expected.facts:
            check.off(f"{fact.type} of {fact.flight_id} for {fact.board} ({fact.minutes} min) is not in the file")
        elif times > 1:
            check.off(f"{fact.type} of {fact.flight_id} for {fact.board} is there {times} times")
    for fact in expected.facts:
        if fact not in found:
            check.off(f"{fact.type} of {fact.flight_id} for {fact.board} ({fact.minutes} min) was lost")
    check.compared = len(expected.facts)
    return check


def check_aircraft(records: Iterable[Read], expected: Expected) -> Check:
    """The state of each aircraft, as its changelog has it."""
    check = Check("state of every aircraft")
    decoder = msgspec.json.Decoder(Aircraft)
    found = {key: decoder.decode(value) for key, value in last_values(records).items()}
    compare(check, found, expected.aircraft, STATE_FIELDS)
    missing = sum(len(state.open_flights) for state in found.values())
    check.equal(
        "flights without an arrival", missing, expected.events["FlightDeparted"] - expected.events["FlightArrived"]
    )
    return check


def check_boards(records: Iterable[Read], expected: Expected) -> tuple[Check, dict[str, BoardPublished]]:
    """The last line of each board; also gives the lines."""
    check = Check("boards of airlines and airports, as last published")
    decoder = msgspec.json.Decoder(BoardPublished)
    found = {key: decoder.decode(value) for key, value in last_values(records).items()}
    compare(check, found, expected.boards, BOARD_FIELDS)
    return check, found


def compare(
    check: Check, found: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]], fields: tuple[str, ...]
) -> None:
    """Every field of every key, and no key too many or too few."""
    for key in wanted.keys() - found.keys():
        check.off(f"{key} is in the file and not in Kafka")
    for key in found.keys() - wanted.keys():
        check.off(f"{key} is in Kafka and not in the file")
    for key in wanted.keys() & found.keys():
        for field in fields:
            check.equal(f"{key}, {field}", getattr(found[key], field), wanted[key][field])


def last_values(records: Iterable[Read]) -> dict[str, bytes]:
    """The last value of each key; deleted keys and the toolkit's own records are left out."""
    last: dict[bytes, bytes | None] = {}
    for record in records:
        key = record.key()
        if key is not None and not key.startswith(RESERVED_KEY_PREFIX):
            last[key] = record.value()
    return {key.decode(): value for key, value in last.items() if value is not None}


def decoder_of(*classes: type) -> Callable[[Read], Any]:
    """A function from a record to its event, by the type header; ``None`` if it is none of ``classes``."""
    decoders: dict[bytes, Any] = {cls.__name__.encode(): msgspec.json.Decoder(cls) for cls in classes}

    def decode(record: Read) -> Any:
        name = next((value for name, value in record.headers() or () if name == TYPE_HEADER), b"")
        decoder = decoders.get(name)
        value = record.value()
        if decoder is None or value is None:
            return None
        try:
            return decoder.decode(value)
        except msgspec.DecodeError:
            return None

    return decode


def describe(record: Read) -> str:
    """Where the record is."""
    return f"{record.topic()}[{record.partition()}]@{record.offset()}"


def check_hours(found: Mapping[tuple[str, int], tuple[int, int]], expected: Expected) -> Check:
    """What Spark reads back out of Kafka, typed: departures and minutes of delay by airline and hour."""
    check = Check("departures read back by Spark, by airline and hour")
    for airline, hour in found.keys() | expected.hours.keys():
        check.equal(f"{airline}, hour {hour}", found.get((airline, hour)), expected.hours.get((airline, hour)))
    return check


def check_ends(cluster: Cluster, exit_codes: Mapping[str, int]) -> Check:
    """Nothing is left over: every group is at the end, no transaction is open, every worker left in good order.

    ``exit_codes``: those of the groups that were at work.
    """
    check = Check("offsets at the end, no transaction left open, workers drained")
    for group in exit_codes:
        committed, topic = cluster.reach(group).committed, SOURCES[group]
        for partition, offset in cluster.last_records(topic).items():
            check.compared += 1
            if committed.get(partition, 0) <= offset:
                check.off(
                    f"{topic}[{partition}] has a record at {offset}; {group} has committed {committed.get(partition)}"
                )
    for topic in (*TOPICS, *(CHANGELOGS[group] for group in exit_codes)):
        stable, end = cluster.ends(topic), cluster.ends(topic, committed_only=False)
        for partition in end:
            check.compared += 1
            if stable[partition] != end[partition]:
                check.off(f"{topic}[{partition}] ends at {end[partition]}, but only {stable[partition]} is settled")
    for name, code in exit_codes.items():
        check.compared += 1
        if code != 0:
            check.off(f"the workers of {name} ended with exit code {code}")
    return check
