"""A sink over a database that is not there: what is done again, and what has no fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import psycopg
import pytest

from streams import DEAD_LETTER, BatcherConfig, EventContext, EventSource, EventSourceConfig, PostgresSink, SinkItem
from streams.testing import TestDriver


class Moved(msgspec.Struct, frozen=True):
    count: int


class Remind(msgspec.Struct, frozen=True):
    count: int


class Database:
    """A connection whose fence begins at 0. ``failures``: of the next commands."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def execute(self, query: str, arguments: object = ()) -> Self:
        if self._failures:
            raise self._failures.pop(0)
        return self

    async def fetchone(self) -> tuple[str, int]:
        return "", 0

    async def close(self) -> None: ...


BAD = 7


def sink_of(database: Any, failure: Exception | None = None, **settings: Any) -> tuple[EventSource[Any], list[int]]:
    """A source with a sink that collects what it would write, within 0.2 s; with ``BAD`` in it a call fails."""
    config = EventSourceConfig(group_id="g", topic="stock", num_partitions=1, error_policy=DEAD_LETTER)
    source: EventSource[Any] = EventSource(config)
    sink, written = PostgresSink(source, "postgresql:///nowhere", name="stock", **settings), list[int]()
    source._declared.lifespans.clear()

    async def connect() -> Any:
        return database

    sink._connect = connect  # type: ignore[method-assign]

    @sink.register_event_type(Moved)
    async def moved(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[Moved]]) -> None:
        counts = [item.event.count for item in items]
        if failure is not None and BAD in counts:
            raise failure
        await asyncio.sleep(0.2)
        written.extend(counts)

    return source, written


@pytest.mark.parametrize(
    ("failure", "letters"),
    [
        (psycopg.OperationalError("cut off"), 0),
        (psycopg.errors.IdleInTransactionSessionTimeout("terminating connection: the worker was frozen"), 0),
        (psycopg.errors.TransactionTimeout("terminating connection: the worker was frozen"), 0),
        (psycopg.errors.ReadOnlySqlTransaction("it is a standby"), 0),
        (psycopg.errors.UniqueViolation("twice"), 1),
    ],
    ids=["cut off", "frozen", "frozen long", "standby", "wrong"],
)
def test_what_passes_is_done_again_and_meets_no_policy(failure: psycopg.Error, letters: int) -> None:
    source, written = sink_of(Database(failure))
    with TestDriver(source) as driver:
        driver.send(Moved(3), key="a")
        driver.advance(1.0)
        assert len(driver.dead_letters()) == letters
        assert written == [3][letters:]


@pytest.mark.parametrize(
    ("failure", "settings"),
    [
        (ValueError("wrong"), {}),
        (ValueError("wrong"), {"config": BatcherConfig(max_batch_size=500, timeout_seconds=1.0)}),
        (psycopg.errors.ProgramLimitExceeded("index row size 2712 exceeds btree version 4 maximum 2704"), {}),
        (psycopg.errors.QueryCanceled("canceling statement due to statement timeout"), {"retry_seconds": 0}),
    ],
    ids=["wrong", "one by one in the time of a call", "for good", "always a timeout"],
)
def test_one_bad_event_takes_no_other_with_it(failure: Exception, settings: dict[str, Any]) -> None:
    source, written = sink_of(Database(), failure, **settings)
    with TestDriver(source) as driver:
        for count in range(12):
            driver.send(Moved(count), key="a", wait=False)
        driver.advance(20.0)
        [letter] = driver.dead_letters()
        assert str(BAD) in (letter.value or b"").decode()
        assert written == [count for count in range(12) if count != BAD]


def test_the_event_of_a_timer_is_refused_and_not_left_out_in_silence() -> None:
    source, written = sink_of(Database())

    @source.register_event_type(Remind)
    def remind(ctx: EventContext[Any], event: Remind) -> None:
        ctx.schedule_in(1, Moved(event.count))

    with TestDriver(source) as driver:
        driver.send(Remind(3), key="a")
        driver.advance(5.0)
        (letter,) = driver.dead_letters()
        assert "no offset" in (letter.header("__kes_dlq_message") or b"").decode()
        assert not written
