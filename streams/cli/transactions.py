"""``kes transactions``: open transactions in the topics of an event source, and the end of those no client ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from streams.cli.cluster import Json, Servers, SourceName, Timeout, admin_of, await_listener, brokers, named_source
from streams.cli.console import emit, notices
from streams.clients import kafka_python_settings
from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.open_transactions import OpenTransactions
from streams.config import EventSourceConfig
from streams.errors import TopicError
from streams.group import HANGING_SECONDS, OpenTransaction

app = typer.Typer(no_args_is_help=True, help="Transactions that are open in topics: list, hanging, abort.")

_CLOSE_SECONDS: Final = 2.0

_Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="A topic to look into, instead of the changelog and the dead letters. Repeatable."),
]


@app.command("list")
def list_open(
    source: SourceName,
    topic: _Topics = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """Show all open transactions, and which transactional id has them. Changes nothing.

    Exit codes: 0 shown, also when there are none; 1 no answer, or no such topic; 2 wrong usage.
    """
    _show(source, topic, bootstrap_servers, timeout, json=json, only_hanging=False)


@app.command()
def hanging(
    source: SourceName,
    topic: _Topics = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """Show the open transactions that no coordinator lists, and the command that ends each. Changes nothing.

    Exit codes: 0 shown, also when there are none; 1 no answer, or no such topic; 2 wrong usage.
    """
    _show(source, topic, bootstrap_servers, timeout, json=json, only_hanging=True)


@app.command()
def abort(
    source: SourceName,
    topic: Annotated[str, typer.Option(help="The topic.")],
    partition: Annotated[int, typer.Option(min=0, help="The partition.")],
    start_offset: Annotated[int, typer.Option(min=0, help="Where the transaction begins, as `hanging` shows it.")],
    min_age: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds since its last record: no fewer than the brokers' transaction.max.timeout.ms."
        ),
    ] = HANGING_SECONDS,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """End a hanging transaction: its records in this partition are aborted, and readers go on behind them.

    Refused if a coordinator lists the transaction: that one ends it; and if its last record is younger than
    --min-age. Needs the rights ClusterAction, and Describe of all transactional ids: what this principal must not see
    looks as if no coordinator knew of it.

    Exit codes: 0 ended; 1 refused, not confirmed, or no answer; 2 wrong usage.
    """
    config = named_source(source).config
    servers = brokers(bootstrap_servers, config)
    if not yes:
        typer.confirm(f"Abort the transaction at offset {start_offset} of {topic}[{partition}]?", abort=True, err=True)
    await_listener(servers, timeout)
    with _questions(servers, config) as questions:
        ended = questions.abort(topic, partition, start_offset, time.monotonic() + timeout, min_age_seconds=min_age)
    emit(
        {"bootstrap_servers": servers, "aborted": msgspec.structs.asdict(ended)},
        json,
        lambda: f"ended: {topic}\\[{partition}], the transaction of producer {ended.producer_id} at {start_offset}",
    )


def _show(name: str, topics: list[str] | None, option: str, timeout: float, *, json: bool, only_hanging: bool) -> None:
    config = named_source(name).config
    servers = brokers(option, config)
    deadline = time.monotonic() + timeout
    found: list[OpenTransaction] = []
    with admin_of(servers, config, timeout) as admin, _questions(servers, config) as questions:
        counts = admin.describe(topics or [config.changelog, config.dead_letters], timeout)
        for topic, description in counts.items():
            if description is None:
                raise TopicError(f"topic {topic} does not exist at {servers}")
            found += questions.find(topic, range(description.partitions), deadline)
    shown = [txn for txn in found if txn.is_hanging or not only_hanging]
    emit(
        {"bootstrap_servers": servers, "transactions": [_facts(txn) for txn in shown]},
        json,
        lambda: _table(shown) if shown else "no open transactions" if not only_hanging else "no hanging transactions",
    )
    if not json:
        for txn in shown:
            if txn.is_hanging:
                notices().print(_command(name, txn), soft_wrap=True, markup=False)


@contextmanager
def _questions(servers: str, config: EventSourceConfig) -> Iterator[OpenTransactions]:
    client = KafkaPythonClient(servers, "kes-cli", kafka_python_settings.security_of(config.client_settings))
    client.start()
    try:
        yield OpenTransactions(client)
    finally:
        client.close(_CLOSE_SECONDS)


def _facts(txn: OpenTransaction) -> dict[str, Any]:
    return {**msgspec.structs.asdict(txn), "hanging": txn.is_hanging}


def _command(source: str, txn: OpenTransaction) -> str:
    return (
        f"to end it: kes transactions abort {source} --topic {txn.topic} --partition {txn.partition} "
        f"--start-offset {txn.start_offset}"
    )


def _table(found: list[OpenTransaction]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("topic", overflow="fold")
    for name in ("partition", "from offset", "producer id", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("transactional id", overflow="fold")
    table.add_column("state", no_wrap=True)
    for txn in found:
        numbers = (txn.partition, txn.start_offset, txn.producer_id, txn.producer_epoch)
        owner, state = (txn.transactional_id, txn.state) if not txn.is_hanging else ("none", "hanging")
        style = "bold red" if txn.is_hanging else ""
        table.add_row(txn.topic, *map(str, numbers), owner, state, style=style)
    return table
