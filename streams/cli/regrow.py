"""``kes topics regrow``: more partitions for a stopped source, and each entry of its state where its key goes.

**Why nothing is lost or doubled.** Topics cannot grow in a transaction, so the order is what counts, and each step that
is half done is refused at a start, by the numbers of partitions alone (also by a release that knows nothing of this):

1. All of the state is looked at, and all that cannot be moved is refused. Nothing is changed yet.
2. The changelog grows. A start compares it with the settings: with the old number it is too large, and with the new
   one the source's topic is too small.
3. One transaction, as one of ``kes skip`` (see there why no member can come between), moves the state: entries into
   the partitions of their keys, deletions in the old places, positions and growth records in all partitions. So a key
   is in one partition at any time.
4. The other topics grow, the source's own the last. From here on the new settings start, and the old ones do not.

Run again after a death anywhere, it goes on: without growth records it begins with 1, with them at 4.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, admin_of, config_at, source_admin_of
from streams.cli.console import complain, emit, notices, plain_table, print_whole
from streams.cli.growth import Growth, growth_table, planned
from streams.cli.regrown_rows import COPY, STAY, EntryMove, Regrowth, RoutedBy, Rules
from streams.cli.skip import slot_of, source_reader
from streams.cli.start_places import LONG_SECONDS, known_offset
from streams.cli.state_sources import state_of
from streams.cli.state_writing import stopped_source, store_of
from streams.errors import ConfigError, OffsetError, Stopped, TopicError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.committing import IN_DOUBT, transaction
from streams.looks.scans import late_lines
from streams.model.loading import described
from streams.model.partitioners import PARTITIONERS
from streams.records import Change, IncomingRecord, Output, TopicPartition, changelog_record
from streams.runtime.changelog import (
    GROWTH_KEY,
    OFFSET_KEY,
    GrowthRecord,
    OffsetRecord,
    decode_growth,
    decode_offset,
    further_positions,
)
from streams.runtime.ownership.replicas import make_store
from streams.runtime.source_topics import TABLE
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.several import Stores
from streams.stores.stateless import Stateless

_WRITER: Final = "kes topics regrow"
_AGAIN: Final = "Run it again: it moves the state, or says that it is moved"
_AT_ONCE, _BYTES_AT_ONCE = 5_000, 4 << 20
"""So many moves are sent together, at most, or one more than these bytes."""
_MOST_NAMED: Final = 5


def regrow(
    source: SourceName,
    partitions: Annotated[int, typer.Option(min=1, help="New number of partitions.")],
    routed_by: Annotated[
        list[str] | None,
        typer.Option(
            "--routed-by",
            metavar="[STRUCTURE=]MODULE:FUNCTION",
            help="f(key of the store), which returns the key of its records; None: it belongs to the partition. "
            "Default: the routed_by of the source, or the key itself. Repeatable.",
        ),
    ] = None,
    partitioner: Annotated[
        str, typer.Option(metavar="NAME", help=f"How producers place keys: {', '.join(PARTITIONERS)}.")
    ] = "murmur2",
    shared: Annotated[
        str,
        typer.Option(
            metavar=f"{COPY}|{STAY}", help="What becomes of entries that belong to a partition, not to a key."
        ),
    ] = "",
    drop_closed_windows: Annotated[
        bool, typer.Option("--drop-closed-windows", help="Drop windows that were reported, where they hinder.")
    ] = False,
    still: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds for which no producer may have written.")
    ] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look at all of it without changing anything.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Add partitions to the topics of a stopped event source, and move its state with its keys.

    Producers must be stopped, all records handled, and then all members stopped. Killed anywhere, run it again: until
    it is done no member starts. Then set num_partitions.

    Exit codes: 0 done, or done before; 1 refused (a member is running, records are not handled, an entry has no
    partition), not confirmed, or no broker answers; 2 wrong usage.
    """
    found = stopped_source(source, json=json, yes=yes or dry_run)
    config = config_at(bootstrap_servers, found)
    if shared not in ("", COPY, STAY):
        raise typer.BadParameter(f"{shared!r} is not {COPY} or {STAY}", param_hint="--shared")
    if partitioner not in PARTITIONERS:
        raise typer.BadParameter(f"{partitioner!r} is not one of {', '.join(PARTITIONERS)}", param_hint="--partitioner")
    if tables := [one.name for one in found.topology.topics if one.purpose == TABLE]:
        raise ConfigError(
            f"{source} joins {', '.join(tables)}: the rows of a joined table lie in the partitions of its topic, and "
            "growing does not move them. Take the join away, kes state forget --join, grow, have the table's topic "
            "written again with its new number of partitions, and declare the join again: it is read from its start"
        )
    routes = dict(map(_route, routed_by or []))
    if found.routed_by is not None:
        routes.setdefault("", found.routed_by)
    with ExitStack() as stack:
        admin = stack.enter_context(admin_of(config.bootstrap_servers, config, timeout))
        source_admin = stack.enter_context(source_admin_of(config, admin, timeout))
        specs = [*found.specs(), *found.input_topics()]
        admins = {spec.name: source_admin if spec.name == config.topic else admin for spec in specs}
        growth = planned(admins, config, partitions, timeout)
        # What an earlier run has left open is ended before anything is read.
        slot = None if dry_run else stack.enter_context(slot_of(config, "kes-regrow", timeout, LONG_SECONDS))
        before, is_moved = _stand(config, admins, growth, timeout)
        config = msgspec.structs.replace(config, num_partitions=before)
        checks = stack.enter_context(GroupChecks(config, seconds=timeout))
        if growth.steps or not is_moved:  # else all is done, and members may be running
            checks.refuse_if_alive()
        rules = Rules(before, partitions, routes, partitioner, shared, drop_closed_windows)  # type: ignore[arg-type]
        command = _Regrow(found, config, rules, checks, admins, bootstrap_servers, timeout)
        if not is_moved:
            command.look(still)
            if slot is not None:
                if not yes:
                    for shown in (growth_table(growth), _table(command.rows())):
                        print_whole(notices(), shown)
                    notices().print(Text("Partitions can never be taken away again."))
                    typer.confirm("Add the partitions, and move the state?", abort=True, err=True)
                command.move(slot)
        came = [] if dry_run else command.grow(growth)
    next_step = f"set num_partitions={partitions} in the settings of {source} before it is started again"
    facts = {"partitions": partitions, "before": before, "moved": not (is_moved or dry_run), "dry_run": dry_run}
    rows = [] if is_moved else command.rows()
    emit({**facts, "steps": growth.steps, "state": rows, "next": next_step}, json, lambda: _table(rows))
    if not json:
        done = "the state was moved before: nothing was written to it" if is_moved else next_step
        notices().print(Text("nothing was written" if dry_run else done), soft_wrap=True)
    if came:
        complain(
            f"producers have written meanwhile, the first record is {came[0]}: events of its key may belong to another "
            "partition by now, which has the state of the key",
            hint="See the guide, More partitions: kes skip passes such a record, and it can be sent again.",
        )
        raise typer.Exit(1)


def _route(text: str) -> tuple[str, RoutedBy]:
    """Return the structure (``""``: all others) and the function of a ``--routed-by``. Raises ``ConfigError``."""
    structure, _, name = text.rpartition("=")
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(import_module(module), function)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot load --routed-by {text!r}: {described(error)}") from error
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"--routed-by {text!r} is no plain function of a key")
    return structure, found


def _stand(
    config: EventSourceConfig, admins: Mapping[str, TopicAdmin], growth: Growth, timeout: float
) -> tuple[int, bool]:
    """Return the number of partitions before, and whether the state is moved already. Raises ``TopicError``."""
    after = growth.partitions
    counts = {name: growth.steps.get(name, after) for name in admins}
    with GroupChecks(config, seconds=timeout) as checks:
        numbers = list(range(counts[config.changelog]))
        records = checks.last_records(config.changelog, numbers, GROWTH_KEY)
    grown = {number: decode_growth(record) for number, record in records.items()}
    if len(grown) == after and all(one.after == after for one in grown.values()):
        return grown[0].before, True
    before = counts[config.topic]
    if before == after:
        raise TopicError(
            f"topic {config.topic} has {after} partitions already, and the state was not moved: if they were added by "
            "other means, records of most keys are in other partitions than their state. kes topics grow adds the "
            "partitions to the other topics, without the state"
        )
    if config.num_partitions not in (before, after):
        raise TopicError(
            f"topic {config.topic} has {before} partitions, the settings of the source say {config.num_partitions}"
        )
    for name, count in counts.items():
        if count not in (before, after):
            raise TopicError(f"topic {name} has {count} partitions, {config.topic} has {before}: make them equal first")
    return before, False


def _empty_store(source: EventSource[Any], rules: Rules) -> Any:
    """Return a store that reads keys. Raises ``ConfigError`` for rules about structures that it does not have, and
    ``StoreError`` for a store whose entries only it knows."""
    store: Any = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    if not isinstance(store, Stateless):  # that has timers at most
        store = store_of(source)
    names = {one.name for one in store.declared.values()} if isinstance(store, Stores) else set[str]()
    for name in rules.routed_by.keys() - names - {""}:
        raise ConfigError(f"--routed-by {name}=...: the store has no structure of this name, but {sorted(names)}")
    return store


class _Regrow:
    """One run of the command, for a source whose settings have the number of partitions before."""

    def __init__(
        self,
        source: EventSource[Any],
        config: EventSourceConfig,
        rules: Rules,
        checks: GroupChecks,
        admins: Mapping[str, TopicAdmin],
        servers: str,
        timeout: float,
    ) -> None:
        self._source, self._config, self._rules, self._checks = source, config, rules, checks
        self._admins, self._servers, self._timeout = admins, servers, timeout
        self._topics = [config.topic, *source.inputs]
        self._numbers = list(range(rules.before))
        self._new = range(rules.before, rules.after)
        self._writer = f"{_WRITER} {uuid.uuid4().hex[:8]}"
        self._last: dict[int, IncomingRecord] = {}  # offset records
        self._at: dict[str, dict[int, int]] = {}  # positions, by input and partition
        self._regrowth = Regrowth(_empty_store(source, rules), rules)

    def rows(self) -> list[dict[str, int]]:
        """Return what becomes of the entries of each partition, as data."""
        found = self._regrowth
        return [
            {"partition": n, "stay": found.kept.get(n, 0), "go": found.sent.get(n, 0), "come": found.received[n]}
            for n in range(self._rules.after)
        ]

    def look(self, still: float) -> None:
        """Look at positions and state, and check that producers have stopped. Raises ``OffsetError`` for records that
        are not handled, ``StoreError`` for entries that cannot be moved."""
        self._read_positions()
        self._refuse_unhandled()
        self._wait_still(still)
        report = late_lines("partitions")
        for number in self._numbers:
            self._regrowth.look(number, self._state(number))
            report("looking at the state", number + 1, self._rules.before)
        self._regrowth.settle()

    def move(self, slot: BlockingSlot) -> None:
        """Let the changelog grow, and move the state in one transaction. Raises ``OffsetError`` when a member or a
        producer came between, and ``TransactionFailed``."""
        config, rules, checks = self._config, self._rules, self._checks
        changelog = self._admins[config.changelog]
        identity = changelog.identity(config.changelog, self._timeout)
        if identity is not None and identity[1] < rules.after:
            changelog.grow(config.changelog, rules.after, self._timeout)
        self._refuse_filled(changelog)
        try:
            with transaction(slot, _AGAIN, complain):
                for topic, offsets in self._at.items():
                    checks.hold(slot, offsets, config.offsets_topic if topic == config.topic else topic)
                if self._records(self._numbers) != self._last:
                    raise OffsetError(f"a member of group {config.group_id} has run meanwhile; run it again")
                self._refuse_unhandled()
                self._send_all(slot)
        except TransactionFailed as error:
            if error.kind in IN_DOUBT:
                raise OffsetError(f"{error}. Whether the state is moved is not known: run it again") from error
            raise

    def grow(self, growth: Growth) -> list[str]:
        """Let the topics grow that are still to, the source's own the last, and set the group's offsets in the new
        partitions. Returns the places of records that were written meanwhile."""
        self._read_positions()
        for name, before in growth.steps.items():
            if name != self._config.changelog:
                self._admins[name].grow(name, growth.partitions, self._timeout)
            notices().print(Text(f"{name}: {before} -> {growth.partitions} partitions"), soft_wrap=True)
        came = self._unhandled() if growth.steps else []
        config, new = self._config, list(self._new)
        for topic in self._topics:
            name = config.offsets_topic if topic == config.topic else topic
            missing = {n: 0 for n, offset in self._checks.committed(new, name).items() if offset is None}
            with suppress(OffsetError):  # a member has started meanwhile: it commits offsets by itself
                self._checks.set_offsets(missing, name)
        return came

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _read_positions(self) -> None:
        config, checks = self._config, self._checks
        committed = checks.committed(self._numbers)  # it waits for what a departed member has left undecided
        self._last = self._records(self._numbers)
        changelog_id = checks.changelog_id()
        for topic in self._topics:
            (log, topic_id), found = checks.source(topic), dict[int, int]()
            for number in self._numbers:
                record = decode_offset(self._last[number]) if number in self._last else None
                at = known_offset(config, record, topic, number, topic_id, changelog_id)
                low, high = log[number]
                if at is None and low < high:
                    raise OffsetError(f"{topic}[{number}] has records, and none is handled: let the source handle them")
                found[number] = low if at is None else at
                if topic == config.topic and (committed[number] or 0) > found[number]:
                    raise OffsetError(
                        f"{topic}[{number}]: the group's offset {committed[number]} is ahead of the changelog's "
                        f"{found[number]}: run `kes offsets accept` first"
                    )
            self._at[topic] = found

    def _unhandled(self) -> list[str]:
        """Return the places of the first records that are not handled, in each partition of each input."""
        places: list[str] = []
        for topic, at in self._at.items():
            log, _ = self._checks.source(topic)
            spans = {number: (offset, log[number][1]) for number, offset in at.items() if offset < log[number][1]}
            for number, span in spans.items():
                found: list[IncomingRecord] = []
                with closing(source_reader(self._config)) as reader, suppress(Stopped):
                    reader.read(
                        topic,
                        {number: span},
                        lambda _, records, found=found: found.extend(records),  # type: ignore[misc]
                        stalled_after_seconds=self._timeout,
                        cancelled=lambda found=found: bool(found),  # type: ignore[misc]
                    )
                places += [found[0].where] if found else []  # else there are only marks of transactions
        return places

    def _refuse_unhandled(self) -> None:
        if places := self._unhandled():
            more = f" and {len(places) - _MOST_NAMED} more partitions" if len(places) > _MOST_NAMED else ""
            raise OffsetError(
                f"records are not handled yet: from {', '.join(places[:_MOST_NAMED])}{more} on. Stop the producers, "
                "let the source handle everything, and stop its members"
            )

    def _wait_still(self, seconds: float) -> None:
        """Wait, and check that no input has got a record. Raises ``OffsetError``."""
        before = {topic: self._checks.source(topic)[0] for topic in self._topics}
        if seconds:
            notices().print(Text(f"waiting {seconds:g} s for producers that have not stopped"), soft_wrap=True)
            time.sleep(seconds)
        for topic, log in before.items():
            for number, (_, end) in self._checks.source(topic)[0].items():
                if end != log[number][1]:
                    raise OffsetError(f"{topic}[{number}] has grown from {log[number][1]} to {end}: stop its producers")

    def _refuse_filled(self, admin: TopicAdmin) -> None:
        """Raise ``OffsetError`` for anything in the new partitions."""
        marks = admin.watermarks(self._config.changelog, list(self._new), self._timeout)
        heads = {number: (mark.start, mark.end) for number, mark in marks.items()}
        for record in self._checks.first_within(self._config.changelog, heads).values():
            raise OffsetError(
                f"{record.where}: a new partition has state already, so a member has run with {self._rules.after} "
                "partitions: the state of its keys would be there twice"
            )

    def _records(self, numbers: list[int]) -> dict[int, IncomingRecord]:
        return self._checks.last_records(self._config.changelog, numbers, OFFSET_KEY)

    def _state(self, number: int) -> dict[bytes, bytes]:
        return state_of(self._source, "changelog", self._servers, self._timeout, [number])[number].entries

    # -- writes --------------------------------------------------------------------------------------------------------

    def _send_all(self, slot: BlockingSlot) -> None:
        report, done, total = late_lines("entries"), 0, sum(self._regrowth.received.values())
        for number in self._numbers:
            for some in _together(self._regrowth.moved(number, self._state(number))):
                slot.send(self._outputs(some))
                done += sum(move.partition != number for move in some)
                report("moving the state", done, total)
        slot.send(self._outputs(self._regrowth.ends()))
        slot.send(self._last_records())

    def _outputs(self, moves: Iterable[EntryMove]) -> list[Output]:
        topic = self._config.changelog
        return [Output(topic, value, key, None, number, 0, number, -1) for number, key, value in moves]

    def _last_records(self) -> list[Output]:
        """Return growth record and position of each partition."""
        config, checks, rules, found = self._config, self._checks, self._rules, self._regrowth
        ids = {topic: checks.source_id(topic) for topic in self._topics}
        own, *further = self._topics
        changelog_id, now_ms = checks.changelog_id(), int(time.time() * 1000)
        outputs: list[Output] = []
        for number in range(rules.after):
            known = decode_offset(self._last[number]) if number in self._last else None
            # The new partitions of the inputs are not there yet: they are empty when they come.
            at = {topic: self._at[topic].get(number, 0) for topic in self._topics}
            carried = known.inputs if known is not None else msgspec.UNSET
            if further:
                carried = further_positions(known, number, {topic: (at[topic], ids[topic]) for topic in further})
            position = OffsetRecord(at[own], self._writer, 0, 0, ids[own], changelog_id, carried)
            grown = GrowthRecord(
                before=rules.before,
                after=rules.after,
                by=self._writer,
                at_ms=now_ms,
                entries=found.received[number],
                left=found.sent.get(number, 0),
            )
            ends = Change(GROWTH_KEY, msgspec.json.encode(grown)), Change(OFFSET_KEY, msgspec.json.encode(position))
            outputs += [changelog_record(config.changelog, number, each) for each in ends]
        return outputs


def _together(moves: Iterable[EntryMove]) -> Iterator[list[EntryMove]]:
    some: list[EntryMove] = []
    size = 0
    for move in moves:
        some.append(move)
        size += len(move.key) + len(move.value or b"")
        if len(some) >= _AT_ONCE or size >= _BYTES_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _table(rows: list[dict[str, int]]) -> Table:
    names = ("partition", "stay", "go", "come")
    table = plain_table(*names, right=names)
    for row in rows:
        table.add_row(*(f"{row[name]:,}" for name in names))
    return table
