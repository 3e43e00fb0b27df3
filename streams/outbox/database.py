"""The seam between a relay and a database: what a session does, and the values that it passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from streams.core.outbox import RowId
from streams.errors import OutboxError
from streams.outbox.schema import VERSION
from streams.records import Output


class DatabaseLost(Exception):
    """The database does not answer, or has ended the session. It may come back."""


class StashedRow(NamedTuple):
    """A row, and its record."""

    row: RowId
    output: Output


class ShardStatus(NamedTuple):
    """Waiting rows of a shard (counted up to 100,000), parked ones, the age of the oldest in seconds, the last serial,
    its owner's process id in the database (``None``: no relay)."""

    shard: int
    waiting: int
    parked: int
    oldest_seconds: float
    serial: int
    owner: int | None


class ParkedRow(NamedTuple):
    """A row that Kafka refuses. ``key`` and ``error`` as they are shown. ``id`` and ``tag`` name it (``RowId``)."""

    id: int
    tag: int
    shard: int
    topic: str
    key: str
    attempts: int
    next_try_seconds: float
    error: str


class OutboxAbout(NamedTuple):
    """An outbox as its database describes it. ``identity``: a uuid, made with the tables. ``lock_class``: a number
    by which the database knows the table. ``topic_id``: the positions topic that it belongs to; ``""``: no
    relay has run yet."""

    identity: str
    version: int
    shards: int
    topic_id: str
    lock_class: int


def check_version(version: int, table: str) -> None:
    """Refuse tables that this program does not know. Raises ``OutboxError``."""
    if version != VERSION:
        what = "update this program" if version > VERSION else "run `kes outbox apply`"
        raise OutboxError(f"the tables of {table} have version {version}, this program needs {VERSION}: {what}")


def check_columns(table: str, wanted: Mapping[str, str], found: Iterable[tuple[str, str]]) -> None:
    """Refuse a table without a column, or with one of another type; others may be there. Raises ``OutboxError``."""
    kinds = dict(found)
    for name, kind in wanted.items():
        if kinds.get(name) != kind:
            what = f"has the type {kinds[name]}, not {kind}" if name in kinds else "is missing"
            raise OutboxError(f"column {name} of {table} {what}: make an outbox with `kes outbox apply` or `sql`")


class OutboxSession(Protocol):
    """One session of the database of an outbox; each call is a transaction of its own. One thread.

    All calls raise ``DatabaseLost`` (nothing more is to be done with the session) and ``OutboxError``.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None:
        """End the session, and its locks with it. Also from another thread, to end a call that hangs."""
        ...

    def about(self) -> OutboxAbout:
        """Describe the outbox; refuse tables of another version."""
        ...

    def show_owner(self, lock_class: int, shard: int) -> None:
        """Show in ``status`` that this session works on a shard. It keeps no other one out."""
        ...

    def adopt(self, topic_id: str, replace: bool = False) -> str:
        """Note the positions topic that the outbox belongs to, if none is noted yet or ``replace``; return the one that
        is."""
        ...

    def noted_serial(self, shard: int) -> int:
        """Return the serial of the last batch that was deleted."""
        ...

    def fetch(self, shard: int, rows: int, size: int) -> list[StashedRow]:
        """Return the next rows by id: so many, and not much more than ``size`` bytes, but one at least. A crash of the
        server does not undo their transactions any more."""
        ...

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> int:
        """Delete rows that are in Kafka, those that are still there, and note the serial in the same transaction;
        returns how many were there."""
        ...

    def drop_through(self, shard: int, last: int, until_ms: int) -> int:
        """Delete the rows up to this id, parked ones too, that were stashed up to this time; returns their number."""
        ...

    def park(self, shard: int, row: RowId, error: str, first_seconds: float, longest_seconds: float) -> None:
        """Set a row aside: it is tried again after ``first_seconds``, doubled each time; later rows of its key wait."""
        ...

    def retry_parked(self, shard: int) -> int:
        """Take the parked rows back whose time has come, to their place in the order; returns their number."""
        ...

    def listen(self) -> None:
        """Receive wake-ups from now on."""
        ...

    def fall_asleep(self, lock_class: int, shard: int) -> bool:
        """Have writers send wake-ups. Not possible while one has stashed and its transaction is still open. What was
        committed before is to be fetched once more before ``sleep``."""
        ...

    def sleep(self, shard: int, seconds: float) -> bool:
        """Wait for a wake-up, at most so long; returns whether it came."""
        ...

    def rouse(self) -> None:
        """End the sleep that is under way, or the next one, at once. Any thread."""
        ...

    def wake(self, lock_class: int, shard: int) -> None:
        """Have writers send no wake-ups any more."""
        ...

    def status(self, about: OutboxAbout) -> list[ShardStatus]:
        """Look at all shards."""
        ...

    def parked(self) -> list[ParkedRow]:
        """List parked rows by id, 1,000 at most."""
        ...

    def parked_records(self, number: int) -> list[StashedRow]:
        """Return the parked rows with this id, as they would be sent: one, or none, or several after a failover of the
        database that has used the id again."""
        ...

    def hasten_parked(self) -> int:
        """Have all parked rows tried again now; returns their number."""
        ...

    def drop_parked(self, row: RowId) -> int:
        """Delete a parked row; returns how many there were."""
        ...

    def apply(self, shards: int) -> str:
        """Make the tables if they are missing, bring those of an older version to this one; returns what was made, or
        nothing. Two at once make them once. Refuses tables of a newer version, or with another number of shards."""
        ...


def made_tables(table: str) -> str:
    """Say which tables were made."""
    return f"tables {table}, {table}_parked, {table}_shards, {table}_about"


def other_shards(table: str, there: int, wanted: int) -> OutboxError:
    """Make the error for tables that are there with another number of shards."""
    return OutboxError(
        f"{table} has {there} shards, not {wanted}. It is made with them: for another number, let the relay empty it, "
        "stop writers and relays, and make another outbox with another table and name"
    )
