"""Sessions of an outbox by the address of its database. A driver is imported when an address needs it."""

from __future__ import annotations

from typing import Final

from streams.outbox.database import OutboxSession

SQLITE: Final = "sqlite:"
"""The beginning of an address of SQLite: ``sqlite:FILE``."""


def open_session(database: str, table: str) -> OutboxSession:
    """Open a session. Raises ``DatabaseLost``, ``ConfigError``, and ``ModuleNotFoundError`` without the driver."""
    if database.startswith(SQLITE):
        from streams.outbox.sqlite import SqliteSession

        return SqliteSession(database.removeprefix(SQLITE), table)
    from streams.outbox.postgres import PostgresSession

    return PostgresSession(database, table)


def has_password(database: str) -> bool:
    """Check whether there is a password in an address. Raises ``ConfigError`` for one that cannot be read."""
    if database.startswith(SQLITE):
        return False
    from streams.outbox.postgres import parts_of

    return bool(parts_of(database).get("password"))
