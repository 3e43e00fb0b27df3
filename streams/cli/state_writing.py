"""``kes state import``, ``migrate``, ``set-time``, ``forget``: changes to the state of a stopped source.

Each transaction is as one of ``kes skip`` (see there why no member can come between): the group's offset is pending in
it before the group is looked at for the second time, and the last offset record must be the one that was there when
the state was read. It holds some of the changes of one partition, and ends with an offset record of the same position,
as everything does that is written to a changelog. So folders, snapshots and standbys read on from where they are.
Killed in between, a partition has a part of the changes; the next run writes the rest. The rows of a joined table that
is forgotten go in one transaction per partition, and the position in its topic with them: a part of the rows would pass
for the table.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, config_at, named_source, refuse_to_ask
from streams.cli.console import complain, emit, notices, print_whole
from streams.cli.skip import Position, offset_record, position_of, slot_of
from streams.cli.state_files import Partition, rows_table
from streams.cli.state_sources import JOB_NUMBERS, StateAt, from_export, jobs_of, next_job_of, parked_of, state_of
from streams.cli.tail import time_of
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import ConfigError, DecodeError, OffsetError, StoreError
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.committing import transaction
from streams.looks.records import shortened
from streams.looks.scans import late_lines
from streams.records import IncomingRecord, Output, TopicPartition
from streams.runtime.changelog import (
    JOIN_PREFIX,
    OFFSET_KEY,
    STORY_KEYS,
    TIMER_PREFIX,
    OffsetRecord,
    decode_timer,
    without_input,
)
from streams.runtime.ownership.replicas import make_store
from streams.runtime.partition.joined_rows import row_key
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.journalled import JournalledBytes
from streams.stores.several import Stores

_WRITER: Final = "kes state"
_MOST_CHANGES, _MOST_BYTES = 10_000, 4 << 20
"""Of one transaction, or one change more."""
_AGAIN: Final = "Run it again: it writes what is not there yet"

State = Mapping[bytes, bytes]
Changes = dict[bytes, bytes | None]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Count the changes without writing them.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]


def import_(
    source: SourceName,
    file: Annotated[Path, typer.Argument(help="A file of `kes state export`.")],
    partition: Partition = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Replace the state of partitions by that of a file, timers included. Keys that the file lacks are deleted.

    Rows of joined tables stay as they are. All members must be stopped. The input continues where it stood. Nothing is
    written if the store cannot read the whole file.

    Exit codes: 0 the state is that of the file; 1 refused (a member is running, or the file is not an export for this
    store), not confirmed, or no broker answers; 2 wrong usage.
    """
    found = stopped_source(source, json=json, yes=yes or dry_run)
    states = from_export(file, partition)
    if not states:
        raise StoreError(f"{file} has none of the partitions {partition}" if partition else f"{file} is empty")
    store = store_of(found)
    for number, state in states.items():
        if number >= found.config.num_partitions:
            raise StoreError(f"{file} has the partition {number}, and {found.config.topic} has none of that number")
        for key, value in without_rows(state.entries).items():
            check_entry(store, file, number, key, value)
        try:
            parked_of(number, state.entries)
            jobs_of(number, state.entries)
        except OffsetError as error:  # a start would refuse it
            raise StoreError(f"{file}: {error}") from error
    store.revoked()

    def changes(number: int, there: State) -> Changes:
        wanted, there = without_rows(states[number].entries), without_rows(there)
        # The number of the next durable job never goes back: receivers drop a call whose id they have seen.
        if next_job_of(number, there) > next_job_of(number, wanted):
            wanted[JOB_NUMBERS] = there[JOB_NUMBERS]
        puts: Changes = {key: value for key, value in wanted.items() if there.get(key) != value}
        return puts | dict.fromkeys(there.keys() - wanted.keys())

    write_changes(found, sorted(states), changes, bootstrap_servers, timeout, dry_run=dry_run, yes=yes, json=json)


def migrate(
    source: SourceName,
    partition: Partition = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Rewrite all values of older versions in the current one, by the upcasters of their tables.

    Values are upcast when they are read and rewritten when they are put. This command rewrites the rest, so that the
    upcasters can be removed. All members must be stopped. Nothing is written if any value cannot be upcast.

    Exit codes: 0 all values have the current version; 1 refused (a member is running, a value cannot be read, or the
    store has no versions), not confirmed, or no broker answers; 2 wrong usage.
    """
    found = stopped_source(source, json=json, yes=yes or dry_run)
    store = _stores_of(found, "has no versions of values: only the tables of a Stores have them")

    def changes(number: int, there: State) -> Changes:
        upgraded: Changes = {}
        for key, value in without_rows(there).items():
            if not key.startswith(TIMER_PREFIX):
                try:
                    new = store.upgraded(key, value)
                except DecodeError as error:
                    raise StoreError(f"partition {number}, key {_shown(store, key)}: {error}") from error
                if new is not None:
                    upgraded[key] = new
        return upgraded

    _rewrite(found, partition, changes, bootstrap_servers, timeout, dry_run=dry_run, yes=yes, json=json)
    store.revoked()


def set_time(
    source: SourceName,
    to: Annotated[str, typer.Option("--to", metavar="TIME", help="Time (2026-11-24T10:00Z) or age (10m, 2h, 3d).")],
    partition: Partition = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Set the time of partitions (of windows and expiry) back, after an event from the future has moved it.

    Entries put after TIME count as put at TIME; windows that end after it are open again. What has expired or was
    reported stays so. A partition whose time is not later is left alone. All members must be stopped.

    Exit codes: 0 no partition has a later time; 1 refused (a member is running, the store has no time, or an entry
    cannot be read), not confirmed, or no broker answers; 2 wrong usage.
    """
    time_ms, found = time_of(to, "--to"), stopped_source(source, json=json, yes=yes or dry_run)
    store = _stores_of(found, "has no time: only the partitions of a Stores have one")

    def changes(number: int, there: State) -> Changes:
        try:
            return store.set_back(there, time_ms)
        except DecodeError as error:
            raise StoreError(f"partition {number}: {error}") from error

    _rewrite(found, partition, changes, bootstrap_servers, timeout, dry_run=dry_run, yes=yes, json=json)
    store.revoked()


def forget(
    source: SourceName,
    join: Annotated[str, typer.Option("--join", metavar="TOPIC", help="Topic of the joined table.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Remove the rows of a joined table that the source no longer declares.

    Also removes the position in the table's topic and the group's offsets there. If the join comes back, the table is
    read from its beginning. All members must be stopped. Each partition is one transaction.

    Exit codes: 0 removed; 1 refused (a member is running, the source still joins the table, or there are no rows of
    it), not confirmed, or no broker answers; 2 wrong usage.
    """
    found = stopped_source(source, json=json, yes=yes or dry_run)
    if join in (found.config.topic, *found.inputs):
        raise ConfigError(
            f"{source} reads {join}: only rows of a join that the source no longer declares can be removed"
        )
    numbers = list(range(found.config.num_partitions))

    def changes(number: int, there: State) -> Changes:
        rows = row_key(join, b"")
        return {key: None for key in there if key.startswith(rows) or key == JOIN_PREFIX + join.encode()}

    write_changes(
        found,
        numbers,
        changes,
        bootstrap_servers,
        timeout,
        dry_run=dry_run,
        yes=yes,
        json=json,
        only_begun=True,
        forgotten=join,
    )


def without_rows(entries: State) -> dict[bytes, bytes]:
    """Leave out the rows of joined tables, which go with a position in their topic, and how the state began or was
    reset: they stay as they are."""
    return {key: value for key, value in entries.items() if not key.startswith((JOIN_PREFIX, *STORY_KEYS))}


def stopped_source(name: str, *, json: bool, yes: bool) -> EventSource[Any]:
    """Return the named source. Raises ``BadParameter`` for ``--json`` without ``--yes``, which could not ask."""
    refuse_to_ask(json=json, yes=yes)
    return named_source(name)


def store_of(source: EventSource[Any]) -> Any:
    """Make a store that reads keys and values. Raises ``StoreError`` for one that the changes could be wrong for."""
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    if not isinstance(store, JournalledBytes):
        raise StoreError(
            f"the state of {type(store).__name__} cannot be changed from outside: only the store "
            "knows the types of its entries"
        )
    return store


def _rewrite(
    source: EventSource[Any],
    partition: Partition,
    changes: Callable[[int, State], Changes],
    bootstrap_servers: str,
    timeout: float,
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Write changes of what is there into these partitions (``None``: all), where a partition has begun."""
    numbers = sorted(set(partition)) if partition else list(range(source.config.num_partitions))
    write_changes(
        source, numbers, changes, bootstrap_servers, timeout, dry_run=dry_run, yes=yes, json=json, only_begun=True
    )


def _stores_of(source: EventSource[Any], lacks: str) -> Stores:
    """Return the store of a partition, which has to be a ``Stores``. Raises ``StoreError`` with what others lack."""
    store = store_of(source)
    if not isinstance(store, Stores):
        raise StoreError(f"{type(store).__name__} {lacks}")
    return store


def check_entry(store: Any, file: Path, number: int, key: bytes, value: bytes) -> None:
    """Raise ``StoreError`` for an entry that the store could not read, or that is none of a store."""
    try:
        if key.startswith(TIMER_PREFIX):
            decode_timer(IncomingRecord("", number, 0, key, value, None))
        elif key.startswith(RESERVED_KEY_PREFIX):
            raise DecodeError("the key is the toolkit's own")
        elif not (isinstance(store, Stores) and store.is_carried(key)):
            store.decode_key(key)
            if isinstance(store, Stores):
                store.decode_entry(key, value)
            else:
                store.decode_value(value)
    except (DecodeError, OffsetError) as error:
        raise StoreError(f"{file}: partition {number}, key {_shown(store, key)}: {error}") from error


def _shown(store: Any, key: bytes) -> str:
    try:
        return shortened(harmless(str(store.decode_key(key))), 80)
    except DecodeError:
        return repr(key[:64])


# -- writing -----------------------------------------------------------------------------------------------------------


def write_changes(
    source: EventSource[Any],
    numbers: list[int],
    changes: Callable[[int, State], Changes],
    servers: str,
    timeout: float,
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
    only_begun: bool = False,
    forgotten: str = "",
) -> None:
    """Write what ``changes`` makes of the state of each partition, after it was shown. ``only_begun``: leave out those
    in which nothing was handled yet. ``forgotten``: a joined table whose rows the changes remove."""
    config = config_at(servers, source)
    limit = source.program().message_limit
    with GroupChecks(config, seconds=timeout) as checks:
        checks.refuse_if_alive()
        committed = checks.committed(numbers)
        if only_begun:
            numbers = sorted(checks.last_records(config.changelog, numbers, OFFSET_KEY))
        before = {number: position_of(config, checks, config.topic, number, committed[number]) for number in numbers}
        states = state_of(source, "changelog", servers, timeout, numbers)
        wanted = {number: changes(number, states[number].entries) for number in numbers}
        for number, some in wanted.items():
            check_sizes(some, number, limit)
        if forgotten and not any(wanted.values()):
            raise StoreError(_no_rows(config.changelog, forgotten, states.values()))
        rows = [_counts(number, some) for number, some in wanted.items()]
        if any(wanted.values()) and not dry_run:
            if not yes:
                print_whole(notices(), rows_table(rows, "partition", "put", "deleted"))
                typer.confirm(f"Apply these changes to {config.changelog}?", abort=True, err=True)
            if forgotten:  # first: a position without the group's offset is one, the offset alone is refused
                checks.forget_offsets(forgotten)
            with slot_of(config, "kes-state", timeout) as slot:
                for number, some in wanted.items():
                    partition = StoppedPartition(config, checks, slot, number, committed[number])
                    if forgotten:
                        partition.forget(before[number], some, forgotten)
                    else:
                        partition.write(before[number], some)
    emit(
        {"changelog": config.changelog, "dry_run": dry_run, "partitions": rows},
        json,
        lambda: rows_table(rows, "partition", "put", "deleted"),
    )
    if dry_run and not json:
        notices().print(Text("nothing was written"))


def _no_rows(changelog: str, topic: str, states: Iterable[StateAt]) -> str:
    found = {
        key[len(JOIN_PREFIX) :].partition(b"\0")[0].decode(errors="replace")
        for state in states
        for key in state.entries
        if key.startswith(JOIN_PREFIX)
    }
    there = f"it has those of {', '.join(sorted(found))}" if found else "it has none of any table"
    return f"{changelog} has no rows of a joined table {topic}: {there}"


def _counts(number: int, changes: Changes) -> dict[str, Any]:
    deleted = sum(1 for value in changes.values() if value is None)
    return {"partition": number, "put": len(changes) - deleted, "deleted": deleted}


def check_sizes(changes: Mapping[bytes, bytes | None], number: int, limit: int) -> None:
    """Raise ``StoreError`` for a change that is more than a record may have."""
    for key, value in changes.items():
        if len(key) + len(value or b"") > limit:
            raise StoreError(
                f"partition {number}, key {key[:64]!r}: {len(key) + len(value or b'')} bytes are more than a record "
                f"may have ({limit})"
            )


class StoppedPartition:
    """The changelog of one partition, written to by this command alone."""

    def __init__(
        self, config: EventSourceConfig, checks: GroupChecks, slot: BlockingSlot, number: int, committed: int | None
    ) -> None:
        self._config, self._checks, self._slot = config, checks, slot
        self._number, self._committed = number, committed
        self._ids = checks.source_id(), checks.changelog_id()
        self._writer = (
            f"{_WRITER} {uuid.uuid4().hex[:8]}"  # of two runs at a time, each sees that the other has written
        )

    def write(self, position: Position, changes: Changes) -> None:
        """Write changes, as many in a transaction as it may have. Raises ``OffsetError`` when a member was there."""
        report, done = late_lines("changes"), 0
        for serial, some in enumerate(chunks(self._config.changelog, self._number, changes)):
            carried = msgspec.UNSET if position.record is None else position.record.inputs
            record = OffsetRecord(position.offset, self._writer, serial, 0, *self._ids, carried)
            with transaction(self._slot, _AGAIN, complain):
                self._hold(position)
                self._slot.send([*some, offset_record(self._config, self._number, record)])
            position = Position(position.offset, position.own, record)
            done += len(some)
            report(f"writing partition {self._number}", done, len(changes))

    def forget(self, position: Position, changes: Changes, topic: str) -> None:
        """Write changes, and an offset record without the positions in a topic, all in one transaction. Raises as
        ``write``."""
        if position.record is None:
            return
        self.write_whole(position, changes, without_input(position.record, topic))

    def write_whole(
        self,
        position: Position,
        changes: Changes,
        carried: msgspec.Raw | msgspec.UnsetType,
        outputs: Sequence[Output] = (),
    ) -> None:
        """Write changes, with these outputs and what the offset record carries of further inputs, all in one
        transaction. Raises as ``write``."""
        with transaction(self._slot, _AGAIN, complain):
            self._hold(position)
            for some in chunks(self._config.changelog, self._number, changes):
                self._slot.send(some)
            record = OffsetRecord(position.offset, self._writer, 0, 0, *self._ids, carried)
            self._slot.send([*outputs, offset_record(self._config, self._number, record)])

    def _hold(self, position: Position) -> None:
        """Make members that join from now on wait for the end of the transaction. Raises ``OffsetError`` when one was
        there before."""
        self._checks.hold(self._slot, {self._number: position.offset})
        if self._position() != position:
            raise OffsetError(
                f"a member of group {self._config.group_id} has written to {self._config.changelog} meanwhile: run it "
                "again"
            )

    def _position(self) -> Position:
        return position_of(self._config, self._checks, self._config.topic, self._number, self._committed)


def chunks(topic: str, number: int, changes: Mapping[bytes, bytes | None]) -> Iterator[list[Output]]:
    """Split changes by the bounds of a transaction."""
    chunk: list[Output] = []
    size = 0
    for key, value in changes.items():
        chunk.append(Output(topic, value, key, None, number, 0, number, -1))
        size += len(key) + len(value or b"")
        if len(chunk) >= _MOST_CHANGES or size >= _MOST_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
