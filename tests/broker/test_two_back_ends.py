"""The driver's answers are the broker's: handlers, policies, bad input, records (see ``back_ends_kit``)."""

from __future__ import annotations

from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    ErrorPolicy,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Record,
)
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers
from streams.testing.fixtures import BrokerAddress
from tests.broker.back_ends_kit import BackEnd, Scenario, feed, making, scenario, telling, turn_of_others
from tests.broker.gate import nightly
from tests.broker.two_back_ends import must_be_equal
from tests.vocabulary import Added, Total, Totals, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

RETRIED = ErrorPolicy(retries=2, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)


def counting(end: BackEnd, kind: str = "plain", policy: ErrorPolicy | None = None) -> Any:
    """Makes sources that count, with one kind of handler. What was tried is noted: name and attempt."""
    seen = end.notes.setdefault("seen", {})

    def plain(ctx: EventContext[Totals], event: Added) -> ExecutionState | None:
        seen.setdefault(event.name, []).append(ctx.attempt)
        tell_total(ctx, event, end.out)
        ctx.store.put("last", len(event.name))
        if event.deed == "raise":
            raise ValueError(f"no {event.name}, please")
        if event.deed == "delete":
            ctx.store.delete(event.name)
        if event.deed == "fail":
            return ExecutionState.FAIL
        return ExecutionState.FATAL if event.deed == "fatal" else None

    return making(plain, kind, policy)


def handlers(kind: str) -> Scenario:
    """Keys spread over partitions; outputs land where a real producer puts them; a change is undone, others stay."""

    def play(end: BackEnd) -> None:
        end.run(counting(end, kind, SKIP))
        feed(end, "a", "b", "a", "c", "d")
        feed(end, "a", "e", deed="raise")
        feed(end, "b", deed="delete")
        feed(end, "a", "f", "g", "h", "\N{GREEK SMALL LETTER ALPHA}", "")
        end.settle()

    play.__name__ = f"handlers_{kind}"
    return Scenario(play, partitions=3, topics={"out": 5})


def policies(name: str, policy: ErrorPolicy) -> Scenario:
    """What fails for good: by an exception, and by its answer."""

    def play(end: BackEnd) -> None:
        end.run(counting(end, "plain", policy))
        feed(end, "a", "b")
        end.send(Added("bad", 1, "raise"), b"\x00key", headers=[("trace", b"\xff"), ("trace", None)])
        feed(end, "a")
        end.send(Added("worse", 1, "fail"), None)
        feed(end, "a")
        end.settle()

    play.__name__ = f"policy_{name}"
    return Scenario(play)


@scenario()
def stops(end: BackEnd) -> None:
    """The default policy: the source stops, what came before is committed; the next one meets the record again."""
    end.run(counting(end, "plain", STOP), start=False)
    end.start()
    feed(end, "a", "b")
    end.settle()
    feed(end, "bad", deed="raise")
    feed(end, "c")
    end.failure()
    end.notes["committed when it stopped"] = end.committed()
    end.failure("the same again", end.restart)


@scenario()
def fatal(end: BackEnd) -> None:
    """An answer that stops the source whatever its policy says."""
    end.run(counting(end, "plain", SKIP))
    feed(end, "a")
    end.settle()
    feed(end, "bad", deed="fatal")
    end.failure()


@scenario(partitions=2)
def bad_input(end: BackEnd) -> None:
    """Records that nobody can read: no type, unknown type, a value that is none, versions that are none."""

    end.run(telling(end), decode_policy=DEAD_LETTER)
    added: Headers = [(TYPE_HEADER, b"Added")]
    feed(end, "a", "b")
    end.send_raw(b"{}", b"no type")
    end.send_raw(b"{}", b"unknown", headers=[(TYPE_HEADER, b"Unheard")])
    end.send_raw(b"{}", b"null type", headers=[(TYPE_HEADER, None)])
    end.send_raw(b"{}", b"not text", headers=[(TYPE_HEADER, b"\xff")])
    end.send_raw(b'{"name": 5}', b"wrong", headers=added)
    end.send_raw(b"", b"empty", headers=added)
    end.send_raw(None, b"tombstone", headers=added)
    end.send_raw(b'{"name": "old"}', b"version", headers=[*added, (VERSION_HEADER, b"one")])
    end.send_raw(b'{"name": "old"}', b"version", headers=[*added, (VERSION_HEADER, b"7")])
    end.send_raw(None, None, partition=1)
    feed(end, "a", "b")
    end.settle()


@scenario()
def bad_input_stops(end: BackEnd) -> None:
    """The default policy for what cannot be read."""
    end.run(counting(end))
    feed(end, "a")
    end.settle()
    end.send_raw(b"?", b"x", headers=[(TYPE_HEADER, b"Added")])
    end.failure()


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


@scenario(partitions=3)
def restart(end: BackEnd) -> None:
    """A source that stops and starts again goes on with the stores that it had."""
    end.run(counting(end))
    feed(end, "a", "b", "c", "d", "e")
    feed(end, "a", deed="delete")
    end.settle()
    end.leave()
    feed(end, "a", "b")
    end.restart()
    feed(end, "c")
    end.settle()


SCENARIOS = [
    handlers("plain"),
    nightly(handlers("async")),
    nightly(handlers("blocking")),
    nightly(policies("skip", SKIP)),
    policies("dead_letter", DEAD_LETTER),
    policies("retried", RETRIED),
    stops,
    fatal,
    bad_input,
    bad_input_stops,
    records,
    interjections,
    restart,
]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    must_be_equal(one, kafka_broker.bootstrap_servers)
