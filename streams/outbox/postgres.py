"""The relay's session of PostgreSQL, by psycopg: the next rows of a shard, their deletion, sleep and wake-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import conninfo, sql

from streams.core.outbox import RowId
from streams.errors import ConfigError, OutboxError
from streams.outbox.database import (
    DatabaseLost,
    OutboxAbout,
    ParkedRow,
    ShardStatus,
    StashedRow,
    check_columns,
    check_version,
    made_tables,
    other_shards,
)
from streams.outbox.schema import (
    AWAKE_LOCKS,
    COLUMNS,
    FLUSH,
    FOUND_FUNCTION,
    OWNER_LOCKS,
    PARKED_COLUMNS,
    SCHEMA,
    VERSION,
    checked_table,
    functions_sql,
    parked_index,
    parked_index_sql,
    schema_sql,
    stash_function,
    upgrade_sql,
)
from streams.records import DEFAULT_MESSAGE_LIMIT, Headers, Output, shown_key
from streams.sak.bell import Bell

_CONNECT_SECONDS: Final = 10
_MOST_RETRIED: Final = 10_000
_SESSION: Final = """
SET synchronous_commit = on;  -- a delete that is known has to outlive a crash
SET idle_session_timeout = '10s';  -- ends the session of a relay that is frozen, and its locks with it
SET idle_in_transaction_session_timeout = '10s';  -- the same for one that is frozen in a deletion
SET statement_timeout = '60s';
SET tcp_keepalives_idle = 5;
SET tcp_keepalives_interval = 2;
SET tcp_keepalives_count = 3;
SET client_encoding = 'UTF8'
"""
# Rows of a key that has a parked one wait. NOT EXISTS behind OR is no join, for which a planner might sort the whole
# shard: it is a hash of the parked keys if they are few, else a look into their index for each row. The sizes of keys
# and values in TOAST are known without reading them. A time that was set by hand may be one that no record can have.
_FETCH: Final = """
SELECT id, tag, topic, key, value, header_names, header_values, partition,
       (extract(epoch FROM least(greatest(stashed_at, '1970-01-02'), clock_timestamp())) * 1000)::bigint
FROM (
  SELECT *, sum(size) OVER (ORDER BY id, tag) AS through
  FROM (
    SELECT *, coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)
      + octet_length(array_send(header_values)) AS size
    FROM {table} AS waiting
    WHERE shard = %(shard)s
      AND (key IS NULL OR NOT EXISTS (
        SELECT FROM {parked} AS parked WHERE parked.shard = %(shard)s AND parked.key = waiting.key))
    ORDER BY id, tag LIMIT %(rows)s
  ) AS head
) AS sized
WHERE through - size <= %(bytes)s
ORDER BY id, tag
"""
# With the range of ids it is an index scan of the batch; without it a hash of the whole shard.
_DELETE: Final = """
DELETE FROM {rows} AS stashed USING unnest(%(ids)s::bigint[], %(tags)s::integer[]) AS sent (id, tag)
WHERE stashed.shard = %(shard)s AND stashed.id BETWEEN %(first)s AND %(last)s
  AND stashed.id = sent.id AND stashed.tag = sent.tag
"""
_DROP: Final = """
DELETE FROM {rows} WHERE shard = %s AND id <= %s AND stashed_at <= to_timestamp(%s / 1000.0::float8)
"""
_PARKED_RECORDS: Final = """
SELECT shard, id, tag, topic, key, value, header_names, header_values, partition,
       (extract(epoch FROM least(greatest(stashed_at, '1970-01-02'), clock_timestamp())) * 1000)::bigint
FROM {parked} WHERE id = %s ORDER BY tag
"""
_COLUMNS: Final = "id, tag, topic, key, value, header_names, header_values, partition, stashed_at, attempts"
_PARK: Final = """
WITH refused AS (DELETE FROM {table} WHERE shard = %s AND id = %s AND tag = %s RETURNING *)
INSERT INTO {parked} (shard, {columns}, error, next_try_at)
SELECT shard, id, tag, topic, key, value, header_names, header_values, partition, stashed_at, attempts + 1, %s,
       clock_timestamp() + least(%s * 2.0 ^ least(attempts, 30), %s) * interval '1 second'
FROM refused
"""
# Not all at once, which could take longer than a statement may. The rest of a key keeps those that are back waiting.
_RETRY: Final = """
WITH due AS (
  DELETE FROM {parked} WHERE shard = %(shard)s AND (id, tag) IN (
    SELECT id, tag FROM {parked} WHERE shard = %(shard)s AND next_try_at <= clock_timestamp() LIMIT %(most)s)
  RETURNING *
)
INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM due
"""
_NOTE: Final = "UPDATE {shards} SET serial = greatest(serial, %s) WHERE shard = %s"
_ABOUT: Final = "SELECT identity::text, version, shards, topic_id, '{table}'::regclass::oid::integer FROM {table}_about"
_COLUMNS_OF: Final = """
SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = %s::text::regclass AND attnum > 0 AND NOT attisdropped
"""
_NUMBERING: Final = """
SELECT (SELECT seqcache FROM pg_sequence WHERE seqrelid = pg_get_serial_sequence('{table}', 'id')::regclass),
       (SELECT substring(pg_get_expr(adbin, adrelid) FROM '% ([0-9]+)[)]') FROM pg_attrdef JOIN pg_attribute
        ON attrelid = adrelid AND attnum = adnum WHERE adrelid = '{table}'::regclass AND attname = 'shard'),
       (SELECT count(*)::integer FROM {table}_shards)
"""


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn psycopg's errors into those of this package; the address of the database is not in them."""
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise OutboxError(f"{_first_line(error)}: run `kes outbox apply`") from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise OutboxError(f"the database refuses the relay: {_first_line(error)}") from None
    except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
        # Internal: a session that was ended within a transaction, and a server that is read-only after a failover.
        raise DatabaseLost(_first_line(error)) from None
    except psycopg.Error as error:  # a server that is too old, tables that were changed by hand
        raise OutboxError(f"the database refuses a statement: {_first_line(error)}") from None


def parts_of(database: str) -> dict[str, Any]:
    """Take an address apart. Raises ``ConfigError`` for one that cannot be read."""
    try:
        return conninfo.conninfo_to_dict(database)
    except psycopg.ProgrammingError:
        raise ConfigError("the address of the database cannot be read: postgresql://user@host/name") from None


def refuse_shared_sessions(connection: Any, connect: Callable[[], Any]) -> None:
    """Refuse a pooler that gives a session of the server to another client after each transaction: locks, wake-ups and
    settings of a relay would be those of others. Raises ``OutboxError``.

    A pooler makes up the process id that libpq is given, so that one in between is known. It shares sessions if two
    connections at a time are one session of the server; one that happens to give them two is not found out.
    """
    pid = _server_process(connection)
    if connection.info.backend_pid in (0, pid):  # none in between
        return
    try:
        other = connect()
        # A pool in session mode that has no second session has it wait, as long as it likes.
        timer = threading.Timer(_CONNECT_SECONDS, other.close)
        timer.start()
        try:
            is_shared = _server_process(other) == pid
        finally:
            timer.cancel()
            other.close()
    except psycopg.Error:
        return
    if is_shared:
        raise OutboxError(
            "a pooler in transaction mode is between relay and database: give the relay an address of the server "
            "itself, or of a pool in session mode (PgBouncer: pool_mode = session). Writers may use the pooler"
        )


def _server_process(connection: Any) -> int:
    return int(connection.execute("SELECT pg_backend_pid()").fetchone()[0])


def _first_line(error: psycopg.Error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class PostgresSession:
    """One connection, in autocommit: each call is a transaction of its own. One thread.

    All calls raise ``DatabaseLost`` (nothing more is to be done with the session) and ``OutboxError``.
    """

    def __init__(self, database: str, table: str) -> None:
        self._table = checked_table(table)
        self._bell: Bell | None = None  # of a session that listens
        known = {"connect_timeout": _CONNECT_SECONDS, "application_name": "kes-outbox", **parts_of(database)}

        def connect() -> psycopg.Connection[Any]:
            return psycopg.connect(**known, autocommit=True)

        with database_errors():
            self._connection = connect()
            try:
                refuse_shared_sessions(self._connection, connect)
                self._connection.execute(_SESSION)
            except BaseException:
                self._connection.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self._bell is not None:  # not by ``close``, since the thread of the session may be about to wait
            self._bell.close()

    def close(self) -> None:
        """End the session, and its locks with it. Also from another thread, to end a call that hangs."""
        self._connection.close()
        self.rouse()

    def about(self) -> OutboxAbout:
        """Describe the outbox; refuse tables of another version."""
        found = OutboxAbout(*self._one(_ABOUT.replace("{table}", self._table)))
        check_version(found.version, self._table)
        self._check_tables(found)
        return found

    def _check_tables(self, about: OutboxAbout) -> None:
        """Refuse tables that were changed by hand such that rows would be lost, or come in another order."""
        table = self._table
        for name, wanted in ((table, COLUMNS), (f"{table}_parked", PARKED_COLUMNS)):
            with database_errors():
                check_columns(name, wanted, self._connection.execute(_COLUMNS_OF, [name]).fetchall())
        cache, divisor, shards = self._one(_NUMBERING.replace("{table}", table))
        if cache != 1:
            raise OutboxError(
                f"the ids of {table} come from a sequence with CACHE {cache}: a session keeps ids for later, and those "
                f"of a key are not in the order of the commits. ALTER TABLE {table} ALTER COLUMN id SET CACHE 1"
            )
        if (divisor, shards) != (str(about.shards), about.shards):
            raise OutboxError(
                f"{table}_about has {about.shards} shards, {table}_shards {shards}, and the column shard of {table} "
                f"counts modulo {divisor}: rows would wait where no relay looks. Make another outbox with another table"
            )

    def show_owner(self, lock_class: int, shard: int) -> None:
        """Show in ``status`` that this session works on a shard; free again when the session ends. It keeps no
        other one out."""
        self._one("SELECT pg_try_advisory_lock_shared(%s, %s)", lock_class, OWNER_LOCKS + shard)

    def adopt(self, topic_id: str, replace: bool = False) -> str:
        """Note the positions topic that the outbox belongs to, if none is noted yet or ``replace``; return the one that
        is."""
        with database_errors():
            text = f"UPDATE {self._table}_about SET topic_id = %s WHERE topic_id = '' OR %s"
            self._connection.execute(text.encode(), [topic_id, replace])
        return str(self._one(f"SELECT topic_id FROM {self._table}_about")[0])

    def noted_serial(self, shard: int) -> int:
        """Return the serial of the last batch that was deleted."""
        return int(self._one(f"SELECT serial FROM {self._table}_shards WHERE shard = %s", shard)[0])

    def fetch(self, shard: int, rows: int, size: int) -> list[StashedRow]:
        """Return rows as ``OutboxSession.fetch``; a crash of the server does not undo their transactions any more."""
        arguments = {"shard": shard, "rows": rows, "bytes": size}
        with database_errors():
            cursor = self._connection.execute(self._sql(_FETCH), arguments, binary=True)
            found = [_stashed_row(shard, index, *row) for index, row in enumerate(cursor)]
            if found:
                self._connection.execute(FLUSH)
            return found

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> int:
        """Delete rows that are in Kafka, those that are still there, and note the serial in the same transaction;
        returns how many were there."""
        deleted = 0
        with database_errors(), self._connection.transaction():
            if rows:
                ids = [row.id for row in rows]
                arguments = {
                    "ids": ids,
                    "tags": [row.tag for row in rows],
                    "shard": shard,
                    "first": min(ids),
                    "last": max(ids),
                }
                # In this order: a relay that was frozen may park a row that it had, and that is sent by now.
                for name in (self._table, f"{self._table}_parked"):
                    deleted += self._connection.execute(
                        self._sql(_DELETE, rows=sql.Identifier(name)), arguments
                    ).rowcount
            self._note(shard, serial)
        return deleted

    def drop_through(self, shard: int, last: int, until_ms: int) -> int:
        """Delete the rows up to this id, parked ones too, that were stashed up to this time; returns their number."""
        with database_errors(), self._connection.transaction():
            return sum(
                self._connection.execute(self._sql(_DROP, rows=sql.Identifier(name)), [shard, last, until_ms]).rowcount
                for name in (self._table, f"{self._table}_parked")
            )

    def _note(self, shard: int, serial: int) -> None:
        # A relay that was frozen may come late with an old one: the greater stays.
        self._connection.execute(self._sql(_NOTE), [serial, shard])

    def park(self, shard: int, row: RowId, error: str, first_seconds: float, longest_seconds: float) -> None:
        """Set a row aside: it is tried again after ``first_seconds``, doubled each time; later rows of its key wait."""
        shown = error.replace("\0", "").encode("ascii", "backslashreplace").decode()  # in any encoding of the server
        arguments = [shard, row.id, row.tag, shown, first_seconds, longest_seconds]
        with database_errors():
            self._connection.execute(self._sql(_PARK), arguments)

    def retry_parked(self, shard: int) -> int:
        """Take the parked rows back whose time has come, to their place in the order; returns their number."""
        with database_errors():
            return self._connection.execute(self._sql(_RETRY), {"shard": shard, "most": _MOST_RETRIED}).rowcount

    def listen(self) -> None:
        """Receive wake-ups from now on."""
        self._bell = Bell()
        with database_errors():
            self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._table)))

    def fall_asleep(self, lock_class: int, shard: int) -> bool:
        """Have writers send wake-ups. Not possible while one has stashed and its transaction is still open. What was
        committed before is to be fetched once more before ``sleep``."""
        return bool(self._one("SELECT pg_try_advisory_lock(%s, %s)", lock_class, AWAKE_LOCKS + shard)[0])

    def sleep(self, shard: int, seconds: float) -> bool:
        """Wait for a wake-up, at most so long; returns whether it came."""
        assert self._bell is not None, "listen comes first"
        with database_errors():
            if self._has_wake_up(shard):  # it came with an earlier answer
                return True
            self._bell.wait(self._connection.fileno(), seconds)
            return self._has_wake_up(shard)

    def _has_wake_up(self, shard: int) -> bool:
        return any(notice.payload == str(shard) for notice in self._connection.notifies(timeout=0))

    def rouse(self) -> None:
        """End the sleep that is under way, or the next one, at once. Any thread."""
        if self._bell is not None:
            self._bell.ring()

    def wake(self, lock_class: int, shard: int) -> None:
        """Have writers send no wake-ups any more."""
        self._one("SELECT pg_advisory_unlock(%s, %s)", lock_class, AWAKE_LOCKS + shard)

    def status(self, about: OutboxAbout) -> list[ShardStatus]:
        """Look at all shards."""
        found = []
        for shard in range(about.shards):
            text = f"""
                SELECT (SELECT count(*) FROM (SELECT 1 FROM {self._table} WHERE shard = %s LIMIT 100000) AS head),
                       (SELECT count(*) FROM {self._table}_parked WHERE shard = %s),
                       (SELECT extract(epoch FROM
                          clock_timestamp() - greatest(least(stashed_at, clock_timestamp()), '1970-01-02'))::float
                        FROM {self._table} WHERE shard = %s ORDER BY id LIMIT 1),
                       (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
                        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                        AND classid = '{self._table}'::regclass::oid AND objid = %s LIMIT 1)"""
            waiting, parked, age, owner = self._one(text, shard, shard, shard, OWNER_LOCKS + shard)
            found.append(ShardStatus(shard, waiting, parked, max(age or 0.0, 0.0), self.noted_serial(shard), owner))
        return found

    def parked(self) -> list[ParkedRow]:
        """List parked rows by id, 1,000 at most."""
        text = f"""
            SELECT id, tag, shard, topic, key, attempts,
                   greatest(extract(epoch FROM next_try_at - clock_timestamp()), 0)::float, error
            FROM {self._table}_parked ORDER BY id, tag LIMIT 1000"""
        with database_errors():
            rows = self._connection.execute(text.encode()).fetchall()
        return [ParkedRow(*row)._replace(key=shown_key(row[4])) for row in rows]

    def parked_records(self, number: int) -> list[StashedRow]:
        """Return the parked rows with this id, as they would be sent."""
        with database_errors():
            cursor = self._connection.execute(self._sql(_PARKED_RECORDS), [number], binary=True)
            return [_stashed_row(shard, index, *row) for index, (shard, *row) in enumerate(cursor)]

    def hasten_parked(self) -> int:
        """Have all parked rows tried again now; returns their number."""
        text = f"UPDATE {self._table}_parked SET next_try_at = clock_timestamp()"
        with database_errors():
            return self._connection.execute(text.encode()).rowcount

    def drop_parked(self, row: RowId) -> int:
        """Delete a parked row; returns how many there were."""
        text = f"DELETE FROM {self._table}_parked WHERE id = %s AND tag = %s"
        with database_errors():
            return self._connection.execute(text.encode(), row).rowcount

    def apply(self, shards: int, max_record_bytes: int = DEFAULT_MESSAGE_LIMIT) -> str:
        """Make the tables if they are missing, bring those of an older version to this one; returns what was made, or
        nothing. Two at once make them once. Refuses tables of a newer version, or with another number of shards."""
        made = ""
        with database_errors(), self._connection.transaction():
            self._connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"kes outbox {self._table}"])
            if self._one("SELECT to_regclass(%s) IS NULL", f"{self._table}_about")[0]:
                text = schema_sql(self._table, shards, max_record_bytes)
                self._connection.execute(text.encode())
                return made_tables(self._table)
            version = self._one(f"SELECT version FROM {self._table}_about")[0]
            if version < VERSION:
                self._connection.execute(upgrade_sql(version, self._table).encode())
                made = f"version {VERSION} of the tables of {self._table}, from {version}"
            if self._one("SELECT to_regclass(%s) IS NULL", index := parked_index(self._table))[0]:
                self._connection.execute(parked_index_sql(self._table).encode())
                made = made or f"index {index}"
            functions, name = functions_sql(self._table), stash_function(self._table)
            schema, found = self._one(FOUND_FUNCTION, name, self._table)
            if found not in functions.replace(SCHEMA, schema):
                self._connection.execute(functions.encode())
                made = made or f"functions {name} and {name}_rows"
        if (about := self.about()).shards != shards:
            raise other_shards(self._table, about.shards, shards)
        return made

    def _one(self, text: str, *arguments: Any) -> tuple[Any, ...]:
        with database_errors():
            row: tuple[Any, ...] | None = self._connection.execute(text.encode(), arguments or None).fetchone()
        if row is None:
            raise OutboxError(f"the tables of {self._table} are not whole: a row of one beside it is missing")
        return row

    def _sql(self, text: LiteralString, **names: sql.Composable) -> sql.Composed:
        own = {name: sql.Identifier(f"{self._table}_{name}") for name in ("parked", "shards")}
        return sql.SQL(text).format(table=sql.Identifier(self._table), columns=sql.SQL(_COLUMNS), **own, **names)


def _stashed_row(
    shard: int,
    index: int,
    number: int,
    tag: int,
    topic: str,
    key: bytes | None,
    value: bytes | None,
    names: list[str],
    contents: list[bytes | None],
    partition: int | None,
    timestamp_ms: int,
) -> StashedRow:
    headers: Headers | None = list(zip(names, contents, strict=True)) or None
    to = -1 if partition is None else partition
    return StashedRow(RowId(number, tag), Output(topic, value, key, headers, to, timestamp_ms, shard, index))
