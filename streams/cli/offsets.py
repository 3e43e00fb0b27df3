"""``kes offsets``: a group's offsets beside those in the changelog, when the two contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, await_listener, brokers, named_source
from streams.cli.console import complain, emit, notices, print_whole
from streams.clients.group_checks import GroupChecks
from streams.config import EventSourceConfig
from streams.errors import OffsetError
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, TopicIds, decode_offset

app = typer.Typer(no_args_is_help=True, help="Offsets of a group that contradict its changelog: accept.")

AHEAD: Final = "ahead"
BEHIND: Final = "behind"
EQUAL: Final = "equal"
NO_STATE: Final = "no offset in the changelog"
SET_BACK: Final = "set back"


class Standing(NamedTuple):
    """The first offset that is not handled yet: as the group has it, and as the changelog has it. ``None``: none."""

    partition: int
    group_offset: int | None
    changelog_offset: int | None

    @property
    def state(self) -> str:
        """Relation of the group's offset to the changelog's."""
        if self.group_offset == self.changelog_offset:
            return EQUAL
        if self.changelog_offset is None:
            return NO_STATE
        return BEHIND if self.group_offset is None or self.group_offset < self.changelog_offset else AHEAD

    @property
    def next_start(self) -> str:
        """Effect of the next start on this partition, once an offset that is ahead was set back."""
        if self.state == NO_STATE:
            return "refused: its state is lost"
        if self.state == AHEAD:
            return f"records {self.changelog_offset} to {(self.group_offset or 0) - 1} are handled again"
        return "begins" if self.changelog_offset is None else f"goes on at {self.changelog_offset}"


@app.callback()
def offsets() -> None:
    """Offsets of a group that contradict its changelog."""


@app.command()
def accept(
    source: SourceName,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this one. May be repeated.")
    ] = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    restored: Annotated[
        bool, typer.Option("--restored", help="Source or changelog was restored, or copied, with the same offsets.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Set offsets of the group that are ahead of the changelog back to it, so that the source starts again.

    The records in between are handled again: their outputs appear a second time. With --restored, the topics that are
    there now are also taken for those that the state belongs to. All members must be stopped.

    Exit codes: 0 no offset is ahead (any more); 1 not confirmed, a member is running, a partition has lost its state
    altogether, or no broker answers; 2 wrong usage.
    """
    found = named_source(source).config
    config = msgspec.structs.replace(found, bootstrap_servers=brokers(bootstrap_servers, found)).resolved()
    numbers = _numbers(config, partition)
    await_listener(config.bootstrap_servers, timeout)
    with GroupChecks(config, seconds=timeout) as checks:
        standings, adopted = look = _look(config, checks, numbers, restored=restored)
        ahead = [standing for standing in standings if standing.state == AHEAD]
        if (ahead or adopted) and not yes:
            print_whole(notices(), _table(standings))
            for standing in ahead:
                notices().print(Text(_warning(config, standing)), soft_wrap=True)
            if adopted:
                notices().print(Text(_adopting(config, list(adopted))), soft_wrap=True)
            typer.confirm(f"Change the group {config.group_id} and its changelog so?", abort=True, err=True)
            if _look(config, checks, numbers, restored=restored) != look:  # a member went on while the question stood
                raise OffsetError(f"the offsets of the group {config.group_id} have changed meanwhile; run this again")
        # The group's offset first: a death in between leaves a start that is refused, and this command to run again.
        checks.set_offsets({standing.partition: standing.changelog_offset or 0 for standing in ahead})
        encoded = {number: msgspec.json.encode(record) for number, record in adopted.items()}
        checks.write(config.changelog, OFFSET_KEY, encoded)
    emit(
        {
            "group": config.group_id,
            "topic": config.topic,
            "partitions": [_facts(entry) for entry in standings],
            "restored": sorted(adopted),
        },
        json,
        lambda: _table(standings, accepted=True),
    )
    lost = [standing.partition for standing in standings if standing.state == NO_STATE]
    if lost:
        complain(
            f"the group {config.group_id} has offsets for the partitions {lost}, and the changelog {config.changelog} "
            "has none: there is nothing to go back to",
            hint="Restore the changelog, or delete it and the group's offsets to start over.",
        )
        raise typer.Exit(1)


def _numbers(config: EventSourceConfig, wanted: list[int] | None) -> list[int]:
    unknown = [number for number in wanted or () if number >= config.num_partitions]
    if unknown:
        raise typer.BadParameter(
            f"{config.topic} has the partitions 0 to {config.num_partitions - 1}, not {unknown[0]}",
            param_hint="--partition",
        )
    return sorted(set(wanted or range(config.num_partitions)))


def _look(
    config: EventSourceConfig, checks: GroupChecks, numbers: list[int], *, restored: bool
) -> tuple[list[Standing], dict[int, OffsetRecord]]:
    """Return the offsets of the partitions, and the offset records to be written for topics that were restored."""
    checks.refuse_if_alive()
    committed = checks.committed(numbers)
    records = checks.last_records(config.changelog, numbers, OFFSET_KEY)
    written = {number: decode_offset(record) for number, record in records.items()}
    offsets = {number: record.offset for number, record in written.items()}
    standings = [Standing(number, committed[number], offsets.get(number)) for number in numbers]
    if not restored:
        return standings, {}
    return standings, _adopted(written, TopicIds(checks.source_id(), checks.changelog_id()))


def _adopted(written: Mapping[int, OffsetRecord], now: TopicIds) -> dict[int, OffsetRecord]:
    """The offset records that name other topics than those that are there now, with the ids of now."""
    return {
        number: msgspec.structs.replace(record, source_id=now.source, changelog_id=now.changelog)
        for number, record in written.items()
        if any(known not in ("", there) for known, there in zip(record.ids, now, strict=True))
    }


def _adopting(config: EventSourceConfig, partitions: list[int]) -> str:
    return (
        f"the state of the partitions {partitions} belongs to other topics named {config.topic} and {config.changelog} "
        "than those that are there now. It is taken for theirs: right only if they hold the same records at the same "
        "offsets"
    )


def _warning(config: EventSourceConfig, standing: Standing) -> str:
    return (
        f"{config.topic}[{standing.partition}]: {standing.next_start} by the next start, from the state in the "
        "changelog; outputs that they had before appear a second time"
    )


def _facts(standing: Standing) -> dict[str, Any]:
    return {**standing._asdict(), "state": SET_BACK if standing.state == AHEAD else standing.state}


def _table(standings: list[Standing], *, accepted: bool = False) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("partition", "group", "changelog"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("the next start", overflow="fold")
    for standing in standings:
        offsets = ["-" if offset is None else str(offset) for offset in standing[1:]]
        state = SET_BACK if accepted and standing.state == AHEAD else standing.state
        style = "bold red" if state in (AHEAD, NO_STATE) else ""
        table.add_row(str(standing.partition), *offsets, state, standing.next_start, style=style)
    return table
