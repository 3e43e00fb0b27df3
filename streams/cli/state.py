"""``kes state``: the state of an event source as its changelog or its folder has it, without disturbing the source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import complain, emit, frameless, plain_table
from streams.cli.state_copies import diff, export
from streams.cli.state_files import drop, restore, snapshot, verify
from streams.cli.state_history import history
from streams.cli.state_past import AsOf
from streams.cli.state_queries import (
    AskOwner,
    AtLeast,
    ByIndex,
    Confirm,
    MaxStaleness,
    OwnerOptions,
    get_of_owner,
    scan_of_owners,
)
from streams.cli.state_repair import repair
from streams.cli.state_sources import TableName, decoded, decoded_entry, opened, shown_by
from streams.cli.state_writing import forget, import_, migrate, set_time
from streams.codecs import RESERVED_KEY_PREFIX, int_codec
from streams.core.parking import is_parked
from streams.errors import DecodeError
from streams.looks.records import one_line, shortened, shown_time
from streams.records import TYPE_HEADER, IncomingRecord, TopicPartition
from streams.runtime.changelog import (
    BEGIN_KEY,
    GROWTH_KEY,
    OFFSET_KEY,
    RESET_KEY,
    TIMER_PREFIX,
    decode_begin,
    decode_growth,
    decode_offset,
    decode_reset,
    decode_timer,
)
from streams.runtime.ownership.replicas import make_store
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource
from streams.stores.structured import TIME_KEY

app = typer.Typer(no_args_is_help=True)

_WIDEST: Final = 100

_Folder = Annotated[
    str,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Read this folder (StateConfig.folder) instead of the changelog. Needs no broker; it may be in use.",
    ),
]
_Partition = Annotated[
    list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition. Repeatable.")
]


class _Entry(NamedTuple):
    """An entry of a store: its last record in the changelog. ``key`` and ``value``: as plain data."""

    partition: int
    key: Any
    value: Any
    type: str
    problem: str
    changed_at_ms: int
    data: bytes

    @property
    def name(self) -> str:
        """Return the key as it is typed."""
        return one_line(self.key)


@app.callback()
def state() -> None:
    """The state of an event source: in its changelog, on disk, in snapshots. The source may run meanwhile."""


@app.command("ls")
def list_partitions(
    source: SourceName,
    partition: _Partition = None,
    table: TableName = "",
    folder: _Folder = "",
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show the size of each partition (keys, bytes, timers), the next offset of its input, and how it was begun.

    Exit codes: 0 shown; 1 no changelog, no such folder, or no broker answers; 2 wrong usage.
    """
    found = named_source(source)
    store = make_store(found.program().store_factory, TopicPartition(found.config.topic, 0))
    takes = shown_by(store, table)[1]
    rows: dict[int, _Partitions] = {}

    def receive(number: int, records: list[IncomingRecord]) -> None:
        row = rows[number]
        for record in records:
            row.receive(record)

    with opened(found, bootstrap_servers, timeout, partition, folder) as (numbers, read):
        rows.update({number: _Partitions(takes) for number in numbers})
        read(receive)
    data = [row.facts(number) for number, row in rows.items()]
    emit({"changelog": found.config.changelog, "partitions": data}, json, lambda: _partition_table(data))


@app.command()
def get(
    source: SourceName,
    key: Annotated[str, typer.Argument(help="Key, as shown by `scan`: o1, 17, or JSON.")],
    partition: _Partition = None,
    table: TableName = "",
    folder: _Folder = "",
    as_of: AsOf = "",
    raw: Annotated[bool, typer.Option("--raw", help="Write only the stored bytes of the value.")] = False,
    ask_owner: AskOwner = False,
    at_least: AtLeast = None,
    max_staleness: MaxStaleness = None,
    confirm: Confirm = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show the value of one key: from the changelog, or with --ask-owner from the running source.

    Exit codes: 0 shown; 1 no such key, no changelog, no such folder, or no broker or owner answers; 2 wrong usage.
    """
    if _asks(options := OwnerOptions(ask_owner, at_least, max_staleness, confirm, table), folder or as_of):
        if raw:
            raise typer.BadParameter("--raw and --ask-owner exclude each other: an owner answers with values")
        rows, absence = get_of_owner(named_source(source), bootstrap_servers, key, partition, options, timeout)
        facts = {"key": key, "entries": rows, "absence": absence}
        emit(facts, json, lambda: _answered(rows) if rows else _no_such(key, absence))
        if not rows:
            raise typer.Exit(1)
        return
    found = _entries(
        named_source(source), bootstrap_servers, timeout, partition, folder, lambda name: name == key, as_of, table
    )
    if raw:
        if len(found) != 1:
            numbers = ", ".join(str(entry.partition) for entry in found)
            several = f"the key is in the partitions {numbers}: choose one with --partition"
            complain(several if found else _no_such(key).plain)
            raise typer.Exit(1)
        sys.stdout.buffer.write(found[0].data)
        return
    emit(
        {"key": key, "entries": [_facts(entry) for entry in found]},
        json,
        lambda: Text("\n".join(_line(entry) for entry in found) if found else _no_such(key).plain),
    )
    if len(found) > 1:
        numbers = ", ".join(str(entry.partition) for entry in found)
        complain(
            f"the key is in the partitions {numbers}, with a state of its own in each: its events come from producers "
            "that partition differently, or a handler uses another key than that of its event"
        )
    if not found:
        raise typer.Exit(1)


@app.command()
def scan(
    source: SourceName,
    prefix: Annotated[str, typer.Option("--prefix", help="Only keys with this prefix.")] = "",
    partition: _Partition = None,
    table: TableName = "",
    by: ByIndex = "",
    folder: _Folder = "",
    as_of: AsOf = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of entries.")] = 100,
    ask_owner: AskOwner = False,
    max_staleness: MaxStaleness = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show keys and values by partition and key. With --ask-owner, show those of an ordered table by key.

    Exit codes: 0 shown; 1 no changelog, no such folder, or no broker or owner answers; 2 wrong usage.
    """
    if _asks(options := OwnerOptions(ask_owner, None, max_staleness, False, table, by), folder or as_of):
        if partition:
            raise typer.BadParameter("--partition and --ask-owner exclude each other here: all owners answer")
        rows = scan_of_owners(named_source(source), bootstrap_servers, prefix, options, limit, timeout)
        emit({"entries": rows[:limit], "more": len(rows) > limit}, json, lambda: _answered(rows[:limit]))
        if len(rows) > limit and not json:
            complain(f"{limit:,} keys are shown, and there are more: raise --limit, or use --prefix")
        return
    found = _entries(
        named_source(source),
        bootstrap_servers,
        timeout,
        partition,
        folder,
        lambda name: name.startswith(prefix),
        as_of,
        table,
    )
    shown = found[:limit]
    emit({"keys": len(found), "entries": [_facts(entry) for entry in shown]}, json, lambda: _entry_table(shown))
    if len(shown) < len(found) and not json:
        complain(f"{len(shown):,} of {len(found):,} keys are shown: raise --limit, or use --prefix")


def _asks(options: OwnerOptions, folder: str) -> bool:
    if folder and options.check():
        raise typer.BadParameter("--folder and --as-of exclude --ask-owner")
    return options.check()


def _no_such(key: str, absence: str = "") -> Text:
    return Text(f"no such key: {harmless(key)}" + (f" ({absence})" if absence else ""))


def _answered(rows: list[dict[str, Any]]) -> Text:
    lines = [
        "  ".join(
            [
                str(row["partition"]),
                *([shown_time(int(row["as_of"] * 1000))] if "as_of" in row else []),
                one_line(row["key"]),
                one_line(row["value"]),
            ]
        )
        for row in rows
    ]
    return Text("\n".join(lines))


app.command("import")(import_)
app.command("set-time")(set_time)
for command in (history, export, diff, verify, snapshot, restore, migrate, forget, drop, repair):
    app.command()(command)


class _Partitions:
    """Sums of the changelog of one partition. ``takes``: checks for the keys that count."""

    def __init__(self, takes: Callable[[bytes], bool]) -> None:
        self._takes = takes
        self._sizes: dict[bytes, int] = {}
        self._timers: set[bytes] = set()
        self._records = 0
        self._offset: int | None = None
        self._changed_at_ms = -1
        self._time_ms: int | None = None
        self._begun = self._reset = self._grown = ""

    def receive(self, record: IncomingRecord) -> None:
        self._records += 1
        key = record.key
        if key is None:
            return
        if self._takes(key):
            self._changed_at_ms = record.timestamp_ms
            if record.value is None:
                self._sizes.pop(key, None)
            else:
                self._sizes[key] = len(key) + len(record.value)
        if key == TIME_KEY:
            with suppress(DecodeError):  # a store of another kind has any bytes there
                self._time_ms = None if record.value is None else int_codec.decode(record.value)
        elif key == OFFSET_KEY and record.value is not None:
            self._offset = decode_offset(record).offset
        elif key == BEGIN_KEY:
            self._begun = "" if record.value is None else decode_begin(record).shown
        elif key == RESET_KEY:
            self._reset = "" if record.value is None else decode_reset(record).shown
        elif key == GROWTH_KEY and record.value is not None:
            self._grown = decode_growth(record).shown
        elif key.startswith(TIMER_PREFIX):
            name, timer = decode_timer(record)
            if not is_parked(name):  # events in queues are no timers
                self._timers.discard(key) if timer is None else self._timers.add(key)

    def facts(self, partition: int) -> dict[str, Any]:
        return {
            "partition": partition,
            "keys": len(self._sizes),
            "bytes": sum(self._sizes.values()),
            "timers": len(self._timers),
            "next_offset": self._offset,
            "changelog_records": self._records,
            "changed_at_ms": self._changed_at_ms,
            "time_ms": self._time_ms,
            "begun": "; ".join(filter(None, [self._begun, self._reset, self._grown])),
        }


def _entries(
    source: EventSource[Any],
    servers: str,
    timeout: float,
    wanted: list[int] | None,
    folder: str,
    takes: Callable[[str], bool],
    as_of: str = "",
    table: str = "",
) -> list[_Entry]:
    """The entries whose keys are taken, in order. ``as_of``: as they were at this place."""
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    part, is_shown = shown_by(store, table)
    last: dict[tuple[int, bytes], IncomingRecord] = {}

    def about(key: bytes) -> bool:
        return is_shown(key) and takes(one_line(decoded(part, "decode_key", key)[0]))

    def receive(number: int, records: list[IncomingRecord]) -> None:
        for record in records:
            key = record.key
            if key is None or key.startswith(RESERVED_KEY_PREFIX):
                continue
            if record.value is None:
                last.pop((number, key), None)
            elif (number, key) in last or about(key):
                last[number, key] = record

    try:
        with opened(source, servers, timeout, wanted, folder, as_of, about) as (_, read):
            read(receive)
        found = [_entry(record, part) for record in last.values()]
    finally:
        store.revoked()
    return sorted(found, key=lambda entry: (entry.partition, entry.name))


def _entry(record: IncomingRecord, store: Any) -> _Entry:
    key, wrong_key = decoded(store, "decode_key", record.key or b"")
    data = record.value or b""
    value, wrong_value = decoded_entry(store, record.key or b"", data)
    wrong = wrong_key or wrong_value
    kind = harmless(record.header(TYPE_HEADER) or b"")
    return _Entry(
        record.partition, key, value, kind, f"{record.where}: {wrong}" if wrong else "", record.timestamp_ms, data
    )


def _facts(entry: _Entry) -> dict[str, Any]:
    return {name: value for name, value in entry._asdict().items() if name != "data"}


def _line(entry: _Entry) -> str:
    problem = f"  (cannot be read: {harmless(entry.problem)})" if entry.problem else ""
    return f"{entry.partition}  {shown_time(entry.changed_at_ms)}  {entry.name}  {one_line(entry.value)}{problem}"


def _entry_table(entries: list[_Entry]) -> Table:
    table = plain_table("partition", "changed at", "key", "value", right=("partition",))
    for entry in entries:
        value = shortened(one_line(entry.value), _WIDEST)
        text = Text(value) if not entry.problem else Text(shortened(harmless(entry.problem), _WIDEST), style="red")
        table.add_row(str(entry.partition), shown_time(entry.changed_at_ms), Text(shortened(entry.name, 60)), text)
    return table


def _partition_table(rows: list[dict[str, Any]]) -> Table:
    table = frameless(show_footer=True)
    table.add_column("partition", footer="all", justify="right")
    for name in ("keys", "bytes", "timers"):
        table.add_column(name, footer=f"{sum(row[name] for row in rows):,}", justify="right", no_wrap=True)
    has_time = any(row["time_ms"] is not None for row in rows)
    for name in ("next offset", "records", "changed at", *(["time"] if has_time else [])):
        table.add_column(name, justify="right", no_wrap=True)
    has_begun = any(row["begun"] for row in rows)
    if has_begun:
        table.add_column("begun", no_wrap=True)
    for row in rows:
        offset = "-" if row["next_offset"] is None else f"{row['next_offset']:,}"
        numbers = [f"{row[name]:,}" for name in ("keys", "bytes", "timers")]
        table.add_row(
            str(row["partition"]),
            *numbers,
            offset,
            f"{row['changelog_records']:,}",
            shown_time(row["changed_at_ms"]),
            *([] if not has_time else ["" if row["time_ms"] is None else shown_time(row["time_ms"])]),
            *([harmless(row["begun"])] if has_begun else []),
        )
    return table
