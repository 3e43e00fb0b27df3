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

from streams.cli.cluster import Json, Servers, SourceName, Timeout, admin_of, brokers, named_source
from streams.cli.console import emit, notices
from streams.cli.records import Content, Decoder, Place, checked_place, harmless, one_line, shortened, shown_time
from streams.cli.transaction import IN_DOUBT, transaction
from streams.clients.group_checks import GroupChecks
from streams.clients.producing.blocking import BlockingSlot
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.config import EventSourceConfig
from streams.errors import DecodeError, OffsetError, Stopped, TopicReplaced, TransactionFailed
from streams.records import IncomingRecord, Output
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, decode_offset
from streams.runtime.partition.dead_letters import dead_letter

app = typer.Typer()

_WRITER: Final = "kes skip"
_TRANSACTION_SECONDS: Final = 30.0
_LONGEST: Final = 500


class Skipped(Exception):
    """The error in the letter of a record that an operator passed, although it can be read."""


class Position(NamedTuple):
    """The next offset of a partition. ``record``: the offset record that says so; ``None``: it begins at the start of
    its log."""

    offset: int
    record: OffsetRecord | None


@app.command()
def skip(
    source: SourceName,
    record: Annotated[str, typer.Argument(metavar="PARTITION@OFFSET", help="The record, as the error names it.")],
    as_letter: Annotated[bool, typer.Option("--dead-letter", help="Write it to the dead letters, too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Take the next record of a partition for handled, without any effect, so that the source goes on behind it.

    It must be the record at which the source stands, and all members must be stopped: with several workers, those that
    the record did not stop, too. With --dead-letter it is kept as a dead letter, to be sent again later (kes dlq).

    Exit codes: 0 passed; 1 refused (a member is running, it is not the next record), not confirmed, or no broker
    answers; 2 wrong usage.
    """
    place = checked_place(record)
    if json and not yes:
        raise typer.BadParameter("--json cannot ask: say --yes", param_hint="--yes")
    found = named_source(source)
    config = msgspec.structs.replace(
        found.config, bootstrap_servers=brokers(bootstrap_servers, found.config)
    ).resolved()
    if place.partition >= config.num_partitions:
        raise OffsetError(f"{config.topic} has the partitions 0 to {config.num_partitions - 1}, not {place.partition}")
    with admin_of(config.bootstrap_servers, config, timeout) as admin:
        if admin.identity(config.changelog, timeout) is None:
            raise OffsetError(f"{config.changelog} does not exist: the source has not run yet, so it stands nowhere")
    with GroupChecks(config, seconds=timeout) as checks, slot_of(config, "kes-skip", timeout) as slot:
        checks.refuse_if_alive()
        committed = checks.committed([place.partition])[place.partition]
        position = position_of(config, checks, place.partition, committed)
        passed = _next(config, checks, place, position, timeout)
        content = Decoder(found).content(passed)
        if not yes:
            notices().print(Text(_shown(passed, content)), soft_wrap=True)
            what = "goes to the dead letters" if as_letter else "is passed, and nothing is kept of it elsewhere"
            typer.confirm(f"This record {what}. Go on behind it?", abort=True, err=True)
        outputs: list[Output] = []
        if as_letter:
            error = DecodeError(content.problem) if content.problem else Skipped("passed by kes skip")
            letter = dead_letter(config.dead_letters, passed, error, 0, int(time.time() * 1000), instance=_WRITER)
            outputs.append(letter.within(found.program().message_limit))
        carried = msgspec.UNSET if position.record is None else position.record.inputs
        moved = OffsetRecord(place.offset + 1, _WRITER, 0, 0, checks.source_id(), checks.changelog_id(), carried)
        outputs.append(offset_record(config, place.partition, moved))
        try:
            with transaction(slot, "Run it again: it passes the record, or says that it is handled already"):
                checks.hold(slot, {place.partition: place.offset + 1})
                if position_of(config, checks, place.partition, committed) != position:
                    raise OffsetError(f"a member of group {config.group_id} has handled records meanwhile; look again")
                slot.send(outputs)
        except TransactionFailed as error:
            if error.kind in IN_DOUBT:
                raise OffsetError(f"{error}. Whether the record was passed is not known: run it again") from error
            raise
    data = {
        "group": config.group_id,
        "topic": config.topic,
        "partition": place.partition,
        "offset": place.offset,
        "next_offset": place.offset + 1,
        "dead_letter": as_letter,
    }
    emit(data, json, lambda: Text(f"{config.topic}[{place.partition}] goes on behind {place.offset}"))


def position_of(config: EventSourceConfig, checks: GroupChecks, partition: int, committed: int | None) -> Position:
    """Return where the next start of the source goes on, by the rules of a take-over. Raises ``OffsetError`` where that
    start is refused."""
    where = f"{config.topic}[{partition}]"
    found = checks.last_records(config.changelog, [partition], OFFSET_KEY).get(partition)
    (low, high), source_id = checks.source()[0][partition], checks.source_id()
    if found is None:
        if committed is not None:
            raise OffsetError(
                f"{where}: the group {config.group_id} has committed offset {committed}, but the changelog "
                f"{config.changelog} has none: its state is lost"
            )
        if config.auto_offset_reset != "earliest":
            raise OffsetError(f"{where}: no record was handled yet, and a start does not begin with the first one")
        return Position(low, None)
    record = decode_offset(found)
    if any(known not in ("", now) for known, now in zip(record.ids, (source_id, checks.changelog_id()), strict=True)):
        raise TopicReplaced(
            f"{where}: the state in {config.changelog} belongs to other topics of these names; see `kes offsets accept "
            "--restored`"
        )
    if committed is not None and committed > record.offset:
        raise OffsetError(
            f"{where}: the group's offset {committed} is ahead of the changelog's {record.offset}: run `kes offsets "
            "accept` first"
        )
    if not low <= record.offset <= high:
        raise OffsetError(f"{where}: the state goes on at {record.offset}, and the log has {low} to {high} only")
    return Position(record.offset, record)


def _next(
    config: EventSourceConfig, checks: GroupChecks, place: Place, position: Position, timeout: float
) -> IncomingRecord:
    """Return the first committed record at the position. Raises ``OffsetError`` if it is another one than ``place``."""
    where = f"{config.topic}[{place.partition}]"
    if place.offset < position.offset:
        raise OffsetError(
            f"{where}: the record at {place.offset} is handled already, the next one is {position.offset}"
        )
    end = checks.source()[0][place.partition][1]
    found: list[IncomingRecord] = []
    with closing(_reader_of(config)) as reader, suppress(Stopped):
        reader.read(
            config.topic,
            {place.partition: (position.offset, end)},
            lambda _, records: found.extend(records),
            stalled_after_seconds=timeout,
            cancelled=lambda: bool(found),
        )
    if not found:
        raise OffsetError(f"{where}: there is no record at {position.offset} or behind it yet, so none can be passed")
    if found[0].offset != place.offset:
        raise OffsetError(
            f"{where}: the next record is the one at {found[0].offset}, not {place.offset}; records are passed in order"
        )
    return found[0]


@contextmanager
def slot_of(config: EventSourceConfig, command: str, timeout: float) -> Iterator[BlockingSlot]:
    """Take the transactional id of a command. What an earlier run left open is ended: its pending offset would be
    waited for."""
    settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id=command)
    name = f"{config.changelog}.{command}"
    slot = BlockingSlot(
        settings, name, group_id=config.group_id, transaction_seconds=_TRANSACTION_SECONDS, seconds=timeout
    )
    with closing(slot):
        slot.open()
        yield slot


def _reader_of(config: EventSourceConfig) -> PartitionReader:
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
