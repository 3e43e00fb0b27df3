"""``kes reset``: a stopped source goes on at other places, from an empty state or with the one that it has.

The transaction is as one of ``kes skip`` (see there why no member can come between): the group's offsets are pending in
it before the group is looked at for the second time, and the last offset records must be those that were there when the
state was read. It holds deletions of the entries, a reset record that keeps the former places, and an offset record of
each partition: all of them are reset, or none. The way back (``--restore``) is open until a member has written
anything: then the last offset record is not the reset's own any more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, admin_of, config_at, source_admin_of
from streams.cli.console import complain, emit, notices, plain_table, print_whole
from streams.cli.skip import slot_of
from streams.cli.start_places import (
    LONG_SECONDS,
    further_inputs,
    known_offset,
    place_option,
    places_in,
    request_of_places,
)
from streams.cli.state_copies import write_export
from streams.cli.state_sources import JOB_NUMBERS, StateAt, from_export, parked_of, state_of
from streams.cli.state_writing import Changes, check_entry, chunks, stopped_source, store_of, without_rows
from streams.errors import ConfigError, OffsetError, StoreError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.looks.committing import IN_DOUBT, transaction
from streams.records import Change, IncomingRecord, changelog_record
from streams.runtime.changelog import (
    JOIN_PREFIX,
    OFFSET_KEY,
    RESET_KEY,
    TIMER_PREFIX,
    OffsetRecord,
    ResetRecord,
    decode_offset,
    decode_reset,
    further_positions,
)
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

app = typer.Typer()

DROP: Final = "drop"
KEEP: Final = "keep"
_MOST_NAMED: Final = 5
_AGAIN: Final = "Run it again: it resets the source, or says that it is reset"


class Reset(NamedTuple):
    """The reset of one partition: its offsets before and after in each input, the changes of its entries, and its reset
    record (``None``: on the way back)."""

    was: dict[str, int]
    at: dict[str, int]
    changes: Changes
    record: ResetRecord | None


@app.command()
def reset(
    source: SourceName,
    to: Annotated[list[str] | None, place_option("--to")] = None,
    state: Annotated[
        str, typer.Option("--state", metavar="drop|keep", help="Delete the state, or keep it as it is.")
    ] = "",
    backup: Annotated[Path | None, typer.Option("--backup", metavar="FILE", help="File for the state of now.")] = None,
    no_backup: Annotated[bool, typer.Option("--no-backup", help="Make no backup: then there is no way back.")] = False,
    restore: Annotated[
        Path | None, typer.Option("--restore", metavar="FILE", help="Undo the last reset, by its backup.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen without writing it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Set a stopped source to other places, with an empty state or with the one it has.

    Partitions and inputs without a place stay as they are. Rows of joined tables stay, too. A backup is written before
    anything else (kes reset --restore is the way back, until a member has run). All in one transaction.

    Exit codes: 0 reset, or restored; 1 refused (a member is running, a place is not in the log, keys are parked), not
    confirmed, or no broker answers; 2 wrong usage.
    """
    found = stopped_source(source, json=json, yes=yes or dry_run)
    config = config_at(bootstrap_servers, found)
    if restore is None and state not in (DROP, KEEP):
        raise typer.BadParameter("say --state drop or --state keep", param_hint="--state")
    if restore is None and not dry_run and (backup is None) is not no_backup:
        raise typer.BadParameter("name a file for the state of now with --backup, or say --no-backup")
    if restore is not None and (to or state or backup or no_backup):
        raise typer.BadParameter("--restore goes back to the places and state of before: name nothing else")
    if config.own_inputs:
        raise ConfigError(
            f"{source} has a loop or visits ({', '.join(config.own_inputs)}): what waits there belongs to the state of "
            "now, so it cannot be reset. Read the topic from its start under another group_id"
        )
    with ExitStack() as stack:
        admin = stack.enter_context(admin_of(config.bootstrap_servers, config, timeout))
        source_admin = stack.enter_context(source_admin_of(config, admin, timeout))
        checks = stack.enter_context(GroupChecks(config, seconds=timeout))
        checks.refuse_if_alive()
        command = _Reset(found, config, checks, source_admin, bootstrap_servers, timeout)
        # What an earlier run has left open is ended before anything is read.
        slot = None if dry_run else stack.enter_context(slot_of(config, "kes-reset", timeout, LONG_SECONDS))
        resets = command.back(restore) if restore else command.plan(to or [], state == KEEP, str(backup or ""))
        rows = [row for number, one in sorted(resets.items()) for row in _facts(number, one)]
        lines = command.warnings(resets) if resets else []
        is_there = backup is not None and bool(resets) and backup.exists()  # of a run that was killed behind it
        if backup is not None and is_there and from_export(backup, None) != command.states:
            raise StoreError(f"{backup} is there, with another state than that of now: name another file")
        if slot is not None and resets:
            if not yes:
                print_whole(notices(), _table(rows))
                notices().print(Text("\n".join(lines)), soft_wrap=True)
                typer.confirm(f"Reset {config.group_id}?", abort=True, err=True)
            if backup is not None and not is_there:
                write_export(found, command.states, backup)
            command.write(slot, resets)
    written = bool(resets) and not dry_run
    facts = {"group": config.group_id, "written": written, "dry_run": dry_run, "backup": str(backup or restore or "")}
    emit({**facts, "partitions": rows, "warnings": lines}, json, lambda: _table(rows))
    if not written:
        lines.append("nothing was written" if resets else "it is reset to these places already: nothing was written")
    for line in () if json else lines:
        notices().print(Text(line), soft_wrap=True)


class _Reset:
    """One run of the command. ``states``: those of the partitions that are reset, as they were read."""

    def __init__(
        self,
        source: EventSource[Any],
        config: EventSourceConfig,
        checks: GroupChecks,
        source_admin: TopicAdmin,
        servers: str,
        timeout: float,
    ) -> None:
        self._source, self._config, self._checks, self._admin = source, config, checks, source_admin
        self._servers, self._timeout = servers, timeout
        self._topics = [config.topic, *further_inputs(source.topology, config.topic)]
        self._writer = f"kes reset {uuid.uuid4().hex[:8]}"
        self._last: dict[int, IncomingRecord] = {}  # offset records
        self.states: dict[int, StateAt] = {}

    def plan(self, to: list[str], keep: bool, backup: str) -> dict[int, Reset]:
        """Plan the way to these places; empty: the source is there, by the same command. Raises ``OffsetError`` for a
        partition that cannot be reset."""
        wanted = request_of_places(self._config, self._topics[1:], to, "--to")
        places = places_in(self._config, self._topics, wanted, self._admin, self._timeout, {}, all_of_them=False)
        found: dict[int, Reset] = {}
        done: list[bool] = []
        for number, (was, last) in self._look(sorted({n for found in places.values() for n in found})).items():
            entries = self.states[number].entries
            if waiting := parked_of(number, entries).keys.events:
                raise OffsetError(
                    f"partition {number}: {waiting:,} events of parked keys wait, below the position: have them worked "
                    "off first, or drop them (kes parked)"
                )
            to_ = {topic: of_it[number] for topic, of_it in places.items() if number in of_it}
            record = ResetRecord(
                was=was,
                at=was | {topic: offset for topic, (offset, _) in to_.items()},
                places={topic: text for topic, (_, text) in to_.items()},
                kept_state=keep,
                by=self._writer,
                at_ms=int(time.time() * 1000),
                backup=backup,
                end=self.states[number].offset,
            )
            former = self._reset_of(number)
            done.append(
                former is not None
                and former.by == (last and last.writer)
                and (former.at, former.places, former.kept_state) == (record.at, record.places, keep)
            )
            # The number of the next durable job stays: receivers drop a call whose id they have seen.
            dropped = [key for key in without_rows(entries) if key != JOB_NUMBERS]
            found[number] = Reset(was, record.at, {} if keep else dict.fromkeys(dropped), record)
        return {} if all(done) else found

    def back(self, file: Path) -> dict[int, Reset]:
        """Plan the way back to what is in a backup. Raises ``OffsetError`` for partitions in which a member has written
        since, and ``StoreError`` for a file that is no backup of the last reset."""
        states = from_export(file, None)
        positions = self._look(sorted(states))
        store = store_of(self._source)
        found: dict[int, Reset] = {}
        for number, state in states.items():
            record = self._reset_of(number) if number in positions else None
            if record is None:
                raise OffsetError(f"{self._config.topic}[{number}] was not reset: there is nothing to undo")
            was, last = positions[number]
            if last is None or last.writer != record.by:
                raise OffsetError(
                    f"{self._config.topic}[{number}]: a member has run since the reset ({record.shown}), so the way "
                    "back is closed. kes state import takes the state from the file, for other places"
                )
            if state.offset != record.end:
                raise StoreError(f"{file} is not the backup of the last reset, which was written to {record.backup}")
            wanted, now = without_rows(state.entries), without_rows(self.states[number].entries)
            for key, content in wanted.items():
                check_entry(store, file, number, key, content)
            changes: Changes = {key: content for key, content in wanted.items() if now.get(key) != content}
            former = state.entries.get(RESET_KEY)
            changes |= {**dict.fromkeys(now.keys() - wanted.keys()), RESET_KEY: former}
            found[number] = Reset(was, record.was, changes, None)
        store.revoked()
        return found

    def write(self, slot: Any, resets: Mapping[int, Reset]) -> None:
        """Write it. Raises ``OffsetError`` when a member came between, and ``TransactionFailed``."""
        config, checks = self._config, self._checks
        own, *further = self._topics
        ids = {topic: checks.source_id(topic) for topic in self._topics}
        changelog_id = checks.changelog_id()
        try:
            with transaction(slot, _AGAIN, complain):
                for topic in self._topics:
                    offsets = {number: one.at[topic] for number, one in resets.items()}
                    checks.hold(slot, offsets, config.offsets_topic if topic == own else topic)
                if self._records(sorted(resets)) != {n: record for n, record in self._last.items() if n in resets}:
                    raise OffsetError(f"a member of group {config.group_id} has run meanwhile; run it again")
                for number, one in resets.items():
                    for some in chunks(config.changelog, number, one.changes):
                        slot.send(some)
                    known = decode_offset(self._last[number]) if number in self._last else None
                    carried = known.inputs if known is not None else msgspec.UNSET
                    if further:
                        carried = further_positions(
                            known, number, {each: (one.at[each], ids[each]) for each in further}
                        )
                    position = OffsetRecord(one.at[own], self._writer, 0, 0, ids[own], changelog_id, carried)
                    ends = [Change(OFFSET_KEY, msgspec.json.encode(position))]
                    if one.record is not None:
                        ends.insert(0, Change(RESET_KEY, msgspec.json.encode(one.record)))
                    slot.send([changelog_record(config.changelog, number, each) for each in ends])
        except TransactionFailed as error:
            if error.kind in IN_DOUBT:
                raise OffsetError(f"{error}. Whether the source is reset is not known: run it again") from error
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    def _look(self, numbers: list[int]) -> dict[int, tuple[dict[str, int], OffsetRecord | None]]:
        """Read positions and states of these partitions; return the offset in each input that can have another place,
        and the offset record. Raises ``OffsetError`` and ``TopicReplaced``."""
        config, checks = self._config, self._checks
        checks.committed(numbers)  # it waits for what a departed member has left undecided
        self._last = self._records(numbers)
        ids = {topic: checks.source_id(topic) for topic in self._topics}
        lows = {topic: self._admin.watermarks(topic, None, self._timeout) for topic in self._topics}
        changelog_id = checks.changelog_id()
        found: dict[int, tuple[dict[str, int], OffsetRecord | None]] = {}
        for number in numbers:
            record = decode_offset(self._last[number]) if number in self._last else None
            was: dict[str, int] = {}
            for topic in self._topics:
                at = known_offset(config, record, topic, number, ids[topic], changelog_id)
                if at is None and config.auto_offset_reset != "earliest":
                    raise OffsetError(
                        f"{topic}[{number}] has not begun: kes offsets start sets where a source begins; or name the "
                        "other partitions with --to PARTITION@OFFSET"
                    )
                was[topic] = lows[topic][number].start if at is None else at
            found[number] = was, record
        self.states = state_of(self._source, "changelog", self._servers, self._timeout, numbers)
        return found

    def _reset_of(self, number: int) -> ResetRecord | None:
        """Return the record of the last reset of a partition that ``_look`` has read."""
        value = self.states[number].entries.get(RESET_KEY)
        where = IncomingRecord(self._config.changelog, number, -1, RESET_KEY, value, None)
        return None if value is None else decode_reset(where)

    def _records(self, numbers: list[int]) -> dict[int, IncomingRecord]:
        return self._checks.last_records(self._config.changelog, numbers, OFFSET_KEY)

    def warnings(self, resets: Mapping[int, Reset]) -> list[str]:
        """Say what follows from it."""
        moves = [(one.was[topic], at) for one in resets.values() for topic, at in one.at.items()]
        again, passed = sum(max(was - at, 0) for was, at in moves), sum(max(at - was, 0) for was, at in moves)
        lines: list[str] = []
        if again:
            lines.append(f"{again:,} records are handled again: what they send is sent a second time")
        if passed:
            lines.append(f"{passed:,} records are passed over: they are not handled")
        dropped = [number for number, one in resets.items() if one.record is not None and not one.record.kept_state]
        if places := [f"{topic}[{number}]" for number in dropped for topic, at in resets[number].at.items() if at]:
            more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
            shown = ", ".join(places[:_MOST_NAMED])
            lines.append(f"the state begins empty, without the records below the places in {shown}{more}")
        if any(key.startswith(JOIN_PREFIX) for number in resets for key in self.states[number].entries):
            lines.append("rows of joined tables stay: events that are handled again meet the rows of now")
        return lines


def _facts(number: int, one: Reset) -> list[dict[str, Any]]:
    deleted = [key for key, value in one.changes.items() if value is None]
    timers = sum(key.startswith(TIMER_PREFIX) for key in deleted)
    counts = {"deleted": len(deleted) - timers, "timers": timers, "put": len(one.changes) - len(deleted)}
    return [
        {"topic": topic, "partition": number, "from": one.was[topic], "to": at, **counts}
        for topic, at in one.at.items()
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    names = ("topic", "partition", "from", "to", "deleted", "timers", "put")
    table = plain_table(*names, right=names[1:])
    for row in rows:
        table.add_row(row["topic"], *(f"{row[name]:,}" for name in names[1:]))
    return table
