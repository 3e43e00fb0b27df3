"""``kes rebuild``: a new version of a source beside the running one. It follows that one, and sends nothing.

The beginning is written as by ``kes offsets start``, in one transaction, with a voice record in each partition, and
positions that older releases refuse.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, NamedTuple

import msgspec
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
)
from streams.cli.console import emit, notices, plain_table, print_whole
from streams.cli.offsets_start import StartCommand, places_table
from streams.cli.skip import TRANSACTION_SECONDS, slot_of
from streams.cli.start_places import StartRequest, beginnings, further_inputs
from streams.errors import ConfigError, OffsetError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_checks import GroupChecks
from streams.looks.group_live import LiveGroup
from streams.model.places import EARLIEST, Places
from streams.runtime.changelog import MUTED, OFFSET_KEY, VOICE_KEY, VoiceRecord, decode_offset
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

app = typer.Typer(no_args_is_help=True)

_WRITER: Final = "kes rebuild start"
_LIVE_SECONDS: Final = 3.0
"""Time limit for what members report."""


@app.callback()
def rebuild() -> None:
    """A new version of a source beside the running one, muted."""


class _Request(StartRequest):
    """All partitions at the start of their logs."""

    @property
    def how(self) -> str:
        return "rebuild"


class _RebuildStart(StartCommand):
    """One run of ``kes rebuild start``. ``voice``: the voice record of each partition."""

    _mark = MUTED
    voice: VoiceRecord

    def _between(self) -> list[tuple[bytes, bytes]]:
        return [(VOICE_KEY, msgspec.json.encode(self.voice))]


@app.command()
def start(
    source: SourceName,
    of: Annotated[str, typer.Option("--of", metavar="MODULE:SOURCE", help="The running source, which it follows.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the places without writing them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Let a new source begin muted: at the start of its inputs, and never beyond the running one.

    Its settings need shadow_of, a group_id and a changelog of its own, and the same inputs. It keeps state and timers,
    and sends nothing, for as long as it lives: there is no switch yet. Repeating this is harmless.

    Exit codes: 0 begun, or begun so before; 1 refused, not confirmed, or no broker answers; 2 wrong usage.
    """
    refuse_to_ask(json=json, yes=yes or dry_run)
    found, other = named_source(source), named_source(of)
    config, old = config_at(bootstrap_servers, found), config_at(bootstrap_servers, other)
    refuse_pair(found, other, config, old)
    inputs = further_inputs(found.topology, config.topic)
    wanted = _Request(Places({}, EARLIEST), "", takes_over=False, missing=None)
    with (
        admin_of(config.bootstrap_servers, config, timeout) as admin,
        GroupChecks(config, seconds=timeout) as checks,
    ):
        command = _RebuildStart(found, config, [config.topic, *inputs], wanted, checks, admin, admin, None, timeout)
        command.voice = _voice(old, checks, admin, timeout)
        places = command.begun()
        is_new = places is None
        if places is None and dry_run:
            _, places = command.look(rows=False)
        elif places is None:
            with slot_of(config, "kes-start", timeout, TRANSACTION_SECONDS) as slot:
                places = command.begun()
                is_new = places is None
                if places is None:
                    _, places = command.look(rows=False)
                    if not yes:
                        print_whole(notices(), places_table(places))
                        typer.confirm(f"Begin {config.group_id} muted, beside {old.group_id}?", abort=True, err=True)
                    command.write(slot, places, None)
    at = {topic: {number: offset for number, (offset, _) in each.items()} for topic, each in places.items()}
    written = is_new and not dry_run
    data = {"group": config.group_id, "follows": old.group_id, "written": written, "dry_run": dry_run, "inputs": at}
    emit(data, json, lambda: places_table(places))
    if not json:
        said = "begun, muted" if written else "nothing was written" if dry_run else "it has begun before"
        notices().print(Text(f"{said}: it follows {old.group_id}"), soft_wrap=True)


def refuse_pair(
    new: EventSource[Any], old: EventSource[Any], config: EventSourceConfig, old_config: EventSourceConfig
) -> None:
    """Raise ``ConfigError`` for two sources of which one cannot follow the other."""
    if config.shadow_of != old_config.group_id:
        raise ConfigError(f"shadow_of is {config.shadow_of!r}; set it to {old_config.group_id!r}, the group it follows")
    if old_config.shadow_of:
        raise ConfigError(f"{old_config.group_id} is muted itself (shadow_of={old_config.shadow_of!r})")
    for name in ("changelog", "dead_letters"):
        if getattr(config, name) == getattr(old_config, name):
            raise ConfigError(
                f"both sources have the topic {getattr(config, name)} ({name}): the new one needs its own"
            )
    pairs = {
        "topic": (config.topic, old_config.topic),
        "num_partitions": (config.num_partitions, old_config.num_partitions),
        "inputs": (sorted(new.inputs), sorted(old.inputs)),
        "bootstrap_servers": (config.bootstrap_servers, old_config.bootstrap_servers),
        "source_bootstrap_servers": (config.source_bootstrap_servers, old_config.source_bootstrap_servers),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            raise ConfigError(f"{name}: the new source has {here!r}, the running one {there!r}; they must be the same")
    new._declared.refuse_muted()


def _voice(old: EventSourceConfig, checks: GroupChecks, admin: TopicAdmin, timeout: float) -> VoiceRecord:
    """Return the voice record. Raises ``OffsetError`` for a source that has not run, or is muted itself."""
    identity = admin.identity(old.changelog, timeout)
    if identity is None:
        raise OffsetError(f"{old.changelog} does not exist: {old.group_id} has not run yet, so nothing can follow it")
    for record in checks.last_records(old.changelog, list(range(old.num_partitions)), OFFSET_KEY).values():
        if decode_offset(record).is_muted:
            raise OffsetError(f"{record.where}: {old.group_id} is muted itself")
    return VoiceRecord(
        group=old.group_id,
        changelog=old.changelog,
        changelog_id=identity[0],
        by=_WRITER,
        at_ms=int(time.time() * 1000),
    )


class _Row(NamedTuple):
    topic: str
    partition: int
    committed: int | None
    followed: int | None

    @property
    def behind(self) -> int | None:
        return None if self.followed is None else max(0, self.followed - (self.committed or 0))


@app.command()
def status(
    source: SourceName,
    most: Annotated[
        int | None, typer.Option("--max-behind", min=0, help="Exit with 1 if a partition is further behind.")
    ] = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 10.0,
    json: Json = False,
) -> None:
    """Show how far a muted source is behind the one that it follows, and what it has not sent.

    Positions are those that the groups have committed. What was not sent is counted by the members that run.

    Exit codes: 0 shown; 1 it has not begun muted, it is further behind than --max-behind, or no broker answers; 2 wrong
    usage.
    """
    found = named_source(source)
    config = config_at(bootstrap_servers, found)
    topics = [config.topic, *further_inputs(found.topology, config.topic)]
    if not config.shadow_of:
        raise ConfigError(f"{source} has no shadow_of in its settings: it follows no source")
    with (
        admin_of(config.bootstrap_servers, config, timeout) as admin,
        GroupChecks(config, seconds=timeout) as checks,
        LiveGroup(config, "kes-rebuild") as live,
    ):
        begun = {}
        if admin.identity(config.changelog, timeout) is not None:
            begun = beginnings(checks, config, admin.watermarks(config.changelog, None, timeout))
        if {one.how for one in begun.values()} != {"rebuild"} or len(begun) < config.num_partitions:
            raise OffsetError(f"{config.changelog}: it has not begun muted: run `kes rebuild start {source} --of OLD`")
        rows = _rows(checks, config, topics)
        view, members, problems = live.read(_LIVE_SECONDS)
    muted: dict[str, int] = {}
    for member in members.values():
        for topic, records in member.status.muted.items():
            muted[topic] = muted.get(topic, 0) + records
    behind = max((row.behind for row in rows if row.behind is not None), default=None)
    is_late = most is not None and (behind is None or behind > most)
    data = {
        "group": config.group_id,
        "follows": config.shadow_of,
        "members": len(view.members),
        "behind": behind,
        "partitions": [row._asdict() | {"behind": row.behind} for row in rows],
        "muted": muted,
        "problems": list(problems),
    }
    emit(data, json, lambda: _status_table(rows))
    if not json:
        counts = ", ".join(f"{records:,} for {topic}" for topic, records in sorted(muted.items())) or "none"
        lines = [f"{len(view.members)} members; records that they have not sent: {counts}", *problems]
        for line in lines:
            notices().print(Text(line), soft_wrap=True)
    if is_late:
        raise typer.Exit(1)


def _rows(checks: GroupChecks, config: EventSourceConfig, topics: list[str]) -> list[_Row]:
    own, other = checks.described(config.group_id).committed, checks.described(config.shadow_of).committed
    return [
        _Row(topic, number, own.get(topic, {}).get(number), other.get(topic, {}).get(number))
        for topic in topics
        for number in range(config.num_partitions)
    ]


def _status_table(rows: list[_Row]) -> Table:
    right = ("partition", "committed", "followed", "behind")
    table = plain_table("topic", *right, right=right)
    for row in rows:
        cells = ["-" if each is None else f"{each:,}" for each in (row.committed, row.followed, row.behind)]
        table.add_row(row.topic, str(row.partition), *cells)
    return table
