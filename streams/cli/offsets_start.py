"""``kes offsets start``: the place where a source without a past begins, in all partitions and inputs at once.

The transaction is as one of ``kes skip`` (see there why no member can come between): the group's offsets are pending in
it before the group is looked at for the second time, and only then the changelog is read to its end. It holds an offset
record and a begin record of each partition, so all of them begin, or none. Offsets of another group that is taken over
(``--from-group``) are pending, too: a member of it that waits for stable offsets does not go on in between, and one
that does not wait is seen by what it has committed. State that comes along (``foreign_state``) is in the transaction,
too, however much of it there is: a command that was killed leaves none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import (
    Json,
    Servers,
    SourceName,
    Timeout,
    admin_of,
    config_at,
    named_source,
    refuse_to_ask,
    source_admin_of,
)
from streams.cli.console import complain, emit, notices, plain_table, print_whole
from streams.cli.foreign_state import ForeignState, state_request_of
from streams.cli.skip import TRANSACTION_SECONDS, slot_of
from streams.cli.start_places import (
    LONG_SECONDS,
    At,
    StartRequest,
    beginnings,
    further_inputs,
    place_option,
    places_in,
    request_of,
)
from streams.errors import OffsetError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.questions.group_view import NONE, GroupView
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.committing import IN_DOUBT, transaction
from streams.records import Change, Output, changelog_record
from streams.runtime.changelog import BEGIN_KEY, OFFSET_KEY, BeginRecord, beginning, decode_begin, decode_offset
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

_WRITER: Final = "kes offsets start"
_AGAIN: Final = "Run it again: it begins the source, or says that it has begun"
_ANEW: Final = "Another group_id begins anew; or delete the group's offsets and the changelog"


def start(
    source: SourceName,
    at: Annotated[list[str] | None, place_option("--at")] = None,
    like_group: Annotated[
        str, typer.Option("--like-group", metavar="GROUP", help="Begin where this group stands; it may go on.")
    ] = "",
    from_group: Annotated[
        str,
        typer.Option("--from-group", metavar="GROUP", help="Take over from this group, whose members have stopped."),
    ] = "",
    missing: Annotated[
        str,
        typer.Option("--missing", metavar="PLACE", help="Place of partitions in which the group has no offset."),
    ] = "",
    remove_member: Annotated[
        list[str] | None,
        typer.Option(
            "--remove-member",
            metavar="NAME",
            help="With --from-group: take out this static member, which was stopped. Repeatable.",
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="FORMAT:TOPIC",
            help="With --from-group: take the rows of this changelog along (such as "
            "kafka-streams:old-accounts-changelog). Repeatable.",
        ),
    ] = None,
    rows: Annotated[
        str,
        typer.Option("--rows", metavar="MODULE:FUNCTION", help="f(store, row), which puts a row into the store."),
    ] = "",
    stopped_cleanly: Annotated[
        bool, typer.Option("--stopped-cleanly", help="Rows and offsets belong together, although nothing proves it.")
    ] = False,
    keep_unplaced: Annotated[
        bool, typer.Option("--keep-unplaced", help="Take rows whose keys belong to other partitions (murmur2).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show places and rows without writing them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Set where a source that has never run begins, in all partitions at once.

    Joined tables are read from their start in any case. A changelog that is missing is created. Refused if there is
    anything already: a position, state, or an offset of the group. Repeating it with the same places is harmless.

    Exit codes: 0 begun, or begun so before; 1 refused, not confirmed, or no broker answers; 2 wrong usage.
    """
    refuse_to_ask(json=json, yes=yes or dry_run)
    found = named_source(source)
    config = config_at(bootstrap_servers, found)
    inputs = further_inputs(found.topology, config.topic)
    if remove_member and not from_group:
        raise typer.BadParameter("--remove-member needs --from-group", param_hint="--remove-member")
    wanted = request_of(config, inputs, at or [], like_group, from_group, missing)
    asked = state_request_of(
        state or [], rows, from_group, stopped_cleanly=stopped_cleanly, keep_unplaced=keep_unplaced
    )
    with (
        admin_of(config.bootstrap_servers, config, timeout) as admin,
        source_admin_of(config, admin, timeout) as source_admin,
        GroupChecks(config, seconds=timeout) as checks,
    ):
        foreign = None if asked is None else ForeignState(asked, found, config, checks, admin, timeout)
        command = StartCommand(
            found, config, [config.topic, *inputs], wanted, checks, admin, source_admin, foreign, timeout
        )
        group: GroupView | None = None
        places = command.begun()
        is_new = places is None
        if places is None and dry_run:
            group, places = command.look(rows=True)
        elif places is None:
            if remove_member:
                checks.remove_static(from_group, remove_member)
            with slot_of(config, "kes-start", timeout, LONG_SECONDS if foreign else TRANSACTION_SECONDS) as slot:
                # What an earlier run has left open is ended by now: it may have begun the source after all.
                places = command.begun()
                is_new = places is None
                if places is None:
                    group, places = command.look(rows=not yes)
                    if not yes:
                        print_whole(notices(), places_table(places))
                        notices().print(Text(_warning(config, wanted, group, foreign)), soft_wrap=True)
                        typer.confirm(f"Begin {config.group_id} at these places?", abort=True, err=True)
                    command.write(slot, places, group)
        timestamps = command.timestamps()
    unread = sorted(group.committed.keys() - places.keys()) if group else []
    emit(
        {
            "group": config.group_id,
            "how": wanted.how,
            "written": is_new and not dry_run,
            "dry_run": dry_run,
            "inputs": {
                topic: [{"partition": number, "offset": at, "place": text} for number, (at, text) in found.items()]
                for topic, found in places.items()
            },
            "timestamps": timestamps,
            "from_group": wanted.group,
            "from_group_is_alive": bool(group and group.members),
            "not_read": unread,
            **({"state": foreign.facts()} if foreign and is_new else {}),
        },
        json,
        lambda: places_table(places),
    )
    begun = "begun" if is_new else "it has begun there before: nothing was written"
    lines = ["nothing was written" if is_new and dry_run else begun]
    if foreign and is_new:
        lines.append(foreign.shown)
    if timestamps:
        lines.append(f"times are those of {timestamps} (message.timestamp.type)")
    if unread:
        lines.append(f"{wanted.group} also has offsets of topics that are not read here: {', '.join(unread)}")
    for line in () if json else lines:
        notices().print(Text(line), soft_wrap=True)


class StartCommand:
    """One run of the command."""

    _mark = ""
    """The changelog's id begins with it in the offset records."""

    def __init__(
        self,
        source: EventSource[Any],
        config: EventSourceConfig,
        topics: list[str],
        wanted: StartRequest,
        checks: GroupChecks,
        admin: TopicAdmin,
        source_admin: TopicAdmin,
        foreign: ForeignState | None,
        timeout: float,
    ) -> None:
        """``topics``: the inputs that can begin anywhere, the source's own first. ``foreign``: the state, if some comes
        along."""
        self._foreign = foreign
        self._source, self._config, self._topics, self._wanted = source, config, topics, wanted
        self._checks, self._admin, self._source_admin, self._timeout = checks, admin, source_admin, timeout
        self._numbers = list(range(config.num_partitions))
        self._is_own = wanted.group == config.group_id  # the offsets of the source's own group are taken over

    def timestamps(self) -> str:
        """Return by which time the records of the source's topic are found: ``message.timestamp.type``; empty: no time
        was named."""
        if not self._wanted.has_time:
            return ""
        found = self._source_admin.describe([self._config.topic], self._timeout)[self._config.topic]
        return "" if found is None else found.configs.get("message.timestamp.type", "CreateTime")

    def begun(self) -> At | None:
        """Return the places of an earlier run that was given the same ones. Raises ``OffsetError`` when the source has
        begun elsewhere."""
        config = self._config
        if self._admin.identity(config.changelog, self._timeout) is None:
            return None
        found = beginnings(self._checks, config, self._admin.watermarks(config.changelog, None, self._timeout))
        places: At = {topic: {} for topic in self._topics}
        for number, record in sorted(found.items()):
            state = self._foreign.texts if self._foreign else ()
            is_same = (record.how, record.state) == (self._wanted.how, state) and record.at.keys() == places.keys()
            for topic in self._topics if is_same else ():
                same = [self._wanted.place(topic, number, config.topic, offset, 0) for offset in (0, None)]
                is_same = is_same and record.places.get(topic) in [one[1] for one in same if one is not None]
                places[topic][number] = record.at[topic], record.places.get(topic, "")
            if not is_same:
                raise OffsetError(
                    f"{config.changelog}[{number}]: the source has begun elsewhere ({record.shown}, by {record.by}). "
                    f"{_ANEW}"
                )
        return places if len(found) == len(self._numbers) else None

    def look(self, *, rows: bool) -> tuple[GroupView | None, At]:
        """Return the group that is begun like, if one is, and the places. ``rows``: look at all rows that come along,
        too. Raises ``OffsetError`` for a past, or a place that is not there, and as ``ForeignState``."""
        offsets, group = self._offsets()
        self._checks.refuse_if_alive()
        self._refuse_past(lambda name: self._checks.committed(self._numbers, name))
        places = places_in(self._config, self._topics, self._wanted, self._source_admin, self._timeout, offsets)
        if self._foreign is not None:
            self._foreign.check(self._wanted.group, places)
            if rows:
                self._foreign.read(places)
        return group, places

    def write(self, slot: BlockingSlot, places: At, group: GroupView | None) -> None:
        """Begin there. Raises ``OffsetError`` when a member came between, and ``TransactionFailed``."""
        config, checks, wanted = self._config, self._checks, self._wanted
        # Without these two (the second is a stand-in) nothing can be written. The others are made by the first start.
        names = {config.changelog, config.offsets_topic} - {config.topic}
        needed = [spec for spec in self._source.specs() if spec.name in names]
        if missing := [spec for spec in needed if self._admin.identity(spec.name, self._timeout) is None]:
            checks.create(missing)
        offsets = {topic: {number: at for number, (at, _) in found.items()} for topic, found in places.items()}
        try:
            with transaction(slot, _AGAIN, complain):
                if wanted.takes_over and not self._is_own:
                    for topic, found in offsets.items():
                        checks.hold_of(slot, wanted.group, found, topic)
                for topic, found in offsets.items():
                    checks.hold(slot, found, self._name_of(topic))
                self._refuse_change(group)
                if (foreign := self._foreign) is not None:
                    foreign.check(wanted.group, places)
                begun = self._records(places, exact=foreign is None or foreign.exact)
                if foreign is not None:
                    # The begin records come first, where a look finds them, and the positions last, as always.
                    slot.send([begin for begin, *_ in begun])
                    for _, some in foreign.partitions(places):
                        slot.send(some)
                    self._refuse_gone_on(group)  # the rows may have taken minutes
                slot.send([each for pair in begun for each in (pair[1:] if foreign else pair)])
        except TransactionFailed as error:
            if error.kind in IN_DOUBT:
                raise OffsetError(f"{error}. Whether the source has begun is not known: run it again") from error
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    def _offsets(self) -> tuple[dict[str, dict[int, int | None]], GroupView | None]:
        """Return the offsets of the group that is begun like, by input, and the group."""
        wanted, checks = self._wanted, self._checks
        if not wanted.group:
            return {}, None
        group = checks.resting(wanted.group) if wanted.takes_over else checks.described(wanted.group)
        if group.kind == NONE:
            raise OffsetError(
                f"there is no group {wanted.group}; or it is one that this version does not know, such as a streams "
                "group (KIP-1071), or one that may not be described"
            )
        return {topic: checks.committed_by(wanted.group, topic) for topic in self._topics}, group

    def _between(self) -> list[tuple[bytes, bytes]]:
        """Return further records of each partition, by key and value."""
        return []

    def _name_of(self, topic: str) -> str:
        """Return the name under which the group commits its offsets in an input."""
        return self._config.offsets_topic if topic == self._config.topic else topic

    def _refuse_past(self, committed: Callable[[str], Mapping[int, int | None]]) -> None:
        """``committed``: the group's offsets, by the names of inputs. Raises ``OffsetError`` for those that are not
        taken over, and for anything in the changelog."""
        config = self._config
        for topic in () if self._is_own else self._topics:
            for number, offset in committed(self._name_of(topic)).items():
                if offset is not None:
                    raise OffsetError(
                        f"{topic}[{number}]: the group {config.group_id} has committed offset {offset}, so it is not "
                        "new. If another program did that, and has stopped, go on there with --from-group "
                        f"{config.group_id}; or use another group_id"
                    )
        if self._admin.identity(config.changelog, self._timeout) is None:
            return
        found = self._checks.first_record(config.changelog)
        if found is None:
            return
        what = f"a row, key {(found.key or b'')[:64]!r}"
        if found.key == OFFSET_KEY:
            what = f"a position, {config.topic} at offset {decode_offset(found).offset}"
        elif found.key == BEGIN_KEY:
            what = f"a beginning, {decode_begin(found).shown}"
        raise OffsetError(f"{found.where}: the source has begun already: there is {what}. {_ANEW}")

    def _refuse_change(self, group: GroupView | None) -> None:
        """Look once more, while all offsets are pending."""
        own = self._checks.refuse_if_alive()
        self._refuse_gone_on(group)
        self._refuse_past(lambda name: own.committed.get(name, {}))

    def _refuse_gone_on(self, group: GroupView | None) -> None:
        """Raise ``OffsetError`` if the group that is taken over has members, or other offsets than before."""
        if self._wanted.takes_over and group is not None:
            # Members of the own group that join behind the hold are those of the source, and wait.
            now = self._checks.described(group.group) if self._is_own else self._checks.resting(group.group)
            for topic in self._topics:
                if now.committed.get(topic, {}) != group.committed.get(topic, {}):
                    raise OffsetError(
                        f"group {group.group} has gone on in {topic} meanwhile: stop it, and run this again"
                    )

    def _records(self, places: At, *, exact: bool) -> list[tuple[Output, ...]]:
        """Return begin record and offset record of each partition, and what is between them."""
        config, checks, now_ms = self._config, self._checks, int(time.time() * 1000)
        ids = {topic: checks.source_id(topic) for topic in self._topics}
        changelog_id = self._mark + checks.changelog_id()

        record = partial(changelog_record, config.changelog)

        def records(number: int) -> tuple[Output, ...]:
            at = {topic: found[number] for topic, found in places.items()}
            began = BeginRecord(
                how=self._wanted.how,
                at={topic: offset for topic, (offset, _) in at.items()},
                places={topic: text for topic, (_, text) in at.items()},
                by=_WRITER,
                at_ms=now_ms,
                group=self._wanted.group,
                state=self._foreign.texts if self._foreign else (),
                exact=exact,
            )
            begin, position = beginning(began, number, ids, changelog_id)
            return tuple(record(number, Change(*pair)) for pair in (begin, *self._between(), position))

        return [records(number) for number in self._numbers]


def _warning(
    config: EventSourceConfig, wanted: StartRequest, group: GroupView | None, foreign: ForeignState | None
) -> str:
    lines = ["The state begins empty."]
    if wanted.takes_over:
        empty = f"The state begins empty: nothing of what {wanted.group} has counted or stored is in it."
        lines = [
            f"{foreign.shown}\n" if foreign else empty,
            "What its program did with the records below these offsets is as exact as that program was.",
        ]
    if wanted.takes_over and wanted.group != config.group_id:
        lines.append(f"Do not start a member of {wanted.group} again: it would handle the same records.")
    if not wanted.takes_over and group is not None and group.members:
        lines.append(f"The group {wanted.group} is alive: two programs handle the same records from now on.")
    return " ".join(lines)


def places_table(places: At) -> Table:
    """Format the places where partitions begin."""
    table = plain_table("topic", "partition", "begins at", "place", right=("partition", "begins at"))
    for topic, found in places.items():
        for number, (offset, text) in found.items():
            table.add_row(topic, str(number), f"{offset:,}", text)
    return table
