"""``kes topology``: what an event source reads, handles, keeps and sends. Asks no broker."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, SourceName, named_source
from streams.cli.console import emit, frameless, notices
from streams.errors import ConfigError
from streams.looks.addresses import brokers
from streams.looks.asyncapi import asyncapi
from streams.model.topology import Topology
from streams.runtime.source_topics import OUTPUT
from streams.source.event_source import EventSource

app = typer.Typer()


@app.command()
def topology(
    source: SourceName,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    as_asyncapi: Annotated[
        bool, typer.Option("--asyncapi", help="Print an AsyncAPI 3.0 document: topics, events and their schemas.")
    ] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="With --asyncapi: as YAML, not JSON.")] = False,
    servers: Annotated[
        bool, typer.Option("--servers", help="With --asyncapi: show the addresses of the cluster.")
    ] = False,
    api_version: Annotated[
        str, typer.Option("--api-version", help="With --asyncapi: the version of the interface, which you count.")
    ] = "",
    json: Json = False,
) -> None:
    """Show the inputs, handlers, stores and outputs of an event source, from its code and settings. Contacts no broker.

    Exit codes: 0 shown; 1 the source cannot be loaded; 2 wrong usage.
    """
    if mermaid and (json or as_asyncapi):
        other = "--asyncapi" if as_asyncapi else "--json"
        raise typer.BadParameter(f"choose either {other} or --mermaid", param_hint="--mermaid")
    if (as_yaml or servers or api_version) and not as_asyncapi:
        raise typer.BadParameter("--yaml, --servers and --api-version belong to --asyncapi", param_hint="--asyncapi")
    if as_yaml and json:
        raise typer.BadParameter("choose either --json or --yaml", param_hint="--yaml")
    if as_asyncapi:
        _print_asyncapi(named_source(source), api_version, servers, as_yaml)
        return
    found = named_source(source).topology
    if mermaid:
        sys.stdout.write(found.mermaid())
        return
    emit(msgspec.to_builtins(found), json, lambda: _table(found))
    if not json and all(topic.purpose != OUTPUT for topic in found.topics):
        notices().print(Text("no output is declared (source.output): handlers may forward to any topic"))


def _print_asyncapi(source: EventSource[Any], version: str, servers: bool, as_yaml: bool) -> None:
    document = asyncapi(source, version or "1.0.0", brokers("", source.config) if servers else "")
    if not as_yaml:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
        return
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ConfigError("--yaml needs PyYAML: pip install pyyaml; or take the JSON, which is YAML, too") from None
    plain = msgspec.json.decode(msgspec.json.encode(document))  # without the tuples and numbers of other classes
    sys.stdout.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _table(found: Topology) -> Table:
    table = frameless("part", "name", "details")
    table.add_row("group", Text(found.group_id), "with a store" if found.has_store else "stateless")
    for topic in found.topics:
        table.add_row(topic.purpose, Text(topic.name), Text(_with(topic.size, topic.policies)))
    for handler in found.handlers:
        table.add_row(
            "handler", Text(handler.event), Text(_with(f"{handler.function} ({handler.kind})", handler.policies))
        )
    for name in found.interjections:
        table.add_row("interjection", Text(name), Text(found.crons.get(name, "")))
    return table


def _with(text: str, policies: tuple[str, ...]) -> str:
    return f"{text}; failures: {', '.join(policies)}" if policies else text
