"""A sink over a database that is not there: what is done again, and what has no fence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import psycopg
import pytest

from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, PostgresSink, SinkItem
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


def sink_of(database: Any) -> tuple[EventSource[Any], list[int]]:
    """A source with a sink that collects what it would write."""
    config = EventSourceConfig(group_id="g", topic="stock", num_partitions=1, error_policy=DEAD_LETTER)
    source: EventSource[Any] = EventSource(config)
    sink, written = PostgresSink(source, "postgresql:///nowhere", name="stock"), list[int]()
    source._further_lifespans.clear()

    async def connect() -> Any:
        return database

    sink._connect = connect  # type: ignore[method-assign]

    @sink.register_event_type(Moved)
    async def moved(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[Moved]]) -> None:
        written.extend(item.event.count for item in items)

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
