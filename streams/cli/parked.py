"""``kes parked``: the keys of an event source whose events wait, and an operator's acts on their queues.

What waits is read from the owners where members run and answer, else from the changelog. An act names the head that the
operator has seen. Where members run, the owner carries it out, in the order of its partition; where all are stopped it
is a transaction as that of ``kes skip``, whose steps say why it is exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, config_at, named_source
from streams.cli.console import complain, emit, notices
from streams.cli.skip import position_of, slot_of
from streams.cli.state_files import rows_table
from streams.cli.state_sources import ParkedState, parked_of, state_of
from streams.cli.state_writing import Changes, StoppedPartition, Yes, stopped_source
from streams.core.parking import NEVER_MS, PREFIX, ParkedKeys, Queue, queue_name
from streams.core.parking_rules import Action, Seen, acted
from streams.core.timers import Timer
from streams.errors import ConfigError, OffsetError, StoreError, StreamsError
from streams.kafka.questions.group_checks import GroupChecks
from streams.looks.records import Decoder, one_line, plain_text, shortened, shown_time
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.partition.parking_acts import as_parked_record, letters
from streams.runtime.queries.parked import ParkedEvent, ParkedQueue, events_of
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

if TYPE_CHECKING:
    from streams.queries.operating import ParkedClient  # of the extra for queries

T = TypeVar("T")
app = typer.Typer(help="Manage parked keys: list, show, retry, skip-head, drop.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="[KEY]", help="The key, as text.")]
Hex = Annotated[bool, typer.Option("--hex", help="KEY is in hexadecimal digits.")]
QueueOption = Annotated[
    str, typer.Option("--queue", metavar="H", help="The queue, as `list` shows it, instead of KEY: of a null key.")
]
AsLetters = Annotated[bool, typer.Option("--dead-letter", help="Write what goes to the dead-letter topic.")]
Rows = list[dict[str, Any]]
Confirm = Callable[[Rows], None]
OWNERS_SECONDS: Final = 5.0
"""Owners answer in so many seconds, or the changelog does."""
SHOWN: Final = 10
"""Events of a queue that are shown."""
_NOT_PARKED: Final = "this key is not parked (any more): see kes parked list"
PartitionOption = Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")]


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


def _about_one(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``Asked``, which is its first argument, beside its own."""

    def command(
        source: SourceName,
        key: Key = "",
        hex_: Hex = False,
        queue: QueueOption = "",
        bootstrap_servers: Servers = "",
        timeout: Timeout = 30.0,
        json: Json = False,
        **own: Any,
    ) -> None:
        function(Asked(source, key, hex_, queue, bootstrap_servers, timeout, json), **own)

    # typer reads names, types and order from here.
    *shared, _ = inspect.signature(command, eval_str=True).parameters.values()
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*shared, *own)}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


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
    program = named_source(source)

    async def asked(client: ParkedClient) -> Rows:
        return [_row(number, each) for number, each in await client.find("", OWNERS_SECONDS, partition)]

    rows = _of_owners(config_at(bootstrap_servers, program), timeout, asked)
    if rows is None:
        found = _read(program, bootstrap_servers, timeout, partition)
        rows = [_row(number, ParkedQueue.of(queue)) for number, _, queue in _all(found)]
    emit({"parked": rows}, json, lambda: _table(rows))
    raise typer.Exit(bool(rows))


@app.command()
@_about_one
def show(
    asked: Asked, all_: Annotated[bool, typer.Option("--all", help="Show all events, not only the first ten.")] = False
) -> None:
    """Show the events of a parked key, as the source would read them.

    Read as for `kes parked list`.

    Exit codes: 0 shown; 1 the key is not parked, or no broker answers; 2 wrong usage.
    """
    program, name = named_source(asked.source), asked.name
    most = None if all_ else SHOWN

    async def of_owner(client: ParkedClient) -> tuple[int, ParkedQueue, list[ParkedEvent]] | None:
        for number, queue in await client.find(name.removeprefix(PREFIX), OWNERS_SECONDS):
            return number, queue, await client.events(number, queue, OWNERS_SECONDS, most)
        return None

    found = _of_owners(config_at(asked.servers, program), asked.timeout, of_owner)
    if found is None:
        number, parked, chosen = _chosen(_read(program, asked.servers, asked.timeout), name)
        found = number, ParkedQueue.of(chosen), events_of(chosen, parked.timers.get)[:most]
    number, queue, waiting = found
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
    row = _row(number, queue)
    lines = [f"{name}: {harmless(str(value))}" for name, value in row.items() if value not in ("", None)]
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
    _operate(ParkedAct("retry"), asked, "" if all_ else asked.name, yes=yes)


def _letting_go(action: Action, about: str) -> None:
    """Add a command that lets events go."""

    def command(asked: Asked, as_letters: AsLetters = False, yes: Yes = False) -> None:
        _operate(ParkedAct(action, as_letters), asked, asked.name, yes=yes)

    about += "\n\nMembers may be running, and exit codes are, as for `kes parked retry`."
    app.command(action, help=about)(_about_one(command))


_letting_go("skip-head", "Let the first event of a parked key go; the rest goes on in its order.")
_letting_go("drop", "Let all events of a parked key go.")


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(
    source: EventSource[Any], servers: str, timeout: float, partition: int | None = None
) -> dict[int, ParkedState]:
    states = state_of(source, "changelog", servers, timeout, None if partition is None else [partition])
    return {number: parked_of(number, state.entries) for number, state in states.items()}


def _of_owners(
    config: EventSourceConfig, timeout: float, ask: Callable[[ParkedClient], Awaitable[T | None]]
) -> T | None:
    """Return what the owners answer. ``None``: there are none to ask, or one does not answer."""
    with GroupChecks(config, seconds=timeout) as checks:
        if not checks.described(config.group_id).members or not config.queries.secret_file:
            return None
    try:
        from streams.queries.operating import ParkedClient
    except ModuleNotFoundError:  # without the extra for queries
        return None

    async def asked() -> T | None:
        async with ParkedClient(config) as client:
            return await ask(client)

    try:
        return asyncio.run(asked())
    except StreamsError as error:  # members of an older release refuse what they do not know
        complain(f"read from the changelog: {error}")
        return None


def _chosen(found: Mapping[int, ParkedState], name: str) -> tuple[int, ParkedState, Queue]:
    for number, parked in found.items():
        if (queue := parked.keys.by_name.get(name)) is not None:
            return number, parked, queue
    raise StoreError(_NOT_PARKED)


def _by_age(keys: ParkedKeys) -> list[Queue]:
    return sorted(keys.by_name.values(), key=lambda queue: queue.state.since_ms)


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


# -- acts --------------------------------------------------------------------------------------------------------------


class ParkedAct(NamedTuple):
    """An act that an operator has typed."""

    action: Action
    as_letters: bool = False

    def confirm(self, rows: list[dict[str, Any]]) -> None:
        """Show the queues, and ask. Raises ``Abort``."""
        notices().print(_table(rows))
        kept = ", as dead letters" if self.as_letters else ""
        what = {"retry": "are tried at once", "skip-head": f"lose their first event{kept}", "drop": f"go{kept}"}
        typer.confirm(f"These queues {what[self.action]}. Continue?", abort=True, err=True)


def _operate(wanted: ParkedAct, asked: Asked, queue: str, *, yes: bool) -> None:
    """Act on one queue, or on all of them (no ``queue``): by the members that run, or in their place."""
    servers, timeout, json = asked.servers, asked.timeout, asked.json
    source = stopped_source(asked.source, json=json, yes=yes)
    config = config_at(servers, source)
    confirm = (lambda rows: None) if yes else wanted.confirm
    with GroupChecks(config, seconds=timeout) as checks:
        if checks.described(config.group_id).members:
            rows = _by_owners(config, wanted, queue.removeprefix(PREFIX), timeout, confirm)
        else:
            rows = _on_stopped(source, config, checks, wanted, queue, servers, timeout, confirm)
    emit({"action": wanted.action, "dead_letters": wanted.as_letters, "queues": rows}, json, lambda: _table(rows))


def _by_owners(config: EventSourceConfig, wanted: ParkedAct, queue: str, timeout: float, confirm: Confirm) -> Rows:
    if not config.queries.secret_file:
        raise OffsetError(
            f"group {config.group_id} has members that run: stop them all first, or let them act: QueryConfig.operate "
            "and secret_file, and kes run --queries"
        )
    try:
        from streams.queries.operating import ParkedClient, refuse_undone
    except ModuleNotFoundError as error:
        raise ConfigError(f"acts of running members: {error}") from None

    async def find() -> list[tuple[int, ParkedQueue]]:
        async with ParkedClient(config) as client:
            return await client.find(queue, timeout)

    async def act(found: list[tuple[int, ParkedQueue]]) -> frozenset[str]:
        async with ParkedClient(config) as client:
            done = frozenset[str]()
            for number in sorted({number for number, _ in found}):
                there = [each.named for at, each in found if at == number]
                done |= await client.act(
                    number, wanted.action, there, as_letters=wanted.as_letters, timeout_seconds=timeout
                )
            return done

    found = asyncio.run(find())
    if queue and not found:
        raise StoreError(_NOT_PARKED)
    if found:
        confirm([_row(number, each) for number, each in found])
    done = asyncio.run(act(found))
    if queue:
        refuse_undone(done, found[0][1])
    return [_row(number, each) for number, each in found if each.queue in done]


def _on_stopped(
    source: EventSource[Any],
    config: EventSourceConfig,
    checks: GroupChecks,
    wanted: ParkedAct,
    queue: str,
    servers: str,
    timeout: float,
    confirm: Confirm,
) -> Rows:
    checks.refuse_if_alive()
    everything = list(range(config.num_partitions))
    committed = checks.committed(everything)
    before = {number: position_of(config, checks, config.topic, number, committed[number]) for number in everything}
    found = _read(source, servers, timeout)
    chosen = _all(found) if not queue else [_chosen(found, queue)]
    rows = [_row(number, ParkedQueue.of(each)) for number, _, each in chosen]
    if rows:
        confirm(rows)
    limit = source.program().message_limit
    with slot_of(config, "kes-parked", timeout) as slot:
        for number in sorted({number for number, _, _ in chosen}):
            changes, gone, now_ms = Changes(), list[Any](), int(time.time() * 1000)
            for _, parked, each in (one for one in chosen if one[0] == number):
                timers = parked.timers

                def due_of(name: str, timers: dict[str, Timer] = timers) -> int | None:
                    return timers[name].due_ms if name in timers else None

                done = acted(
                    parked.keys, Seen(each.name, each.state.head, each.state.next), wanted.action, now_ms, due_of
                )
                assert done is not None  # it was read just now
                changes |= {
                    timer_key(changed): None if timer is None else encode_timer(timer)
                    for changed, timer in done[0].items()
                }
                if wanted.as_letters:
                    gone += letters(config, number, done[1], timers.get, each.state.error, now_ms, limit)
            position = before[number]
            carried = msgspec.UNSET if position.record is None else position.record.inputs
            writer = StoppedPartition(config, checks, slot, number, committed[number])
            writer.write_whole(position, changes, carried, gone)
    return rows


def _all(found: Mapping[int, ParkedState]) -> list[tuple[int, ParkedState, Queue]]:
    return [(number, parked, queue) for number, parked in sorted(found.items()) for queue in _by_age(parked.keys)]
