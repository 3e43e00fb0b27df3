"""``kes view``: a compacted topic, or the state of an event source, as a view of it has it: get, scan, watch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, Timeout, await_listener, checked_partition_offset, named_source
from streams.cli.console import as_json, complain, emit, plain_table
from streams.cli.failures import discard
from streams.cli.state_sources import TableName, decoded, decoded_entry, shown_by
from streams.codecs import BytesCodec
from streams.looks.addresses import brokers, client_settings_of
from streams.looks.records import one_line, plain_bytes, plain_text, shortened
from streams.records import TopicPartition
from streams.runtime.ownership.replicas import make_store
from streams.sak.harmless import harmless
from streams.views.blocking import BlockingView
from streams.views.view import View

app = typer.Typer(no_args_is_help=True)

_WIDEST: Final = 100

_Target = Annotated[
    str, typer.Argument(metavar="MODULE:SOURCE|TOPIC", help="An event source, for its state, or a compacted topic.")
]
_AtLeast = Annotated[
    list[str] | None,
    typer.Option("--at-least", metavar="PARTITION@OFFSET", help="Wait until this record is in the view. Repeatable."),
]
_Prefix = Annotated[str, typer.Option("--prefix", help="Only keys with this prefix.")]


class _Shown(NamedTuple):
    """A view in bytes, and how keys and values are shown: as plain data, with the reason if they cannot be read."""

    view: BlockingView[bytes, bytes]
    key: Callable[[bytes], tuple[Any, str]]
    value: Callable[[bytes, bytes], tuple[Any, str]]
    shows: Callable[[bytes], bool] = lambda key: True

    def name(self, key: bytes) -> str:
        """Return a key as it is typed."""
        return one_line(self.key(key)[0])

    def rows(self, takes: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the entries whose keys are taken, of one moment, in order."""
        with self.view.snapshot() as frozen:
            found = [
                (number, key, value)
                for number, key, value in frozen.rows()
                if self.shows(key) and takes(self.name(key))
            ]
        rows = []
        for number, key, value in found:
            (shown_key, wrong_key), (shown_value, wrong_value) = self.key(key), self.value(key, value)
            problem = wrong_key or wrong_value
            rows.append({"partition": number, "key": shown_key, "value": shown_value, "problem": problem})
        return sorted(rows, key=lambda row: (one_line(row["key"]), row["partition"]))


@app.callback()
def view() -> None:
    """A compacted topic, or the state of an event source, as a view of it has it. Changes nothing."""


@app.command()
def get(
    target: _Target,
    key: Annotated[str, typer.Argument(help="Key, as shown by `scan`: o1, 17, or JSON.")],
    table: TableName = "",
    at_least: _AtLeast = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show the value of one key.

    Exit codes: 0 shown; 1 no such key or topic, a topic that is not compacted, or no broker answers; 2 wrong usage.
    """
    with _opened(target, table, at_least, bootstrap_servers, timeout) as shown:
        rows = shown.rows(lambda name: name == key)
    emit(
        {"key": key, "entries": rows},
        json,
        lambda: Text("\n".join(_line(row) for row in rows) if rows else f"no such key: {harmless(key)}"),
    )
    if len(rows) > 1:
        complain(
            f"the key is in the partitions {', '.join(str(row['partition']) for row in rows)}: it has no one value"
        )
    if not rows:
        raise typer.Exit(1)


@app.command()
def scan(
    target: _Target,
    prefix: _Prefix = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of entries.")] = 100,
    table: TableName = "",
    at_least: _AtLeast = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show keys and values by key, as of one moment.

    Exit codes: 0 shown; 1 no such topic, a topic that is not compacted, or no broker answers; 2 wrong usage.
    """
    with _opened(target, table, at_least, bootstrap_servers, timeout) as shown:
        rows, positions = shown.rows(lambda name: name.startswith(prefix)), shown.view.positions
    emit({"keys": len(rows), "positions": positions, "entries": rows[:limit]}, json, lambda: _table(rows[:limit]))
    if len(rows) > limit and not json:
        complain(f"{limit:,} of {len(rows):,} keys are shown: raise --limit, or use --prefix")


@app.command()
def watch(
    target: _Target,
    prefix: _Prefix = "",
    table: TableName = "",
    initial: Annotated[bool, typer.Option("--initial", help="Start with all present entries.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per change.")] = False,
) -> None:
    """Show changes as they are committed, until Ctrl-C: each key with its old and its new value.

    Changes of a key that arrive faster than they are shown are merged. The last one is always shown.

    Exit codes: 0 ended by Ctrl-C; 1 no such topic, a topic that is not compacted or was deleted, or no broker answers;
    2 wrong usage.
    """
    try:
        with _opened(target, table, None, bootstrap_servers, timeout) as shown:
            for change in shown.view.changes(initial=initial):
                if shown.shows(change.key) and shown.name(change.key).startswith(prefix):
                    sys.stdout.write(_change(shown, change.partition, change.key, change.old, change.new, json))
                    sys.stdout.flush()
    except KeyboardInterrupt:
        return  # how it ends
    except BrokenPipeError:  # `kes view watch ... | head`: the reader has enough
        discard(sys.stdout)


@contextmanager
def _opened(target: str, table: str, at_least: list[str] | None, servers: str, timeout: float) -> Iterator[_Shown]:
    """Follow the topic until the end of the block, from when everything is here that was committed at its start."""
    positions = [checked_partition_offset(text) for text in at_least or ()]
    source = named_source(target) if ":" in target else None
    if source is None and table:
        raise typer.BadParameter("--table needs an event source: a topic has one table")
    config = None if source is None else source.config
    addresses = brokers(servers, config)
    await_listener(addresses, timeout)
    topic = target if config is None else config.changelog
    raw = View(
        topic,
        key=bytes,
        value=bytes,
        key_codec=BytesCodec(),
        value_codec=BytesCodec(),
        bootstrap_servers=addresses,
        client_settings=client_settings_of(config),
        client_id="kes-view",
        topic_timeout_seconds=min(timeout, 5.0),
    )
    store = None if source is None else make_store(source.program().store_factory, TopicPartition(topic, 0))
    try:
        part, shows = shown_by(store, table)
        with raw as following:
            following.ready(timeout)
            for position in positions:
                following.wait_for({position.partition: position.offset + 1}, timeout)
            if store is None:
                yield _Shown(following, lambda key: (plain_text(key), ""), lambda _, value: (plain_bytes(value), ""))
            else:
                yield _Shown(
                    following,
                    lambda key: decoded(part, "decode_key", key),
                    lambda key, value: decoded_entry(part, key, value),
                    shows,
                )
    finally:
        if store is not None:
            store.revoked()


def _change(shown: _Shown, partition: int, key: bytes, old: bytes | None, new: bytes | None, json: bool) -> str:
    (before, _), (after, problem) = ((None, "") if value is None else shown.value(key, value) for value in (old, new))
    if json:
        facts = {"partition": partition, "key": shown.key(key)[0], "old": before, "new": after, "problem": problem}
        return as_json(facts)
    words = [str(partition), shown.name(key), *("-" if value is None else one_line(value) for value in (before, after))]
    return "  ".join([*words[:2], f"{words[2]} -> {words[3]}"]) + "\n"


def _line(row: dict[str, Any]) -> str:
    problem = f"  (cannot be read: {harmless(row['problem'])})" if row["problem"] else ""
    return f"{row['partition']}  {one_line(row['key'])}  {one_line(row['value'])}{problem}"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("partition", "key", "value", right=("partition",))
    for row in rows:
        text = harmless(row["problem"]) or one_line(row["value"])
        value = Text(shortened(text, _WIDEST), style="red" if row["problem"] else "")
        table.add_row(str(row["partition"]), Text(shortened(one_line(row["key"]), 60)), value)
    return table
