"""Durable timers: set, fired, removed, refused, and what is left of them after everything."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from streams import AsyncBatcher, BatchItem, BatchProducer, EventContext, EventSource, Record
from streams.errors import EventFailure, StoreError
from streams.metrics import EventFailed
from streams.outcomes import DEAD_LETTER, SKIP, STOP, ErrorResponse, Retry
from streams.runtime.changelog import TIMER_PREFIX
from streams.settings.jobs import SchedulerConfig
from streams.source.jobs import AsyncJobScheduler
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import TOTALS, Added, Ring, Total, Words, register, touch

CHANGELOG = config().changelog
STORES = pytest.mark.parametrize("store", [TOTALS, Words], ids=["journalled", "plain"])


def ring(ctx: EventContext[Any], event: Ring) -> None:
    touch(ctx, event.name)
    ctx.forward(OUT, event, key=event.name)


def alarm(ctx: EventContext[Any], event: Added) -> None:
    """By its deed: "+10" sets the timer of its name, to ring in 10 seconds, "-" cancels it, "!+10" fails, too."""
    deed = event.deed.lstrip("!")
    if deed == "-":
        ctx.cancel_timer(event.name)
    elif deed:
        ctx.schedule_in(float(deed), Ring(event.name), name=event.name)
    if event.deed.startswith("!"):
        raise ValueError("not this one")


def source_of(
    on_ring: Any = ring, on_added: Any = alarm, store: Any = TOTALS, policy: Any = None, **settings: Any
) -> EventSource[Any]:
    source: EventSource[Any] = EventSource(config(**settings), store)
    if on_added is not None:
        register(source, on_added, on_error=policy)
    if on_ring is not None:
        register(source, on_ring, on_error=policy, event_class=Ring)
    return source


def clocked(*of: Any, **settings: Any) -> TestDriver[Any]:
    return TestDriver(source_of(*of, **settings), topics={OUT: 1})


def handled(driver: TestDriver[Any], events: str) -> None:
    """Send "a+10 b-" and so on, and wait until they are committed."""
    for event in events.split():
        driver.send(Added(event[0], deed=event[1:]), key=event[0], partition=0, wait=False)
    driver.settle()


def rang(driver: TestDriver[Any]) -> str:
    return " ".join(event.name for event in driver.outputs(OUT, Ring))


def timers(driver: TestDriver[Any]) -> list[str]:
    """The names of those that the changelog holds."""
    log = driver._world.broker.log(CHANGELOG, 0)
    last = {record.key: record.value for record in log.committed(0, log.end) if record.key}
    found = [key for key, value in last.items() if key.startswith(TIMER_PREFIX) and value is not None]
    return sorted(key[len(TIMER_PREFIX) :].decode() for key in found)


@STORES
@pytest.mark.parametrize(
    ("events", "set_", "after"),
    [
        ("a+10 b+5", "a b", {4.5: "", 5: "b", 9.5: "b", 10: "b a"}),
        ("c+30 a+10 b+20 d+10000", "a b c d", {25: "a b", 40: "a b c"}),
        ("a+5 a+50 b+50 b+5 c+7 c-", "a b", {10: "b", 49: "b", 55: "b a"}),  # set anew, and cancelled
        ("a+5 b!+5 a!-", "a", {10: "a"}),  # failed events set and cancel nothing
    ],
)
@pytest.mark.parametrize("meanwhile", ["at work", "away", "evicted"])
def test_they_fire_once_when_they_are_due(
    store: Any, events: str, set_: str, after: dict[float, str], meanwhile: str
) -> None:
    """Late ones after the start, in the order of their times; over restarts, and when the membership is lost."""
    with clocked(store=store, policy=SKIP) as driver:
        began = driver.now
        handled(driver, events)
        assert timers(driver) == set_.split()
        first = min(float(event.rpartition("+")[2]) for event in events.split() if "+" in event)
        found = driver.statistics().partitions[0]
        assert found.timers == len(set_.split())
        assert found.next_timer_ms == pytest.approx((driver.time() + first) * 1000, abs=500)
        for seconds, names in after.items() if meanwhile == "at work" else ():
            driver.advance(began + seconds + 0.4 - driver.now)
            assert rang(driver) == names
        if meanwhile == "evicted":
            driver.evict()
        elif meanwhile == "away":
            driver.leave()
        driver.advance(100)
        if not driver.members:
            driver.restart()
        driver.advance(5)
        last = list(after.values())[-1]
        assert (rang(driver), timers(driver)) == (last, sorted(set(set_.split()) - set(last.split())))
        driver.crash()
        driver.restart()
        driver.advance(5)
        assert (rang(driver), driver.statistics().partitions[0].timers) == (last, len(timers(driver)))
        driver.check()


def test_cancel_tells_whether_there_was_one() -> None:
    told: list[bool] = []

    def handler(ctx: EventContext[Any], event: Added) -> None:
        told.append(ctx.cancel_timer("a"))
        ctx.schedule_in(5, Ring("a"), name="a")
        told.append(ctx.cancel_timer("a"))
        told.append(ctx.cancel_timer("a"))
        if event.name == "l":
            ctx.schedule_in(5, Ring("a"), name="a")

    with clocked(ring, handler) as driver:
        handled(driver, "first last again")
        assert told == [False, True, False, False, True, False, True, True, False]
        assert timers(driver) == []


def test_what_a_handler_knows() -> None:
    seen: list[tuple[Any, ...]] = []

    def handler(ctx: EventContext[Any], event: Ring) -> None:
        assert ctx.timer is not None
        assert (ctx.is_interjection, ctx.input, ctx.offset) == (True, None, -1)
        seen.append((event.name, ctx.timer.name, ctx.timer.due, ctx.timer.key, ctx.now >= ctx.timer.due))
        if ctx.timer.name == "first":
            ctx.schedule_at(at + timedelta(seconds=9), Ring("second"), name="second")

    def start(ctx: EventContext[Any], event: Added) -> None:
        assert ctx.timer is None
        assert abs(ctx.now.timestamp() - driver.time()) < 1
        ctx.schedule_at(at + timedelta(seconds=5), Ring("first"), name="first")

    with clocked(handler, start) as driver:
        at = datetime.fromtimestamp(int(driver.time()), UTC)
        handled(driver, "k")
        driver.advance(20)
    assert seen == [
        ("first", "first", at + timedelta(seconds=5), b"k", True),
        ("second", "second", at + timedelta(seconds=9), b"k", True),
    ]


def test_names_of_their_own() -> None:
    names: list[str] = []

    def set_two(ctx: EventContext[Any], *_: Any) -> None:
        names.extend(ctx.schedule_in(5, Ring("a")) for _ in range(2))

    with clocked(ring, set_two) as driver:
        handled(driver, "x y")
        driver.interject(0, set_two)
        driver.interject(0, set_two)
        assert len(set(names)) == 8
        assert timers(driver) == sorted(names)
        driver.advance(10)
        assert rang(driver) == " ".join("a" * 8)


async def later(ctx: EventContext[Any], event: Ring) -> None:
    await anyio.lowlevel.checkpoint()
    await ctx.turn()
    ring(ctx, event)


def default_handler(source: EventSource[Any]) -> None:
    source.register_default_handler(lambda ctx, value: ring(ctx, msgspec.json.decode(value, type=Ring)))


def scheduler(source: EventSource[Any]) -> None:
    async def job(event: Ring) -> str:
        return event.name

    jobs: AsyncJobScheduler[Any, Ring, str] = AsyncJobScheduler(
        source, job, lambda ctx, item, result: ring(ctx, Ring(result)), config=SchedulerConfig(concurrency=2)
    )
    plan: Callable[..., Any] = lambda record, event: (event.name, event) if event.name != "b" else None  # noqa: E731
    jobs.register_event_type(Ring, plan)


def batcher(source: EventSource[Any], error: Exception | None = None) -> None:
    async def send(batch: list[BatchItem[Ring]]) -> None:
        if error is not None:
            raise error

    def told(ctx: EventContext[Any], items: list[BatchItem[Ring]]) -> None:
        ring(ctx, items[0].value)

    made: AsyncBatcher[Any, Ring] = AsyncBatcher(source, send, told, on_failure=told if error is not None else None)
    made.register_event_type(Ring, lambda record, event: None if event.name == "b" else [("k", event), ("k", event)])


def producer(source: EventSource[Any]) -> None:
    def finalize(ctx: EventContext[Any], deliveries: Any) -> None:
        assert ctx.timer is not None
        ring(ctx, Ring(ctx.timer.name))
        assert len(deliveries) == 1

    made: BatchProducer[Any] = BatchProducer(source, finalize)
    made.register_event_type(Ring, lambda record, event: Record("mails", event.name.encode()))


@pytest.mark.parametrize(
    ("add", "names"),
    [
        pytest.param(lambda source: source.register_event_type(Ring, later), "a b c", id="async"),
        pytest.param(lambda source: source.register_event_type(Ring, ring, blocking=True), "a b c", id="blocking"),
        pytest.param(lambda source: source.register_event_type(Ring, later, concurrency=4), "a b c", id="concurrent"),
        pytest.param(default_handler, "a b c", id="default"),
        pytest.param(scheduler, "a c", id="scheduler"),
        pytest.param(batcher, "a c", id="batcher"),
        pytest.param(lambda source: batcher(source, ValueError("no")), "a c", id="failing batcher"),
        pytest.param(producer, "a b c", id="producer"),
    ],
)
def test_every_kind_of_handler(add: Any, names: str) -> None:
    """What could run ahead runs in the timer's turn."""
    source = source_of(None)
    add(source)
    with TestDriver(source, topics={OUT: 1, "mails": 1}) as driver:
        handled(driver, "a+1 b+2 c+3")
        driver.advance(10)
        assert (rang(driver), timers(driver)) == (names, [])
        assert [record.value for record in driver.outputs("mails")] == [b"a", b"b", b"c"] * (add is producer)


def test_set_by_an_interjection_and_a_concurrent_handler() -> None:
    source = source_of(on_added=None)

    @source.register_event_type(Added, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Added) -> None:
        with pytest.raises(StoreError, match="ahead of the event's turn"):
            ctx.cancel_timer("b")
        ctx.schedule_at(ctx.now, Ring("ahead"), name="b")
        await ctx.turn()
        assert ctx.cancel_timer("b")
        ctx.schedule_in(1, Ring("c"), name="c")

    with TestDriver(source, topics={OUT: 1}) as driver:
        handled(driver, "x")
        driver.interject(0, lambda ctx: ctx.schedule_in(2, Ring("i"), name="i"))
        assert timers(driver) == ["c", "i"]
        driver.advance(3)
        assert rang(driver) == "c i"


# -- failures ----------------------------------------------------------------------------------------------------------


@STORES
@pytest.mark.parametrize("fails", [2, 9])
@pytest.mark.parametrize("then", [ErrorResponse.CONTINUE, ErrorResponse.DEAD_LETTER, ErrorResponse.FAIL_CONSUMER])
def test_one_that_fails_goes_to_its_policy(store: Any, then: ErrorResponse, fails: int) -> None:
    attempts: list[int] = []
    failed: list[EventFailed] = []

    def bad(ctx: EventContext[Any], event: Ring) -> None:
        attempts.append(ctx.attempt)
        ring(ctx, event)
        ctx.schedule_in(500, Ring("trace"), name="trace")
        if ctx.attempt <= fails:
            raise ValueError("not today")

    def measure(found: Any) -> None:
        failed.extend([found] if isinstance(found, EventFailed) else [])

    policy = Retry(attempts=3, backoff_seconds=0.001, then=then)
    with clocked(bad, store=store, policy=policy, metrics_handler=measure) as driver:
        handled(driver, "a+5")
        due_ms = driver.statistics().partitions[0].next_timer_ms
        if fails == 9 and then is ErrorResponse.FAIL_CONSUMER:
            with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\] .*not today.*deploy it$"):
                driver.advance(10)
            assert timers(driver) == ["a"], "it fires again at the next start"
        else:
            driver.advance(10)
            assert timers(driver) == ["trace"] * (fails == 2)
        assert attempts == [1, 2, 3]
        assert rang(driver) == ("a" if fails == 2 else "")
        assert [(found.offset, found.response) for found in failed] == [(-1, then.value)] * (fails == 9)
        letters = driver.dead_letters()
        assert len(letters) == (fails == 9 and then is ErrorResponse.DEAD_LETTER)
        for letter in letters:
            assert (letter.key, letter.value, letter.record_type) == (b"a", msgspec.json.encode(Ring("a")), "Ring")
            facts = {"timer": b"a", "offset": b"-1", "due_ms": b"%d" % (due_ms or 0), "message": b"not today"}
            assert {name: letter.header(f"__kes_dlq_{name}") for name in facts} == facts
            assert letter.header("__kes_dlq_attempts") == b"3"


@STORES
def test_what_it_sends_is_refused(store: Any) -> None:
    """By the broker, after the handler: undone, and known not to be tried again."""

    def refused(ctx: EventContext[Any], event: Ring) -> None:
        ring(ctx, event)
        if event.name == "a":
            ctx.forward("no topic/with such: a name", Total("x", 1))

    with clocked(refused, store=store, policy=DEAD_LETTER) as driver:
        handled(driver, "a+5 b+6 c")
        driver.advance(10)
        assert (rang(driver), timers(driver), len(driver.dead_letters())) == ("b", [], 1)


def test_what_failed_once_is_tried_when_it_is_set_anew() -> None:
    """For the same time, after a failure that was known over a restart."""
    attempts: list[int] = []

    def bad(ctx: EventContext[Any], event: Ring) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise ValueError("not today")
        ring(ctx, event)

    def at_the_same_time(ctx: EventContext[Any], event: Added) -> None:
        if event.name == "f":
            raise ValueError("the store cannot undo this")
        ctx.schedule_at(due, Ring("a"), name="a")

    with clocked(bad, at_the_same_time, store=Words, policy=SKIP) as driver:
        due = driver.time() + 5
        handled(driver, "set")
        driver.advance(10)
        assert (attempts, timers(driver)) == ([1], [])
        handled(driver, "fail set")
        driver.advance(10)
        assert (attempts, rang(driver)) == ([1, 1], "a")


def test_nobody_handles_it_any_more() -> None:
    """The program was changed: the decode policy decides."""
    programs: list[EventSource[Any]] = [
        source_of(), source_of(), source_of(None, decode_policy=STOP), source_of(None, decode_policy=DEAD_LETTER)
    ]  # fmt: skip
    with TestDriver(lambda: programs.pop(0), topics={OUT: 1}) as driver:
        handled(driver, "a+5")
        driver.crash()
        driver.advance(10)
        with pytest.raises(EventFailure, match=r"timer 'a' of in\[0\].*no handler for the event type 'Ring'"):
            driver.restart()
        driver.restart()
        driver.advance(10)
        assert (timers(driver), len(driver.dead_letters())) == ([], 1)


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps() -> None:
    """Back: nothing fires twice, and events go on. Forward: what is due fires soon."""
    with clocked() as driver:
        handled(driver, "a+5 b+20")
        driver.advance(10)
        driver._world._start_time -= 1000
        handled(driver, "c d")
        driver.crash()
        driver.restart()
        driver.advance(500)
        assert rang(driver) == "a"
        driver._world._start_time += 5000
        driver.advance(2)
        assert rang(driver) == "a b", "nothing but the clock tells that it is due"


def test_never_early_in_any_time_zone() -> None:
    with clocked() as driver:
        second = int(driver.time()) + 5
        at = datetime.fromtimestamp(second + 0.0004, UTC)
        times = {"a": at, "b": at.astimezone(timezone(timedelta(hours=9))), "c": second + 0.0004}
        for name, when in times.items():
            driver.interject(0, lambda ctx, name=name, when=when: ctx.schedule_at(when, Ring(name), name=name))
        assert driver.statistics().partitions[0].next_timer_ms == second * 1000 + 1
        driver.advance(second + 0.0005 - driver.time())
        assert rang(driver) == ""
        driver.advance(1)
        assert rang(driver) == "a b c"


def test_a_chain_of_timers_that_are_due_leaves_time_for_all_others() -> None:
    """Each sets the next one, due at once: events, interjections and time go on."""
    rings = 0

    def on_ring(ctx: EventContext[Any], event: Ring) -> None:
        nonlocal rings
        rings += 1
        ctx.schedule_in(0, Ring("a"), name="a")

    with clocked(on_ring) as driver:
        for number in range(3):
            before = rings
            driver.send(Added("a", deed="" if number else "+0"), wait=False)
            driver.advance(0.04)
            assert (rings > before + 20, driver.committed_offsets()) == (True, {0: number + 1})
        driver._run(driver._world.members[0].source.interject(0, lambda ctx: ctx.cancel_timer("a")))
        driver.settle()
        assert timers(driver) == []
