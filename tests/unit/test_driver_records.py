"""Records that handlers may not send, and that no handler can read; interjections that fail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    ErrorResponse,
    EventContext,
    EventSource,
    ExecutionState,
    Record,
    Retry,
    Table,
    event_type,
    upcaster,
)
from streams.errors import EventFailure, OffsetError, RecordRefused
from streams.metrics import EventFailed, Measurement, OffsetMismatch
from streams.records import Headers
from streams.runtime.changelog import OFFSET_KEY
from streams.testing import TestDriver
from tests.unit.bad_input import Sample, small_records
from tests.unit.handlers_kit import OUT, config, counts, driven, letters, misbehave, send, totals
from tests.vocabulary import ADDED, INTS, KINDS, MISDEEDS, TOTALS, Added, Total, Words, count, register, tell_total

# -- records that are refused ------------------------------------------------------------------------------------------


def refused(ctx: EventContext[Any], event: Added) -> ExecutionState | None:
    tell_total(ctx, event, OUT)
    if event.deed in MISDEEDS:
        MISDEEDS[event.deed](ctx, OUT)
    return misbehave(ctx, event.deed)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_several_guilty_ones_in_several_partitions(kind: str) -> None:
    """In the middle of slices and of transactions, and more than a transaction has attempts: these do not count, since
    each leaves less of it."""
    guilty = {0: {17: "over the topic's limit", 50: "raise", 99: "over the topic's limit"}, 1: {40: "FAIL"}}
    guilty |= {partition: {1: "over the topic's limit"} for partition in range(2, 12)}
    with driven(refused, kind, DEAD_LETTER, partitions=12, limits=[OUT]) as driver:
        for partition, deeds in guilty.items():
            for number in range(400 if partition < 2 else 3):
                send(driver, f"n{partition}", deed=deeds.get(number, ""), partition=partition, wait=False)
        driver.settle()
        bad = {(str(partition), str(offset)) for partition, deeds in guilty.items() for offset in deeds}
        assert sorted(letters(driver, "partition", "offset")) == sorted(bad)
        for partition, deeds in guilty.items():
            good = (400 if partition < 2 else 3) - len(deeds)
            assert [amount for name, amount in totals(driver) if name == f"n{partition}"] == list(range(1, good + 1))
            assert counts(driver, partition) == {f"n{partition}": good}
        driver.check()


@pytest.mark.parametrize("first", ["refused", "failed"])
def test_a_first_event_that_restarts_its_partition_skips_nothing(first: str) -> None:
    """``latest`` has moved on when the partition is restarted, and nothing of it is committed yet."""
    met: list[str] = []

    def work(ctx: EventContext[Any], event: Added) -> None:
        if not met:
            send(driver, "b", "c", wait=False)  # these come while it is being handled
        met.append(event.name)
        if event.name == "a":
            if first == "failed":
                raise RuntimeError("not undone by this store")
            ctx.forward("no topic/with such: a name", event)
        ctx.forward(OUT, Total(event.name, 1))

    store = TOTALS if first == "refused" else Words
    driver = driven(work, on_error=SKIP, store=store, auto_offset_reset="latest", start=False)
    with driver:
        send(driver, "before", "before", wait=False)
        driver.at("activated", lambda member: send(driver, "a", wait=False))
        begun_again = driver.at("activated", lambda member: None, skip=1)

        def refuse(member: int) -> None:
            if not met or (first == "refused" and begun_again.is_armed):
                driver.refuse("commit")

        driver.at("commit.before", refuse, times=99)
        driver.start()
        driver.settle()
        assert (totals(driver), driver.committed_offsets()) == ([("b", 1), ("c", 1)], {0: 5})
        assert begun_again.sprung == 1
        assert "before" not in met


def test_latest_means_the_latest_of_the_first_start() -> None:
    """Nothing was handled when it went away; what comes until the next start must not be passed over."""
    with driven(refused, auto_offset_reset="latest", start=False) as driver:
        send(driver, "before", "before", wait=False)
        driver.start()
        driver.settle()
        assert driver._world.handled(0) == 2, "the start is committed, without any event"
        driver.crash()
        send(driver, "a", "b", wait=False)
        driver.restart()
        driver.settle()
        assert totals(driver) == [("a", 1), ("b", 1)]


def test_a_refused_record_is_not_tried_again() -> None:
    """The same bytes would be refused again: retries are for handlers."""
    policy = Retry(attempts=1_001, backoff_seconds=5, then=ErrorResponse.CONTINUE)
    with driven(refused, on_error=policy, limits=[OUT]) as driver:
        before = driver.now
        send(driver, "a", deed="over the client's limit")
        send(driver, "b", deed="over the topic's limit")
        send(driver, "c")
        assert totals(driver) == [("c", 1)]
        assert driver.now - before < 5


@pytest.mark.parametrize("size", [1_000_001, 50_000], ids=["client", "broker"])
def test_a_change_over_the_limit(size: int) -> None:
    """The store's value is too large: for the client, or for the changelog topic. The event is undone."""

    def work(ctx: EventContext[Any], event: Added) -> None:
        ctx.store.put("last", event.name)
        ctx.store.put(event.name, "x" * (size if event.deed else 5))
        ctx.forward(OUT, Total(event.name, 1), key=event.name)

    store = Table.factory(key=str, value=str)
    with driven(work, on_error=DEAD_LETTER, store=store, limits=["g.in.changelog"]) as driver:
        send(driver, "a", "b")
        send(driver, "guilty", deed="large")
        send(driver, "c")
        assert letters(driver, "offset") == [("2",)]
        assert totals(driver) == [("a", 1), ("b", 1), ("c", 1)]
        assert counts(driver) == dict.fromkeys("abc", "xxxxx") | {"last": "c"}
        driver.check()


# -- interjections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("raise", "the reason"),
        ("ctx.fail", "the reason"),
        ("FATAL", "FATAL"),
        ("over the topic's limit", "too large"),
        ("value of the wrong type", "bytes"),
    ],
)
def test_an_interjection_that_fails_is_undone_and_its_caller_told(deed: str, said: str) -> None:
    """The events around it stay. No policy applies, but to what the broker refuses."""

    def bad(ctx: EventContext[Any]) -> ExecutionState | None:
        ctx.store.put("first", 1)
        return refused(ctx, Added("interjected", deed=deed))

    policy = SKIP if deed in MISDEEDS else STOP
    with driven(refused, error_policy=policy, limits=[OUT]) as driver:
        send(driver, "a", "b", wait=False)
        with pytest.raises(RecordRefused if deed in MISDEEDS else Exception, match=said):
            driver.interject(0, bad)
        send(driver, "c")
        assert (totals(driver), counts(driver)) == ([("a", 1), ("b", 1), ("c", 1)], dict.fromkeys("abc", 1))
        driver.check()


def test_interjections_have_their_place_in_the_order_of_the_partition() -> None:
    """Each comes behind what is queued, sees its effects, and what comes later sees its own."""
    seen: list[tuple[int | None, int | None]] = []

    async def look(ctx: EventContext[Any]) -> ExecutionState:
        seen.append((ctx.store.get("a"), ctx.store.get("mark")))
        ctx.store.put("mark", len(seen))
        return ExecutionState.COMPLETE

    with driven(refused) as driver:
        send(driver, *["a"] * 50, wait=False)
        driver.settle()
        driver.interject(0, look)
        driver.interject(0, look)
        assert seen == [(50, None), (50, 1)]


@pytest.mark.parametrize("policy", [SKIP, STOP], ids=["skip", "stop"])
def test_a_scheduled_interjection_that_fails(policy: Retry) -> None:
    failures: list[EventFailed] = []
    source = EventSource(
        config(metrics_handler=lambda m: failures.append(m) if isinstance(m, EventFailed) else None), TOTALS
    )
    register(source, refused)

    @source.schedule_interjection(every=10.0, on_error=policy)
    def bad(ctx: EventContext[Any]) -> None:
        ctx.store.put("trace", 1)
        raise ValueError("not today")

    with TestDriver(source, topics={OUT: 1}) as driver:
        if policy is STOP:
            with pytest.raises(EventFailure, match=r"(?s)in.*bad.*not today|bad.*in.*not today"):
                driver.advance(40)
        else:
            driver.advance(40)
            send(driver, "a")
            assert counts(driver) == {"a": 1}
            assert len(failures) >= 3, "it runs again and again"
        assert failures[0].response == policy.then.value


# -- records that cannot be read ---------------------------------------------------------------------------------------

CORPUS = small_records()


@pytest.mark.parametrize("case", [case for case in CORPUS if case.ending != "decoded"], ids=lambda case: case.name)
def test_a_record_that_cannot_be_read_stops_the_source_by_name(case: Any) -> None:
    source = EventSource(config(), Table.factory(key=bytes, value=int))
    source.register_event_type(Sample, lambda ctx, event: ctx.store.put(b"all", 1))
    with TestDriver(source) as driver:
        with pytest.raises(EventFailure, match=r"in\[0\]@0") as stopped:
            driver.send_record(Record("in", case.value, case.key, case.headers, 0))
        assert len(str(stopped.value)) < 3_000
        assert driver.committed_offsets().get(0, 0) == 0


def test_unknown_types_to_a_default_handler() -> None:
    """With a default handler nothing is unknown: it gets the bytes as they are, null too."""
    got: list[bytes | None] = []
    source = EventSource(config())
    source.register_default_handler(lambda ctx, value: got.append(value))
    cases = [case for case in CORPUS if case.name.startswith(("type header", "value: null", "value: empty"))]
    with TestDriver(source) as driver:
        for case in cases:
            driver.send_record(Record("in", case.value, case.key, case.headers, 0), wait=False)
        driver.settle()
        assert got == [case.value for case in cases]


@event_type("Priced", version=2)
class Priced(msgspec.Struct, frozen=True):
    cents: int
    currency: str


@upcaster(Priced, from_version=1)
def add_currency(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"currency": "EUR"}


@pytest.mark.parametrize("kind", KINDS)
def test_versions(kind: str) -> None:
    """Records of the present version are decoded as they are, older ones are upcast, newer ones are bad input."""
    got: list[tuple[int, Priced]] = []
    source = EventSource(config(decode_policy=SKIP))
    register(source, lambda ctx, event: got.append((ctx.offset, event)), kind, event_class=Priced)
    name: Headers = [("__grt__", b"Priced")]
    sent: list[tuple[bytes, Headers]] = [
        (b'{"cents":1,"currency":"USD"}', [*name, ("__grv__", b"2")]),
        (b'{"cents":2}', name),
        (b'{"cents":3,"currency":"CHF"}', [("__grv__", b"02"), *name]),
        (b'{"cents":4}', [*name, ("__grv__", b"1")]),
        (b'{"cents":5,"currency":"CHF"}', [*name, ("__grv__", b"3")]),
        (b'{"cents":6,"currency":"USD"}', [*name, ("__grv__", b"2")]),
    ]
    with TestDriver(source) as driver:
        for value, headers in sent:
            driver.send_record(Record("in", value, None, headers, 0), wait=False)
        driver.settle()
    expected = [(0, 1, "USD"), (1, 2, "EUR"), (2, 3, "CHF"), (3, 4, "EUR"), (5, 6, "USD")]
    assert got == [(offset, Priced(cents, currency)) for offset, cents, currency in expected]


def test_own_headers_stay_in_a_letter() -> None:
    with driven(refused, on_error=DEAD_LETTER) as driver:
        headers = [*ADDED, ("trace", b"\xff\x00"), ("trace", None), ("empty", b"")]
        driver.send_record(Record("in", b'{"name":"bad","deed":"negative partition"}', b"\x00key", headers, 0))
        [letter] = driver.dead_letters()
        assert letter.key == b"\x00key"
        assert [pair for pair in letter.headers or () if not pair[0].startswith("__kes_dlq_")] == headers


# -- changelogs with strange contents ----------------------------------------------------------------------------------

CHANGELOG = "g.in.changelog"


def over_changelog(key: bytes, value: bytes, *sent: str, **settings: Any) -> TestDriver[Any]:
    """A driver that is not started yet, with this in its changelog, and with events."""
    source = EventSource(config(**settings), TOTALS)
    register(source, count)
    driver = TestDriver(source, start=False)
    broker = driver._world.broker
    broker.append(CHANGELOG, 0, key, value, None, broker.wall_ms())
    for name in sent:
        driver.send(Added(name), partition=0, wait=False)
    return driver


@pytest.mark.parametrize("value", [b"{}", b"rubbish", b'{"offset":"1"}', b"", b"[" * 10_000])
def test_an_offset_record_that_cannot_be_read(value: bytes) -> None:
    with over_changelog(OFFSET_KEY, value) as driver, pytest.raises(OffsetError, match=r"g\.in\.changelog\[0\]@0"):
        driver.start()


def test_a_newer_offset_record_with_more_fields() -> None:
    """A later version may say more; what is known is enough. The group has no offset: the changelog wins."""
    measured: list[Measurement] = []
    newer = b'{"offset":1,"writer":"w","serial":1,"generation":1,"more":{"x":[1]}}'
    with over_changelog(OFFSET_KEY, newer, "passed", "taken", metrics_handler=measured.append) as driver:
        driver.start()
        driver.settle()
        assert counts(driver) == {"taken": 1}
    assert OffsetMismatch(0, -1, 1) in measured


def test_a_value_in_the_changelog_that_cannot_be_decoded() -> None:
    """It fails the events that read it (their policy decides), and no others."""
    with over_changelog(b"a", b"rubbish", "a", "b", error_policy=SKIP) as driver:
        driver.start()
        driver.settle()
        assert driver.changelog(0) == {b"a": b"rubbish", b"b": INTS.encode(1)}
