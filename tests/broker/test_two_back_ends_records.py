"""The driver's answers are the broker's: records that are refused, topics that are not there, transactional input."""

from __future__ import annotations

from typing import Any

import pytest

from streams import DEAD_LETTER, STOP, ErrorPolicy, EventContext, EventSource, EventSourceConfig, Record
from streams.records import TYPE_HEADER, Headers
from streams.testing.fixtures import BrokerAddress
from tests.broker.back_ends_kit import BackEnd, Make, Scenario, scenario
from tests.broker.engine_kit import TOTALS, Added, Total, Totals, added
from tests.broker.two_back_ends import compare

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

ADDED: Headers = [(TYPE_HEADER, b"Added")]


def misbehave(end: BackEnd, ctx: EventContext[Totals], deed: str) -> None:
    match deed:
        case "over the client's limit":
            ctx.forward(end.out, Total("x" * 1_000_001, 1))
        case "just under the client's limit":  # with its overhead it is over
            ctx.forward(Record(end.out, b"x" * 999_990))
        case "over the topic's limit":
            ctx.forward(Record(end.name("small"), b"x" * 50_000, b"big"))
        case "invalid topic name":
            ctx.forward("no topic/with such: a name", Total("a", 1))
        case "unknown partition":
            ctx.forward(end.out, Total("a", 1), partition=99)
        case "negative partition":
            ctx.forward(end.out, Total("a", 1), partition=-7)
        case "year 3000":
            ctx.forward(end.out, Total("a", 1), partition=0, timestamp_ms=32_503_680_000_000)
        case "value of the wrong type":
            ctx.forward(Record(end.out, {"a": 1}))  # type: ignore[arg-type]
        case "key of the wrong type":
            ctx.forward(Record(end.out, b"x", 5))  # type: ignore[arg-type]
        case "header of the wrong type":
            ctx.forward(end.out, Total("a", 1), headers=[("h", 5)])  # type: ignore[list-item]
        case "large change":
            ctx.store.put("x" * 1_000_000, 1)
        case _:
            assert not deed


DEEDS = [
    "over the client's limit",
    "just under the client's limit",
    "over the topic's limit",
    "invalid topic name",
    "unknown partition",
    "negative partition",
    "year 3000",
    "value of the wrong type",
    "key of the wrong type",
    "header of the wrong type",
    "large change",
]


def misbehaving(end: BackEnd, policy: ErrorPolicy) -> Make:
    def work(ctx: EventContext[Totals], event: Added) -> None:
        total = ctx.store.get(event.name, 0) + event.amount
        ctx.store.put(event.name, total)
        ctx.forward(end.out, Total(event.name, total), key=event.name)
        misbehave(end, ctx, event.deed)

    def make(config: EventSourceConfig) -> EventSource[Totals]:
        source = EventSource(config, TOTALS)
        source.register_event_type(Added, work, on_error=policy)
        return source

    return make


def refused(deed: str) -> Scenario:
    """One of many: it becomes a dead letter with this reason, its neighbours are there once and in order."""

    def play(end: BackEnd) -> None:
        end.run(misbehaving(end, DEAD_LETTER))
        for number in range(9):
            end.send(Added("ab"[number % 2], 1, deed if number == 4 else ""), "ab"[number % 2])
        end.settle()

    play.__name__ = "refused_" + "".join(letter if letter.isalnum() else "_" for letter in deed)
    return Scenario(play, topics={"out": 2, "small": 1}, configs={"small": {"max.message.bytes": "20000"}})


@scenario(topics={"out": 1, "small": 1}, configs={"small": {"max.message.bytes": "20000"}})
def refused_and_stopped(end: BackEnd) -> None:
    """The same under the default policy: what the source says."""
    end.run(misbehaving(end, STOP))
    end.send(Added("a"), "a")
    end.settle()
    end.send(Added("a", 1, "over the topic's limit"), "a")
    end.failure()


def totals(end: BackEnd, seen: list[Any]) -> Make:
    def work(ctx: EventContext[Totals], event: Added) -> None:
        record = ctx.input
        assert record is not None
        seen.append((record.partition, record.offset, event.name))
        total = ctx.store.get(event.name, 0) + event.amount
        ctx.store.put(event.name, total)
        ctx.forward(end.out, Total(event.name, total), key=event.name)

    def make(config: EventSourceConfig) -> EventSource[Totals]:
        source = EventSource(config, TOTALS)
        source.register_event_type(Added, work)
        return source

    return make


@scenario(partitions=2)
def transactional_input(end: BackEnd) -> None:
    """Markers take offsets, aborted records are not seen, and a log that ends with them is at its end."""
    seen: list[Any] = []
    end.run(totals(end, seen))
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


SCENARIOS = [*map(refused, DEEDS), refused_and_stopped, transactional_input]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    found = compare(one, kafka_broker.bootstrap_servers)
    assert not found, "\n".join(found)
