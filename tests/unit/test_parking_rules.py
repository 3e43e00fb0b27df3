"""The queues of parked keys alone: bounds, pace, what a new owner does with what it finds, acts, broken records."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from streams.core.parking import (
    EVENT_TYPE,
    FORMAT,
    NEVER_MS,
    PREFIX,
    BrokenQueue,
    ParkedKeys,
    Queued,
    QueueRecord,
    QueueState,
    encoded_size,
    queue_name,
    queued_record,
)
from streams.core.parking_rules import Seen, acted, found_by, next_due_ms, pause_seconds
from streams.core.timers import Timer, Timers
from streams.errors import DecodeError
from streams.outcomes import PARK, Retry
from streams.settings import ParkingConfig

CONFIG = ParkingConfig(first_retry_seconds=10, max_retry_seconds=60, max_keys=2, max_key_events=3, max_bytes=200)
CHANCE = random.Random(1)


def record(offset: int, key: bytes | None = b"k", value: bytes = b"v") -> Queued:
    return queued_record("t", offset, 5, None, key, value)


def parked_with(*keys: bytes | None, owner: str = "me", since: int = 100) -> ParkedKeys:
    """A queue of one event for each of these keys, parked one millisecond after the other."""
    parked = ParkedKeys()
    for number, key in enumerate(keys):
        changes = parked.begun(record(number, key), owner, 1, 5000, "error", "handler", since + number, 512)
        parked.apply(changes)
    return parked


def queue_of(parked: ParkedKeys, key: bytes) -> Any:
    return parked.keys[key]


def test_an_event_finds_room_or_the_bound_is_named() -> None:
    parked = parked_with(b"a")
    assert parked.lacks_room(CONFIG, b"b", 10) == ""
    assert parked.lacks_room(CONFIG, b"b", 500) == "max_bytes"
    assert ParkedKeys().lacks_room(CONFIG, b"b", 500) == ""  # one event always fits
    for number in (2, 3):
        parked.apply(queue_of(parked, b"a").followed_by(record(number, b"a"), 512))
    assert parked.lacks_room(CONFIG, b"a", 1) == "max_key_events"
    assert parked.is_urgent(queue_name(b"a"), CONFIG)
    assert not parked.is_urgent(queue_name(b"b"), CONFIG)
    parked.apply(parked.begun(record(9, None), "me", 1, 1, "", "", 1, 512))
    assert parked.lacks_room(CONFIG, None, 1) == "max_keys"
    assert parked.lacks_room(CONFIG, b"b", 1) == "max_keys"
    size = sum(encoded_size(each) for queue in parked.by_name.values() for each in queue.events.values())
    assert parked.figures("max_keys") == (2, 4, size, 1, "max_keys")
    assert ParkedKeys().figures("") == (0, 0, 0, None, "")


def test_pauses_grow_up_to_the_longest_and_some_errors_have_none() -> None:
    assert [7 < pause_seconds(CONFIG, n, CHANCE) / 2 ** (n - 1) < 13 for n in (1, 2, 3)] == [True] * 3
    assert pause_seconds(CONFIG, 50, CHANCE) < 76
    policy = Retry(attempts=4, waits="key")
    assert next_due_ms(DecodeError("no"), 1, PARK, CONFIG, 1000, CHANCE) == NEVER_MS
    assert 8_000 < next_due_ms(OSError("no"), 4, policy, CONFIG, 1000, CHANCE) < 14_000
    assert 16_000 < next_due_ms(OSError("no"), 5, policy, CONFIG, 1000, CHANCE) < 27_000


def test_a_new_owner_tries_what_it_finds_the_oldest_first_and_once() -> None:
    parked = parked_with(b"a", b"b", b"c", owner="other")
    parked.apply(queue_of(parked, b"b").noted("other"))  # and died of it
    parked.apply(queue_of(parked, b"c").noted("me"))  # before a restart of the partition in this process
    queues = list(parked.by_name.values())
    assert [queue.is_found_by("me") for queue in queues] == [True, True, False]
    found = found_by(reversed(queues), "me", 1000, CONFIG, CHANCE)
    parked.apply(found)
    due = {queue.key: queue.record.due_ms for queue in queues}
    assert due[b"a"] == 1000
    assert 1000 + 2 * 7_500 <= due[b"b"] <= 1000 + 2 * 12_500
    assert due[b"c"] == 5000
    a, b, c = queues
    assert (a.must_be_noted("me"), b.must_be_noted("me"), c.must_be_noted("me")) == (True, True, False)
    assert (b.state.attempts, b.state.owner, b.state.noted) == (2, "me", "")
    parked.apply(a.followed_by(record(5, b"a"), 512))
    parked.apply(a.left("me", 7))
    assert not a.must_be_noted("me")  # a first attempt, behind a success
    assert not found_by([a], "me", 1, CONFIG, CHANCE)


def test_acts_are_for_the_queue_that_was_seen() -> None:
    parked = parked_with(b"a")
    timer = Timer("t", 77, "T", b"", key=b"a")
    parked.apply(queue_of(parked, b"a").followed_by(Queued.of_timer(timer), 512))
    parked.apply(queue_of(parked, b"a").followed_by(Queued.of_timer(Timer("gone", 78, "T", b"", key=b"a")), 512))
    head = queue_of(parked, b"a").state.head
    seen, before = Seen(queue_name(b"a"), head, head + 3), Seen(queue_name(b"a"), head, head + 2)
    due = {"t": 77, "gone": 99}
    assert acted(parked, before, "drop", 1, due.get) is None
    assert acted(parked, before, "skip-head", 1, due.get) is not None  # the same head, whatever has queued since
    assert acted(parked, seen._replace(head=head + 1), "skip-head", 1, due.get) is None
    assert acted(parked, seen._replace(name=queue_name(b"x")), "drop", 1, due.get) is None
    retried = acted(parked, seen, "retry", 42, due.get)
    assert retried is not None
    parked.apply(retried[0])
    assert queue_of(parked, b"a").record.due_ms == 42
    dropped = acted(parked, seen, "drop", 1, due.get)
    assert dropped is not None
    assert [each.topic for each in dropped[1]] == ["t", "t"]  # the record's topic, and the timer that is still set
    assert ("t" in dropped[0], "gone" in dropped[0]) == (True, False)
    skipped = acted(parked, seen, "skip-head", 1, due.get)
    assert skipped is not None
    parked.apply(skipped[0])
    assert queue_of(parked, b"a").state.head == head + 1
    parked.apply(dropped[0])  # nothing of what is gone is missed
    parked.apply(dropped[0])
    assert not parked.by_name
    assert not parked.keys


def test_a_later_queue_of_a_key_has_other_numbers() -> None:
    """A request that is late by a whole queue means none of its events."""
    earlier, later = ParkedKeys(), ParkedKeys()
    earlier.apply(earlier.begun(record(1), "me", 1, 1, "", "", 1, 512))
    later.apply(later.begun(record(2), "me", 1, 1, "", "", 1, 512))
    there = queue_of(earlier, b"k")
    seen = Seen(there.name, there.state.head, there.state.next)
    assert acted(earlier, seen, "drop", 1, {}.get) is not None
    assert acted(later, seen, "drop", 1, {}.get) is None


def test_an_update_waits_with_the_row_that_it_replaced() -> None:
    parked = ParkedKeys()
    update = record(1).with_old(b"old")
    changes = parked.begun(update, "me", 1, 1, "", "", 1, 512)
    restored = ParkedKeys(timer for timer in changes.values() if timer is not None)
    assert (queue_of(restored, b"k").head, update.is_update, record(1).is_update) == (update, True, False)


def test_a_queue_without_key_goes_alone() -> None:
    parked = parked_with(None, b"a")
    (queue,) = (each for each in parked.by_name.values() if each.key is None)
    parked.apply(queue.left("me", 1))
    assert (list(parked.keys), parked.events) == ([b"a"], 1)


def test_a_key_that_is_parked_again_has_a_head_of_another_origin() -> None:
    """Else it would meet what is known of the head before it, whose failure outlives restarts."""
    parked = parked_with(b"k")
    before = queue_of(parked, b"k").origin
    parked.apply(queue_of(parked, b"k").left("me", 1))
    parked.apply(parked.begun(record(7), "me", 1, 5000, "error", "handler", 100, 512))
    assert queue_of(parked, b"k").origin != before


def test_broken_records_are_refused() -> None:
    name = queue_name(b"k")
    head = QueueRecord.of(name, 5, QueueState(0, 1, 3, 1))
    fits = msgspec.msgpack.encode(record(1))
    other = msgspec.msgpack.encode(record(1, b"other"))
    newer = msgspec.msgpack.encode(msgspec.structs.replace(record(1), v=FORMAT + 1))

    def piece(suffix: str, value: bytes) -> Timer:
        return Timer(f"{name}/{suffix}", NEVER_MS, EVENT_TYPE, value)

    assert ParkedKeys([head, piece("00000000", fits)]).events == 1
    for records, message in (
        ([Timer(name, 5, "kes.parked", b"{")], "cannot be read"),
        ([piece("00000000", fits)], "no record of its own"),
        ([head], "has the events"),
        ([head, piece("00000001", fits)], "has the events"),
        ([head, piece("00000000", fits[:3]), piece("00000000.00000002", fits[3:])], "has the pieces"),
        ([head, piece("00000000", fits[:3])], "cannot be read"),
        ([head, piece("00000000", other)], "of another key"),
        ([head, piece("00000000", newer)], "newer release"),
        ([head, piece("xyz", fits)], "is no name"),
        ([QueueRecord.of(name, 5, QueueState(2, 1, 3, 1)), piece("00000001", fits)], "goes from 2 to 1"),
    ):
        with pytest.raises(BrokenQueue, match=message):
            ParkedKeys(records)
    assert name.startswith(PREFIX)


def test_a_timer_that_is_set_aside_does_not_come_first() -> None:
    timers = Timers([Timer("a", 1, "T", b""), Timer("b", 2, "T", b"")])
    timers.set_aside("a")
    timers.set_aside("unknown")
    assert [timers.is_aside(name) for name in ("a", "b", "unknown")] == [True, False, False]
    assert timers.first() == timers.get("b")
    timers.call_back("b")
    timers.call_back("a")
    assert timers.first() == timers.get("a")
    timers.set_aside("a")
    timers.apply({"a": Timer("a", 1, "T", b"again")})
    assert timers.first() == Timer("a", 1, "T", b"again")
    timers.set_aside("a")
    timers.apply({f"x{number}": Timer(f"x{number}", 9, "T", b"") for number in range(100)})
    timers.apply({f"x{number}": None for number in range(100)})  # the heap is built anew
    assert timers.first() == timers.get("b")
