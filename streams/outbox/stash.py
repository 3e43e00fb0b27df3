"""Stash events as rows, in the SQL transaction that changes the tables: a relay moves them to Kafka, once each.

outbox = Outbox()
with psycopg.connect(DATABASE) as db:  # one transaction
    db.execute("UPDATE accounts SET cents = cents - %s WHERE id = %s", (500, "alice"))
    outbox.stash(db, "bank-events", Withdrawn("alice", 500), key="alice")  # last: it locks the key
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, overload

from streams.errors import ConfigError, OutboxError
from streams.events import to_record
from streams.outbox.schema import DEFAULT_TABLE, TOPIC_PATTERN, stash_function
from streams.outbox.sqlite import stash_rows
from streams.records import DEFAULT_MESSAGE_LIMIT, Record, record_size
from streams.settings.once import with_id

_NAMES: Final = ("topics", "keys", "contents", "partitions", "header_counts", "names", "contents_of_headers", "ordered")
_TYPES: Final = ("text[]", "bytea[]", "bytea[]", "integer[]", "integer[]", "text[]", "bytea[]", "boolean")


class SyncDatabase(Protocol):
    """A connection or cursor of psycopg, a Connection or Session of SQLAlchemy, or a connection of sqlite3, within a
    transaction."""

    def __enter__(self) -> Any: ...

    def execute(self, query: Any, params: Any = ..., /) -> Any:
        """Run a statement."""


class AsyncDatabase(Protocol):
    """The same with ``await``: AsyncConnection and AsyncCursor of psycopg, AsyncConnection and
    AsyncSession of SQLAlchemy."""

    async def __aenter__(self) -> Any: ...

    def execute(self, query: Any, params: Any = ..., /) -> Awaitable[Any]:
        """Run a statement."""
        ...


class _Statements:
    """The settings of both kinds of outbox, and the statement that stashes. No I/O; any thread."""

    def __init__(self, table: str = DEFAULT_TABLE, *, max_record_bytes: int = DEFAULT_MESSAGE_LIMIT) -> None:
        """``max_record_bytes``: the most that the topics take, headers and Kafka's own bytes included. Raises
        ``ConfigError``."""
        if type(max_record_bytes) is not int or max_record_bytes < 1:
            raise ConfigError(f"max_record_bytes is {max_record_bytes!r}; it must be a whole number, 1 or more")
        self._function, self._table = stash_function(table), table
        self._limit = max_record_bytes

    @overload
    def statement(
        self, records: Sequence[Record], style: Literal["psycopg", "asyncpg"] = "psycopg", *, ordered: bool = True
    ) -> tuple[str, list[Any]]: ...

    @overload
    def statement(
        self, records: Sequence[Record], style: Literal["sqlalchemy"], *, ordered: bool = True
    ) -> tuple[str, dict[str, Any]]: ...

    def statement(
        self,
        records: Sequence[Record],
        style: Literal["psycopg", "asyncpg", "sqlalchemy"] = "psycopg",
        *,
        ordered: bool = True,
    ) -> tuple[str, list[Any] | dict[str, Any]]:
        """Return the statement that stashes records, and its arguments, to be run within a transaction.

        ``style``: ``%s`` as psycopg and Django's cursors have it, ``$1`` (``connection.execute(text, *arguments)`` of
        asyncpg), or ``:name`` for ``sqlalchemy.text``. Raises ``OutboxError`` for records that Kafka would refuse.
        """
        for record in records:
            self._check(record)
        headers = [header for record in records for header in record.headers or ()]
        arguments: list[Any] = [
            [record.topic for record in records],
            [record.key for record in records],
            [record.value for record in records],
            [record.partition for record in records],
            [len(record.headers or ()) for record in records],
            [name for name, _ in headers],
            [value for _, value in headers],
            ordered,
        ]
        if style == "sqlalchemy":
            return self._text([f":{name}" for name in _NAMES]), dict(zip(_NAMES, arguments, strict=True))
        if style not in ("psycopg", "asyncpg"):
            raise ConfigError(f"there is no style {style!r}; use 'psycopg', 'asyncpg' or 'sqlalchemy'")
        places = ["%s"] * len(_NAMES) if style == "psycopg" else [f"${1 + at}" for at in range(len(_NAMES))]
        return self._text(places), arguments

    def _text(self, places: Iterable[str]) -> str:
        typed = (f"CAST({place} AS {kind})" for place, kind in zip(places, _TYPES, strict=True))
        return f"SELECT {self._function}_rows({', '.join(typed)})"

    def _check(self, record: Record) -> None:
        """Refuse what Kafka would refuse for sure. Raises ``OutboxError``."""
        topic = record.topic
        if not re.fullmatch(TOPIC_PATTERN, topic) or topic in (".", ".."):
            raise OutboxError(f"{str(topic)[:300]!r} is no topic's name: 1 to 249 of A-Z, a-z, 0-9, '.', '_' and '-'")
        for part, value in (("key", record.key), ("value", record.value)):
            if value is not None and not isinstance(value, bytes):
                raise OutboxError(f"the {part} for {topic} is a {type(value).__name__}; a record has bytes or None")
        number = record.partition
        if number is not None and (type(number) is not int or not 0 <= number < 2**31):
            raise OutboxError(f"the partition for {topic} is {number!r}; it must be a whole number, 0 or more")
        for name, value in record.headers or ():
            if "\0" in name:
                raise OutboxError(f"a header for {topic} is named {name!r}; a name has no zero bytes")
            if not _is_text(name):
                raise OutboxError(f"a header for {topic} is named {name!r}; that is no text in UTF-8")
            if value is not None and not isinstance(value, bytes):
                raise OutboxError(f"the header {name} for {topic} is a {type(value).__name__}; use bytes or None")
        size = record_size(record.key, record.value, record.headers)
        if size > self._limit:
            raise OutboxError(f"the record for {topic} has {size:,} bytes; max_record_bytes is {self._limit:,}")


class Outbox(_Statements):
    """The outbox of a database, for blocking programs. A value: no I/O, any thread.

    Records become rows of ``table`` (`kes outbox apply` makes it) in the transaction that is open on the connection,
    and go to Kafka after its commit: each once, those of a key in the order of the commits. Stash last, after the rows
    that the transaction changes are locked: the key is locked until its end.
    """

    def stash(
        self,
        db: SyncDatabase,
        topic: str,
        event: object,
        /,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        ordered: bool = True,
        id: str | bytes | int | None = None,
    ) -> None:
        """Stash an event, encoded as ``to_record`` does; ``None`` is a tombstone of the key.

        ``ordered=False``: the key is not locked, and its records may come in another order than the commits. ``id`` is
        the header ``kes-id``, for sources that handle each id once. Raises ``OutboxError`` (no transaction, or a record
        that Kafka would refuse), ``EncodeError``, ``RegistrationError``, and what the database raises.
        """
        self.stash_many(db, [stashed(topic, event, key, with_id(headers, id), partition)], ordered=ordered)

    def stash_many(self, db: SyncDatabase, records: Sequence[Record], /, *, ordered: bool = True) -> None:
        """Stash records in one statement, in their order. Raises as ``stash``."""
        text, arguments = self.statement(records, ordered=ordered)
        if not records:
            return
        target: Any = db
        if isinstance(target, sqlite3.Connection):
            _check_sqlite(target)
            stash_rows(target, self._table, records)
            return
        if hasattr(target, "get_bind"):  # a Session
            target = target.connection()
        if hasattr(target, "exec_driver_sql"):
            _check_sqlalchemy(target)
            target.exec_driver_sql(text, tuple(arguments))
        else:
            _check_psycopg(target)
            target.execute(text, arguments)


class AsyncOutbox(_Statements):
    """The outbox of a database, for programs on an event loop: ``Outbox``, awaited."""

    async def stash(
        self,
        db: AsyncDatabase,
        topic: str,
        event: object,
        /,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        ordered: bool = True,
        id: str | bytes | int | None = None,
    ) -> None:
        """Stash an event, as ``Outbox.stash``."""
        await self.stash_many(db, [stashed(topic, event, key, with_id(headers, id), partition)], ordered=ordered)

    async def stash_many(self, db: AsyncDatabase, records: Sequence[Record], /, *, ordered: bool = True) -> None:
        """Stash records in one statement, as ``Outbox.stash_many``."""
        text, arguments = self.statement(records, ordered=ordered)
        if not records:
            return
        target: Any = db
        if hasattr(target, "get_bind"):  # an AsyncSession
            target = await target.connection()
        if hasattr(target, "exec_driver_sql"):
            _check_sqlalchemy(target.sync_connection)
            await target.exec_driver_sql(text, tuple(arguments))
        else:
            _check_psycopg(target)
            await target.execute(text, arguments)


def stashed(
    topic: str,
    event: object,
    key: str | bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    partition: int | None,
) -> Record:
    """Make the record of an event, or a tombstone. Raises ``EncodeError`` and ``RegistrationError``."""
    if event is None:
        return Record(topic, None, key.encode() if isinstance(key, str) else key, list(headers), partition)
    return to_record(topic, event, key=key, headers=headers, partition=partition)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_psycopg(target: Any) -> None:
    """Refuse a connection on which a statement would be a transaction of its own. Raises ``OutboxError``."""
    connection = getattr(target, "connection", target)  # of a cursor
    info: Any = getattr(connection, "info", None)
    if not hasattr(info, "transaction_status"):
        kind = type(target)
        raise OutboxError(
            f"{kind.__module__}.{kind.__qualname__} is no connection of psycopg, SQLAlchemy or sqlite3: run what "
            "statement() returns on it"
        )
    if connection.autocommit and info.transaction_status.name == "IDLE":
        raise _outside()


def _check_sqlite(connection: sqlite3.Connection) -> None:
    """Refuse a connection in autocommit (Python 3.12 has two ways to it). Raises ``OutboxError``."""
    is_autocommit = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
    if is_autocommit and not connection.in_transaction:
        raise _outside()


def _check_sqlalchemy(connection: Any) -> None:
    """Refuse a connection in autocommit. Raises ``OutboxError``."""
    driver = connection.dialect.driver
    if driver not in ("psycopg", "psycopg_async"):
        raise OutboxError(f"SQLAlchemy's driver {driver} is not known here: run sqlalchemy.text(...) of statement()")
    options: Mapping[str, Any] = connection.get_execution_options()
    if options.get("isolation_level") == "AUTOCOMMIT" or connection.connection.driver_connection.autocommit:
        raise _outside()


def _outside() -> OutboxError:
    return OutboxError(
        "the connection is in autocommit, and no transaction is open: the record would be sent whatever becomes of the "
        "rest. Stash within a transaction, on the connection that changes the tables"
    )
