"""``kes broker``: an embedded real Kafka that goes on in the background until it is stopped."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from streams.broker.detached import DetachedBroker, detached_brokers, start_detached, stop_detached
from streams.cli.console import emit, frameless, progress
from streams.errors import ConfigError
from streams.looks.figures import duration

app = typer.Typer(no_args_is_help=True)

_Name = Annotated[str, typer.Option(help="Name of the broker. Several can run side by side.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


@app.command()
def start(
    name: _Name = "default",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for clients on 127.0.0.1. 0: any free port.")
    ] = 9092,
    data_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the data in this folder. Default: removed at the stop.")
    ] = None,
    durable: Annotated[
        bool,
        typer.Option("--durable", help="Use the JVM's ordinary settings: slower start, faster under load."),
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a server property. Repeatable.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Require TLS. The CA and certificates are created at the start.")
    ] = False,
    mutual_tls: Annotated[
        bool, typer.Option("--mutual-tls", help="Require TLS with client certificates, one per user.")
    ] = False,
    sasl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MECHANISM", help="Enable PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER. Repeatable."
        ),
    ] = None,
    acl: Annotated[bool, typer.Option("--acl", help="Enforce ACLs for all users but admin.")] = False,
    user: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Create a user with a generated password. Repeatable."),
    ] = None,
    json: _Json = False,
) -> None:
    """Start a broker in the background. The first start downloads Kafka (45 MB) to the cache folder.

    With --tls, --mutual-tls or --sasl, the settings of each user are written to a file that only you can read.
    """
    with progress("bytes") as show:
        broker = start_detached(
            name,
            port=port or None,
            data_dir=data_dir,
            durable=durable,
            properties=_properties(setting or []),
            tls="mutual" if mutual_tls else tls,
            sasl=sasl or (),
            acl=acl,
            users=user or (),
            progress=show,
        )
    emit(_facts(broker), json, lambda: _started(broker))


@app.command()
def stop(name: _Name = "default", json: _Json = False) -> None:
    """Stop a broker. It is no error if it does not run."""
    broker = stop_detached(name)
    sentence = f"the broker {name!r} is stopped" if broker else f"no broker {name!r} runs"
    emit({"name": name, "stopped": broker is not None}, json, lambda: Text(sentence))


@app.command()
def status(
    name: Annotated[str, typer.Option(help="Show only the broker of this name.")] = "", json: _Json = False
) -> None:
    """List the brokers that run in the background."""
    brokers = [broker for broker in detached_brokers() if name in ("", broker.name)]
    emit([{**_facts(broker), "answers": broker.answers} for broker in brokers], json, lambda: _listed(brokers))


def _properties(settings: list[str]) -> dict[str, str]:
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set must be NAME=VALUE, not {setting!r}")
        pairs[name.strip()] = value.strip()
    return pairs


def _facts(broker: DetachedBroker) -> dict[str, Any]:
    return {**asdict(broker), "bootstrap_servers": broker.bootstrap_servers}


def _started(broker: DetachedBroker) -> Text:
    data = "removed at the stop" if broker.throw_away else f"kept in {broker.data_dir}"
    settings = f"Settings of clients: {broker.security_dir}/*.properties\n" if broker.security_dir else ""
    which = "" if broker.name == "default" else f" --name {broker.name}"
    return Text(
        f"Kafka serves at {broker.bootstrap_servers} (process {broker.pid}).\nIts data are {data}.\n{settings}"
        f"    export KES_BOOTSTRAP_SERVERS={broker.bootstrap_servers}\n"
        f"    kes broker stop{which}"
    )


def _listed(brokers: list[DetachedBroker]) -> Table | Text:
    if not brokers:
        return Text("no broker runs")
    table = frameless("name", "address", "answers", "process", "since", "data")
    for broker in brokers:
        data = f"{broker.data_dir}{' (removed at the stop)' if broker.throw_away else ''}"
        since = duration(time.time() - broker.started)
        table.add_row(
            broker.name, broker.bootstrap_servers, "yes" if broker.answers else "no", str(broker.pid), since, data
        )
    return table
