"""``kes offsets start``: the place where a source without a past begins, in all partitions and inputs at once.

The transaction is as one of ``kes skip`` (see there why no member can come between): the group's offsets are pending in
it before the group is looked at for the second time, and only then the changelog is read to its end. It holds an offset
record and a begin record of each partition, so all of them begin, or none. Offsets of another group that is taken over
(``--from-group``) are pending, too: a member of it that waits for stable offsets does not go on in between, and one
that does not wait is seen by what it has committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, admin_of, named_source, source_admin_of
from streams.cli.console import complain, emit, notices, plain_table, print_whole
from streams.cli.skip import slot_of
from streams.cli.start_places import StartRequest, request_of
from streams.errors import OffsetError, TopicError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.questions.group_view import NONE, GroupView
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.addresses import brokers
from streams.looks.committing import IN_DOUBT, transaction
from streams.model.places import EARLIEST, LATEST
from streams.records import Output
from streams.runtime.changelog import BEGIN_KEY, OFFSET_KEY, BeginRecord, beginning, decode_begin, decode_offset
from streams.runtime.source_topics import INPUT
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

_WRITER: Final = "kes offsets start"
_AGAIN: Final = "Run it again: it begins the source, or says that it has begun"
_MOST_NAMED: Final = 5

At = dict[str, dict[int, tuple[int, str]]]
"""By input and partition: the first offset, and the text of the place that says so."""


def start(
    source: SourceName,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="PLACE",
            help="A time (2026-11-20T00:00Z), earliest, latest, or [TOPIC:]PARTITION@OFFSET. Repeatable.",
        ),
    ] = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the places without writing them.")] = False,
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
    if json and not (yes or dry_run):
        raise typer.BadParameter("--json needs --yes: it cannot ask for confirmation", param_hint="--yes")
    found = named_source(source)
    config = msgspec.structs.replace(
        found.config, bootstrap_servers=brokers(bootstrap_servers, found.config)
    ).resolved()
    inputs = [one.name for one in found.topology.topics if one.purpose == INPUT and one.name != config.topic]
    if remove_member and not from_group:
        raise typer.BadParameter("--remove-member needs --from-group", param_hint="--remove-member")
    wanted = request_of(config, inputs, at or [], like_group, from_group, missing)
    with (
        admin_of(config.bootstrap_servers, config, timeout) as admin,
        source_admin_of(config, admin, timeout) as source_admin,
        GroupChecks(config, seconds=timeout) as checks,
    ):
        command = _Start(found, config, [config.topic, *inputs], wanted, checks, admin, source_admin, timeout)
        begun = command.begun()
        if begun is not None:
            _answer(config, wanted, begun, json, written=False, timestamps=command.timestamps())
            return
        if dry_run:
            group, places = command.look()
            shown = _Told(places, group)
            _answer(config, wanted, shown, json, written=False, timestamps=command.timestamps(), dry_run=True)
            return
        if remove_member:
            checks.remove_static(from_group, remove_member)
        with slot_of(config, "kes-start", timeout) as slot:
            group, places = command.look()
            if not yes:
                print_whole(notices(), _table(places))
                notices().print(Text(_warning(config, wanted, group)), soft_wrap=True)
                typer.confirm(f"Begin {config.group_id} at these places?", abort=True, err=True)
            command.write(slot, places, group)
    _answer(config, wanted, _Told(places, group), json, written=True, timestamps=command.timestamps())


class _Told(NamedTuple):
    """Places as they are shown. ``group``: the one that they were taken from."""

    places: At
    group: GroupView | None


class _Start:
    """One run of the command."""

    def __init__(
        self,
        source: EventSource[Any],
        config: EventSourceConfig,
        topics: list[str],
        wanted: StartRequest,
        checks: GroupChecks,
        admin: TopicAdmin,
        source_admin: TopicAdmin,
        timeout: float,
    ) -> None:
        """``topics``: the inputs that can begin anywhere, the source's own first."""
        self._source, self._config, self._topics, self._wanted = source, config, topics, wanted
        self._checks, self._admin, self._source_admin, self._timeout = checks, admin, source_admin, timeout
        self._numbers = list(range(config.num_partitions))

    def timestamps(self) -> str:
        """Return by which time the records of the source's topic are found: ``message.timestamp.type``; empty: no time
        was named."""
        if not self._wanted.has_time:
            return ""
        found = self._source_admin.describe([self._config.topic], self._timeout)[self._config.topic]
        return "" if found is None else found.configs.get("message.timestamp.type", "CreateTime")

    def begun(self) -> _Told | None:
        """Return the places of an earlier run that was given the same ones. Raises ``OffsetError`` when the source has
        begun elsewhere."""
        config = self._config
        if self._admin.identity(config.changelog, self._timeout) is None:
            return None
        records = self._checks.last_records(config.changelog, self._numbers, BEGIN_KEY)
        found = {number: decode_begin(record) for number, record in records.items() if record.value is not None}
        places: At = {topic: {} for topic in self._topics}
        for number, record in sorted(found.items()):
            is_same = record.how == self._wanted.how and record.at.keys() == places.keys()
            for topic in self._topics if is_same else ():
                texts = [self._wanted.text(topic, number, config.topic, has_offset=has) for has in (True, False)]
                is_same = is_same and record.places.get(topic) in texts
                places[topic][number] = record.at[topic], record.places.get(topic, "")
            if not is_same:
                raise OffsetError(
                    f"{config.changelog}[{number}]: the source has begun elsewhere ({record.shown}, by {record.by}). "
                    "Another group_id begins anew; or delete the group's offsets and the changelog"
                )
        return _Told(places, None) if len(found) == len(self._numbers) else None

    def look(self) -> tuple[GroupView | None, At]:
        """Return the group that is begun like, if one is, and the places. Raises ``OffsetError`` for a past, or a
        place that is not there."""
        offsets, group = self._offsets()
        self._refuse_past(offsets if self._wanted.group == self._config.group_id else None)
        return group, self._places(offsets)

    def write(self, slot: BlockingSlot, places: At, group: GroupView | None) -> None:
        """Begin there. Raises ``OffsetError`` when anybody came between, and ``TransactionFailed``."""
        config, checks, wanted = self._config, self._checks, self._wanted
        if self._admin.identity(config.changelog, self._timeout) is None:  # other topics are made by the first start
            checks.create([spec for spec in self._source.specs() if spec.name == config.changelog])
        records = self._records(places)
        try:
            with transaction(slot, _AGAIN, complain):
                if wanted.takes_over and wanted.group != config.group_id:
                    for topic, found in places.items():
                        checks.hold_of(slot, wanted.group, _offsets(found), topic)
                for topic, found in places.items():
                    checks.hold(slot, _offsets(found), config.offsets_topic if topic == config.topic else topic)
                self._refuse_change(group)
                slot.send(records)
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

    def _refuse_past(self, own: Mapping[str, Mapping[int, int | None]] | None) -> None:
        """``own``: offsets of the source's own group that are taken over. Raises ``OffsetError``."""
        config, checks = self._config, self._checks
        checks.refuse_if_alive()
        for topic in self._topics if own is None else ():
            name = config.offsets_topic if topic == config.topic else topic
            for number, offset in checks.committed(self._numbers, name).items():
                if offset is not None:
                    raise _has_offset(config, topic, number, offset)
        if self._admin.identity(config.changelog, self._timeout) is not None:
            self._refuse_changelog()

    def _refuse_changelog(self) -> None:
        config = self._config
        found = self._checks.first_record(config.changelog)
        if found is None:
            return
        what = f"a row, key {(found.key or b'')[:64]!r}"
        if found.key == OFFSET_KEY:
            what = f"a position, {config.topic} at offset {decode_offset(found).offset}"
        elif found.key == BEGIN_KEY:
            what = f"a beginning, {decode_begin(found).shown}"
        raise OffsetError(
            f"{found.where}: the source has begun already: there is {what}. Another group_id begins anew; or delete "
            "the group's offsets and the changelog"
        )

    def _refuse_change(self, group: GroupView | None) -> None:
        """Look once more, while all offsets are pending."""
        config, wanted = self._config, self._wanted
        own = self._checks.refuse_if_alive()
        for topic in self._topics:
            name = config.offsets_topic if topic == config.topic else topic
            if wanted.takes_over and wanted.group == config.group_id:
                break
            for number, offset in own.committed.get(name, {}).items():
                raise _has_offset(config, topic, number, offset)
        if wanted.takes_over:
            assert group is not None
            now = self._checks.resting(wanted.group)
            for topic in self._topics:
                if now.committed.get(topic, {}) != group.committed.get(topic, {}):
                    raise OffsetError(
                        f"group {wanted.group} has gone on in {topic} meanwhile: stop it, and run this again"
                    )
        self._refuse_changelog()

    def _places(self, offsets: Mapping[str, Mapping[int, int | None]]) -> At:
        """Return the places. Raises ``OffsetError`` for those that are not there, all of them named."""
        config, wanted = self._config, self._wanted
        found: At = {}
        wrong: list[str] = []
        for topic in self._topics:
            marks = self._source_admin.watermarks(topic, None, self._timeout)
            if len(marks) < config.num_partitions:
                raise TopicError(f"{topic} has {len(marks)} partitions, the source has {config.num_partitions}")
            given = offsets.get(topic, {})
            at_time = self._at(topic, wanted.missing if wanted.group else wanted.places.time_ms, marks)
            found[topic] = {}
            for number in self._numbers:
                offset = given.get(number)
                text = wanted.text(topic, number, config.topic, has_offset=offset is not None)
                named = wanted.places.offset_in(topic, number, config.topic)
                chosen = named if named is not None else offset if offset is not None else at_time.get(number)
                if text is None or chosen is None:
                    wrong.append(f"{topic}[{number}] has no place")
                elif not marks[number].start <= chosen <= marks[number].end:
                    low, high = marks[number].start, marks[number].end
                    wrong.append(f"{topic}[{number}]: {text} is offset {chosen}, and the log has {low} to {high} only")
                else:
                    found[topic][number] = chosen, text
        if wrong:
            more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            remedy = "--missing earliest or latest" if wanted.group else "--at earliest or latest"
            raise OffsetError(
                f"{'; '.join(wrong[:_MOST_NAMED])}{more}. Name single partitions with --at [TOPIC:]PARTITION@OFFSET, "
                f"and all that have no place with {remedy}"
            )
        return found

    def _at(self, topic: str, time_ms: int | None, marks: Mapping[int, Watermarks]) -> dict[int, int]:
        """Return the offsets of a place for all partitions."""
        if time_ms is None:
            return {}
        if time_ms == EARLIEST:
            return {number: mark.start for number, mark in marks.items()}
        stable = {number: mark.stable for number, mark in marks.items()}
        if time_ms == LATEST:
            return stable
        found = self._source_admin.offsets_at(topic, time_ms, self._timeout)
        return stable | {number: offset for number, offset in found.items() if offset >= 0}

    def _records(self, places: At) -> list[Output]:
        """Return begin record and offset record of each partition."""
        config, checks, now_ms = self._config, self._checks, int(time.time() * 1000)
        ids = {topic: checks.source_id(topic) for topic in self._topics}
        changelog_id = checks.changelog_id()
        made: list[Output] = []
        for number in self._numbers:
            at = {topic: found[number] for topic, found in places.items()}
            began = BeginRecord(
                how=self._wanted.how,
                at={topic: offset for topic, (offset, _) in at.items()},
                places={topic: text for topic, (_, text) in at.items()},
                by=_WRITER,
                at_ms=now_ms,
            )
            for key, value in beginning(began, number, ids, changelog_id):
                made.append(Output(config.changelog, value, key, None, number, 0, number, -1))
        return made


def _offsets(found: Mapping[int, tuple[int, str]]) -> dict[int, int]:
    return {number: offset for number, (offset, _) in found.items()}


def _has_offset(config: EventSourceConfig, topic: str, number: int, offset: int) -> OffsetError:
    return OffsetError(
        f"{topic}[{number}]: the group {config.group_id} has committed offset {offset}, so it is not new. If another "
        f"program did that, and has stopped, go on there with --from-group {config.group_id}; or use another group_id"
    )


def _warning(config: EventSourceConfig, wanted: StartRequest, group: GroupView | None) -> str:
    lines = ["The state begins empty."]
    if wanted.takes_over:
        lines = [
            f"The state begins empty: nothing of what {wanted.group} has counted or stored is in it.",
            "What its program did with the records below these offsets is as exact as that program was.",
        ]
    if wanted.takes_over and wanted.group != config.group_id:
        lines.append(f"Do not start a member of {wanted.group} again: it would handle the same records.")
    if not wanted.takes_over and group is not None and group.members:
        lines.append(f"The group {wanted.group} is alive: two programs handle the same records from now on.")
    return " ".join(lines)


def _answer(
    config: EventSourceConfig,
    wanted: StartRequest,
    told: _Told,
    json: bool,
    *,
    written: bool,
    timestamps: str,
    dry_run: bool = False,
) -> None:
    unread = sorted((told.group.committed.keys() - told.places.keys()) if told.group else ())
    emit(
        {
            "group": config.group_id,
            "how": wanted.how,
            "written": written,
            "dry_run": dry_run,
            "inputs": {
                topic: [{"partition": number, "offset": at, "place": text} for number, (at, text) in found.items()]
                for topic, found in told.places.items()
            },
            "timestamps": timestamps,
            "from_group": wanted.group,
            "from_group_is_alive": bool(told.group and told.group.members),
            "not_read": unread,
        },
        json,
        lambda: _table(told.places),
    )
    if json:
        return
    begun = "begun" if written else "it has begun there before: nothing was written"
    lines = ["nothing was written" if dry_run else begun]
    if timestamps:
        lines.append(f"times are those of {timestamps} (message.timestamp.type)")
    if unread:
        lines.append(f"{wanted.group} also has offsets of topics that are not read here: {', '.join(unread)}")
    for line in lines:
        notices().print(Text(line), soft_wrap=True)


def _table(places: At) -> Table:
    table = plain_table("topic", "partition", "begins at", "place", right=("partition", "begins at"))
    for topic, number, (offset, text) in _rows(places):
        table.add_row(topic, str(number), f"{offset:,}", text)
    return table


def _rows(places: At) -> Iterator[tuple[str, int, tuple[int, str]]]:
    for topic, found in places.items():
        for number, at in found.items():
            yield topic, number, at
