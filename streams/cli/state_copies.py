"""``kes state export`` and ``diff``: copies of state as files, and the comparison of any two."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import complain, emit, plain_table
from streams.cli.state_sources import ExportedLine, StateAt, read_on, state_of
from streams.errors import DecodeError, StoreError
from streams.looks.records import one_line, plain, plain_bytes, plain_text, shortened
from streams.records import TopicPartition
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.ownership.replicas import make_store
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

_SHOWN: Final = 20
_SIDES: Final = (
    "changelog, changelog:PLACE (as it was), folder, folder:DIR, snapshots, snapshots:ADDRESS, or a file of `kes state "
    "export`"
)
_Partition = Annotated[
    list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition. Repeatable.")
]


def export(
    source: SourceName,
    file: Annotated[Path, typer.Argument(help="File to write, one line of JSON per entry.")],
    from_: Annotated[str, typer.Option("--from", metavar="SIDE", help=f"{_SIDES}.")] = "changelog",
    partition: _Partition = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Export state to a file: entries and timers, as bytes and as decoded by their codecs.

    Exit codes: 0 written; 1 no such state, the file exists, or no broker answers; 2 wrong usage.
    """
    found = named_source(source)
    states = state_of(found, from_, bootstrap_servers, timeout, partition)
    write_export(found, states, file)
    entries = sum(len(state.entries) for state in states.values())
    rows = [
        {"partition": number, "offset": state.offset, "entries": len(state.entries)} for number, state in states.items()
    ]
    emit({"file": str(file), "partitions": rows}, json, lambda: Text(f"{file}: {entries:,} entries"))


def write_export(source: EventSource[Any], states: Mapping[int, StateAt], file: Path) -> None:
    """Write states to a file that is not there yet, and wait until the disk has it. Raises ``StoreError``."""
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    try:
        with open(file, "xb") as out:
            for number, state in sorted(states.items()):
                for line in _lines(number, state, store):
                    out.write(msgspec.json.encode(line) + b"\n")
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise StoreError(f"{file}: {error.strerror or error}") from error
    finally:
        store.revoked()


def _lines(number: int, state: StateAt, store: Any) -> Iterator[ExportedLine]:
    for key, value in sorted(state.entries.items()):
        name, text = _shown(store, key, value)
        yield ExportedLine(
            partition=number,
            key=base64.b64encode(key).decode(),
            value=base64.b64encode(value).decode(),
            shown_key=name,
            shown_value=text,
        )
    yield ExportedLine(partition=number, offset=state.offset)


def _shown(store: Any, key: bytes, value: bytes) -> tuple[Any, Any]:
    """Return key and value as plain data, as far as the store can read them."""
    if key.startswith(TIMER_PREFIX):
        return plain_text(key[len(TIMER_PREFIX) :]), plain_bytes(value)
    name, text = plain_text(key), plain_bytes(value)
    try:
        if (decode := getattr(store, "decode_key", None)) is not None:
            name = plain(decode(key))
        if (decode := getattr(store, "decode_entry", None)) is not None:
            text = plain(decode(key, value))
        elif (decode := getattr(store, "decode_value", None)) is not None:
            text = plain(decode(value))
    except DecodeError:
        pass
    return name, text


def diff(
    source: SourceName,
    a: Annotated[str, typer.Argument(metavar="A", help=f"{_SIDES}.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side.")],
    partition: _Partition = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Compare two copies of the state, key by key and byte by byte. Both are read up to the end of the changelog first,
    unless one of them is the state as it was.

    Exit codes: 0 equal; 1 different, no such state, or no broker answers; 2 wrong usage.
    """
    found = named_source(source)
    sides = [state_of(found, side, bootstrap_servers, timeout, partition) for side in (a, b)]
    is_past = any(side.startswith("changelog:") for side in (a, b))
    first, second = sides if is_past else read_on(found, sides, bootstrap_servers, timeout)
    store = make_store(found.program().store_factory, TopicPartition(found.config.topic, 0))
    rows: list[dict[str, Any]] = []
    count = 0
    for number in sorted(first.keys() & second.keys()):
        one, other = first[number].entries, second[number].entries
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                count += 1
                if count <= _SHOWN:
                    values = [
                        None if side is None else _shown(store, key, side)[1] for side in (one.get(key), other.get(key))
                    ]
                    rows.append(
                        {"partition": number, "key": _shown(store, key, b"")[0], "a": values[0], "b": values[1]}
                    )
    store.revoked()
    alone = sorted(first.keys() ^ second.keys())
    emit(
        {"a": a, "b": b, "differences": count, "shown": rows, "partitions_on_one_side": alone},
        json,
        lambda: _differences(rows, a, b) if rows else Text("no difference"),
    )
    if count > len(rows) and not json:
        complain(f"{len(rows)} of {count:,} differences are shown")
    if alone:
        complain(f"the partitions {', '.join(map(str, alone))} are on one side only")
    if count or alone:
        raise typer.Exit(1)


def _differences(rows: list[dict[str, Any]], a: str, b: str) -> Table:
    table = plain_table("partition", "key", harmless(a), harmless(b))
    for row in rows:
        texts = ["-" if row[side] is None else shortened(one_line(row[side]), 60) for side in ("a", "b")]
        table.add_row(str(row["partition"]), shortened(one_line(row["key"]), 60), *map(Text, texts))
    return table
