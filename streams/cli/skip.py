"""``kes skip``: pass the record at which an event source stops, without a deployment.

**Why this is exactly once.** A record counts as handled when the offset record in the changelog, from which every
take-over starts, is behind it. This command writes such a record, and with ``--dead-letter`` the letter, in one
transaction. Between its look and its commit no member may handle the record, or its effects would be there beside
the letter, and worse, this offset record would set back one that a member wrote. So, in this order:

1. The group has no members. What departed ones, or an earlier run of this command, left open is ended, or waited for
   (the stable offsets).
2. A transaction begins, and the group's offset goes into it: it is pending from now on.
3. Only after that the group is looked at once more: still no members. A member that joins later asks for the stable
   offset of the partition before it reads the end of the changelog, and gets no answer while ours is pending. So it
   reads our outcome. One that came and went between 1 and 3 is seen in step 4.
4. The position is read from the changelog, up to its high watermark, read committed: what a member had written before
   step 3 and not committed would be waited for. It must still be what it was, and the record must be the next one.
5. Offset record and letter are written, and all is committed. An abort, or a death, leaves everything as it was.

An unclear end is cleared up by the next run: under the same transactional id it ends what was open, and finds the
position behind the record, or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from rich.text import Text

from streams.cli.cluster import (
    Json,
    Servers,
    SourceName,
    Timeout,
    admin_of,
    checked_partition_offset,
    config_at,
    named_source,
    refuse_to_ask,
)
from streams.cli.console import complain, emit, notices
from streams.cli.start_places import refuse_muted
from streams.errors import DecodeError, OffsetError, Stopped, TopicReplaced, TransactionFailed
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.committing import IN_DOUBT, transaction
from streams.looks.records import Content, Decoder, PartitionOffset, one_line, shortened, shown_time
from streams.records import IncomingRecord, Output
from streams.runtime.changelog import JOIN_PREFIX, OFFSET_KEY, OffsetRecord, decode_offset, further_positions
from streams.runtime.partition.dead_letters import dead_letter
from streams.runtime.source_topics import TABLE
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig

app = typer.Typer()

_WRITER: Final = "kes skip"
TRANSACTION_SECONDS: Final = 30.0
_LONGEST: Final = 500


class Skipped(Exception):
    """The error in the letter of a record that an operator passed, although it can be read."""


class Position(NamedTuple):
    """The next offset of a partition in an input, and in the source's own topic (``own``). ``record``: the offset
    record that says so; ``None``: it begins at the start of its logs."""

    offset: int
    own: int
    record: OffsetRecord | None


@app.command()
def skip(
    source: SourceName,
    record: Annotated[
        str,
        typer.Argument(
            metavar="[TOPIC:]PARTITION@OFFSET", help="The record, as named by the error. TOPIC: for a further input."
        ),
    ],
    as_letter: Annotated[
        bool, typer.Option("--dead-letter", help="Also write the record to the dead-letter topic.")
    ] = False,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason to store in the dead letter, such as the logged error.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Mark the next record of a partition as handled, without any effect, so that the source continues after it.

    It must be the record at which the source stands. All members must be stopped, including workers that the record did
    not stop. With --dead-letter it is kept as a dead letter and can be sent again later (kes dlq).

    Exit codes: 0 skipped; 1 refused (a member is running, or it is not the next record), not confirmed, or no broker
    answers; 2 wrong usage.
    """
    named, _, number = record.rpartition(":")
    at = checked_partition_offset(number)
    refuse_to_ask(json=json, yes=yes)
    if reason and not as_letter:
        raise typer.BadParameter("--reason needs --dead-letter: only a dead letter keeps it", param_hint="--reason")
    found = named_source(source)
    config = config_at(bootstrap_servers, found)
    topic = named or config.topic
    if topic not in (config.topic, *found.inputs):
        inputs = ", ".join((config.topic, *found.inputs))
        raise typer.BadParameter(f"{topic!r} is no input of {source}, which reads {inputs}", param_hint="TOPIC")
    if at.partition >= config.num_partitions:
        raise OffsetError(f"{topic} has the partitions 0 to {config.num_partitions - 1}, not {at.partition}")
    with admin_of(config.bootstrap_servers, config, timeout) as admin:
        if admin.identity(config.changelog, timeout) is None:
            raise OffsetError(f"{config.changelog} does not exist: the source has not run yet, so it stands nowhere")
    with GroupChecks(config, seconds=timeout) as checks, slot_of(config, "kes-skip", timeout) as slot:
        checks.refuse_if_alive()
        offsets_topic = config.offsets_topic if topic == config.topic else topic
        committed = checks.committed([at.partition], offsets_topic)[at.partition]
        position = position_of(config, checks, topic, at.partition, committed)
        [passed] = found.received(topic, [_next(config, checks, topic, at, position, timeout)])
        content = Decoder(found).content(passed)
        if not yes:
            notices().print(Text(_shown(passed, content)), soft_wrap=True)
            what = "goes to the dead letters" if as_letter else "is skipped, and not kept anywhere else"
            typer.confirm(f"This record {what}. Continue after it?", abort=True, err=True)
        outputs: list[Output] = []
        if as_letter:
            what = f"passed by kes skip{reason and f': {reason}'}"
            unread = DecodeError(f"{content.problem} ({what})" if reason else content.problem)
            error = unread if content.problem else Skipped(what)
            letter = dead_letter(config.dead_letters, passed, error, 0, int(time.time() * 1000), instance=_WRITER)
            outputs.append(letter.within(found.program().message_limit))
        carried = msgspec.UNSET if position.record is None else position.record.inputs
        own = at.offset + 1
        if topic != config.topic:
            own, further = position.own, {topic: (at.offset + 1, checks.source_id(topic))}
            carried = further_positions(position.record, at.partition, further)
        is_new = position.record is None or position.record.position_in(topic, at.partition) is None
        if is_new and topic in [one.name for one in found.topology.topics if one.purpose == TABLE]:
            # As the first start does it: no event meets half of the table.
            end = b"%d" % checks.source(topic)[0][at.partition][1]
            key = JOIN_PREFIX + topic.encode()
            outputs.append(Output(config.changelog, end, key, None, at.partition, 0, at.partition, -1))
        moved = OffsetRecord(own, _WRITER, 0, 0, checks.source_id(), checks.changelog_id(), carried)
        outputs.append(offset_record(config, at.partition, moved))
        try:
            with transaction(slot, "Run it again: it passes the record, or says that it is handled already", complain):
                checks.hold(slot, {at.partition: at.offset + 1}, offsets_topic)
                if position_of(config, checks, topic, at.partition, committed) != position:
                    raise OffsetError(f"a member of group {config.group_id} has handled records meanwhile; look again")
                slot.send(outputs)
        except TransactionFailed as error:
            if error.kind in IN_DOUBT:
                raise OffsetError(f"{error}. Whether the record was passed is not known: run it again") from error
            raise
    data = {
        "group": config.group_id,
        "topic": topic,
        "partition": at.partition,
        "offset": at.offset,
        "next_offset": at.offset + 1,
        "dead_letter": as_letter,
    }
    emit(data, json, lambda: Text(f"{topic}[{at.partition}] goes on behind {at.offset}"))


def position_of(
    config: EventSourceConfig, checks: GroupChecks, topic: str, partition: int, committed: int | None
) -> Position:
    """Return where the next start of the source goes on in this input, by the rules of a take-over. Raises
    ``OffsetError`` where that start is refused."""
    where = f"{topic}[{partition}]"
    found = checks.last_records(config.changelog, [partition], OFFSET_KEY).get(partition)
    record = None if found is None else decode_offset(found)
    refuse_muted(config, record)
    (ranges, topic_id), own_id = checks.source(topic), checks.source_id()
    low, high = ranges[partition]
    at: tuple[int, str] | None = None
    if record is not None:
        at = (record.offset, record.source_id) if topic == config.topic else record.position_in(topic, partition)
        known = zip(
            (*record.ids, topic_id if at is None else at[1]), (own_id, checks.changelog_id(), topic_id), strict=True
        )
        if any(before not in ("", now) for before, now in known):
            raise TopicReplaced(
                f"{where}: the state in {config.changelog} belongs to other topics of these names; see `kes offsets "
                "accept --restored`"
            )
    if at is None:
        if committed is not None:
            raise OffsetError(
                f"{where}: the group {config.group_id} has committed offset {committed}, but the changelog "
                f"{config.changelog} has none: its state is lost"
            )
        if config.auto_offset_reset != "earliest" and topic not in config.own_inputs:
            raise OffsetError(f"{where}: no record was handled yet, and a start does not begin with the first one")
        own = low if topic == config.topic else checks.source()[0][partition][0]
        return Position(low, own if record is None else record.offset, record)
    if committed is not None and committed > at[0]:
        raise OffsetError(
            f"{where}: the group's offset {committed} is ahead of the changelog's {at[0]}: run `kes offsets "
            "accept` first"
        )
    if not low <= at[0] <= high:
        raise OffsetError(f"{where}: the state goes on at {at[0]}, and the log has {low} to {high} only")
    assert record is not None
    return Position(at[0], record.offset, record)


def _next(
    config: EventSourceConfig, checks: GroupChecks, topic: str, at: PartitionOffset, position: Position, timeout: float
) -> IncomingRecord:
    """Return the first committed record at the position. Raises ``OffsetError`` if it is another one than ``at``."""
    where = f"{topic}[{at.partition}]"
    if at.offset < position.offset:
        raise OffsetError(f"{where}: the record at {at.offset} is handled already, the next one is {position.offset}")
    end = checks.source(topic)[0][at.partition][1]
    found: list[IncomingRecord] = []
    with closing(source_reader(config)) as reader, suppress(Stopped):
        reader.read(
            topic,
            {at.partition: (position.offset, end)},
            lambda _, records: found.extend(records),
            stalled_after_seconds=timeout,
            cancelled=lambda: bool(found),
        )
    if not found:
        raise OffsetError(f"{where}: there is no record at {position.offset} or behind it yet, so none can be passed")
    if found[0].offset != at.offset:
        raise OffsetError(
            f"{where}: the next record is the one at {found[0].offset}, not {at.offset}; records are passed in order"
        )
    return found[0]


@contextmanager
def slot_of(
    config: EventSourceConfig, command: str, timeout: float, transaction_seconds: float = TRANSACTION_SECONDS
) -> Iterator[BlockingSlot]:
    """Take the transactional id of a command. What an earlier run left open is ended: its pending offset would be
    waited for."""
    settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id=command)
    name = f"{config.changelog}.{command}"
    slot = BlockingSlot(
        settings, name, group_id=config.group_id, transaction_seconds=transaction_seconds, seconds=timeout
    )
    with closing(slot):
        slot.open()
        yield slot


def source_reader(config: EventSourceConfig) -> PartitionReader:
    """Make a reader of the source topic."""
    servers, overrides = config.bootstrap_servers, config.client_settings
    if config.source_is_elsewhere:
        servers, overrides = config.source_bootstrap_servers, config.source_client_settings
    return PartitionReader(ClientSettings(servers, overrides, client_id="kes-skip"))


def offset_record(config: EventSourceConfig, partition: int, record: OffsetRecord) -> Output:
    """Return an offset record as it goes into the changelog."""
    return Output(config.changelog, msgspec.json.encode(record), OFFSET_KEY, None, partition, 0, partition, -1)


def _shown(record: IncomingRecord, content: Content) -> str:
    lines = [
        f"{record.where}  {shown_time(record.timestamp_ms)}  {harmless(record.key)}  {content.type or '-'}",
        shortened(one_line(content.value), _LONGEST),
        f"(cannot be read: {harmless(content.problem)})" if content.problem else "(the source can read it)",
    ]
    return "\n".join(lines)
