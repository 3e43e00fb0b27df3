"""One handler of any kind over ``TestDriver``: events in, and what they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streams import (
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Retry,
)
from streams.testing import TestDriver
from tests.vocabulary import TOTALS, Added, Total, Work, config_of, register

OUT = "out"
SMALL = 20_000


def config(partitions: int = 1, **settings: Any) -> EventSourceConfig:
    return config_of(group_id="g", topic="in", num_partitions=partitions, **settings)


def driven(
    work: Work,
    kind: str = "plain",
    on_error: Retry | None = None,
    *,
    store: Any = TOTALS,
    partitions: int = 1,
    limits: Sequence[str] = (),
    start: bool = True,
    outputs: Sequence[str] = (),
    **settings: Any,
) -> TestDriver[Any]:
    """A driver of one handler. ``limits``: topics that take ``SMALL`` records only; ``outputs``: declared ones."""
    source = EventSource(config(partitions, **settings), store)
    register(source, work, kind, on_error)
    for name in outputs:
        source.output(name, num_partitions=1)
    driver = TestDriver(source, topics={OUT: 1}, start=start)
    driver._world.broker.limits.update(dict.fromkeys(limits, SMALL))
    return driver


def send(driver: TestDriver[Any], *names: str, deed: str = "", partition: int = 0, wait: bool = True) -> None:
    for name in names:
        driver.send(Added(name, 1, deed), key=name, partition=partition, wait=wait)


def totals(driver: TestDriver[Any]) -> list[tuple[str, int]]:
    return [(total.name, total.amount) for total in driver.outputs(OUT, Total)]


def letters(driver: TestDriver[Any], *names: str) -> list[tuple[str, ...]]:
    """These facts of each dead letter."""
    return [
        tuple((letter.header(f"__kes_dlq_{name}") or b"").decode() for name in names)
        for letter in driver.dead_letters()
    ]


def counts(driver: TestDriver[Any], partition: int = 0) -> dict[str, Any]:
    """The table, which is also what would be restored."""
    found = dict(driver.store(partition).items())
    assert dict(driver.restored_store(partition).items()) == found
    return found


def misbehave(ctx: EventContext[Any], deed: str) -> ExecutionState | None:
    """End as the deed says, after some effects."""
    match deed:
        case "raise":
            ctx.store.delete("first")
            raise KeyError("the reason")
        case "ctx.fail":
            return ctx.fail(KeyError("the reason"))
        case "FAIL" | "FATAL" | "COMPLETE":
            return ExecutionState[deed]
    return None
