"""``kes txn``: open transactions, of the whole cluster or in some topics, and the end of those that no client ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, Timeout, admin_of, await_listener, named_source, refuse_to_ask
from streams.cli.console import emit, notices, plain_table
from streams.errors import OffsetError, TopicError
from streams.kafka.questions.hanging_transactions import HangingTransactions
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import Security
from streams.looks.addresses import brokers
from streams.looks.figures import duration
from streams.model.group import HANGING_SECONDS, HangingEnd, ListedTransaction, OpenTransaction
from streams.settings.config import EventSourceConfig

app = typer.Typer(no_args_is_help=True)

_Source = Annotated[
    str,
    typer.Argument(metavar="MODULE:SOURCE", help="An event source: examine its changelog, dead letters and loop."),
]
_Topics = Annotated[list[str] | None, typer.Option("--topic", help="Topic to examine instead. Repeatable.")]


@app.command("list")
def list_open(
    source: _Source = "",
    topic: _Topics = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """List open transactions: all that coordinators know, and hanging ones in any topic. Changes nothing.

    With a source or topics, list the transactions that are open there, with their transactional ids.

    Exit codes: 0 shown, also if there are none; 1 no answer, or no such topic; 2 wrong usage.
    """
    if source or topic:
        _show(source, topic, bootstrap_servers, timeout, json=json, only_hanging=False)
        return
    servers = brokers(bootstrap_servers)
    deadline = time.monotonic() + timeout
    await_listener(servers, timeout)
    with _questions(servers, None) as questions:
        listed = questions.listed(deadline)
        hanging = [txn for txn in questions.find_all(deadline) if txn.is_hanging]
    data = {
        "bootstrap_servers": servers,
        "transactions": [msgspec.structs.asdict(txn) for txn in listed],
        "hanging": [_facts(txn) for txn in hanging],
    }
    emit(data, json, lambda: _everything(listed, hanging))
    if not json:
        _show_commands("", hanging, bootstrap_servers)


@app.command()
def hanging(
    source: _Source = "",
    topic: _Topics = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """List transactions that no coordinator knows, with the command that ends each. Changes nothing.

    Without a source or topics, all topics are searched.

    Exit codes: 0 shown, also if there are none; 1 no answer, or no such topic; 2 wrong usage.
    """
    _show(source, topic, bootstrap_servers, timeout, json=json, only_hanging=True)


_Topic = Annotated[str, typer.Option("--topic", help="Topic of the transaction.")]
_Partition = Annotated[int, typer.Option(min=0, help="Partition of the transaction.")]
_Start = Annotated[int, typer.Option(min=0, help="First offset of the transaction, as shown by `hanging`.")]
_MinAge = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds since the last record before an end without any trace counts as an abort. At least the brokers' "
        "transaction.max.timeout.ms.",
    ),
]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]


@app.command()
def end(
    topic: _Topic,
    partition: _Partition,
    start_offset: _Start,
    source: _Source = "",
    min_age: _MinAge = HANGING_SECONDS,
    yes: _Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """End a hanging transaction as it ended in other partitions, by a commit or an abort. Consumers then read on.

    It is committed if the log of the coordinators, or a marker in another partition, shows a commit. It is aborted if
    that log shows an abort, or if neither shows a commit and --min-age has passed since its last record. Otherwise the
    command refuses and names what to check. A transaction that a coordinator knows is refused, too: the coordinator
    ends it.

    Needs the rights ClusterAction; Read on __transaction_state and on all topics that the transaction may have written
    to; Describe on all transactional ids: a hidden id looks like a missing one.

    Exit codes: 0 ended; 1 refused, not confirmed, or no answer; 2 wrong usage.
    """
    _end(source, (topic, partition, start_offset), min_age, bootstrap_servers, timeout, yes, json)


@app.command()
def abort(
    topic: _Topic,
    partition: _Partition,
    start_offset: _Start,
    source: _Source = "",
    min_age: _MinAge = HANGING_SECONDS,
    yes: _Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Abort a hanging transaction. Checks as `end` does; refuses one that is committed in another partition.

    Exit codes: 0 aborted; 1 refused, not confirmed, or no answer; 2 wrong usage.
    """
    place = topic, partition, start_offset
    _end(source, place, min_age, bootstrap_servers, timeout, yes, json, may_commit=False)


def _end(
    source: str,
    place: tuple[str, int, int],
    min_age: float,
    option: str,
    timeout: float,
    yes: bool,
    json: bool,
    *,
    may_commit: bool = True,
) -> None:
    refuse_to_ask(json=json, yes=yes)
    config = named_source(source).config if source else None
    servers, topic, partition = brokers(option, config), place[0], place[1]
    await_listener(servers, timeout)
    with _questions(servers, config) as questions:
        deadline = time.monotonic() + timeout
        found = questions.judge(*place, deadline, min_age_seconds=min_age)
        if found.commit and not may_commit:
            raise OffsetError(
                f"{topic}[{partition}]: the transaction at offset {place[2]} is committed ({found.proof}): to abort it "
                "here would take back a part of it. `kes txn end` commits it here, too"
            )
        if not json:
            with admin_of(servers, config, timeout) as admin:
                high = admin.watermarks(topic, [partition], timeout)[partition].end
            notices().print(Text(_meaning(found, high)), soft_wrap=True)
        if not yes:
            typer.confirm("Commit it?" if found.commit else "Abort it?", abort=True, err=True)
        questions.end(found, time.monotonic() + timeout)
    how, txn = "committed" if found.commit else "aborted", found.txn
    emit(
        {"bootstrap_servers": servers, how: msgspec.structs.asdict(txn), "proof": found.proof},
        json,
        lambda: f"{how}: {topic}\\[{partition}], the transaction of producer {txn.producer_id} at {txn.start_offset}",
    )


def _meaning(found: HangingEnd, end: int) -> str:
    """Say what the end does, and what proves it."""
    txn = found.txn
    what = (
        "To commit it shows what this producer wrote from there to the end"
        if found.commit
        else "To abort it takes away for good what this producer wrote from there to the end"
    )
    return (
        f"{txn.topic}[{txn.partition}]: producer {txn.producer_id} (epoch {txn.producer_epoch}) began a transaction at "
        f"offset {txn.start_offset}, and wrote its last record {duration(_age(txn.last_timestamp_ms))} ago. No "
        f"coordinator is going to end it. It is to be {'committed' if found.commit else 'aborted'}: {found.proof}. "
        f"{what} (at most {end - txn.start_offset:,} offsets); records of others stay, and readers of committed "
        "records go on. What it wrote to other partitions is not touched: `kes txn hanging` lists them."
    )


def _topics_of(config: EventSourceConfig | None) -> list[str]:
    return [config.changelog, config.dead_letters, *config.own_inputs] if config else []


def _show(
    source: str, topics: list[str] | None, option: str, timeout: float, *, json: bool, only_hanging: bool
) -> None:
    config = named_source(source).config if source else None
    servers = brokers(option, config)
    deadline = time.monotonic() + timeout
    found: list[OpenTransaction] = []
    wanted = topics or _topics_of(config)
    with admin_of(servers, config, timeout) as admin, _questions(servers, config) as questions:
        if not wanted:
            found = questions.find_all(deadline)
        for topic in wanted:
            identity = admin.identity(topic, timeout)
            if identity is None:
                raise TopicError(f"topic {topic} does not exist at {servers}")
            found += questions.find(topic, range(identity[1]), deadline)
    shown = [txn for txn in found if txn.is_hanging or not only_hanging]
    emit(
        {"bootstrap_servers": servers, "transactions": [_facts(txn) for txn in shown]},
        json,
        lambda: _table(shown) if shown else "no open transactions" if not only_hanging else "no hanging transactions",
    )
    if not json:
        _show_commands(source, [txn for txn in shown if txn.is_hanging], option)


@contextmanager
def _questions(servers: str, config: EventSourceConfig | None) -> Iterator[HangingTransactions]:
    security = Security.of(config.client_settings if config else {})
    with WireClient(servers, "kes-cli", security) as client:
        yield HangingTransactions(client)


def _facts(txn: OpenTransaction) -> dict[str, Any]:
    return {**msgspec.structs.asdict(txn), "hanging": txn.is_hanging}


def _show_commands(source: str, hanging: list[OpenTransaction], option: str) -> None:
    named = f" {source}" if source else ""
    servers = f" --bootstrap-servers {option}" if option else ""
    for txn in hanging:
        place = f"--topic {txn.topic} --partition {txn.partition} --start-offset {txn.start_offset}"
        notices().print(f"to end it: kes txn end{named} {place}{servers}", soft_wrap=True, markup=False)


def _age(since_ms: int) -> float:
    return max(time.time() - since_ms / 1000, 0.0)


def _everything(listed: list[ListedTransaction], hanging: list[OpenTransaction]) -> Group:
    return Group(
        _listed(listed) if listed else "no coordinator has an open transaction",
        _table(hanging) if hanging else "no transaction hangs",
    )


def _listed(found: list[ListedTransaction]) -> Table:
    numbers = ("producer id", "epoch", "coordinator", "age", "time-out")
    names = ("transactional id", "state", *numbers, "partitions")
    table = plain_table(*names, right=numbers, folded=("transactional id", "partitions"))
    for txn in found:
        producer = txn.producer_id, txn.producer_epoch, txn.coordinator
        times = duration(_age(txn.started_ms)), duration(txn.timeout_ms / 1000)
        places = Text(", ".join(f"{topic}[{number}]" for topic, number in txn.partitions))
        table.add_row(txn.transactional_id, txn.state, *map(str, producer), *times, places)
    return table


def _table(found: list[OpenTransaction]) -> Table:
    numbers = ("partition", "from offset", "producer id", "epoch", "last record")
    names = ("topic", *numbers, "transactional id", "state")
    table = plain_table(*names, right=numbers, folded=("topic", "transactional id"))
    for txn in found:
        place = (txn.partition, txn.start_offset, txn.producer_id, txn.producer_epoch)
        age = f"{duration(_age(txn.last_timestamp_ms))} ago"
        owner, state = (txn.transactional_id, txn.state) if not txn.is_hanging else ("none", "hanging")
        style = "bold red" if txn.is_hanging else ""
        table.add_row(txn.topic, *map(str, place), age, owner, state, style=style)
    return table
