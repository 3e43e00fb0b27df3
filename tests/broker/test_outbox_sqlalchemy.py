"""Stashing by SQLAlchemy: in the transaction of its Connection or Session, blocking and awaited."""

from __future__ import annotations

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from streams import AsyncOutbox, Outbox, Record
from streams.errors import OutboxError
from streams.outbox.postgres import PostgresSession
from tests.broker.outbox_kit import Counted, PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    address = postgres.make_database()
    with PostgresSession(address, "kes_outbox") as session:
        session.apply(4)
    return address


def url(database: str) -> str:
    return database.replace("postgresql://", "postgresql+psycopg://")


def keys(database: str) -> list[bytes]:
    with psycopg.connect(database) as db:
        return [row[0] for row in db.execute("SELECT key FROM kes_outbox ORDER BY id")]


def test_connections_and_sessions(database: str) -> None:
    outbox = Outbox()
    engine = sqlalchemy.create_engine(url(database), poolclass=sqlalchemy.NullPool)
    with engine.connect() as db:
        outbox.stash(db, "t", Counted("a", 1), key="undone")
        db.rollback()
        outbox.stash(db, "t", Counted("a", 1), key="a")
        db.commit()
    with Session(engine) as session, session.begin():
        session.execute(sqlalchemy.text("SELECT 1"))
        outbox.stash(session, "t", None, key="b")
        text, arguments = outbox.statement([Record("t", b"", b"c")], "sqlalchemy")
        session.execute(sqlalchemy.text(text), arguments)
        nested = session.begin_nested()
        outbox.stash(session, "t", None, key="undone")
        nested.rollback()
    assert keys(database) == [b"a", b"b", b"c"]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db, pytest.raises(OutboxError):
        outbox.stash(db, "t", None, key="a")
    automatic = sqlalchemy.create_engine(url(database), isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool)
    with Session(automatic) as session, pytest.raises(OutboxError, match="in autocommit"):
        outbox.stash(session, "t", None, key="a")
    assert len(keys(database)) == 3


async def test_the_same_awaited(database: str) -> None:
    outbox = AsyncOutbox()
    engine = create_async_engine(url(database), poolclass=sqlalchemy.NullPool)
    async with engine.begin() as db:
        await outbox.stash(db, "t", Counted("a", 1), key="a")
    async with AsyncSession(engine) as session, session.begin():
        await outbox.stash(session, "t", None, key="b")
    async with engine.connect() as db:
        await outbox.stash(db, "t", None, key="undone")
        await db.rollback()
    assert keys(database) == [b"a", b"b"]
    automatic = create_async_engine(url(database), isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool)
    async with automatic.connect() as db:
        with pytest.raises(OutboxError, match="in autocommit"):
            await outbox.stash(db, "t", None, key="a")
