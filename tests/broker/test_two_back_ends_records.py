"""The driver's answers are the broker's: records that are refused, topics that are not there, transactional input."""

from __future__ import annotations

from typing import Any

import pytest

from streams import DEAD_LETTER, STOP, ErrorPolicy, EventContext
from streams.testing.fixtures import BrokerAddress
from tests.broker.back_ends_kit import BackEnd, Make, Scenario, making, scenario
from tests.broker.gate import nightly
from tests.broker.two_back_ends import must_be_equal
from tests.vocabulary import ADDED, MISDEEDS, Added, Totals, added, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

SMALL = {"out": {"max.message.bytes": "20000"}}


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
        tell_total(ctx, event, end.out)
        MISDEEDS[event.deed](ctx, end.out)

    return making(work, on_error=policy)


def refused(deed: str) -> Scenario:
    """One of many: it becomes a dead letter with this reason, its neighbours are there once and in order."""

    def play(end: BackEnd) -> None:
        end.run(misbehaving(end, DEAD_LETTER))
        for number in range(9):
            end.send(Added("ab"[number % 2], 1, deed if number == 4 else ""), "ab"[number % 2])
        end.settle()

    play.__name__ = "refused_" + "".join(letter if letter.isalnum() else "_" for letter in deed)
    return Scenario(play, topics={"out": 2}, configs=SMALL)


@scenario(configs=SMALL)
def refused_and_stopped(end: BackEnd) -> None:
    """The same under the default policy: what the source says."""
    end.run(misbehaving(end, STOP))
    end.send(Added("a"), "a")
    end.settle()
    end.send(Added("a", 1, "over the topic's limit"), "a")
    end.failure()


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


SCENARIOS = [*map(refused, DEEDS[:3]), *map(nightly, map(refused, DEEDS[3:])), refused_and_stopped, transactional_input]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    must_be_equal(one, kafka_broker.bootstrap_servers)
