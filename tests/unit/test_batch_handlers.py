"""Handlers that get lists of events: what is in a list, what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streams import (
    DEAD_LETTER,
    SKIP,
    BatchContext,
    ErrorPolicy,
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Table,
)
from streams.events import event_type, upcaster
from streams.metrics import BatchFailed, EventFailed, Measurement, TransactionSettled
from streams.testing import TestDriver

Totals = Table[str, int]
OUT = "out"


@event_type("batched.Added", version=2)
class Added(msgspec.Struct, frozen=True):
    key: str
    amount: int = 1


@upcaster(Added, from_version=1)
def _(old: Any) -> Any:
    return {"key": old["name"], "amount": 100}


@event_type("batched.Other")
class Other(msgspec.Struct, frozen=True):
    key: str


@event_type("batched.Total")
class Total(msgspec.Struct, frozen=True):
    key: str
    total: int
    offset: int


Handle = Callable[[BatchContext[Totals], list[Added]], Any]


class Bench:
    """A source with one batch handler, and what it has seen: ``calls`` are lists of keys."""

    def __init__(self, policy: ErrorPolicy = SKIP, then: Handle | None = None, store: Any = None) -> None:
        self.calls: list[list[str]] = []
        self.attempts: list[int] = []
        self.measured: list[Measurement] = []
        config = EventSourceConfig(
            group_id="g",
            topic="in",
            num_partitions=1,
            error_policy=policy,
            decode_policy=DEAD_LETTER,
            metrics_handler=self.measured.append,
        )
        self.source: EventSource[Any] = EventSource(config, store or Table.factory(key=str, value=int))

        def added(ctx: BatchContext[Totals], events: list[Added]) -> ExecutionState | None:
            self.calls.append([event.key for event in events])
            self.attempts.append(ctx.attempt)
            for event, record in zip(events, ctx.records, strict=True):
                count(ctx, event.key, event.amount, record.offset)
            answer: ExecutionState | None = None if then is None else then(ctx, events)
            return answer

        def other(ctx: EventContext[Totals], event: Other) -> None:
            self.calls.append([f"<{event.key}>"])
            count(ctx, event.key, 1, ctx.offset)

        self.source.register_event_type(Added, added, batch=True)
        self.source.register_event_type(Other, other)

    def run(self, *keys: str, then: Callable[[TestDriver[Any]], None] = lambda driver: None) -> list[tuple[str, int]]:
        """Send these (``<key>`` is of the other type), returns (key, total) of what came out."""
        with TestDriver(self.source, topics={OUT: 1}) as driver:
            for key in keys:
                send(driver, key)
            driver.settle()
            then(driver)
            driver.settle()
            driver.check()
            self.letters = [record.key for record in driver.dead_letters()]
            self.state = driver.changelog(0)
            return [(event.key, event.total) for event in driver.outputs(OUT, Total)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.measured if isinstance(one, kind)]


def count(ctx: EventContext[Totals], key: str, amount: int, offset: int) -> None:
    total = ctx.store.get(key, 0) + amount
    ctx.store.put(key, total)
    ctx.forward(OUT, Total(key, total, offset), key=key)


def send(driver: TestDriver[Any], key: str) -> None:
    event = Other(key.strip("<>")) if key.startswith("<") else Added(key)
    driver.send(event, key=key, wait=False)


def test_events_that_follow_each_other_come_as_a_list() -> None:
    bench = Bench()
    assert bench.run("a", "b", "a") == [("a", 1), ("b", 1), ("a", 2)]
    assert bench.calls == [["a", "b", "a"]]
    (settled,) = bench.of(TransactionSettled)
    assert (settled.events, settled.outputs, settled.changes) == (3, 3, 2)
    assert bench.state == {b'"a"': b"2", b'"b"': b"1"} or len(bench.state) == 2


def test_another_type_ends_the_list() -> None:
    bench = Bench()
    assert bench.run("a", "<x>", "b", "a", "<x>", "<x>") == [
        ("a", 1), ("x", 1), ("b", 1), ("a", 2), ("x", 2), ("x", 3)
    ]  # fmt: skip
    assert bench.calls == [["a"], ["<x>"], ["b", "a"], ["<x>"], ["<x>"]]


def test_a_failure_is_that_of_one_event() -> None:
    def fails(ctx: BatchContext[Totals], events: list[Added]) -> None:
        if any(event.key == "bad" for event in events):
            raise ValueError("no")

    bench = Bench(DEAD_LETTER, fails)
    assert bench.run("a", "bad", "a", "b") == [("a", 1), ("a", 2), ("b", 1)]
    assert bench.calls == [["a", "bad", "a", "b"], ["a"], ["bad"], ["a"], ["b"]]
    assert bench.letters == [b"bad"]
    assert [(one.offset, one.error) for one in bench.of(BatchFailed)] == [(3, "ValueError: no")]
    assert [(one.offset, one.error) for one in bench.of(EventFailed)] == [(1, "ValueError: no")]
