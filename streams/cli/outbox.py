"""``kes outbox``: the tables of an outbox, its relay, and the rows that Kafka refuses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from streams.cli.cluster import Json, Servers
from streams.cli.cluster import watch as watch_again
from streams.cli.console import answers, complain, emit, frameless, notices
from streams.cli.logging_setup import LogOptions
from streams.cli.run import StatusLines, served
from streams.cli.supervisor import Status, Supervisor, worker_command, worker_names
from streams.cli.worker import WorkerOptions
from streams.errors import ConfigError, OutboxError
from streams.looks.figures import duration
from streams.looks.records import one_line, plain_bytes, plain_text
from streams.outbox.config import DATABASE_VARIABLE, RelayConfig
from streams.outbox.database import DatabaseLost, OutboxSession, ParkedRow, ShardStatus, StashedRow
from streams.outbox.purge import AfterRestore, PurgedShard, purge
from streams.outbox.relay import Relay, apply
from streams.outbox.relay_file import relay_config
from streams.outbox.schema import DEFAULT_TABLE, schema_sql
from streams.outbox.sessions import open_session
from streams.outbox.shard import BatchRelayed, RelayEvent, described
from streams.records import shown_key
from streams.sak.restarts import RestartPolicy
from streams.settings.config import host_name

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)
parked_app = typer.Typer(no_args_is_help=True)
app.add_typer(parked_app, name="parked", help="Manage rows that Kafka refuses: list, show, retry, drop.")

Name = Annotated[str, typer.Option(help="Name of the outbox in Kafka. Its topic is NAME.outbox.")]
Database = Annotated[str, typer.Option(help=f"postgresql://user@host/name. Default: {DATABASE_VARIABLE}.")]
TableName = Annotated[str, typer.Option("--table", help="Table of the outbox.")]
Shards = Annotated[
    int, typer.Option(min=1, max=256, help="Maximum number of relays that share the work. Cannot be changed later.")
]
RowNumber = Annotated[int, typer.Argument(metavar="ID", max=2**63 - 1, help="Id of the row, as shown by `list`.")]
Tag = Annotated[int | None, typer.Option(help="Tag of the row, if several have the same id after a failover.")]
SettingsFile = Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="Settings of the relay (YAML).")]

WORKER_VARIABLE: Final = "KES_OUTBOX_WORKER"
"""Environment variable with the settings of a relay, for worker processes."""
_DRAIN_SECONDS: Final = 60.0


@app.command("apply")
def apply_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: TableName = "",
    file: SettingsFile = "",
    shards: Shards = 4,
    replication_factor: Annotated[int, typer.Option(min=1, help="Replication factor of the positions topic.")] = 1,
) -> None:
    """Create missing tables, functions and the positions topic, and upgrade tables of an older version.

    Stop the relays before an upgrade of tables. Functions are replaced while writers and relays run.
    """
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    for made in apply(config, shards, replication_factor) or ["nothing: all of it is there"]:
        notices().print(f"made {made}", highlight=False, markup=False)


@app.command("sql")
def sql_command(table: TableName = DEFAULT_TABLE, shards: Shards = 4) -> None:
    """Print the SQL of tables and functions, for a migration tool. `apply` creates the topic."""
    typer.echo(schema_sql(table, shards))


@app.command("relay")
def relay_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: TableName = "",
    file: SettingsFile = "",
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of supervised relay processes.")] = 1,
    metrics: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or PORT to serve /metrics (Prometheus), /live and /ready.")
    ] = "",
) -> None:
    """Send committed rows to Kafka, exactly once, until Ctrl-C or SIGTERM.

    Any number of relays share the shards. A database that does not answer at the start is an error; later, a relay
    waits for it.
    """
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    if workers > 1:
        raise typer.Exit(_supervise(config, workers, metrics))
    relay = Relay(config)
    relay.on_event(_report)
    with _metrics_of(relay, metrics):
        relay.run()


def _metrics_of(relay: Relay, address: str) -> AbstractContextManager[object]:
    """Serve the metrics of a relay, if there is an address. Raises ``ConfigError``."""
    if not address:
        return nullcontext()
    try:
        from streams.observability import RelayMetrics
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from None
    return RelayMetrics(relay).serve(address)


def _supervise(config: RelayConfig, workers: int, metrics: str) -> int:
    """Keep worker processes alive; a dead one is taken out of the group at once. Returns the exit code."""
    os.environ[WORKER_VARIABLE] = msgspec.json.encode(config).decode()  # not an argument: it may hold a password
    report = StatusLines(quiet=False)
    with served(metrics, worker_names(host_name(), workers)) as noted:

        def status(status: Status) -> None:
            noted(status)
            if status["event"] != "serving":
                report(status)

        supervisor = Supervisor(
            worker_command(WorkerOptions(f"{__name__}:relay_of_worker", LogOptions(), metrics=bool(metrics))),
            workers=workers,
            instance_prefix=host_name(),
            policy=RestartPolicy(),
            drain_seconds=_DRAIN_SECONDS,
            status=status,
        )
        return supervisor.run()


def relay_of_worker() -> Relay:
    """Make the relay of a worker process, from the settings that the supervisor has read."""
    return Relay(msgspec.json.decode(os.environ[WORKER_VARIABLE], type=RelayConfig))


@app.command("status")
def status_command(
    name: Annotated[str, typer.Option(help="Ignored: the rows are in the table of --table.")] = "",
    database: Database = "",
    table: TableName = DEFAULT_TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes with --watch.")] = 2.0,
    json: Json = False,
) -> None:
    """Show each shard: waiting and parked rows, age of the oldest, last batch, and whether a relay owns it."""

    def read() -> list[ShardStatus]:  # a session for each: one of a database that was away is of no use
        with _session(database, table) as session:
            return _known(lambda: session.status(session.about()))

    if not watch:
        found = read()
        emit([status._asdict() for status in found], json, lambda: _status_table(found))
        return
    with _live(json) as show:
        watch_again(read, show, interval, time.monotonic, time.sleep, passing=OutboxError)


@app.command("purge")
def purge_command(
    name: Name = "",
    database: Database = "",
    bootstrap_servers: Servers = "",
    table: TableName = "",
    file: SettingsFile = "",
    after_restore: Annotated[
        AfterRestore,
        typer.Option(help="Resume after a restore of database or topic: `send` or `drop` the remaining rows."),
    ] = "no",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    json: Json = False,
) -> None:
    """Delete the rows that are in Kafka already. Sends nothing.

    With --after-restore, resume after a database or a positions topic was restored.
    """
    config = relay_config(file, name=name, database=database, bootstrap_servers=bootstrap_servers, table=table)
    if after_restore != "no" and not yes:
        what = "Rows may be sent twice" if after_restore == "send" else "Rows that were late are lost"
        typer.confirm(f"{what}. Are all relays and writers stopped?", abort=True)
    found = purge(config, after_restore)
    emit([shard._asdict() for shard in found], json, lambda: _purged_table(found))


@parked_app.command("list")
def parked_list(database: Database = "", table: TableName = DEFAULT_TABLE, json: Json = False) -> None:
    """List parked rows with their errors, 1,000 at most."""
    with _session(database, table) as session:
        found = _known(session.parked)
    emit([row._asdict() for row in found], json, lambda: _parked_table(found))


@parked_app.command("show")
def parked_show(
    row: RowNumber, database: Database = "", table: TableName = DEFAULT_TABLE, tag: Tag = None, json: Json = False
) -> None:
    """Show a parked row in full: key, headers and value as they would be sent."""
    with _session(database, table) as session:
        found = _parked(session, row, tag, table)
    output = found.output
    facts = {
        "id": row,
        "tag": found.row.tag,
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
    """Retry all parked rows now."""
    with _session(database, table) as session:
        notices().print(f"{_known(session.hasten_parked)} rows are being retried", highlight=False)


@parked_app.command("drop")
def parked_drop(
    row: RowNumber,
    database: Database = "",
    table: TableName = DEFAULT_TABLE,
    tag: Tag = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
) -> None:
    """Delete a parked row. It is never sent, and the other rows of its key continue."""
    with _session(database, table) as session:
        found = _parked(session, row, tag, table)
    if not yes:
        about = f"for {found.output.topic}, key {shown_key(found.output.key)}"
        typer.confirm(f"Delete row {row} {about}? It is in no topic.", abort=True)
    with _session(database, table) as session:
        if not _known(lambda: session.drop_parked(found.row)):
            raise _not_parked(row, table)
    notices().print(f"row {row} is dropped", highlight=False)


def _parked(session: OutboxSession, row: int, tag: int | None, table: str) -> StashedRow:
    """Return the one parked row with this id (and tag). Raises ``OutboxError``: there is none, or more."""
    found = [one for one in _known(lambda: session.parked_records(row)) if tag in (None, one.row.tag)]
    if not found:
        raise _not_parked(row, table)
    if len(found) > 1:
        tags = ", ".join(str(one.row.tag) for one in found)
        raise OutboxError(f"{len(found)} parked rows of {table} have the id {row}: name one by --tag, of {tags}")
    return found[0]


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


@contextmanager
def _live(json: bool) -> Iterator[Callable[[list[ShardStatus], str], None]]:
    """Show a live table on a terminal; elsewhere a table each time, or a line of JSON."""
    console = answers()
    if json or not console.is_terminal or console.is_dumb_terminal:

        def show_again(found: list[ShardStatus], problem: str) -> None:
            if problem:
                complain(problem)
            else:
                emit([status._asdict() for status in found], json, lambda: _status_table(found))

        yield show_again
        return
    with Live(Text("asking the database ..."), console=console, auto_refresh=False) as live:

        def show(found: list[ShardStatus], problem: str) -> None:
            live.update(Group(_status_table(found), Text(problem, style="bold red")), refresh=True)

        yield show


def _status_table(found: list[ShardStatus]) -> Grid:
    grid = frameless("shard", "waiting", "parked", "oldest", "last batch", "owned")
    for shard in found:
        age = duration(shard.oldest_seconds) if shard.waiting else "-"
        owned = "yes" if shard.owner else "no"
        grid.add_row(str(shard.shard), f"{shard.waiting:,}", f"{shard.parked:,}", age, str(shard.serial), owned)
    return grid


def _purged_table(found: list[PurgedShard]) -> Grid:
    grid = frameless("shard", "last batch", "deleted", "dropped")
    for shard in found:
        grid.add_row(str(shard.shard), str(shard.serial), f"{shard.deleted:,}", f"{shard.dropped:,}")
    return grid


def _facts_table(facts: dict[str, Any]) -> Grid:
    grid = Grid("", "", show_header=False)
    for name, value in facts.items():
        grid.add_row(name, Text(one_line(value)))
    return grid


def _parked_table(found: list[ParkedRow]) -> Grid:
    grid = frameless("id", "shard", "topic", "key", "attempts", "next try in", "error")
    for row in found:
        seconds = duration(row.next_try_seconds)
        grid.add_row(str(row.id), str(row.shard), row.topic, row.key, str(row.attempts), seconds, row.error)
    return grid
