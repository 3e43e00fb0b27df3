"""``kes outbox``: the tables of an outbox, its relay, and the rows that Kafka refuses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import typer
from rich.table import Table as Grid

from streams.cli.cluster import Json, Servers, brokers
from streams.cli.console import duration, emit, notices
from streams.errors import ConfigError, OutboxError
from streams.outbox.config import DATABASE_VARIABLE, RelayConfig
from streams.outbox.postgres import DatabaseLost, ParkedRow, PostgresSession, ShardStatus
from streams.outbox.relay import Relay, apply
from streams.outbox.schema import DEFAULT_TABLE, schema_sql
from streams.outbox.shard import RelayEvent, RowParked, ShardAcquired, ShardReleased

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)
parked_app = typer.Typer(no_args_is_help=True)
app.add_typer(parked_app, name="parked", help="Rows that Kafka refuses: list, retry, drop.")

Name = Annotated[str, typer.Option(help="The name of the outbox in Kafka: its topic is NAME.outbox.")]
Database = Annotated[str, typer.Option(help=f"postgresql://user@host/name. Default: {DATABASE_VARIABLE}.")]
TableName = Annotated[str, typer.Option("--table", help="The table of the outbox.")]
Shards = Annotated[int, typer.Option(min=1, max=256, help="How many relays can share the work; fixed from then on.")]

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS: Final = 0.5


@app.command("apply")
def apply_command(
    name: Name,
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: TableName = DEFAULT_TABLE,
    shards: Shards = 4,
    replication_factor: Annotated[int, typer.Option(min=1, help="Of the positions topic.")] = 1,
) -> None:
    """Make the tables, the functions and the positions topic, as far as they are missing."""
    config = _config(name, database, bootstrap_servers, table)
    for made in apply(config, shards, replication_factor) or ["nothing: all of it is there"]:
        notices().print(f"made {made}", highlight=False, markup=False)


@app.command("sql")
def sql_command(table: TableName = DEFAULT_TABLE, shards: Shards = 4) -> None:
    """Print the statements that make tables and functions, for a migration tool. The topic is made by `apply`."""
    typer.echo(schema_sql(table, shards))


@app.command("relay")
def relay_command(
    name: Name, database: Database = "", bootstrap_servers: Servers = "", table: TableName = DEFAULT_TABLE
) -> None:
    """Move committed rows to Kafka, once each, until Ctrl-C or SIGTERM. Any number of relays may run."""
    relay = Relay(_config(name, database, bootstrap_servers, table))
    relay.on_event(_report)
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in _STOP_SIGNALS}
    try:
        with relay:
            while not stopped.wait(_LOOK_SECONDS) and not relay.wait(0):
                pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command("status")
def status_command(database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """Show of each shard: waiting and parked rows, the age of the oldest, the last batch, whether a relay owns it."""
    with _session(database, table) as session:
        found = _known(lambda: session.status(session.about()))
    emit([status._asdict() for status in found], json, lambda: _status_table(found))


@parked_app.command("list")
def parked_list(database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """List the parked rows, with the error of each; 1,000 at most."""
    with _session(database, table) as session:
        found = _known(session.parked)
    emit([row._asdict() for row in found], json, lambda: _parked_table(found))


@parked_app.command("retry")
def parked_retry(database: Database = "", table: TableName = DEFAULT_TABLE) -> None:
    """Have all parked rows tried again now."""
    with _session(database, table) as session:
        notices().print(f"{_known(session.hasten_parked)} rows are tried again", highlight=False)


@parked_app.command("drop")
def parked_drop(
    row: Annotated[int, typer.Argument(metavar="ID", help="The id of the row, as `list` shows it.")],
    database: Database = "",
    table: TableName = DEFAULT_TABLE,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a parked row: it is never sent, and the rows of its key go on."""
    if not yes:
        typer.confirm(f"Delete row {row}? It is in no topic.", abort=True)
    with _session(database, table) as session:
        dropped = _known(lambda: session.drop_parked(row))
    if not dropped:
        raise OutboxError(f"no row {row} is parked in {table}: it was sent, dropped, or is being tried")
    notices().print(f"row {row} is dropped", highlight=False)


def _config(name: str, database: str, bootstrap_servers: str, table: str) -> RelayConfig:
    return RelayConfig(name=name, database=database, bootstrap_servers=brokers(bootstrap_servers), table=table)


def _session(database: str, table: str) -> PostgresSession:
    address = database or os.environ.get(DATABASE_VARIABLE, "")
    if not address:
        raise ConfigError(f"no database is named: use --database, or the variable {DATABASE_VARIABLE}")
    return _known(lambda: PostgresSession(address, table))


def _known(call: Callable[[], T]) -> T:
    """Call the database. Raises ``OutboxError`` where it does not answer."""
    try:
        return call()
    except DatabaseLost as error:
        raise OutboxError(f"the database does not answer: {error}") from None


def _report(event: RelayEvent) -> None:
    if isinstance(event, ShardAcquired):
        line = f"shard {event.shard}: acquired, last batch {event.serial}"
    elif isinstance(event, ShardReleased):
        line = f"shard {event.shard}: released" + (f": {event.reason}" if event.reason else "")
    elif isinstance(event, RowParked):
        line = f"shard {event.shard}: row {event.id} for {event.topic} is parked: {event.error}"
    else:
        return
    notices().print(line, highlight=False, markup=False)


def _status_table(found: list[ShardStatus]) -> Grid:
    grid = Grid("shard", "waiting", "parked", "oldest", "last batch", "owned")
    for shard in found:
        age = duration(shard.oldest_seconds) if shard.waiting else "-"
        owned = "yes" if shard.owner else "no"
        grid.add_row(str(shard.shard), f"{shard.waiting:,}", f"{shard.parked:,}", age, str(shard.serial), owned)
    return grid


def _parked_table(found: list[ParkedRow]) -> Grid:
    grid = Grid("id", "shard", "topic", "key", "attempts", "next try in", "error")
    for row in found:
        seconds = duration(row.next_try_seconds)
        grid.add_row(str(row.id), str(row.shard), row.topic, row.key, str(row.attempts), seconds, row.error)
    return grid
