"""``kes offsets``: the beginning of a source, and a group's offsets that contradict its changelog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, await_listener, config_at, named_source
from streams.cli.console import complain, emit, frameless, notices, print_whole
from streams.cli.offsets_start import start
from streams.cli.start_places import refuse_muted
from streams.errors import OffsetError
from streams.kafka.questions.group_checks import GroupChecks
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, TopicIds, decode_offset, further_positions
from streams.settings.config import EventSourceConfig

app = typer.Typer(no_args_is_help=True)

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
    """Beginning of a source, and offsets of a group that contradict its changelog."""


app.command()(start)


@app.command()
def accept(
    source: SourceName,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition. Repeatable.")
    ] = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    restored: Annotated[
        bool, typer.Option("--restored", help="Accept topics that were restored or copied with the same offsets.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    json: Json = False,
) -> None:
    """Reset group offsets that are ahead of the changelog, so that the source can start again.

    The records in between are handled again, so their outputs appear twice. With --restored, the topics that exist now
    are also accepted as the ones that the state belongs to. All members must be stopped.

    Exit codes: 0 no offset is ahead any more; 1 not confirmed, a member is running, a partition has lost its whole
    state, or no broker answers; 2 wrong usage.
    """
    named = named_source(source)
    inputs = named.inputs
    config = config_at(bootstrap_servers, named)
    numbers = _numbers(config, partition)
    await_listener(config.bootstrap_servers, timeout)
    with GroupChecks(config, seconds=timeout) as checks:
        standings, adopted = before = _compared(config, inputs, checks, numbers, restored=restored)
        ahead = {topic: [one for one in found if one.state == AHEAD] for topic, found in standings.items()}
        if (any(ahead.values()) or adopted) and not yes:
            for topic, found in standings.items():
                print_whole(notices(), _table(found, title=topic if inputs else None))
            for topic, found in ahead.items():
                for standing in found:
                    notices().print(Text(_warning(topic, standing)), soft_wrap=True)
            if adopted:
                notices().print(Text(_adopting(config, inputs, list(adopted))), soft_wrap=True)
            typer.confirm(
                f"Apply these changes to the group {config.group_id} and its changelog?", abort=True, err=True
            )
            # a member may have gone on while the question stood
            if _compared(config, inputs, checks, numbers, restored=restored) != before:
                raise OffsetError(
                    f"the offsets of the group {config.group_id} have changed in the meantime; run the command again"
                )
        # The group's offset first: a death in between leaves a start that is refused, and this command to run again.
        for topic, found in ahead.items():
            offsets = {standing.partition: standing.changelog_offset or 0 for standing in found}
            checks.set_offsets(offsets, "" if topic == config.topic else topic)
        encoded = {number: msgspec.json.encode(record) for number, record in adopted.items()}
        checks.write(config.changelog, OFFSET_KEY, encoded)
    facts = {topic: [_facts(entry) for entry in found] for topic, found in standings.items()}
    emit(
        {
            "group": config.group_id,
            "topic": config.topic,
            "partitions": facts.pop(config.topic),
            "restored": sorted(adopted),
            **({"inputs": facts} if inputs else {}),
        },
        json,
        lambda: Group(
            *(_table(found, accepted=True, title=name if inputs else None) for name, found in standings.items())
        ),
    )
    lost = {topic: [one.partition for one in found if one.state == NO_STATE] for topic, found in standings.items()}
    for topic, partitions in lost.items():
        if partitions:
            complain(
                f"the group {config.group_id} has offsets for the partitions {partitions} of {topic}, and the "
                f"changelog {config.changelog} has none: there is nothing to go back to",
                hint="Restore the changelog, or delete it and the group's offsets to start over.",
            )
    if any(lost.values()):
        raise typer.Exit(1)


def _numbers(config: EventSourceConfig, wanted: list[int] | None) -> list[int]:
    unknown = [number for number in wanted or () if number >= config.num_partitions]
    if unknown:
        raise typer.BadParameter(
            f"{config.topic} has the partitions 0 to {config.num_partitions - 1}, not {unknown[0]}",
            param_hint="--partition",
        )
    return sorted(set(wanted or range(config.num_partitions)))


Comparison = tuple[dict[str, list[Standing]], dict[int, OffsetRecord]]
"""By input, the source's own topic first: the offsets of the partitions. And the offset records to be written for
topics that were restored."""


def _compared(
    config: EventSourceConfig, inputs: list[str], checks: GroupChecks, numbers: list[int], *, restored: bool
) -> Comparison:
    checks.refuse_if_alive()
    records = checks.last_records(config.changelog, numbers, OFFSET_KEY)
    written = {number: decode_offset(record) for number, record in records.items()}
    for record in written.values():
        refuse_muted(config, record)
    offsets = {number: record.offset for number, record in written.items()}
    committed = checks.committed(numbers)
    standings = {config.topic: [Standing(number, committed[number], offsets.get(number)) for number in numbers]}
    for topic in inputs:
        at = {number: record.position_in(topic, number) for number, record in written.items()}
        offsets = {number: found[0] for number, found in at.items() if found is not None}
        committed = checks.committed(numbers, topic)
        standings[topic] = [Standing(number, committed[number], offsets.get(number)) for number in numbers]
    if not restored:
        return standings, {}
    ids = TopicIds(checks.source_id(), checks.changelog_id())
    return standings, _adopted(written, ids, {topic: checks.source_id(topic) for topic in inputs})


def _adopted(written: Mapping[int, OffsetRecord], now: TopicIds, inputs: Mapping[str, str]) -> dict[int, OffsetRecord]:
    """The offset records that name other topics than those that are there now, with the ids of now."""
    adopted: dict[int, OffsetRecord] = {}
    for number, record in written.items():
        at = {topic: record.position_in(topic, number) for topic in inputs}
        other = {
            topic: (found[0], inputs[topic])
            for topic, found in at.items()
            if found is not None and found[1] not in ("", inputs[topic])
        }
        if other or any(known not in ("", there) for known, there in zip(record.ids, now, strict=True)):
            adopted[number] = msgspec.structs.replace(
                record,
                source_id=now.source,
                changelog_id=now.changelog,
                inputs=further_positions(record, number, other) if other else record.inputs,
            )
    return adopted


def _adopting(config: EventSourceConfig, inputs: list[str], partitions: list[int]) -> str:
    topics = ", ".join([config.topic, *inputs])
    return (
        f"the state of the partitions {partitions} belongs to other topics named {topics} and {config.changelog} "
        "than those that are there now. It is taken for theirs: right only if they hold the same records at the same "
        "offsets"
    )


def _warning(topic: str, standing: Standing) -> str:
    return (
        f"{topic}[{standing.partition}]: {standing.next_start} by the next start, from the state in the "
        "changelog; outputs that they had before appear a second time"
    )


def _facts(standing: Standing) -> dict[str, Any]:
    return {**standing._asdict(), "state": SET_BACK if standing.state == AHEAD else standing.state}


def _table(standings: list[Standing], *, accepted: bool = False, title: str | None = None) -> Table:
    table = frameless(title=title or "")
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
