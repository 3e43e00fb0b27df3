"""``kes topology``: what an event source reads, handles, keeps and sends. Asks no broker."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, SourceName, named_source
from streams.cli.console import emit, notices
from streams.model.topology import Topology
from streams.runtime.source_topics import OUTPUT

app = typer.Typer()


@app.command()
def topology(
    source: SourceName,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    json: Json = False,
) -> None:
    """Show the inputs, handlers, stores and outputs of an event source, from its code and settings. Contacts no broker.

    Exit codes: 0 shown; 1 the source cannot be loaded; 2 wrong usage.
    """
    if mermaid and json:
        raise typer.BadParameter("choose either --json or --mermaid", param_hint="--mermaid")
    found = named_source(source).topology
    if mermaid:
        sys.stdout.write(found.mermaid())
        return
    emit(msgspec.to_builtins(found), json, lambda: _table(found))
    if not json and all(topic.purpose != OUTPUT for topic in found.topics):
        notices().print(Text("no output is declared (source.output): handlers may forward to any topic"))


def _table(found: Topology) -> Table:
    table = Table("part", "name", "details", box=SIMPLE_HEAD, pad_edge=False)
    table.add_row("group", Text(found.group_id), "with a store" if found.has_store else "stateless")
    for topic in found.topics:
        table.add_row(topic.purpose, Text(topic.name), Text(_with(topic.size, topic.policies)))
    for handler in found.handlers:
        table.add_row(
            "handler", Text(handler.event), Text(_with(f"{handler.function} ({handler.kind})", handler.policies))
        )
    for name in found.interjections:
        table.add_row("interjection", Text(name), "")
    return table


def _with(text: str, policies: tuple[str, ...]) -> str:
    return f"{text}; failures: {', '.join(policies)}" if policies else text
