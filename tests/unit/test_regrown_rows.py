"""The way of a state into more partitions, without a broker: each entry of a key where its records go, once."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from streams import Heap, Index, NamedTable, Stores, Table, Windows
from streams.cli.regrown_rows import COPY, STAY, Regrowth, Rules
from streams.core.cron import CronSchedule
from streams.core.jobs import COUNTER, PREFIX, JobRecord, Jobs, JobState
from streams.core.parking import ParkedKeys, queued_record
from streams.core.seen import encode
from streams.core.timers import Timer
from streams.errors import ConfigError, OffsetError, StoreError, StreamsError
from streams.model.partitioners import PartitionerName, partition_of
from streams.records import IncomingRecord
from streams.runtime.changelog import (
    BEGIN_KEY,
    JOIN_PREFIX,
    SEEN_PREFIX,
    TIMER_PREFIX,
    decode_timer,
    encode_timer,
    timer_key,
)
from streams.stores.structured import TIME_KEY
from tests.unit.structures_kit import HERE, Entries, at, entries, loaded

States = dict[int, Entries]
TABLE = Table.factory(key=str, value=int)
PARTITIONERS: list[PartitionerName] = ["murmur2", "crc32", "fnv1a"]
KEYS = [f"key-{number}" for number in range(200)]


def grown(states: States, rules: Rules, make: Callable[..., Any] = TABLE) -> States:
    """The states behind a growth. They are read twice, as the command does it."""
    regrowth = Regrowth(make(HERE), rules)
    for number in range(rules.before):
        regrowth.look(number, states.get(number, {}))
    regrowth.settle()
    found = {number: dict(states.get(number, {})) for number in range(rules.after)}
    moves = [move for number in range(rules.before) for move in regrowth.moved(number, states.get(number, {}))]
    for number, key, value in [*moves, *regrowth.ends()]:
        if value is None:
            del found[number][key]  # it is there: no deletion is sent for nothing
        else:
            found[number][key] = value
    assert sum(regrowth.sent.values()) <= sum(regrowth.received.values())
    return found


def rules(before: int = 2, after: int = 4, **fields: Any) -> Rules:
    return Rules(before, after, fields.pop("routed_by", {}), **fields)


def of_key(number: int, partitions: int, *others: int) -> str:
    """A key of this partition, and of another one when there are more."""
    more = dict(zip(others[::2], others[1::2], strict=True))
    return next(
        key
        for key in map(str, range(100_000))
        if partition_of(key, partitions) == number and all(partition_of(key, n) == at for n, at in more.items())
    )


def test_each_key_goes_to_the_partition_of_its_records() -> None:
    """Also among the old partitions, where the new number is no multiple; entries of the toolkit stay."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    for _ in range(20):
        before, place_of = drawn.randrange(1, 7), drawn.choice(PARTITIONERS)
        after = before + drawn.randrange(1, 9)
        keys = {b"%d" % drawn.randrange(1 << 40): b"%d" % drawn.randrange(9) for _ in range(drawn.randrange(80))}
        states: States = {number: {BEGIN_KEY: b"{}"} for number in range(before)}
        for key, value in keys.items():
            states[partition_of(key, before, place_of)][key] = value
        found = grown(states, rules(before, after, partitioner=place_of), Table.factory(key=bytes, value=int))
        for number, state in found.items():
            assert state.pop(BEGIN_KEY, None) == (b"{}" if number < before else None)
            assert {partition_of(key, after, place_of) for key in state} <= {number}
        assert {key: value for state in found.values() for key, value in state.items()} == keys
        assert sum(map(len, found.values())) == len(keys)


ROW: Entries = {KEYS[0].encode(): b"7"}
HOME = partition_of(KEYS[0], 2)
TIMER = Timer("flush", 99, "Due", b"1")


def raises(key: str) -> str:
    raise KeyError(key)


@pytest.mark.parametrize(
    ("states", "given", "error", "text"),
    [
        ({1 - HOME: ROW}, {}, StoreError, f"records of the key 'key-0' are in partition {HOME} of 2"),
        ({HOME: ROW}, {"routed_by": {"": lambda key: of_key(1 - HOME, 2)}}, StoreError, "--routed-by"),
        ({HOME: ROW}, {"routed_by": {"": raises}}, ConfigError, "--routed-by: KeyError: 'key-0'"),
        ({HOME: ROW}, {"routed_by": {"": lambda key: 7}}, ConfigError, "it is routed by int"),
        ({HOME: ROW}, {"routed_by": {"": lambda key: None}}, StoreError, "belongs to the partition, and to no key"),
        ({HOME: {b"\xff\x00": b"7"}}, {}, StoreError, f"partition {HOME}, key b'\\xff\\x00'"),
        ({0: {timer_key("flush"): encode_timer(TIMER)}}, {}, StoreError, "timer 'flush': it belongs to the partition"),
        ({0: {JOIN_PREFIX + b"names\0bob": b"Bob"}}, {}, StoreError, "kes state forget --join names removes them"),
        ({0: {SEEN_PREFIX + b"x" * 16: encode(9)}}, {}, StoreError, "partition 0 has the ids of 1 events that were"),
        ({0: {timer_key("x"): b"{}"}}, {}, OffsetError, "the timer b'x' cannot be read"),
    ],
)
def test_what_has_no_partition_is_refused_by_name(
    states: States, given: dict[str, Any], error: type[StreamsError], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        grown(states, rules(**given))


def test_parked_keys_are_refused() -> None:
    queued = queued_record("t", 3, 0, None, b"bob", b"1")
    records = ParkedKeys().begun(queued, "me", 1, 99, "no", "on", 5, 1000)
    state = {timer_key(name): encode_timer(record) for name, record in records.items() if record is not None}
    with pytest.raises(OffsetError, match="have them worked off first, or drop them"):
        grown({0: state}, rules())


def test_entries_of_a_partition_stay_or_are_copied() -> None:
    """A copy comes from the partition of the same number modulo the old one."""
    own = {"routed_by": {"": lambda key: None if key == "total" else key}}
    flush = {timer_key("flush"): encode_timer(TIMER)}
    states: States = {0: {b"total": b"10"} | flush, 1: {b"total": b"11"}}
    assert grown(states, rules(2, 5, shared=STAY, **own)) == states | {2: {}, 3: {}, 4: {}}
    copies = {2: states[0], 3: states[1], 4: states[0]}
    assert grown(states, rules(2, 5, shared=COPY, **own)) == states | copies


def test_ids_that_were_handled_stay_or_are_everywhere() -> None:
    """Nothing says which key they had: a duplicate may come to any partition."""
    ids = [{SEEN_PREFIX + bytes([number]) * 16: encode(9)} for number in range(2)]
    states = dict(enumerate(ids))
    assert grown(states, rules(shared=STAY)) == states | {2: {}, 3: {}}
    assert grown(states, rules(shared=COPY)) == dict.fromkeys(range(4), ids[0] | ids[1])


def timers_in(state: Mapping[bytes, bytes]) -> dict[str, Timer]:
    found = {}
    for key, value in state.items():
        if key.startswith(TIMER_PREFIX):
            name, timer = decode_timer(IncomingRecord("", 0, 0, key, value, None))
            assert timer is not None
            found[name] = timer
    return found


def test_the_timer_of_a_schedule_stays() -> None:
    """No ``--shared`` is needed: new partitions set one of their own when they begin."""
    timer = CronSchedule("30 2 * * *", "UTC").timer("nightly", 0)
    found = grown({0: {timer_key(timer.name): encode_timer(timer)}}, rules(2, 4))
    assert [list(timers_in(found.get(number, {})).values()) for number in range(4)] == [[timer], [], [], []]


def test_timers_go_with_the_key_of_their_event() -> None:
    far, near = of_key(0, 2, 4, 2), of_key(0, 2, 4, 0)
    timers = [Timer(name, 9, "Due", b"1", key=key.encode()) for name, key in (("far", far), ("near", near))]
    state = {timer_key(timer.name): encode_timer(timer) for timer in timers}
    found = grown({0: state}, rules())
    assert [sorted(timers_in(found[number])) for number in range(4)] == [["near"], [], ["far"], []]
    assert timers_in(found[2])["far"] == timers[0]
    one, two = (Timer("same", 9, "Due", b"1", key=of_key(number, 3, 4, 2).encode()) for number in (0, 1))
    with pytest.raises(StoreError, match="timer 'same' would go to partition 2, which has another one of this name"):
        grown({n: {timer_key("same"): encode_timer(timer)} for n, timer in enumerate((one, two))}, rules(3, 4))
    with pytest.raises(StoreError, match="timer 'far': records of the key"):
        grown({1: {timer_key("far"): encode_timer(timers[0])}}, rules())


def job(name: str, number: int, key: str | None, order: bytes | None = None) -> JobRecord:
    state = JobState("calls", b"1", 5, number, f"kes-0-{number}", order)
    return JobRecord.of(PREFIX + name, 9, state, None if key is None else key.encode())


def with_jobs(after: int, *jobs: JobRecord) -> Entries:
    """The state of a partition with these jobs, whose next one has this number."""
    counted = Jobs()
    counted.next = after
    return {timer_key(record.name): encode_timer(record) for record in (counted.counter, *jobs)}


def test_jobs_go_with_their_key_and_keep_their_ids() -> None:
    """Their numbers are new ones of where they go; no number is given twice, and jobs of one order keep it."""
    far, near, back = of_key(0, 3, 4, 2), of_key(0, 3, 4, 0), of_key(1, 3, 4, 0)
    zero = with_jobs(30, job("b", 7, far, b"lane"), job("a", 3, far, b"lane"), job("n", 9, near), job("own", 11, None))
    found = grown({0: zero, 1: with_jobs(5, job("back", 2, back)), 2: with_jobs(40)}, rules(3, 4))

    def numbers(number: int) -> dict[str, tuple[int, str]]:
        jobs = Jobs(timers_in(found[number]).values())
        return {one.job_name: (one.state.number, one.state.id) for one in jobs.by_name.values()}

    assert numbers(2) == {"a": (40, "kes-0-3"), "b": (41, "kes-0-7")}
    assert numbers(0) == {"n": (9, "kes-0-9"), "own": (11, "kes-0-11"), "back": (30, "kes-0-2")}
    nexts = [Jobs(timers_in(found[number]).values()).next for number in range(4)]
    assert nexts == [31, 5, 42, 0]
    assert COUNTER in timers_in(found[1]), "the number of the next one stays where no job is left"
    lane = with_jobs(30, job("a", 3, far, b"lane"), job("n", 9, near, b"lane"))
    with pytest.raises(OffsetError, match="they run one after the other in one partition only"):
        grown({0: lane}, rules(3, 4))
    with pytest.raises(OffsetError, match=r"partition 0: job 'a' .* has the number 3, and the next one is 2"):
        grown({0: with_jobs(2, job("a", 3, far))}, rules(3, 4))


# -- several structures ------------------------------------------------------------------------------------------------


def summed(total: int | None, item: int) -> int:
    return (total or 0) + item


class Shop(Stores):
    closed: ClassVar[Counter[tuple[str, int, int]]] = Counter()
    totals = NamedTable.of(str, int, expires=100)
    orders = NamedTable.of(int, str)
    best = Heap.of(str, int, priority=Index(int, lambda value: value))
    tens = Windows.tumbling(
        str,
        int,
        size=10,
        add=summed,
        on_close=lambda ctx, key, window, value: Shop.closed.update([(key, window.start_ms, value)]),
    )


class Keeping(Shop):
    tens = Windows.tumbling(
        str,
        int,
        size=10,
        keep=1000,
        add=summed,
        on_close=lambda ctx, key, window, value: Shop.closed.update([(key, window.start_ms, value)]),
    )


def told(make: type[Shop], before: int, times: Mapping[int, float]) -> States:
    """States in which each key has an entry of each kind, and partitions stand at these times (seconds)."""
    Shop.closed.clear()
    states: States = {}
    for number, end in times.items():
        store = make(HERE)
        keys = [key for key in KEYS if partition_of(key, before) == number]
        for seconds in (1, int(end) // 2, int(end)):

            def add(store: Any = store, keys: list[str] = keys) -> None:
                for key in keys:
                    store.totals.put(key, 1)
                    store.orders.put(int(key[4:]), key)
                    store.best.put(key, 2)
                    store.tens.add(key, 1)

            for _ in range(1 + len(keys) // 60):
                at(store, seconds)  # windows that have ended close, 64 at a time
            at(store, seconds, add)
        states[number] = entries(store)
    return states


BY_ORDER = {"orders": lambda number: f"key-{number}"}


def closed_behind(make: type[Shop], states: States) -> Counter[tuple[str, int, int]]:
    """The windows that are closed until all are, and how often."""
    for state in states.values():
        store = loaded(make, state)
        for _ in range(20):
            at(store, 10_000)
    return Shop.closed


@pytest.mark.parametrize("after", [6, 9])
def test_structures_go_with_their_keys_and_each_window_is_reported_once(after: int) -> None:
    """Partitions are at different times. Where they meet it is the latest; what one has not reported yet still is."""
    states = told(Shop, 4, {0: 12, 1: 57, 2: 33, 3: 5})
    wanted = closed_behind(Shop, states)
    states = told(Shop, 4, {0: 12, 1: 57, 2: 33, 3: 5})
    found = grown(states, rules(4, after, routed_by=BY_ORDER), Shop)
    for number, state in found.items():
        store = loaded(Shop, state)
        keys = sorted(key for key in KEYS if partition_of(key, after) == number)
        assert sorted(key for key, _ in store.totals.items()) == keys
        assert sorted(key for _, key in store.orders.items()) == keys
        assert sorted(key for key, _ in store.best.ascending()) == keys
        origins = {partition_of(key, 4) for key in keys} | ({number} if number < 4 else set())
        assert store.time_ms == max({0: 12, 1: 57, 2: 33, 3: 5}[origin] for origin in origins) * 1000
    again = closed_behind(Shop, found)
    assert set(again.values()) == {1}
    assert again == wanted


def test_windows_that_are_kept_would_be_reported_twice() -> None:
    states = told(Keeping, 2, {0: 12, 1: 57})
    with pytest.raises(StoreError, match=r"windows of 'tens' that are closed, and are kept.*--drop-closed-windows"):
        grown(states, rules(2, 5, routed_by=BY_ORDER), Keeping)
    before = Counter(Shop.closed)
    found = grown(states, rules(2, 5, routed_by=BY_ORDER, drops_closed=True), Keeping)
    again = closed_behind(Keeping, found)
    assert set(again.values()) == {1}
    assert before.keys() < again.keys()
    same = told(Keeping, 2, {0: 57, 1: 57})
    kept = grown(same, rules(2, 5, routed_by=BY_ORDER), Keeping)
    rows = [key for state in kept.values() for key in state if key.startswith(b"\xfetens\0")]
    assert len(rows) == len(set(rows)) == sum(key.startswith(b"\xfetens\0") for state in same.values() for key in state)


def test_expiry_goes_on_from_the_latest_time() -> None:
    found = grown(told(Shop, 2, {0: 12, 1: 57}), rules(2, 3, routed_by=BY_ORDER), Shop)
    marks = [Shop(HERE).mark_in(state, "totals") for state in found.values()]
    assert marks[2] == max(mark for mark in marks if mark is not None)
    assert all(TIME_KEY in state for state in found.values())


def test_structures_that_the_source_does_not_have_are_refused() -> None:
    states = {0: {b"\xfeother\0" + of_key(0, 2).encode(): b"7"}}
    with pytest.raises(StoreError, match="the key is of no structure of Shop"):
        grown(states, rules(), Shop)
