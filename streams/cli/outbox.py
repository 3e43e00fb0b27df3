"""``kes outbox``: the tables of an outbox, its relay, and the rows that Kafka refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.table import Table as Grid
from rich.text import Text

from streams.cli.cluster import Json, Servers
from streams.cli.console import duration, emit, notices
from streams.cli.logging_setup import LogOptions
from streams.cli.records import one_line, plain_bytes, plain_text
from streams.cli.run import StatusLines
from streams.cli.supervisor import Supervisor, worker_command
from streams.cli.worker import WorkerOptions
from streams.config import host_name
from streams.errors import ConfigError, OutboxError
from streams.outbox.config import DATABASE_VARIABLE, RelayConfig
from streams.outbox.database import DatabaseLost, OutboxSession, ParkedRow, ShardStatus, open_session
from streams.outbox.purge import AfterRestore, PurgedShard, purge
from streams.outbox.relay import Relay, apply
from streams.outbox.relay_file import relay_config
from streams.outbox.schema import DEFAULT_TABLE, schema_sql
from streams.outbox.shard import BatchRelayed, RelayEvent, described
from streams.sak.restarts import RestartPolicy

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)
parked_app = typer.Typer(no_args_is_help=True)
app.add_typer(parked_app, name="parked", help="Rows that Kafka refuses: list, show, retry, drop.")

Name = Annotated[str, typer.Option(help="The name of the outbox in Kafka: its topic is NAME.outbox.")]
Database = Annotated[str, typer.Option(help=f"postgresql://user@host/name. Default: {DATABASE_VARIABLE}.")]
TableName = Annotated[str, typer.Option("--table", help="The table of the outbox.")]
Shards = Annotated[int, typer.Option(min=1, max=256, help="How many relays can share the work; fixed from then on.")]
RowNumber = Annotated[int, typer.Argument(metavar="ID", help="The id of the row, as `list` shows it.")]
SettingsFile = Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="YAML with the settings of a relay.")]

WORKER_VARIABLE: Final = "KES_OUTBOX_WORKER"
"""Environment variable with the settings of a relay, for worker processes."""
_DRAIN_SECONDS: Final = 60.0


@app.command("apply")
def apply_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: Annotated[str, typer.Option("--table", help="The table of the outbox.")] = "",
    file: SettingsFile = "",
    shards: Shards = 4,
    replication_factor: Annotated[int, typer.Option(min=1, help="Of the positions topic.")] = 1,
) -> None:
    """Make the tables, the functions and the positions topic, as far as they are missing; bring tables of an older
    version to this one, with the relays stopped."""
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    for made in apply(config, shards, replication_factor) or ["nothing: all of it is there"]:
        notices().print(f"made {made}", highlight=False, markup=False)


@app.command("sql")
def sql_command(table: TableName = DEFAULT_TABLE, shards: Shards = 4) -> None:
    """Print the statements that make tables and functions, for a migration tool. The topic is made by `apply`."""
    typer.echo(schema_sql(table, shards))


@app.command("relay")
def relay_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: Annotated[str, typer.Option("--table", help="The table of the outbox.")] = "",
    file: SettingsFile = "",
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Processes that are kept alive.")] = 1,
) -> None:
    """Move committed rows to Kafka, once each, until Ctrl-C or SIGTERM. Any number of relays may run, and share the
    shards."""
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    if workers > 1:
        raise typer.Exit(_supervise(config, workers))
    relay = Relay(config)
    relay.on_event(_report)
    relay.run()


def _supervise(config: RelayConfig, workers: int) -> int:
    """Keep worker processes alive; a dead one is taken out of the group at once. Returns the exit code."""
    os.environ[WORKER_VARIABLE] = msgspec.json.encode(config).decode()  # not an argument: it may hold a password
    supervisor = Supervisor(
        worker_command(WorkerOptions(f"{__name__}:relay_of_worker", LogOptions())),
        workers=workers,
        instance_prefix=host_name(),
        policy=RestartPolicy(),
        drain_seconds=_DRAIN_SECONDS,
        status=StatusLines(quiet=False),
    )
    return supervisor.run()


def relay_of_worker() -> Relay:
    """Make the relay of a worker process, from the settings that the supervisor has read."""
    return Relay(msgspec.json.decode(os.environ[WORKER_VARIABLE], type=RelayConfig))


@app.command("status")
def status_command(database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """Show of each shard: waiting and parked rows, the age of the oldest, the last batch, whether a relay owns it."""
    with _session(database, table) as session:
        found = _known(lambda: session.status(session.about()))
    emit([status._asdict() for status in found], json, lambda: _status_table(found))


@app.command("purge")
def purge_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: Annotated[str, typer.Option("--table", help="The table of the outbox.")] = "",
    file: SettingsFile = "",
    after_restore: Annotated[
        AfterRestore,
        typer.Option(
            help="Go on after database or topic were set back: `send` what is left, or `drop` what was there."
        ),
    ] = "no",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete the rows that are in Kafka already, and send none. With --after-restore it is the way out after a database
    or a positions topic was set back."""
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    if after_restore != "no" and not yes:
        what = "Rows may be sent twice" if after_restore == "send" else "Rows that were late are lost"
        typer.confirm(f"{what}. Are all relays and writers stopped?", abort=True)
    found = purge(config, after_restore)
    emit([shard._asdict() for shard in found], json, lambda: _purged_table(found))


@parked_app.command("list")
def parked_list(database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """List the parked rows, with the error of each; 1,000 at most."""
    with _session(database, table) as session:
        found = _known(session.parked)
    emit([row._asdict() for row in found], json, lambda: _parked_table(found))


@parked_app.command("show")
def parked_show(row: RowNumber, database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """Show a parked row whole: key, headers and value as they would be sent."""
    with _session(database, table) as session:
        found = _known(lambda: session.parked_records(row))
    if not found:
        raise _not_parked(row, table)
    output = found[0].output
    facts = {
        "id": row,
        "topic": output.topic,
        "partition": None if output.partition < 0 else output.partition,
        "key": plain_text(output.key),
        "headers": [[name, plain_text(value)] for name, value in output.headers or ()],
        "stashed_at_ms": output.timestamp_ms,
        "value": plain_bytes(output.value),
    }
    emit(facts, json, lambda: _facts_table(facts))


@parked_app.command("retry")
def parked_retry(database: Database = "", table: TableName = DEFAULT_TABLE) -> None:
    """Have all parked rows tried again now."""
    with _session(database, table) as session:
        notices().print(f"{_known(session.hasten_parked)} rows are tried again", highlight=False)


@parked_app.command("drop")
def parked_drop(
    row: RowNumber,
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
        raise _not_parked(row, table)
    notices().print(f"row {row} is dropped", highlight=False)


def _not_parked(row: int, table: str) -> OutboxError:
    return OutboxError(f"no row {row} is parked in {table}: it was sent, dropped, or is being tried")


def _session(database: str, table: str) -> OutboxSession:
    address = database or os.environ.get(DATABASE_VARIABLE, "")
    if not address:
        raise ConfigError(f"no database is named: use --database, or the variable {DATABASE_VARIABLE}")
    return _known(lambda: open_session(address, table))


def _known(call: Callable[[], T]) -> T:
    """Call the database. Raises ``OutboxError`` where it does not answer."""
    try:
        return call()
    except DatabaseLost as error:
        raise OutboxError(f"the database does not answer: {error}") from None


def _report(event: RelayEvent) -> None:
    if not isinstance(event, BatchRelayed):
        notices().print(described(event), highlight=False, markup=False)


def _status_table(found: list[ShardStatus]) -> Grid:
    grid = Grid("shard", "waiting", "parked", "oldest", "last batch", "owned")
    for shard in found:
        age = duration(shard.oldest_seconds) if shard.waiting else "-"
        owned = "yes" if shard.owner else "no"
        grid.add_row(str(shard.shard), f"{shard.waiting:,}", f"{shard.parked:,}", age, str(shard.serial), owned)
    return grid


def _purged_table(found: list[PurgedShard]) -> Grid:
    grid = Grid("shard", "last batch", "deleted", "dropped")
    for shard in found:
        grid.add_row(str(shard.shard), str(shard.serial), f"{shard.deleted:,}", f"{shard.dropped:,}")
    return grid


def _facts_table(facts: dict[str, Any]) -> Grid:
    grid = Grid("", "", show_header=False)
    for name, value in facts.items():
        grid.add_row(name, Text(one_line(value)))
    return grid


def _parked_table(found: list[ParkedRow]) -> Grid:
    grid = Grid("id", "shard", "topic", "key", "attempts", "next try in", "error")
    for row in found:
        seconds = duration(row.next_try_seconds)
        grid.add_row(str(row.id), str(row.shard), row.topic, row.key, str(row.attempts), seconds, row.error)
    return grid
