"""``kes parked``: the keys of an event source whose events wait, and an operator's acts on their queues.

What waits is read from the changelog, so members may be running. An act is a transaction as that of ``kes skip``, whose
steps say why it is exactly once; it names the head that the operator has seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import emit, notices
from streams.cli.skip import position_of, slot_of
from streams.cli.state_files import rows_table
from streams.cli.state_sources import state_of
from streams.cli.state_writing import Changes, StoppedPartition, Yes, stopped_source
from streams.core.parking import NEVER_MS, PREFIX, BrokenQueue, ParkedKeys, Queue, queue_name
from streams.core.parking_rules import Action, Seen, acted
from streams.core.timers import Timer
from streams.errors import OffsetError, StoreError
from streams.kafka.questions.group_checks import GroupChecks
from streams.looks.addresses import brokers
from streams.looks.records import Decoder, one_line, plain_text, shortened, shown_time
from streams.records import IncomingRecord
from streams.runtime.changelog import TIMER_PREFIX, decode_timer, encode_timer, timer_key
from streams.runtime.partition.parking_acts import as_parked_record, letters
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

app = typer.Typer(help="Manage parked keys: list, show, retry, skip-head, drop.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="[KEY]", help="The key, as text.")]
Hex = Annotated[bool, typer.Option("--hex", help="KEY is in hexadecimal digits.")]
QueueOption = Annotated[
    str, typer.Option("--queue", metavar="H", help="The queue, as `list` shows it, instead of KEY: of a null key.")
]
AsLetters = Annotated[bool, typer.Option("--dead-letter", help="Write what goes to the dead-letter topic.")]
PartitionOption = Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")]


class Parked(NamedTuple):
    """The parked keys of one partition, and its timers by name."""

    keys: ParkedKeys
    timers: dict[str, Timer]


@app.command("list")
def list_(
    source: SourceName,
    partition: PartitionOption = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """List parked keys: how many events wait, since when, why, and when the first one is tried again.

    Read from the changelog; members may be running.

    Exit codes: 0 no key is parked; 1 some are, or no broker answers; 2 wrong usage.
    """
    found = _read(named_source(source), bootstrap_servers, timeout, partition)
    rows = [_row(number, queue) for number, parked in sorted(found.items()) for queue in _by_age(parked.keys)]
    emit({"parked": rows}, json, lambda: _table(rows))
    raise typer.Exit(bool(rows))


@app.command()
def show(
    source: SourceName,
    key: Key = "",
    all_: Annotated[bool, typer.Option("--all", help="Show all events, not only the first ten.")] = False,
    hex_: Hex = False,
    queue: QueueOption = "",
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show the events of a parked key, as the source would read them.

    Exit codes: 0 shown; 1 the key is not parked, or no broker answers; 2 wrong usage.
    """
    program = named_source(source)
    number, parked, chosen = _chosen(_read(program, bootstrap_servers, timeout), _name(key, queue, is_hex=hex_))
    decoder, events = Decoder(program), list[dict[str, Any]]()
    for at in sorted(chosen.events)[: None if all_ else 10]:
        queued = chosen.events[at]
        timer = parked.timers.get(queued.topic) if queued.is_timer else None
        facts: dict[str, Any] = {"number": at, "timestamp_ms": queued.timestamp_ms}
        if queued.is_timer:
            facts |= {"timer": queued.topic, "is_set": timer is not None and timer.due_ms == queued.timestamp_ms}
        else:
            record = as_parked_record(queued, number)
            content = decoder.content(record)
            facts |= {"origin": record.where, "type": content.type, "value": content.value, "problem": content.problem}
        events.append(facts)
    row = _row(number, chosen)
    lines = [f"{name}: {harmless(str(value))}" for name, value in row.items() if value not in ("", None)]
    lines += [shortened(one_line(facts), 500) for facts in events]
    emit(row | {"events_shown": events}, json, lambda: Text("\n".join(lines)))


@app.command()
def retry(
    source: SourceName,
    key: Key = "",
    all_: Annotated[bool, typer.Option("--all", help="All parked keys.")] = False,
    hex_: Hex = False,
    queue: QueueOption = "",
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Have the first event of a parked key tried as soon as members run. All members must be stopped.

    Each start tries parked keys once by itself. This forgets that a process ended while it tried the event, after which
    the key would wait for its pause.

    Exit codes: 0 done; 1 refused (a member is running, or the key is not parked), not confirmed, or no broker answers;
    2 wrong usage.
    """
    if all_ and (key or queue):
        raise typer.BadParameter("choose KEY or --all")
    name = "" if all_ else _name(key, queue, is_hex=hex_)
    _operate("retry", source, name, bootstrap_servers, timeout, yes=yes, json=json)


@app.command("skip-head")
def skip_head(
    source: SourceName,
    key: Key = "",
    as_letter: AsLetters = False,
    hex_: Hex = False,
    queue: QueueOption = "",
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Let the first event of a parked key go; the rest goes on in its order. All members must be stopped.

    Exit codes: as `kes parked retry`.
    """
    name = _name(key, queue, is_hex=hex_)
    _operate("skip-head", source, name, bootstrap_servers, timeout, yes=yes, json=json, as_letters=as_letter)


@app.command()
def drop(
    source: SourceName,
    key: Key = "",
    as_letter: AsLetters = False,
    hex_: Hex = False,
    queue: QueueOption = "",
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Let all events of a parked key go. All members must be stopped.

    Exit codes: as `kes parked retry`.
    """
    name = _name(key, queue, is_hex=hex_)
    _operate("drop", source, name, bootstrap_servers, timeout, yes=yes, json=json, as_letters=as_letter)


# -- reading -----------------------------------------------------------------------------------------------------------


def parked_of(number: int, entries: Mapping[bytes, bytes]) -> Parked:
    """Return the parked keys in a state. Raises ``OffsetError`` for one that cannot be read."""
    timers: dict[str, Timer] = {}
    for key, value in entries.items():
        if key.startswith(TIMER_PREFIX):
            name, timer = decode_timer(IncomingRecord("", number, 0, key, value, None))
            if timer is not None:
                timers[name] = timer
    try:
        keys = ParkedKeys(timer for name, timer in timers.items() if name.startswith(PREFIX))
    except BrokenQueue as error:
        raise OffsetError(f"partition {number}: {error}") from error
    return Parked(keys, timers)


def _read(source: EventSource[Any], servers: str, timeout: float, partition: int | None = None) -> dict[int, Parked]:
    states = state_of(source, "changelog", servers, timeout, None if partition is None else [partition])
    return {number: parked_of(number, state.entries) for number, state in states.items()}


def _name(key: str, queue: str, *, is_hex: bool) -> str:
    """Return the name of the queue that is meant. Raises ``BadParameter``."""
    if bool(key) is bool(queue):
        raise typer.BadParameter("name the KEY, or its queue with --queue")
    if queue:
        return PREFIX + queue
    try:
        return queue_name(bytes.fromhex(key) if is_hex else key.encode())
    except ValueError as error:
        raise typer.BadParameter(f"{key!r} is not in hexadecimal digits", param_hint="KEY") from error


def _chosen(found: Mapping[int, Parked], name: str) -> tuple[int, Parked, Queue]:
    for number, parked in found.items():
        if (queue := parked.keys.by_name.get(name)) is not None:
            return number, parked, queue
    raise StoreError("this key is not parked (any more): see kes parked list")


def _by_age(keys: ParkedKeys) -> list[Queue]:
    return sorted(keys.by_name.values(), key=lambda queue: queue.state.since_ms)


def _row(number: int, queue: Queue) -> dict[str, Any]:
    state, due_ms = queue.state, queue.record.due_ms
    return {
        "partition": number,
        "key": plain_text(queue.key),
        "queue": queue.name.removeprefix(PREFIX),
        "events": len(queue),
        "bytes": state.bytes,
        "since_ms": state.since_ms,
        "attempts": state.attempts,
        "next_retry_ms": None if due_ms >= NEVER_MS else due_ms,
        "error": state.error,
        "handler": state.handler,
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    shown = [
        row
        | {
            "key": "null" if row["key"] is None else shortened(one_line(row["key"]), 64),
            "since": shown_time(row["since_ms"]),
            "next retry": "-" if row["next_retry_ms"] is None else shown_time(row["next_retry_ms"]),
            "error": shortened(harmless(row["error"]), 60),
        }
        for row in rows
    ]
    names = ("partition", "key", "queue", "events", "bytes", "since", "attempts", "next retry", "error")
    return rows_table(shown, *names)


# -- acts --------------------------------------------------------------------------------------------------------------


def _operate(
    action: Action,
    name: str,
    queue: str,
    servers: str,
    timeout: float,
    *,
    yes: bool,
    json: bool,
    as_letters: bool = False,
) -> None:
    """Act on one queue, or on all of them (no ``queue``)."""
    source = stopped_source(name, json=json, yes=yes)
    config = msgspec.structs.replace(source.config, bootstrap_servers=brokers(servers, source.config)).resolved()
    with GroupChecks(config, seconds=timeout) as checks:
        checks.refuse_if_alive()
        everything = list(range(config.num_partitions))
        committed = checks.committed(everything)
        before = {number: position_of(config, checks, config.topic, number, committed[number]) for number in everything}
        found = _read(source, servers, timeout)
        chosen = _all(found) if not queue else [_chosen(found, queue)]
        rows = [_row(number, each) for number, _, each in chosen]
        if rows and not yes:
            notices().print(_table(rows))
            kept = ", as dead letters" if as_letters else ""
            what = {"retry": "are tried at once", "skip-head": f"lose their first event{kept}", "drop": f"go{kept}"}
            typer.confirm(f"These queues {what[action]}. Continue?", abort=True, err=True)
        limit = source.program().message_limit
        with slot_of(config, "kes-parked", timeout) as slot:
            for number in sorted({number for number, _, _ in chosen}):
                changes, gone, now_ms = Changes(), list[Any](), int(time.time() * 1000)
                for _, parked, each in (one for one in chosen if one[0] == number):
                    timers = parked.timers
                    seen = Seen(each.name, each.state.head, each.state.next)

                    def due_of(name: str, timers: dict[str, Timer] = timers) -> int | None:
                        return timers[name].due_ms if name in timers else None

                    done = acted(parked.keys, seen, action, now_ms, due_of)
                    assert done is not None  # it was read just now
                    changes |= {
                        timer_key(changed): None if timer is None else encode_timer(timer)
                        for changed, timer in done[0].items()
                    }
                    if as_letters:
                        gone += letters(config, number, done[1], timers.get, each.state.error, now_ms, limit)
                position = before[number]
                carried = msgspec.UNSET if position.record is None else position.record.inputs
                writer = StoppedPartition(config, checks, slot, number, committed[number])
                writer.write_whole(position, changes, carried, gone)
    emit({"action": action, "dead_letters": as_letters, "queues": rows}, json, lambda: _table(rows))


def _all(found: Mapping[int, Parked]) -> list[tuple[int, Parked, Queue]]:
    return [(number, parked, queue) for number, parked in sorted(found.items()) for queue in _by_age(parked.keys)]
