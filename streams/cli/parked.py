"""``kes parked``: the keys of an event source whose events wait, and an operator's acts on their queues.

An act names the head that the operator has seen.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import emit
from streams.cli.operating import (
    OWNERS_SECONDS,
    Act,
    Entries,
    PartitionOption,
    Rows,
    Selection,
    about,
    found_of,
    kept_of,
    of_owners,
    operate,
)
from streams.cli.state_files import rows_table
from streams.cli.state_sources import parked_of
from streams.cli.state_writing import Changes, Yes, stopped_source
from streams.core.parking import NEVER_MS, PREFIX, queue_name
from streams.core.parking_rules import Action, Seen, acted
from streams.errors import StoreError
from streams.looks.records import Decoder, one_line, plain_text, shortened, shown_time
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.partition.dead_letters import DeadLetter
from streams.runtime.partition.parking_acts import as_parked_record, letters
from streams.runtime.queries.parked import ParkedEvent, ParkedQueue, events_of
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

if TYPE_CHECKING:
    from streams.queries.operating import ParkedClient  # of the extra for queries

app = typer.Typer(help="Manage parked keys: list, show, retry, skip-head, drop.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="[KEY]", help="The key, as text.")]
Hex = Annotated[bool, typer.Option("--hex", help="KEY is in hexadecimal digits.")]
QueueOption = Annotated[
    str, typer.Option("--queue", metavar="H", help="The queue, as `list` shows it, instead of KEY: of a null key.")
]
AsLetters = Annotated[bool, typer.Option("--dead-letter", help="Write what goes to the dead-letter topic.")]
SHOWN: Final = 10
"""Events of a queue that are shown."""


class ChosenQueues(Selection[ParkedQueue]):
    """Parked keys: all of them, or that of one queue, by its name."""

    command: ClassVar[str] = "kes parked"
    noun: ClassVar[str] = "queue"
    absent: ClassVar[str] = "this key is not parked (any more): see kes parked list"

    def __init__(
        self,
        source: EventSource[Any],
        action: Action | str = "list",
        queue: str = "",
        *,
        as_letters: bool = False,
        partition: int | None = None,
    ) -> None:
        super().__init__(source, action, is_one=bool(queue), partition=partition)
        self._queue = queue
        self.as_letters = as_letters
        self.only = {"queue": queue.removeprefix(PREFIX)} if queue else {}
        self.more = {"as_letters": as_letters}

    def client(self, config: EventSourceConfig) -> ParkedClient:
        from streams.queries.operating import ParkedClient

        return ParkedClient(config)

    def chosen(self, number: int, entries: Entries) -> list[ParkedQueue]:
        by_name = parked_of(number, entries).keys.by_name
        found = [queue for queue in by_name.values() if self._queue in ("", queue.name)]
        return [ParkedQueue.of(queue) for queue in sorted(found, key=lambda each: each.state.since_ms)]

    def changes(
        self, config: EventSourceConfig, number: int, entries: Entries, chosen: list[ParkedQueue], limit: int
    ) -> Act:
        keys, timers = parked_of(number, entries)
        changes, gone, now_ms = Changes(), list[DeadLetter](), int(time.time() * 1000)

        def due_of(name: str) -> int | None:
            return timers[name].due_ms if name in timers else None

        for queue in chosen:
            seen, action = Seen(PREFIX + queue.queue, queue.head, queue.next), self.action
            done = acted(keys, seen, action, now_ms, due_of)  # type: ignore[arg-type]
            assert done is not None  # it was read just now
            changes |= {
                timer_key(name): None if timer is None else encode_timer(timer) for name, timer in done[0].items()
            }
            if self.as_letters:
                gone += letters(config, number, done[1], timers.get, queue.error, now_ms, limit)
        return Act(changes, gone, is_whole=True)

    @property
    def question(self) -> str:
        kept = ", as dead letters" if self.as_letters else ""
        what = {"retry": "are tried at once", "skip-head": f"lose their first event{kept}", "drop": f"go{kept}"}
        return what[self.action]

    @property
    def facts(self) -> dict[str, Any]:
        return {"dead_letters": self.as_letters}

    def row(self, number: int, entry: ParkedQueue) -> dict[str, Any]:
        return _row(number, entry)

    def table(self, rows: Rows) -> Any:
        return _table(rows)


class Asked(NamedTuple):
    """The options of a command about one queue."""

    source: str
    key: str
    is_hex: bool
    queue: str
    servers: str
    timeout: float
    json: bool

    @property
    def name(self) -> str:
        """Return the name of the queue that is meant. Raises ``BadParameter``."""
        if bool(self.key) is bool(self.queue):
            raise typer.BadParameter("name the KEY, or its queue with --queue")
        if self.queue:
            return PREFIX + self.queue
        try:  # keys may be bytes that are no text, too
            return queue_name(bytes.fromhex(self.key) if self.is_hex else os.fsencode(self.key))
        except ValueError as error:
            raise typer.BadParameter(f"{self.key!r} is not in hexadecimal digits", param_hint="KEY") from error


def _asked(
    source: SourceName,
    key: Key = "",
    hex_: Hex = False,
    queue: QueueOption = "",
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> Asked:
    return Asked(source, key, hex_, queue, bootstrap_servers, timeout, json)


_about_one = about(_asked)


@app.command("list")
def list_(
    source: SourceName,
    partition: PartitionOption = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """List parked keys: how many events wait, since when, why, and when the first one is tried again.

    Read from the members that own them, or from the changelog if no member answers.

    Exit codes: 0 no key is parked; 1 some are, or no broker answers; 2 wrong usage.
    """
    queues = ChosenQueues(named_source(source), partition=partition)
    rows = queues.rows(found_of(queues, bootstrap_servers, timeout))
    emit({"parked": rows}, json, lambda: _table(rows))
    raise typer.Exit(bool(rows))


@app.command()
@_about_one
def show(
    asked: Asked, all_: Annotated[bool, typer.Option("--all", help="Show all events, not only the first ten.")] = False
) -> None:
    """Show the events of a parked key, as the source would read them.

    Read as for `kes parked list`. If the owner answers, and has tried the first event itself, its stack trace is shown,
    too.

    Exit codes: 0 shown; 1 the key is not parked, or no broker answers; 2 wrong usage.
    """
    program = named_source(asked.source)
    queues, most = ChosenQueues(program, queue=asked.name), None if all_ else SHOWN

    async def of_owner(client: ParkedClient) -> list[tuple[int, ParkedQueue, list[ParkedEvent]]]:
        there = await client.find(OWNERS_SECONDS, **queues.only)
        return [(number, queue, await client.events(number, queue, OWNERS_SECONDS, most)) for number, queue in there]

    found = of_owners(queues, asked.servers, asked.timeout, of_owner)
    if found is None:
        found = []
        for number, entries in kept_of(queues, asked.servers, asked.timeout).items():
            keys, timers = parked_of(number, entries)
            for queue in queues.chosen(number, entries):
                found.append((number, queue, events_of(keys.by_name[PREFIX + queue.queue], timers.get)[:most]))
    if not found:
        raise StoreError(queues.absent)
    number, queue, waiting = found[0]
    decoder, events = Decoder(program), list[dict[str, Any]]()
    for event in waiting:
        queued = event.queued
        facts: dict[str, Any] = {"number": event.number, "timestamp_ms": queued.timestamp_ms}
        if queued.is_timer:
            facts |= {"timer": queued.topic, "is_set": event.is_set}
        else:
            record = as_parked_record(queued, number)
            content = decoder.content(record)
            facts |= {"origin": record.where, "type": content.type, "value": content.value, "problem": content.problem}
        events.append(facts)
    row = _row(number, queue) | {"trace": queue.trace}
    lines = [
        f"{name}: {harmless(str(value))}" for name, value in row.items() if value not in ("", None) and name != "trace"
    ]
    lines += [f"    {harmless(line)}" for line in queue.trace.splitlines()]
    lines += [shortened(one_line(facts), 500) for facts in events]
    emit(row | {"events_shown": events}, asked.json, lambda: Text("\n".join(lines)))


@app.command()
@_about_one
def retry(
    asked: Asked,
    all_: Annotated[bool, typer.Option("--all", help="All parked keys.")] = False,
    yes: Yes = False,
) -> None:
    """Have the first event of a parked key tried at once: by the member that owns it, or by the next start.

    Running members need QueryConfig.operate and `kes run --queries`; without them all members must be stopped.

    Each start tries parked keys once by itself. This also forgets that a process ended while it tried the event, after
    which the key would wait for its pause.

    Exit codes: 0 done; 1 refused (the key is not parked, its first event has gone meanwhile, or running members take no
    acts), not confirmed, or no broker or owner answers; 2 wrong usage.
    """
    if all_ and (asked.key or asked.queue):
        raise typer.BadParameter("choose KEY or --all")
    _act("retry", asked, "" if all_ else asked.name, yes=yes)


def _letting_go(action: Action, about: str) -> None:
    """Add a command that lets events go."""

    def command(asked: Asked, as_letters: AsLetters = False, yes: Yes = False) -> None:
        _act(action, asked, asked.name, as_letters=as_letters, yes=yes)

    about += "\n\nMembers may be running, and exit codes are, as for `kes parked retry`."
    app.command(action, help=about)(_about_one(command))


_letting_go("skip-head", "Let the first event of a parked key go; the rest goes on in its order.")
_letting_go("drop", "Let all events of a parked key go.")


def _act(action: Action, asked: Asked, queue: str, *, as_letters: bool = False, yes: bool) -> None:
    source = stopped_source(asked.source, json=asked.json, yes=yes)
    queues = ChosenQueues(source, action, queue, as_letters=as_letters)
    operate(queues, asked.servers, asked.timeout, json=asked.json, yes=yes)


def _row(number: int, queue: ParkedQueue) -> dict[str, Any]:
    key, due_ms = queue.key, queue.due_ms
    is_cut = key is not None and len(key) < queue.key_bytes
    return {
        "partition": number,
        "key": f"{key.decode(errors='replace')}..." if key is not None and is_cut else plain_text(key),
        "queue": queue.queue,
        "events": queue.next - queue.head,
        "bytes": queue.size,
        "since_ms": queue.since_ms,
        "attempts": queue.attempts,
        "next_retry_ms": None if due_ms >= NEVER_MS else due_ms,
        "error": queue.error,
        "handler": queue.handler,
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
