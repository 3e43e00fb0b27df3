"""``kes state repair``: one value of the state of a source that is stopped, as its class can read it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout
from streams.cli.console import notices
from streams.cli.state_sources import opened
from streams.cli.state_writing import Changes, DryRun, State, Yes, check_entry, stopped_source, store_of, write_changes
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import DecodeError, StoreError
from streams.looks.records import one_line, plain, plain_bytes, plain_text, shortened
from streams.records import IncomingRecord
from streams.source.event_source import EventSource


def repair(
    source: SourceName,
    key: Annotated[str, typer.Argument(help="Key, as shown by `scan` and the error: o1, 17, or JSON.")],
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Partition of the key.")] = None,
    previous: Annotated[
        bool, typer.Option("--previous", help="Restore the last earlier value that the store can read.")
    ] = False,
    with_: Annotated[
        Path | None,
        typer.Option("--with", metavar="FILE", help="Put the bytes of this file, if the store can read them."),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the key.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Replace or remove one value that cannot be read. The old bytes are saved to a file in the current folder.

    `kes state get --raw` writes the bytes of a value, to be edited by hand. --previous finds only values that
    compaction has left in the changelog. All members must be stopped.

    Exit codes: 0 repaired; 1 refused (a member is running, no such key, or the store cannot read the new value), not
    confirmed, or no broker answers; 2 wrong usage.
    """
    if (previous, with_ is not None, delete).count(True) != 1:
        raise typer.BadParameter("choose one of --previous, --with FILE and --delete")
    found = stopped_source(source, json=json, yes=yes or dry_run)
    store = store_of(found)
    number, records = _history(found, store, key, partition, bootstrap_servers, timeout)
    last = records[-1]
    assert last.key is not None
    new: bytes | None = None
    if with_ is not None:
        try:
            new = with_.read_bytes()
        except OSError as error:
            raise StoreError(f"{with_}: {error.strerror or error}") from error
        check_entry(store, with_, number, last.key, new)
    elif previous:
        new = _readable(store, records[:-1], key)
    store.revoked()
    if not json:
        for title, value in (("is", last.value), ("will be", new)):
            shown = "removed" if value is None else shortened(one_line(plain_bytes(value)), 500)
            notices().print(Text(f"{title}: {shown}"), soft_wrap=True)

    def changes(_: int, there: State) -> Changes:
        if there.get(last.key or b"") != last.value:
            raise StoreError(f"key {key} has changed in the meantime: run the command again")
        if not dry_run:
            _keep(last, json)
        return {last.key or b"": new}

    write_changes(found, [number], changes, bootstrap_servers, timeout, dry_run=dry_run, yes=yes, json=json)


def _history(
    source: EventSource[Any], store: Any, key: str, partition: int | None, servers: str, timeout: float
) -> tuple[int, list[IncomingRecord]]:
    """Return the partition of a key, and its records in the changelog. Raises ``StoreError`` for a key that is not in
    the state, or is in several partitions."""
    found: dict[tuple[int, bytes], list[IncomingRecord]] = {}

    def receive(number: int, records: list[IncomingRecord]) -> None:
        for record in records:
            if record.key is None or record.key.startswith(RESERVED_KEY_PREFIX):
                continue
            if (number, record.key) in found or _typed(store, record.key) == key:
                found.setdefault((number, record.key), []).append(record)

    with opened(source, servers, timeout, None if partition is None else [partition], "") as (_, read):
        read(receive)
    there = [(number, records) for (number, _), records in found.items() if records[-1].value is not None]
    if not there:
        raise StoreError(f"no such key: {key}")
    if len(there) > 1:
        numbers = ", ".join(str(number) for number, _ in there)
        raise StoreError(f"the key {key} is in the partitions {numbers}: choose one with --partition")
    return there[0]


def _typed(store: Any, key: bytes) -> str:
    """Return a key as it is typed."""
    try:
        return one_line(plain(store.decode_key(key)))
    except DecodeError:
        return one_line(plain_text(key))


def _readable(store: Any, records: list[IncomingRecord], key: str) -> bytes:
    for record in reversed(records):
        if record.value is not None:
            try:
                check_entry(store, Path(record.where), record.partition, record.key or b"", record.value)
            except StoreError:
                continue
            return record.value
    raise StoreError(
        f"the changelog has no earlier value of {key} that the store can read: repair it by hand (kes state get --raw, "
        "--with FILE), or --delete it"
    )


def _keep(record: IncomingRecord, json: bool) -> None:
    """Write the bytes that are replaced to a file of their own."""
    path = Path(f"{record.topic}-{record.partition}-{record.offset}.value")
    try:
        path.write_bytes(record.value or b"")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; nothing is changed") from error
    if not json:
        notices().print(Text(f"the old bytes are in {path}"), soft_wrap=True)
