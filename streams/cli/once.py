"""``kes once``: the ids that an event source remembers of the events that it handles once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import emit
from streams.cli.state_files import rows_table
from streams.cli.state_sources import opened
from streams.core.seen import DIGEST, HEAD, due_of
from streams.errors import OffsetError
from streams.looks.records import shown_time
from streams.records import IncomingRecord
from streams.runtime.changelog import SEEN_PREFIX

app = typer.Typer(help="Look at the ids of events that are handled once (once=): stats.", no_args_is_help=True)


@app.callback()
def once() -> None:
    """Keep ``stats`` a command of its own: the only one of a group would take the group's name."""


@app.command()
def stats(source: SourceName, bootstrap_servers: Servers = "", timeout: Timeout = 30.0, json: Json = False) -> None:
    """Show how many ids each partition remembers, and when the first and the last of them may go.

    Read from what is committed in the changelog, members may run. How many duplicates were passed, by type, is the
    metric kes_once_duplicates_total of the members.

    Exit codes: 0; 1 no broker answers, or a record of an id cannot be read; 2 wrong usage.
    """
    program = named_source(source)
    found: dict[int, dict[bytes, tuple[int, int]]] = {}

    def receive(number: int, records: list[IncomingRecord]) -> None:
        for record in records:
            if record.key is not None and record.key.startswith(SEEN_PREFIX):
                _note(found[number], record)

    with opened(program, bootstrap_servers, timeout, None, "") as (numbers, read):
        found |= {number: {} for number in numbers}
        read(receive)
    rows = [_row(number, ids) for number, ids in sorted(found.items())]
    emit({"once": rows}, json, lambda: _table(rows))


def _note(ids: dict[bytes, tuple[int, int]], record: IncomingRecord) -> None:
    digest = (record.key or b"")[len(SEEN_PREFIX) :]
    if record.value is None:
        ids.pop(digest, None)
        return
    try:
        if len(digest) != DIGEST:
            raise ValueError(f"its key has {len(digest)} bytes behind the prefix")
        ids[digest] = due_of(record.value), len(record.value) - HEAD
    except ValueError as error:
        raise OffsetError(f"{record.where}: the record of an id cannot be read: {error}") from error


def _row(number: int, ids: Mapping[bytes, tuple[int, int]]) -> dict[str, Any]:
    dues = [due_s for due_s, _ in ids.values()]
    return {
        "partition": number,
        "ids": len(ids),
        "kept_bytes": sum(size for _, size in ids.values()),
        "first_goes_s": min(dues, default=None),
        "last_goes_s": max(dues, default=None),
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    shown = [
        row
        | {
            "kept bytes": row["kept_bytes"],
            "first goes": "-" if row["first_goes_s"] is None else shown_time(row["first_goes_s"] * 1000),
            "last goes": "-" if row["last_goes_s"] is None else shown_time(row["last_goes_s"] * 1000),
        }
        for row in rows
    ]
    return rows_table(shown, "partition", "ids", "kept bytes", "first goes", "last goes")
