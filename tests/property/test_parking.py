"""Parked keys over random histories, against an oracle that is a list per key; and the queues alone, against lists.

Events fail and are repaired, timers are set, cancelled and fire, members die, leave, freeze and come back, an operator
lets events go: of what took effect, a key's events are in the order of their places, each takes effect once, waits, or
was let go by name.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import (
    PARK,
    SKIP,
    AsyncBatcher,
    AsyncJobScheduler,
    BatchContext,
    BatchItem,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    Retry,
    Table,
    event_type,
)
from streams.core.origin import is_event, is_timer, is_visit
from streams.core.parking import PREFIX, BrokenQueue, ParkedKeys, Queued, is_piece, queued_record
from streams.core.timers import Timer
from streams.errors import MembershipLost, NotOwned
from streams.records import IncomingRecord, Record
from streams.runtime.changelog import decode_timer, encode_timer, timer_key
from streams.sak.murmur2 import partition_of
from streams.settings import BatcherConfig, GroupConfig, ParkingConfig, SchedulerConfig
from streams.stores.joined_table import Update
from streams.testing import TestDriver, Unsettled
from streams.testing.simulation.virtual_time import elapse
from tests.broker.gate import nightly
from tests.property.kit import seeded, trouble
from tests.unit.parking_kit import parked_records

pytestmark = pytest.mark.usefixtures("quiet")

KEYS = "acd"


@event_type("Entry")
class Entry(msgspec.Struct, frozen=True):
    """Writes its number into its key's list; ``timer``: and sets, or cancels, the timer of its key."""

    number: int
    key: str
    timer: str = ""


@event_type("Looped")
class Looped(Entry, frozen=True):
    """An entry that its own source has sent to itself."""


@event_type("Due")
class Due(msgspec.Struct, frozen=True):
    """The event of a timer that the entry of this number has set."""

    number: int
    key: str


WAYS = ("plain", "concurrent", "jobs", "inputs", "loop", "batch", "batcher", "updates", "ahead of two inputs")
"""How the handlers of entries are registered, and where these come from."""


class History:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.way = WAYS[seed % len(WAYS)]
        self.partitions = 1 + seed // len(WAYS) % 2  # with two there are moves
        further = "rows" if self.way == "updates" else "further" if "inputs" in self.way else ""
        self.topics = ("entries", further) if further else ("entries",)
        self.rows: dict[str, list[str | None]] = {key: [None] for key in KEYS}  # in the order of their topic
        self.topic_of: dict[int, str] = {}
        self.broken: set[int] = set()
        self.sent: dict[str, list[Entry]] = {key: [] for key in KEYS}
        self.gone: set[int] = set()
        self.perhaps_gone: set[int] = set()  # the answer to the operator was lost
        self.number = 0
        self.policy = self.chance.choice(
            [PARK, PARK, Retry(attempts=3, backoff_seconds=0.5, waits="key", then=ErrorResponse.PARK)]
        )

    def source(self) -> EventSource[Table[str, tuple[int, ...]]]:
        bounds = ParkingConfig(first_retry_seconds=5, max_retry_seconds=20, max_keys=4, max_key_events=10)
        config = EventSourceConfig(
            group_id="g",
            topic="entries",
            num_partitions=self.partitions,
            parking=bounds,
            loop=self.way == "loop",
            group=GroupConfig(num_standbys=self.partitions - 1),
        )
        source = EventSource(config, store=Table.factory(key=str, value=tuple[int, ...]))
        if "further" in self.topics:
            source.input("further")

        def write(ctx: EventContext[Table[str, tuple[int, ...]]], key: str, number: int) -> None:
            ctx.store.put(key, (*(ctx.store.get(key) or ()), number))
            if abs(number) in self.broken:
                raise RuntimeError(f"no {number}")
            ctx.forward("out", Entry(number, key), key=key)

        def on_entry(ctx: EventContext[Table[str, tuple[int, ...]]], event: Entry) -> None:
            write(ctx, event.key, event.number)
            if event.timer == "set":
                ctx.schedule_in(3, Due(event.number, event.key), name=event.key, key=event.key)
            elif event.timer == "cancel":
                ctx.cancel_timer(event.key)

        async def ahead(number: int) -> None:
            await elapse(self.chance.choice([0, 0, 0.01, 1, 3]))
            if number in self.broken and self.chance.random() < 0.5:  # else it fails in its turn
                raise RuntimeError(f"no call for {number}")

        async def concurrent(ctx: EventContext[Table[str, tuple[int, ...]]], event: Entry) -> None:
            await ahead(event.number)
            await ctx.turn()
            await elapse(self.chance.choice([0, 0, 0.001]))
            on_entry(ctx, event)

        async def job(entry: Entry) -> Entry:
            await ahead(entry.number)
            return entry

        def finalizer(ctx: EventContext[Table[str, tuple[int, ...]]], _: Entry, entry: Entry) -> None:
            on_entry(ctx, entry)

        def round_trip(ctx: EventContext[Table[str, tuple[int, ...]]], event: Entry) -> None:
            if event.number in self.broken and self.chance.random() < 0.5:
                raise RuntimeError(f"no {event.number} yet")
            ctx.loop(Looped(event.number, event.key, event.timer), key=event.key)

        def on_entries(ctx: BatchContext[Table[str, tuple[int, ...]]], events: list[Entry]) -> None:
            for event in events:
                on_entry(ctx, event)

        def on_row(ctx: EventContext[Table[str, tuple[int, ...]]], update: Update[str, str]) -> None:
            rows = self.rows[update.key]
            assert update.old == rows[rows.index(update.new) - 1], "the row before"
            assert update.new is not None
            write(ctx, update.key, int(update.new))

        async def call(items: list[BatchItem[Entry]]) -> list[Any]:
            await elapse(self.chance.choice([0, 0.01, 1]))
            return [RuntimeError("no") if item.value.number in self.broken else None for item in items]

        def called(ctx: EventContext[Table[str, tuple[int, ...]]], items: list[BatchItem[Entry]]) -> None:
            on_entry(ctx, items[0].value)

        if self.way == "updates":
            rows = source.join("rows", key=str, value=str, on_error=SKIP)
            source.register_update(rows, on_row, on_error=self.policy)
        if self.way == "batcher":
            batcher = AsyncBatcher(source, call, called, config=BatcherConfig(max_batch_size=4))
            batcher.register_event_type(Entry, key=lambda entry: entry.key, on_error=self.policy)
        elif self.way == "batch":
            source.register_event_type(Entry, on_entries, batch=True, on_error=self.policy)
        elif self.way == "loop":
            source.register_event_type(Entry, round_trip, on_error=self.policy)
            source.register_event_type(Looped, on_entry, on_error=self.policy)
        elif self.way == "jobs":
            jobs = AsyncJobScheduler(source, job, finalizer, config=SchedulerConfig(concurrency=2))
            jobs.register_event_type(Entry, key=lambda entry: entry.key, on_error=self.policy)
        elif self.way in ("concurrent", "ahead of two inputs"):
            source.register_event_type(Entry, concurrent, concurrency=2, on_error=self.policy)
        else:
            source.register_event_type(Entry, on_entry, on_error=self.policy)

        @source.on(on_error=self.policy)
        def on_due(ctx: EventContext[Table[str, tuple[int, ...]]], event: Due) -> None:
            write(ctx, event.key, -event.number)

        return source

    def place_of(self, key: str) -> int:
        return partition_of(key.encode(), self.partitions)

    def run(self, steps: int) -> None:
        chance = self.chance
        with TestDriver(self.source, members=2, seed=chance.getrandbits(30)) as driver:
            for _ in range(steps):
                with suppress(Unsettled):  # a partition may hold the line
                    self.step(driver, chance.choice(STEPS))
            self.broken = set()
            for number in (0, 1):
                if number not in driver.members:
                    driver.restart(number)
            driver.advance(120)
            driver.settle()
            self.judge(driver)

    def step(self, driver: TestDriver[Any], what: str) -> None:
        chance = self.chance
        if what == "send":
            for _ in range(chance.randrange(1, 5)):
                self.number += 1
                entry = Entry(self.number, chance.choice(KEYS), chance.choice(["", "", "set", "cancel"]))
                self.sent[entry.key].append(entry)
                if chance.random() < 0.25:
                    self.broken.add(entry.number)
                self.topic_of[self.number] = topic = chance.choice(self.topics)
                if topic == "rows":
                    self.sent[entry.key][-1] = Entry(entry.number, entry.key)
                    self.rows[entry.key].append(str(entry.number))
                    row = Record("rows", b"%d" % entry.number, entry.key.encode(), None, self.place_of(entry.key))
                    driver.send_record(row, wait=False)
                else:
                    driver.send(entry, key=entry.key, topic=topic, wait=False)
        elif what == "repair":
            self.broken -= {number for number in self.broken if chance.random() < 0.5}
        elif what == "time":
            driver.advance(chance.choice([0.01, 1, 4, 30]))
        elif what == "crash" and len(driver.members) > 1:
            driver.crash(chance.choice(driver.members))
        elif what == "restart" and len(driver.members) < 2:
            driver.restart(next(number for number in (0, 1) if number not in driver.members))
        elif what == "leave" and len(driver.members) > 1:
            driver.leave(chance.choice(driver.members))
        elif what == "trouble" and driver.members:
            trouble(driver, chance, driver.forget_group)
        elif what == "operate":
            self.operate(driver)

    def operate(self, driver: TestDriver[Any]) -> None:
        with suppress(Unsettled):
            driver.settle(5)
        found = [parked for parked in driver.parked() if parked.key is not None]
        if not found:
            return
        parked, act = self.chance.choice(found), self.chance.choice(["retry", "skip", "drop"])
        assert parked.key is not None
        if act == "retry":
            with suppress(MembershipLost, NotOwned):
                driver.retry_parked(parked.key)
            return
        gone = parked.events[:1] if act == "skip" else parked.events
        numbers = {
            int(record.value or b"")
            if record.topic == "rows"
            else msgspec.json.decode(record.value or b"", type=Entry).number
            for record in gone
            if record.offset >= 0
        }
        try:
            if (driver.skip_head if act == "skip" else driver.drop_parked)(parked.key):
                self.gone |= numbers
        except (MembershipLost, NotOwned, Unsettled):
            self.perhaps_gone |= numbers

    def judge(self, driver: TestDriver[Any]) -> None:
        driver.check()
        assert not driver.parked()
        assert not any(parked_records(driver, number) for number in range(self.partitions))
        for key, entries in self.sent.items():
            there = list(driver.store(self.place_of(key)).get(key) or ())
            assert [event.number for event in driver.outputs("out", Entry) if event.key == key] == there
            numbers = [number for number in there if number > 0]
            kept = self.perhaps_gone & set(numbers)
            gone = self.gone | (self.perhaps_gone - kept)
            kept_entries = [entry.number for entry in entries if entry.number not in gone]
            for topic in self.topics:  # between two inputs the time decides, and the turn
                there_of, sent_of = (
                    [one for one in each if self.topic_of[one] == topic] for each in (numbers, kept_entries)
                )
                assert there_of == sent_of, (key, topic)
            assert sorted(numbers) == kept_entries, key
            due = [-number for number in there if number < 0]
            assert len(set(due)) == len(due), f"a timer fired twice: {there}"
            for number in due:  # behind what set it, and no event that cancels or sets it anew is between the two
                between = there[there.index(number) + 1 : there.index(-number)]
                named = {entry.number: entry.timer for entry in entries}
                assert not [one for one in between if one > 0 and named[one]], (key, there)


STEPS = (
    ["send"] * 6
    + ["time"] * 3
    + ["repair", "repair", "operate", "operate", "crash", "restart", "restart", "leave", "trouble", "trouble"]
)


@pytest.mark.parametrize("seed", [*range(9), *(nightly(seed) for seed in range(9, 1000))])
def test_any_history_ends_as_the_oracle_says(seed: int) -> None:
    History(seed).run(40)


# -- the queues alone --------------------------------------------------------------------------------------------------

operations = st.lists(
    st.tuples(st.sampled_from(["queue", "queue", "queue", "leave", "fail", "drop", "restore"]), st.sampled_from("abc")),
    max_size=40,
)


def as_restored(parked: ParkedKeys, records: dict[bytes, bytes]) -> ParkedKeys:
    """Return what a restore from these changelog records gives."""
    timers = [decode_timer(IncomingRecord("log", 0, 1, key, value, None))[1] for key, value in records.items()]
    restored = ParkedKeys(timer for timer in timers if timer is not None)
    assert restored.size == parked.size
    assert restored.events == parked.events
    assert restored.keys.keys() == parked.keys.keys()
    pieces = [piece for queue in parked.by_name.values() for piece in queue.records()]
    assert {timer_key(piece.name): encode_timer(piece) for piece in pieces} == {
        key: value for key, value in records.items() if b"/" in key.removeprefix(timer_key(PREFIX))
    }
    for name, queue in parked.by_name.items():
        assert restored.by_name[name].state == queue.state
        assert restored.by_name[name].record.due_ms == queue.record.due_ms
        assert restored.by_name[name].events == queue.events
        assert restored.by_name[name].pieces == queue.pieces
    return restored


@given(operations, st.integers(1, 200))
@seeded
def test_queues_are_lists(steps: list[tuple[str, str]], most: int) -> None:
    parked, records = ParkedKeys(), dict[bytes, bytes]()
    lists: dict[bytes, list[int]] = {}

    def apply(changes: dict[str, Timer | None]) -> None:
        parked.apply(changes)
        assert all(len(timer.value) <= most for name, timer in changes.items() if timer is not None and is_piece(name))
        for name, timer in changes.items():
            if timer is None:
                records.pop(timer_key(name), None)
            else:
                records[timer_key(name)] = encode_timer(timer)

    for number, (what, letter) in enumerate(steps):
        key = letter.encode()
        queue = parked.keys.get(key)
        if what == "queue":
            queued = queued_record("t", number, 5, [("h", None), ("h", b"\xff")], key, b"x" * number * 7)
            lists.setdefault(key, []).append(number)
            if queue is None:
                apply(parked.begun(queued, "me", 1, 1000, "error", "handler", 7, most))
            else:
                apply(queue.followed_by(queued, most))
        elif what == "restore":
            parked = as_restored(parked, records)
        elif queue is not None and what == "fail":
            apply(queue.failed("me", queue.state.attempts + 1, number, "again", "handler", 9))
        elif queue is not None:
            apply(queue.left("me", number) if what == "leave" else queue.dropped())
            del lists[key][: 1 if what == "leave" else None]
            if not lists[key]:
                del lists[key]
        assert {
            key: [queue.events[at].offset for at in sorted(queue.events)] for key, queue in parked.keys.items()
        } == lists
        assert parked.events == sum(map(len, lists.values()))
        assert parked.size == sum(sum(map(sum, queue.pieces.values())) for queue in parked.by_name.values())
        assert all(queue.state.bytes == sum(map(sum, queue.pieces.values())) for queue in parked.by_name.values())
    as_restored(parked, records)
    assert bool(records) == bool(lists)


@given(st.data())
@seeded
def test_records_that_do_not_belong_together_are_refused_by_name(data: st.DataObject) -> None:
    made = ParkedKeys()
    changes = made.begun(queued_record("t", 1, 5, None, b"k", b"value" * 9), "me", 1, 1000, "", "", 7, 16)
    made.apply(changes)
    changes |= made.keys[b"k"].followed_by(queued_record("t", 2, 5, None, b"k", b"value" * 9), 16)
    timers = {name: timer for name, timer in changes.items() if timer is not None}
    name = data.draw(st.sampled_from(sorted(timers)))
    timer = timers[name]
    damage = data.draw(st.sampled_from(["gone", "cut", "other"]))
    if damage == "gone":
        del timers[name]
    else:
        value = timer.value[:-1] if damage == "cut" else b"\xc1" + timer.value
        timers[name] = Timer(name, timer.due_ms, timer.type, value)
    with pytest.raises(BrokenQueue, match="@park/"):
        ParkedKeys(timers.values())


def test_other_releases_refuse_the_records_and_origins_are_of_their_own() -> None:
    parked = ParkedKeys()
    changes = parked.begun(queued_record("t", 1, 5, None, b"k", b"v"), "me", 1, 1000, "", "", 7, 512)
    parked.apply(changes)
    written = {name: encode_timer(timer) for name, timer in changes.items() if timer is not None}
    head, event = sorted(written)
    assert msgspec.json.decode(written[head])["v"] == 2  # a timer of format 1 is all that they know
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(written[event])
    origin = parked.keys[b"k"].origin
    assert is_timer(origin)
    assert is_visit(origin)
    assert not is_event(origin)
    assert Queued.of_timer(Timer("n", 1, "T", b"")).queue_name != queued_record("n", 1, 1, None, None, b"").queue_name
