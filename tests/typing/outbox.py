"""What the type checkers must see in an outbox. Checked by mypy and pyright, never run.

An ``ignore`` here is an assertion too: strict mypy reports it as soon as the mistake below it is no longer refused.
"""

from __future__ import annotations

from typing import Any, assert_type

import msgspec
import psycopg

from streams import AsyncOutbox, Outbox, Record


class Withdrawn(msgspec.Struct, frozen=True):
    account: str


def blocking(db: psycopg.Connection[Any], cursor: psycopg.Cursor[Any], other: psycopg.AsyncConnection[Any]) -> None:
    outbox = Outbox()
    outbox.stash(db, "bank-events", Withdrawn("alice"), key="alice", headers=[("trace", None)], partition=1)
    outbox.stash(cursor, "bank-events", None, key=b"alice")
    outbox.stash_many(db, [Record("bank-events", b"")], ordered=False)
    assert_type(outbox.statement([]), tuple[str, list[Any]])
    assert_type(outbox.statement([], "sqlalchemy"), tuple[str, dict[str, Any]])
    outbox.stash(other, "bank-events", Withdrawn("alice"))  # type: ignore[arg-type]
    outbox.stash(db, "bank-events", Withdrawn("alice"), key=1)  # type: ignore[arg-type]
    outbox.stash(db, Withdrawn("alice"))  # type: ignore[call-arg, arg-type]
    outbox.statement([], "django")  # type: ignore[call-overload]


async def awaited(db: psycopg.AsyncConnection[Any], other: psycopg.Connection[Any]) -> None:
    outbox = AsyncOutbox()
    await outbox.stash(db, "bank-events", Withdrawn("alice"), key="alice")
    await outbox.stash(db.cursor(), "bank-events", None, key="alice")
    await outbox.stash(other, "bank-events", Withdrawn("alice"))  # type: ignore[arg-type]
