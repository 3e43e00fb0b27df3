"""Whose record is refused, what waits for an operator instead, and dead letters, which always fit."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import DEAD_LETTER, SKIP, EventContext, Record
from streams.core.timers import Timer
from streams.errors import ConfigError, TransactionFailed
from streams.kafka.wire.cluster import Cluster
from streams.records import Headers, IncomingRecord, record_size
from streams.runtime.partition.dead_letters import PARTS, DeadLetter, dead_letter
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config, driven, letters
from tests.vocabulary import Added

LETTERS, CHANGELOG = config().dead_letters, config().changelog


def same(ctx: EventContext[Any], event: Added) -> None:
    """Send the same record for each event, but for a header that tells the event; fail for an amount below zero."""
    ctx.store.put("last", event.amount)
    ctx.forward(Record(OUT, b"same", b"same", [("n", b"%d" % event.amount)], partition=0))
    if event.amount < 0:
        raise RuntimeError("below zero")


def driver_of(**settings: Any) -> TestDriver[Any]:
    return driven(same, on_error=DEAD_LETTER, **settings)


def written(driver: TestDriver[Any]) -> list[int]:
    return [int(record.header("n") or b"") for record in driver.outputs(OUT)]


def fact(letter: IncomingRecord, name: str) -> bytes | None:
    return letter.header(f"__kes_dlq_{name}")


# -- blame -------------------------------------------------------------------------------------------------------------


def test_a_twin_of_a_refused_record_is_not_blamed() -> None:
    with driver_of() as driver:
        driver._world.broker.refuses = lambda topic, entry: topic == OUT and ("n", b"3") in (entry.headers or [])
        for number in range(6):
            driver.send(Added("x", number), wait=False)
        driver.settle()
        assert letters(driver, "offset") == [("3",)]
        assert written(driver) == [0, 1, 2, 4, 5]
        driver.check()


# -- what is nobody's fault --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [OUT, CHANGELOG])
def test_what_is_not_the_records_fault_is_waited_for(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    with driver_of() as driver:
        driver._world.broker.blocked[topic] = 29
        driver.send(Added("x", 1), wait=False)
        driver.advance(100)
        assert driver.members == [0]
        assert re.search(rf"{topic}(\[0\])?: Broker: Topic authorization failed", caplog.text)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 20
        del driver._world.broker.blocked[topic]
        driver.settle()
        assert (driver.dead_letters(), written(driver)) == ([], [1])
        driver.check()


@pytest.mark.parametrize(
    ("topic", "limit", "said"),
    [(OUT, None, "Unknown topic"), (CHANGELOG, None, "Unknown topic"), (CHANGELOG, 60, "Message too large")],
)
def test_the_wait_is_bounded_and_the_error_names_the_topic(topic: str, limit: int | None, said: str) -> None:
    """A changelog that takes no offset record, either: no event, and no interjection, gets a policy for it."""
    with driver_of(recovery_timeout_seconds=30.0, error_policy=SKIP) as driver:
        if limit is None:
            driver._world.broker.blocked[topic] = 3
        else:
            driver._world.broker.limits[topic] = limit
        driver.send(Added("x", 1), wait=False)
        with pytest.raises(TransactionFailed, match=topic + rf"(\[0\])?: Broker: {said}"):
            driver.advance(60)
        assert (driver.dead_letters(), driver.committed_offsets().get(0, 0)) == ([], 0)


@pytest.mark.parametrize("amount", [1, -1], ids=["output", "dead letter"])
def test_a_wrong_clock_is_named_and_stops_this_machine(amount: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever, also with a dead letter: the next member may have the right time. And no restart: see
    ``cli.worker.NOT_FOR_RESTART``."""
    with driver_of(recovery_timeout_seconds=30.0, error_policy=SKIP) as driver:
        broker = driver._world.broker
        monkeypatch.setattr(Cluster, "now_ms", lambda self: broker.wall_ms() + 7_200_000)
        driver.send(Added("x", amount), wait=False)
        with pytest.raises(
            ConfigError, match=r"clocks of this machine .* message.timestamp.after.max.ms .* 30 seconds"
        ):
            driver.advance(60)
        monkeypatch.undo()
        driver.restart()
        driver.settle()
        assert (letters(driver, "offset"), written(driver)) == (([], [1]) if amount > 0 else ([("0",)], []))
        driver.check()


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [999_000, 999_950])
def test_a_nearly_maximal_record_is_dead_lettered(size: int) -> None:
    """It was accepted as input; with the facts of its failure it is larger than what the client takes."""
    with driver_of() as driver:
        sent = driver.send(Added("x" * size, -1), headers=[("trace", b"y" * 800)])
        driver.send(Added("x", 2))
        (letter,) = driver.dead_letters()
        assert (letter.header("trace"), fact(letter, "offset")) == (None, b"0")
        assert int(fact(letter, "left_out_headers") or b"") > 800
        if size == 999_000:
            assert letter.value == sent.value, "without its headers it fits"
        else:
            assert (letter.value, fact(letter, "left_out_value")) == (None, b"%d" % len(sent.value or b""))
        assert written(driver) == [2]
        driver.check()


def test_a_letter_that_its_topic_does_not_take_goes_by_reference() -> None:
    """Also more of them than a transaction has attempts: they are no reason to stop."""
    with driver_of() as driver:
        driver._world.broker.limits[LETTERS] = 2_000
        sent = driver.send(Added("x" * 5_000, -1), key="k")
        for number in range(20):
            driver.send(Added("x" * (5_000 - number), -1 - number), wait=False)
        driver.send(Added("x", -2), wait=False)
        driver.settle()
        first, *others, last = driver.dead_letters()
        assert (first.key, [letter.value for letter in (first, *others)]) == (b"k", [None] * 21)
        assert fact(first, "left_out_value") == b"%d" % len(sent.value or b"")
        assert [fact(first, name) for name in ("topic", "partition", "offset")] == [b"in", b"0", b"0"]
        assert fact(first, "message") == b"below zero"
        assert fact(last, "left_out_value") is None
        assert driver.members == [0]
        driver.check()


@pytest.mark.parametrize("trouble", ["blocked", "limit"])
def test_a_letter_that_cannot_be_written_at_all_is_waited_for(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """For as long as it takes: whoever stops makes the next member meet the same letter."""
    with driver_of(recovery_timeout_seconds=30.0) as driver:
        if trouble == "blocked":
            driver._world.broker.blocked[LETTERS] = 29
        else:
            driver._world.broker.limits[LETTERS] = 100
        driver.send(Added("x", 7))
        driver.send(Added("x", -1), wait=False)
        driver.send(Added("x", 2), wait=False)
        driver.advance(600)
        assert (driver.members, written(driver)) == ([0], [7])
        assert LETTERS in caplog.text
        driver._world.broker.blocked.clear()
        driver._world.broker.limits.clear()
        driver.settle()
        assert (letters(driver, "offset"), written(driver)) == ([("1",)], [7, 2])
        driver.check()


BYTES = st.one_of(st.none(), st.integers(0, 3_000).map(bytes))
HEADERS: st.SearchStrategy[Headers] = st.lists(st.tuples(st.text(max_size=20), BYTES), max_size=5)


def raised() -> RuntimeError:
    """An error with a trace of its own."""
    try:
        raise RuntimeError("why")
    except RuntimeError as error:
        return error


def left_out_nothing(names: list[str]) -> bool:
    return not any("left_out" in name for name in names)


@given(key=BYTES, value=BYTES, headers=HEADERS, limit=st.integers(1_000, 12_000))
def test_a_letter_fits_and_keeps_what_it_can(key: bytes, value: bytes, headers: Headers, limit: int) -> None:
    record = IncomingRecord("t", 1, 7, key, value, headers)
    whole = dead_letter("letters", record, raised(), 1, 0)
    letter = whole.within(limit)
    assert letter.size == record_size(letter.key, letter.value, letter.headers) <= limit
    if whole.size <= limit:
        assert letter is whole
    names = [name for name, _ in letter.headers or ()][-letter.facts :]
    assert left_out_nothing(names) or "__kes_dlq_trace" not in names, "the trace goes before any part of the record"
    left_out = [name.removeprefix("__kes_dlq_left_out_") for name in names if "left_out" in name]
    assert left_out == [part for part in PARTS if part in left_out]
    assert (letter.key, letter.value) == (
        None if "key" in left_out else key,
        None if "value" in left_out else value,
    )
    assert all(("__kes_dlq_" + name) in names for name in ("topic", "partition", "offset", "message"))
    reference = letter.by_reference
    assert reference is None or (reference.size < letter.size and reference.by_reference is None)


def test_a_timers_letter_is_never_cut() -> None:
    """Its event is nowhere else."""
    record = IncomingRecord("t", 1, -1, b"k", b"v" * 5_000, [("__grt__", b"Ring")])
    timer = Timer("ring", 0, "Ring", b"v" * 5_000)
    letter = dead_letter("letters", record, RuntimeError(), 1, 0, timer)
    assert isinstance(letter, DeadLetter)
    assert (letter.within(1_000), letter.by_reference) == (letter, None)
    traced = dead_letter("letters", record, raised(), 1, 0, timer)
    assert traced.by_reference == traced.within(1_000)
    assert traced.within(1_000).value == b"v" * 5_000
    assert "__kes_dlq_trace" in dict(traced.headers or ())
    assert "__kes_dlq_trace" not in dict(traced.within(1_000).headers or ())
