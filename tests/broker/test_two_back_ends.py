"""The driver's answers are the broker's: handlers, policies, records that cannot be read or are refused, transactional
input (see ``back_ends_kit``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Record,
    Retry,
    Update,
)
from streams.codecs import int_codec
from streams.sak.murmur2 import partition_of
from streams.testing.fixtures import BrokerAddress
from tests.broker.back_ends_kit import BackEnd, Make, Scenario, feed, making, scenario, telling, turn_of_others
from tests.broker.two_back_ends import must_be_equal
from tests.unit.bad_input import GOOD_HEADERS, GOOD_VALUE, small_records
from tests.unit.bad_input import counting as counting_samples
from tests.vocabulary import ADDED, MISDEEDS, TOTALS, Added, Total, Totals, Words, added, tell_total, write

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

SMALL = {"out": {"max_message_bytes": "20000"}}
RETRIED = Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)


def counting(end: BackEnd, policy: Retry | None = None) -> Make:
    """Makes sources that count, and do what an event says besides. What was tried is noted: name and attempt."""
    seen = end.notes.setdefault("seen", {})

    def work(ctx: EventContext[Totals], event: Added) -> ExecutionState | None:
        seen.setdefault(event.name, []).append(ctx.attempt)
        tell_total(ctx, event, end.out)
        ctx.store.put("last", len(event.name))
        if event.deed in MISDEEDS:
            MISDEEDS[event.deed](ctx, end.out)
        if event.deed == "raise":
            raise ValueError(f"no {event.name}, please")
        if event.deed == "delete":
            ctx.store.delete(event.name)
        return {"fail": ExecutionState.FAIL, "fatal": ExecutionState.FATAL}.get(event.deed)

    return making(work, on_error=policy)


@scenario(partitions=3, topics={"out": 5})
def handlers(end: BackEnd) -> None:
    """Keys spread over partitions; outputs land where a real producer puts them; a change is undone, others stay; a
    source that stops and starts again goes on with the stores that it had."""
    end.run(counting(end, SKIP))
    feed(end, "a", "b", "a", "c", "d")
    feed(end, "a", "e", deed="raise")
    feed(end, "b", deed="delete")
    feed(end, "a", "f", "g", "h", "\N{GREEK SMALL LETTER ALPHA}", "")
    end.settle()
    end.leave()
    feed(end, "a", "b")
    end.restart()
    feed(end, "c")
    end.settle()


def policies(name: str, policy: Retry) -> Scenario:
    """What fails for good: by an exception, and by its answer."""

    def play(end: BackEnd) -> None:
        end.run(counting(end, policy))
        feed(end, "a", "b")
        end.send(Added("bad", 1, "raise"), b"\x00key", headers=[("trace", b"\xff"), ("trace", None)])
        feed(end, "a")
        end.send(Added("worse", 1, "fail"), None)
        feed(end, "a")
        end.settle()

    play.__name__ = f"policy_{name}"
    return Scenario(play)


@scenario()
def own_store(end: BackEnd) -> None:
    """One that cannot undo: it is filled from the changelog after each attempt that failed."""

    def work(ctx: EventContext[Any], event: Added) -> None:
        write(ctx, event)
        ctx.forward(end.out, Total(event.name, ctx.attempt), key=event.name)
        if event.deed == "fail" or (event.deed == "once" and ctx.attempt == 1):
            ctx.store.words.clear()
            raise ValueError("spoiled")

    end.run(making(work, RETRIED, Words))
    for name, deed in (("w", "a"), ("v", "a"), ("w", "fail"), ("w", "b"), ("w", "once"), ("v", "c"), ("w", "delete")):
        feed(end, name, deed=deed)
    end.settle()


def stops(deed: str, policy: Retry = STOP) -> Scenario:
    """The source stops, and what came before is committed; the next one, which need not wait for the session of the
    first, meets the record again."""

    def play(end: BackEnd) -> None:
        end.run(counting(end, policy), session_timeout_seconds=120.0)
        feed(end, "a", "b")
        end.settle()
        if deed == "unreadable":
            end.send_raw(b"?", b"x", headers=ADDED)
        else:
            feed(end, "bad", deed=deed)
        feed(end, "c")
        end.failure()
        end.notes["committed when it stopped"] = end.committed()
        end.failure("the same again", end.restart)

    play.__name__ = "stops_" + "".join(letter if letter.isalnum() else "_" for letter in deed)
    return Scenario(play, configs=SMALL)


@scenario()
def bad_input(end: BackEnd) -> None:
    """Records that nobody can read among others that all can."""
    end.run(lambda config: counting_samples(config, end.out, DEAD_LETTER), decode_policy=DEAD_LETTER)
    for case in small_records():
        end.send_raw(GOOD_VALUE, b"good", GOOD_HEADERS)
        end.send_raw(case.value, case.key, case.headers)
    end.settle()


@scenario(topics={"out": 3, "spread": 4})
def records(end: BackEnd) -> None:
    """What a record consists of goes through unchanged: tombstones, empty values, headers, times, partitions."""
    seen: list[Any] = []

    def copy(ctx: EventContext[None], value: bytes | None) -> None:
        record = ctx.input
        assert record is not None
        stamp = record.timestamp_ms if record.timestamp_ms < 1_600_000_000_000 else "now"
        seen.append((record.offset, record.key, value, record.headers, stamp))
        ctx.forward(Record(end.out, value, record.key, record.headers, timestamp_ms=record.timestamp_ms))
        ctx.forward(Record(end.out, value, b"fixed", record.headers, partition=2, timestamp_ms=1_234_567_890_123))
        ctx.forward(Record(end.out, value, None, [*(record.headers or ()), ("partition", b"1")], partition=1))
        ctx.forward(Record(end.name("spread"), value))

    def make(config: EventSourceConfig) -> EventSource[None]:
        source = EventSource(config)
        source.register_default_handler(copy)
        return source

    end.notes["seen"] = seen
    end.run(make)
    end.send_raw(b"value", b"k")
    end.send_raw(b"", b"")
    end.send_raw(None, b"gone")
    end.send_raw(b"no key", None)
    end.send_raw(b"x", b"h", headers=[("a", b"1"), ("a", None), ("", b""), ("b", b"\x00\xff"), ("a", b"1")])
    end.send_raw(b"x", b"h", headers=[])
    end.send_raw(b"old", b"t", timestamp_ms=1_000_000_000_000)
    end.settle()


@scenario(partitions=2, topics={"out": 2})
def interjections(end: BackEnd) -> None:
    """With an answer, with effects, with nothing to commit, and failing: the effects are undone."""
    end.run(counting(end))
    feed(end, "a", "b", "c")
    end.settle()

    def total(ctx: EventContext[Totals]) -> int:
        amount = sum(value for key, value in ctx.store.items() if key != "last")
        ctx.store.put("total", amount)
        ctx.forward(end.out, Total("total", amount), key="total", partition=ctx.topic_partition.partition)
        return amount

    def fails(ctx: EventContext[Totals]) -> None:
        total(ctx)
        ctx.store.delete("total")
        raise ValueError("not today")

    async def looks(ctx: EventContext[Totals]) -> list[tuple[str, int]]:
        await turn_of_others()
        return sorted(ctx.store.items())

    for partition in (0, 1):
        end.refused(f"total {partition}", lambda p=partition: end.interject(p, total))
        end.refused(f"looks {partition}", lambda p=partition: end.interject(p, looks))
        end.refused(f"fails {partition}", lambda p=partition: end.interject(p, fails))
    feed(end, "a", "b")
    end.refused("afterwards", lambda: end.settle())


OTHERS = ("unknown topic", "partition beyond 32 bits", "timestamp of the wrong type")
"""One is waited for, one is refused in other words, and one the driver does not refuse: ``test_engine_refused.py``."""


def refused(name: str, deeds: Sequence[str]) -> Scenario:
    """Among many in one batch: each becomes a dead letter with its reason, its neighbours are there once, in order."""

    def play(end: BackEnd) -> None:
        end.run(counting(end, DEAD_LETTER), start=False)
        for number, deed in enumerate([*[""] * 5, *deeds, *[""] * 5]):
            feed(end, *"abaab"[: 1 + number % 5], *"ba")
            feed(end, "ab"[number % 2], deed=deed)
        feed(end, "a", "b")
        end.start()
        end.settle()
        del end.notes["seen"]  # how often depends on what was in one transaction with what is refused

    play.__name__ = f"refused_{name}"
    return Scenario(play, topics={"out": 2}, configs=SMALL)


@scenario(partitions=2)
def transactional_input(end: BackEnd) -> None:
    """Markers take offsets, aborted records are not seen, and a log that ends with them is at its end."""
    seen: list[Any] = []

    def work(ctx: EventContext[Totals], event: Added) -> None:
        assert ctx.input is not None
        seen.append((ctx.input.partition, ctx.offset, event.name))
        tell_total(ctx, event, end.out)

    end.run(making(work))
    end.send(Added("a"), "a", partition=0)
    end.send_transaction((0, b"b", added("b"), ADDED), (1, b"c", added("c"), ADDED), commit=True)
    end.settle()
    end.send_transaction((0, b"x", added("x"), ADDED), (0, b"y", added("y"), ADDED), commit=False)
    end.send(Added("a"), "a", partition=0)
    end.send_transaction((1, b"x", added("x"), ADDED), commit=False)
    end.settle()
    end.notes["before"] = end.committed()
    end.leave()
    end.send(Added("d"), "d", partition=0)
    end.send(Added("d"), "d", partition=1)
    end.restart()
    end.settle()
    end.notes["seen"] = sorted(seen)


@scenario(partitions=4, topics={"out": 2})
def members(end: BackEnd) -> None:
    """Partitions move to a member that joins, and to the one that stays."""
    end.run(telling(end))
    for happens in (end.join, end.leave, lambda: None):
        feed(end, *"abcdefaba")
        end.settle()
        happens()


@scenario(partitions=2, topics={"out": 2, "customers": 2}, configs={"customers": {"cleanup_policy": "compact"}})
def joined_table(end: BackEnd) -> None:
    """A table that is read first; updates, one that fails, a row that cannot be read; and a restart."""

    def make(config: EventSourceConfig) -> EventSource[Any]:
        source = EventSource(config, TOTALS)
        customers = source.join(end.name("customers"), key=str, value=int, on_error=DEAD_LETTER)

        @source.on
        def work(ctx: EventContext[Totals], event: Added) -> None:
            said(ctx, event.name, ctx.joined(customers).get(event.name))

        @source.register_update(customers, on_error=RETRIED)
        def updated(ctx: EventContext[Totals], row: Update[str, int]) -> None:
            said(ctx, row.key, row.old, row.new)
            if row.new == 13:
                raise ValueError("not this one, please")

        return source

    def said(ctx: EventContext[Totals], *facts: object) -> None:
        assert ctx.input is not None
        ctx.forward(Record(end.out, repr(facts).encode(), ctx.input.key, None, ctx.input.partition))

    def row(key: bytes, value: bytes | None) -> None:
        partition = partition_of(key, 2)
        end.send_record(Record(end.name("customers"), value, key, None, partition))

    def has_said(count: int) -> None:
        end.until(lambda: len(end.records(end.out)) == count, f"{count} are said")

    end.run(make, start=False)
    for key, value in ((b"a", 1), (b"b", 2), (b"a", 3)):
        row(key, int_codec.encode(value))
    feed(end, "a", "b")
    end.start()
    has_said(5)
    row(b"a", int_codec.encode(13))
    row(b"b", b"no number")
    row(b"b", None)
    has_said(6)
    end.leave()
    end.restart()
    feed(end, "a", "b")
    has_said(8)
    end.until(lambda: len(end.records(end.config().dead_letters)) == 2, "two letters")
    end.settle()


SCENARIOS = [
    joined_table,
    handlers,
    policies("dead_letter", DEAD_LETTER),
    policies("retried", RETRIED),
    own_store,
    stops("raise"),
    stops("fatal", SKIP),
    stops("unreadable"),
    stops("over the topic's limit"),
    bad_input,
    records,
    interjections,
    refused("by_the_broker", ["over the topic's limit"]),
    refused("each", [deed for deed in MISDEEDS if deed not in OTHERS]),
    transactional_input,
    members,
]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    must_be_equal(one, kafka_broker.bootstrap_servers)
