"""Error policies that are functions: what they get, what their answers do, and that none of them loses a record."""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, SKIP, STOP, ErrorResponse, EventContext, EventSource, Record, Retry, event_type
from streams.errors import ConfigError, DecodeError, EventFailure, RegistrationError
from streams.events import event_type_of
from streams.formats import ByField, Only
from streams.outcomes import Adapted, ErrorPolicy, Failed, is_policy, policy_name, unparked
from streams.records import Headers
from streams.runtime.replay import PartitionReplay
from streams.stores import NamedTable, Stores, Windows
from streams.testing import TestDriver
from tests.unit import joins_kit, windows_kit
from tests.unit.handlers_kit import config
from tests.unit.parking_kit import AHEAD, Add, Bank, add, redeploy
from tests.unit.test_runtime_replay import count, program, records
from tests.vocabulary import TOTALS, Added, Total

pytestmark = pytest.mark.usefixtures("quiet")
ADDED, TOTAL = event_type_of(Added).name, event_type_of(Total).name
ways = pytest.mark.parametrize("way", ["plain", "batch", *AHEAD])


def letters(failed: Failed) -> ErrorResponse:
    return ErrorResponse.DEAD_LETTER


def three_times(failed: Failed) -> Retry:
    return Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)


def parks(failed: Failed) -> Retry:
    return PARK


class Heard:
    """A policy function that keeps what it gets."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[Failed] = []

    def __call__(self, failed: Failed) -> Any:
        self.calls.append(failed)
        return self.answer(failed) if callable(self.answer) else self.answer


# -- answers -----------------------------------------------------------------------------------------------------------


@ways
def test_a_function_decides_by_the_failure(way: str) -> None:
    """Attempts of the returned ``Retry``, then its last word; others go on."""
    policy = Heard(lambda failed: three_times(failed) if "no 1" in str(failed.error) else SKIP)
    bank = Bank(policy, way)
    bank.broken = {1, 2}
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        assert driver.store(0).get("a") == (3,)
        assert bank.attempts[:3] == [(1, 1), (1, 2), (1, 3)]
        assert [letter.key for letter in driver.dead_letters()] == [b"a"]
        first = policy.calls[0]
        assert (first.type, first.attempts, first.origin) == ("Add", 1, "event")
        assert first.record is not None
        assert (first.record.where, first.record.key) == ("adds[0]@0", b"a")
        assert type(first.error) is RuntimeError
        assert max(call.attempts for call in policy.calls) == 3
        assert policy.calls[2].elapsed_seconds > first.elapsed_seconds >= 0
        driver.check()


@ways
def test_a_function_answers_with_what_parks(way: str) -> None:
    """``PARK``, and attempts from the key's queue, that are counted over a restart."""
    policy = Heard(lambda failed: Retry(attempts=3, backoff_seconds=1, jitter=0, waits="key", then=PARK.then))
    bank = Bank(policy, way)
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        assert [parked.attempts for parked in driver.parked()] == [1]
        driver.advance(1.5)
        redeploy(driver)
        assert driver.parked()[0].attempts >= 2
        bank.broken = set()
        driver.advance(100)
        driver.settle()
        assert driver.store(0).get("a") == (1, 2)
        assert [call.attempts for call in policy.calls] == sorted(call.attempts for call in policy.calls)
        driver.check()


def test_attempts_before_a_restart_count_and_the_first_call_after_it_may_raise() -> None:
    """A policy that raises stops the source at the same event, whose effects are nowhere."""
    answers: list[Any] = [KeyError("policy")]

    def policy(failed: Failed) -> ErrorResponse:
        if answers:
            raise answers.pop()
        return ErrorResponse.CONTINUE

    bank = Bank(policy)
    bank.broken = {1}
    with bank.driver() as driver:
        with pytest.raises(EventFailure, match=r"adds\[0\]@0.*no 1.*error policy .*policy at .*KeyError: 'policy'"):
            add(driver, 1)
        assert driver.committed_offsets() == {}
        driver.restart()
        driver.settle()
        assert driver.committed_offsets() == {0: 1}
        driver.check()


async def coroutine() -> None: ...


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda failed: None, "it returned None"),
        (lambda failed: "dead_letter", "it returned 'dead_letter'"),
        (lambda failed: True, "it returned True"),
        (lambda failed: coroutine(), "it returned <coroutine"),
        (lambda failed: 1 / 0, "ZeroDivisionError"),
        (lambda failed: Retry(attempts=0), "ConfigError"),
        (lambda failed: exec("raise SystemExit(3)"), "SystemExit: 3"),
        (lambda failed: exec("raise asyncio.CancelledError"), "CancelledError"),
    ],
)
@ways
def test_no_answer_stops_the_source_with_both_errors(way: str, answer: Callable[..., Any], text: str) -> None:
    bank = Bank(answer, way)
    bank.broken = {2}
    with bank.driver() as driver:
        with pytest.raises(EventFailure, match=f"adds.0.@1.*RuntimeError: no 2; and its error policy .*{text}"):
            add(driver, 1, 2, 3)
        assert [event.number for event in driver.outputs("out", Add)] == [1]
        assert driver.committed_offsets() == {0: 1}
        assert not driver.dead_letters()


def test_a_handler_that_demands_a_stop_meets_no_function() -> None:
    policy = Heard(ErrorResponse.CONTINUE)
    source = EventSource(config(1, error_policy=policy))
    source.register_event_type(Added, lambda ctx, event: "what")
    with TestDriver(source) as driver, pytest.raises(EventFailure, match="answered 'what'"):
        driver.send(Added("a"))
    assert not policy.calls


def test_a_function_that_takes_long_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def slow(failed: Failed) -> ErrorResponse:
        until = time.perf_counter() + 0.06
        while time.perf_counter() < until:
            pass
        return ErrorResponse.CONTINUE

    bank = Bank(slow)
    bank.broken = {1}
    with caplog.at_level(logging.WARNING), bank.driver() as driver:
        add(driver, 1)
    [said] = [line.getMessage() for line in caplog.records if "event loop" in line.getMessage()]
    assert "test_a_function_that_takes_long_is_named.<locals>.slow at " in said


# -- records that cannot be read ---------------------------------------------------------------------------------------


def unreadable(driver: TestDriver[Any], name: str) -> None:
    headers: Headers = [("__grt__", name.encode())]
    driver.send_record(Record(driver._world.config.topic, b"{", key=b"a", headers=headers, partition=0))


def test_a_type_has_its_own_policy_for_what_cannot_be_read() -> None:
    """By its header; other types have that of the source."""
    of_type, of_source = Heard(three_times), Heard(ErrorResponse.CONTINUE)
    source = EventSource(config(1, decode_policy=of_source), TOTALS)
    source.register_event_type(Added, lambda ctx, event: None, on_decode_error=of_type)
    source.register_event_type(Total, lambda ctx, event: None)
    with TestDriver(source) as driver:
        for name in (ADDED, TOTAL, "Unknown"):
            unreadable(driver, name)
        assert driver.committed_offsets() == {0: 3}
        assert len(driver.dead_letters()) == 1
        driver.check()
    [(record, kind, error, attempts, _, origin)] = of_type.calls  # bytes do not change: no other attempt
    assert record is not None
    assert (record.offset, kind, attempts, origin) == (0, ADDED, 1, "event")
    assert isinstance(error, DecodeError)
    assert [call.type for call in of_source.calls] == [TOTAL, "Unknown"]


@pytest.mark.parametrize("policy", [STOP, SKIP, DEAD_LETTER, PARK])
def test_a_value_for_a_type_beside_another_one_of_the_source(policy: Retry) -> None:
    bank = Bank(decode_policy=SKIP if policy is not SKIP else STOP)

    def source() -> EventSource[Any]:
        made = bank.source()
        made.register_event_type(Total, lambda ctx, event: None, on_decode_error=policy)
        return made

    with TestDriver(source) as driver:
        if policy is STOP:
            with pytest.raises(EventFailure, match="cannot be read"):
                unreadable(driver, TOTAL)
            return
        unreadable(driver, TOTAL)
        driver.settle()
        assert len(driver.dead_letters()) == (policy is DEAD_LETTER)
        assert len(driver.parked()) == (policy is PARK)


@event_type("foreign.Placed")
class Placed(msgspec.Struct, frozen=True):
    name: str


def test_functions_for_nulls_and_records_without_a_type() -> None:
    nulls, missing = Heard(ErrorResponse.CONTINUE), Heard(ErrorResponse.DEAD_LETTER)
    rule = ByField("kind", {"placed": Placed}, nulls=nulls, missing=missing)
    source = EventSource(config(1), types=rule)
    source.register_event_type(Placed, lambda ctx, event: None)
    source.input("more", event=Placed, nulls=nulls)
    topic = source.config.topic
    with TestDriver(source, topics={"more": 1}) as driver:
        for where, value in ((topic, None), (topic, b"{}"), ("more", None)):
            driver.send_record(Record(where, value, key=b"a", partition=0))
        assert len(driver.dead_letters()) == 1
    assert [(call.record.topic, call.record.value) for call in nulls.calls if call.record] == [
        (topic, None),
        ("more", None),
    ]
    assert [call.type for call in missing.calls] == [""]
    assert [topic.policies for topic in source.topology.topics if topic.name == "more"] == [(policy_name(nulls),)]


# -- other work --------------------------------------------------------------------------------------------------------


def test_a_row_of_a_joined_table_cannot_be_parked_by_an_answer() -> None:
    shop = joins_kit.Shop(joins_kit.update, decode_policy=parks)
    with TestDriver(shop.source, topics={joins_kit.CUSTOMERS: 2}) as driver:
        with pytest.raises(EventFailure, match="row of a joined table cannot be parked"):
            joins_kit.row(driver, b"ann", b"{")
        assert not driver.parked()


def test_windows_timers_interjections_and_visits_say_what_they_are() -> None:
    policy = Heard(ErrorResponse.CONTINUE)

    def broken(*given: Any) -> None:
        raise RuntimeError("broken")

    class Shop(Stores):
        win = Windows.tumbling(str, int, size=60, grace=0, add=windows_kit.count, on_close=broken, on_error=policy)
        carts = NamedTable.of(str, int, ordered=True)

    source = EventSource(config(error_policy=policy, visits=True), Shop.factory())

    @source.on
    def on_seen(ctx: EventContext[Any], event: windows_kit.Seen) -> None:
        ctx.store.win.add(event.key, 1)
        ctx.store.carts.put(event.key, 1)
        if event.number:
            ctx.schedule_in(1, windows_kit.Told("t", event.key), name="t")

    @source.on
    def on_told(ctx: EventContext[Any], event: windows_kit.Told) -> None:
        broken()

    source.register_visit("look", broken, table="carts")
    source.schedule_interjection(broken, every=600)
    with TestDriver(source) as driver:
        for at in (1_000, 200_000):
            driver.send_record(windows_kit.seen("a", at, number=1))
        driver.advance(601)
        driver.settle()
        driver.start_visit("look")
        driver.settle()
    kinds = {call.origin: call for call in policy.calls}
    assert set(kinds) == {"window", "timer", "interjection", "visit"}
    assert kinds["interjection"].record is None
    assert kinds["window"].type == "win"


def test_a_policy_that_does_not_park_for_work_without_a_queue() -> None:
    assert unparked(PARK) is not PARK
    changed = unparked(parks)
    assert isinstance(changed, Adapted)
    assert changed(Failed(None, "", ValueError(), 1, 0.0, "visit")).then is ErrorResponse.DEAD_LETTER
    assert policy_name(changed) == policy_name(parks) == f"{__name__}.parks"
    assert pickle.loads(pickle.dumps(changed)).function is parks


async def test_a_replay_calls_the_function_and_waits_for_nothing() -> None:
    """The same policies on Spark's executors, where a source without queues stops at a key that would be parked."""

    def patient(failed: Failed) -> Retry:
        return Retry(attempts=4, backoff_seconds=3600, max_backoff_seconds=3600, then=ErrorResponse.CONTINUE)

    of = program(count, patient)
    assert of.fingerprint == program(count, patient).fingerprint
    assert str(id(patient)) not in str(of.fingerprint)
    replay = PartitionReplay(of, 2, wall_ms=1)
    done = await asyncio.wait_for(replay.handle(records("a!3 b!9 c")), 30)
    assert [(failed.offset, failed.response) for failed in done.failed] == [(1, "continue")]
    assert replay.stopped is None


# -- declarations ------------------------------------------------------------------------------------------------------


async def an_async_function(failed: Failed) -> Retry:
    return SKIP


def a_generator(failed: Failed) -> Any:
    yield SKIP


class Async:
    async def __call__(self, failed: Failed) -> Retry:
        return SKIP


REFUSED = [lambda: SKIP, an_async_function, a_generator, Async(), Retry, ErrorResponse.CONTINUE, "skip", 3, int]
Declares = Callable[[Any], object]


@pytest.mark.parametrize("given", REFUSED, ids=[*map(str, range(len(REFUSED)))])
def test_what_is_no_policy_is_refused_where_it_is_given(given: Any) -> None:
    assert not is_policy(given)
    source = EventSource(config(1, visits=True), TOTALS)
    table = source.join("rows", key=str, value=int)
    rules: list[Declares] = [
        lambda policy: config(1, error_policy=policy),
        lambda policy: config(1, decode_policy=policy),
        lambda policy: Only(Added, nulls=policy),
        lambda policy: ByField("kind", {"a": Added}, missing=policy),
        lambda policy: source.input("in2", event=Added, nulls=policy),
        lambda policy: source.join("rows2", key=str, value=int, on_error=policy),
        lambda policy: source.register_update(table, lambda ctx, row: None, on_error=policy),
        lambda policy: source.register_event_type(Added, lambda ctx, event: None, on_error=policy),
        lambda policy: source.register_event_type(Added, lambda ctx, event: None, on_decode_error=policy),
        lambda policy: source.register_default_handler(lambda ctx, event: None, on_error=policy),
        lambda policy: source.register_visit("v", lambda ctx, key, value: None, on_error=policy),
        lambda policy: source.schedule_interjection(lambda ctx: None, every=1, on_error=policy),
        lambda policy: Windows.tumbling(str, int, size=60, add=windows_kit.count, on_error=policy),
    ]
    for declare in rules:
        with pytest.raises((ConfigError, RegistrationError), match="must be an error policy"):
            declare(given)


def test_what_can_be_called_with_one_argument_is_a_policy() -> None:
    given: list[ErrorPolicy] = [letters, functools.partial(letters), Heard(SKIP), lambda failed, more=1: SKIP]
    assert all(is_policy(policy) for policy in given)


def test_the_topology_names_the_functions() -> None:
    class Kept(Stores):
        win = Windows.tumbling(str, int, size=60, add=windows_kit.count)

    source = EventSource(config(1, decode_policy=letters), Kept.factory())
    source.register_event_type(Added, lambda ctx, event: None, on_error=three_times, on_decode_error=parks)
    source.register_event_type(Total, lambda ctx, event: None)
    first, second = source.topology.handlers
    assert first.policies == (f"{__name__}.three_times", f"{__name__}.parks")
    assert second.policies == ()
    assert source.topology.topics[0].policies == (f"{__name__}.letters",)
