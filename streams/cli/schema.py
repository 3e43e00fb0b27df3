"""``kes schema``: the schemas that an event source writes, and those of the registry. The only place that registers."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, SourceName, named_source
from streams.cli.console import emit, frameless
from streams.errors import ConfigError
from streams.formats.registry import SchemaRegistry
from streams.formats.registry_http import NotInRegistry, Schema
from streams.formats.schema_codecs import SchemaCodec

app = typer.Typer(no_args_is_help=True)


class _Entry(NamedTuple):
    """A schema under one of its subjects. ``id``: -1, if it is not there; ``problem``: why it cannot be."""

    event: str
    subject: str
    registry: SchemaRegistry
    schema: Schema
    newest: str
    id: int
    problem: str

    @property
    def state(self) -> str:
        if self.id >= 0:
            return "registered"
        return "incompatible" if self.problem else "a new version" if self.newest else "the first version"

    def shown(self) -> dict[str, Any]:
        return {"event": self.event, "subject": self.subject, "kind": self.schema.kind, "state": self.state,
                "id": None if self.id < 0 else self.id, "problem": self.problem}  # fmt: skip


def _entries(source: str) -> list[_Entry]:
    """Look all schemas up that the source's events are written with. Raises ``ConfigError`` if there are none: a
    pipeline would pass by mistake."""
    needs = named_source(source)._declared.schema_needs()
    found = [each for each in needs if isinstance(each, SchemaCodec)]  # the others are rules, which write nothing
    if not found:
        raise ConfigError(
            f"{source} writes no event by a schema registry. Those of its handlers count, and those with a subject of "
            "a topic that it names by source.output"
        )
    return [entry for codec in found for entry in _looked_up(codec)]


def _looked_up(codec: SchemaCodec) -> Iterator[_Entry]:
    client = codec.registry.client
    for subject in codec.subjects:
        newest, problem = "", ""
        try:
            known = client.versions(subject)
            newest = [*known.values()][-1].text if known else ""
            number = client.lookup(subject, codec.schema)
        except NotInRegistry:
            number = -1
            problem = client.incompatible(subject, codec.schema) if newest else ""
        yield _Entry(codec.title, subject, codec.registry, codec.schema, newest, number, problem)


def _show(entries: list[_Entry], json: bool) -> None:
    def table() -> Table:
        made = frameless("event", "subject", "kind", "state", "id")
        for each in entries:
            state = f"{each.state}: {each.problem}" if each.problem else each.state
            number = "" if each.id < 0 else str(each.id)
            made.add_row(Text(each.event), Text(each.subject), each.schema.kind, Text(state), number)
        return made

    emit([each.shown() for each in entries], json, table)


@app.command()
def plan(source: SourceName, json: Json = False) -> None:
    """Show what `kes schema register` would register, and whether it is compatible. Changes nothing.

    Exit codes: 0 shown; 1 the registry or the source cannot be read; 2 wrong usage.
    """
    _show(_entries(source), json)


@app.command()
def check(source: SourceName, json: Json = False) -> None:
    """Check that all schemas that the source's events are written with are registered, as a start does.

    Exit codes: 0 they are; 1 one is not, or the registry or the source cannot be read; 2 wrong usage.
    """
    entries = _entries(source)
    _show(entries, json)
    if any(each.id < 0 for each in entries):
        raise typer.Exit(1)


@app.command()
def register(source: SourceName, json: Json = False) -> None:
    """Register the schemas that the source's events are written with, where they are missing. Nothing is registered if
    one of them is incompatible. May be repeated.

    Exit codes: 0 all are registered; 1 one is incompatible, or the registry or the source cannot be read; 2 wrong
    usage.
    """
    entries = _entries(source)
    if any(each.problem for each in entries):
        _show(entries, json)
        raise typer.Exit(1)
    done = []
    for each in entries:
        number = each.id
        if number < 0:
            try:
                number = each.registry.client.register(each.subject, each.schema)
            except NotInRegistry as error:
                raise ConfigError(f"{each.registry.url} does not take the schema of {each.event}: {error}") from None
        done.append(each._replace(id=number))
    _show(done, json)


@app.command()
def diff(source: SourceName) -> None:
    """Show how the schemas of the source's events differ from the newest ones of their subjects.

    Exit codes: 0 they do not; 1 they do, or the registry or the source cannot be read; 2 wrong usage.
    """
    differ = False
    for each in _entries(source):
        theirs, ours = (_lines(text) for text in (each.newest, each.schema.text))
        found = [*difflib.unified_diff(theirs, ours, f"{each.subject} (newest)", each.event, lineterm="")]
        differ |= bool(found)
        sys.stdout.writelines(f"{line}\n" for line in found)
    if differ:
        raise typer.Exit(1)


def _lines(text: str) -> list[str]:
    try:
        fields = msgspec.json.decode(text)  # in one order: that of a registry is its own
        return msgspec.json.format(msgspec.json.encode(fields, order="sorted"), indent=2).decode().splitlines()
    except msgspec.DecodeError:  # of Protobuf
        return text.splitlines()
