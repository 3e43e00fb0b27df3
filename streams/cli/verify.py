"""``kes verify module:source``: is this event source exactly-once under kills and freezes?"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from heapq import merge
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, Final, NoReturn

import msgspec
import typer
from msgspec.structs import replace
from rich.text import Text

from streams.cli.cluster import named_source, topic_option
from streams.cli.console import emit, notices, progress
from streams.errors import ConfigError
from streams.events import event_type_of
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import brokers
from streams.model.loading import described
from streams.model.topics import TopicSpec
from streams.records import Record
from streams.runtime.replay import refuse_several_inputs
from streams.runtime.source_topics import TABLE, VISITS
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.testing.verification import Attack, Trial, Verdict

app = typer.Typer()
_COMPACTED: Final = {"cleanup.policy": "compact"}


@app.command()
def verify(
    source: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An EventSource, or a function that returns one.")
    ],
    events: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that yields the input: events, (key, event) or table rows. Default: a copy.",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of events. Tables are copied whole.")] = 20_000,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of processes to attack.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="Number of kills (SIGKILL).")] = 5,
    freezes: Annotated[int, typer.Option(min=0, help="Number of freezes (SIGSTOP) beyond the session timeout.")] = 2,
    output: Annotated[
        list[str] | None, typer.Option(metavar="NAME:PARTITIONS", help="Output topic of the handlers. Repeatable.")
    ] = None,
    any_order: Annotated[bool, typer.Option(help="Compare outputs of a key in any order.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of an earlier trial, to repeat it. Default: a new one.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=1.0, max=86_400, help="Seconds without progress before the trial fails.")
    ] = 90.0,
    bootstrap_servers: Annotated[
        str, typer.Option(help="Brokers to copy the input from. Default: those of the source.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Kill and freeze an event source at random moments, and compare its results with those of an undisturbed run.

    The input (by default a copy of the beginning of the source topic) goes to two temporary brokers on this machine. On
    one of them a single worker handles it undisturbed; on the other one several workers do, under attack. Outputs per
    key and the state have to be equal. Nothing is written to your cluster or to StateConfig.folder. Handlers must be
    deterministic, and their effects outside of Kafka are repeated. Output topics are declared with source.output, or
    named with --output: the trial ends at the first undeclared one. Timers that are not due by the end of the input do
    not fire; the result counts them.

    Joined tables and lookups are complete before the first event and do not change. A source with further inputs or a
    loop is refused, since the order between topics differs from run to run; use streams.testing.search instead.

    Exit codes: 0 equal; 1 differences, or the trial could not be run (the logs of the workers are kept, and the result
    names their folder); 2 wrong usage; 130, 143: ended by SIGINT, SIGTERM.
    """
    found = named_source(source)
    config = found.config
    tables = _tables(found)
    drawn = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    records, rows = (
        _made(events, limit, config, tables) if events else _copied(config, bootstrap_servers, limit, tables)
    )
    if not records:
        raise ConfigError("there is no input to verify with: the topic is empty, or the function yields nothing")
    attack = Attack(workers=workers, kills=kills, freezes=freezes, seed=drawn, patience_seconds=patience)
    notices().print(Text(f"{len(records):,} records, {kills} kills, {freezes} freezes, seed {drawn}"), soft_wrap=True)
    for table in tables:
        notices().print(Text(f"{table}: {sum(row.topic == table for row in rows):,} records of rows"), soft_wrap=True)
    signal.signal(signal.SIGTERM, _terminated)  # what was started is ended, and what was written removed
    with progress() as report:
        trial = Trial(
            source,
            config,
            records,
            outputs=_outputs(found, output or []),
            tables=[_wide_enough(spec, rows) for spec in tables.values()],
            rows=rows,
            any_order=any_order,
            say=report,
        )
        verdict = trial.run(attack)
    emit(msgspec.to_builtins(verdict), json, lambda: _text(verdict))
    if verdict.differences:
        raise typer.Exit(1)


def _outputs(source: EventSource[Any], options: list[str]) -> dict[str, int]:
    """The partitions of the topics that handlers write to: declared ones, and those of the option."""
    return {spec.name: spec.partitions for spec in source.outputs} | dict(map(topic_option, options))


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _tables(source: EventSource[Any]) -> dict[str, TopicSpec]:
    """The topics of joined tables and lookups, as they are on the trial's brokers. ``ConfigError`` for a source with
    further inputs: in which order a run takes records of several topics depends on when they arrive."""
    purposes = {topic.name: topic.purpose for topic in source.topology.topics}
    # A trial makes no visits, so the topic of their requests is empty.
    refuse_several_inputs("kes verify", [name for name in source.inputs if purposes[name] not in (TABLE, VISITS)])
    specs = [*source.input_topics(), *source.lookup_topics()]
    return {spec.name: replace(spec, replication_factor=1, configs=_COMPACTED) for spec in specs}


def _wide_enough(table: TopicSpec, rows: Iterable[Record]) -> TopicSpec:
    """A lookup has any number of partitions: as many as its rows need."""
    needed = max((row.partition or 0 for row in rows if row.topic == table.name), default=0) + 1
    return replace(table, partitions=max(table.partitions, needed))


Input = tuple[list[Record], list[Record]]
"""The events, and the rows of all tables."""


def _made(function: str, limit: int, config: EventSourceConfig, tables: Mapping[str, TopicSpec]) -> Input:
    """Make records of the yields of the user's function, up to the event that reaches the limit. ``ConfigError``: for
    all that goes wrong in it."""
    module, _, name = function.partition(":")
    try:
        make: Callable[[], Iterable[Any]] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--events {function!r}: {error}; name a function as module:function") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--events {function!r}: cannot import {module!r}: {described(error)}") from error
    rows: list[Record] = []
    items: list[Any] = []
    try:
        for item in make():
            (rows if isinstance(item, Record) and item.topic in tables else items).append(item)
            if len(items) == limit:
                break
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--events {function!r} failed: {described(error)}") from error
    records = [_record(function, item, config) for item in items]
    return records, [_row(function, row, tables[row.topic]) for row in rows]


def _row(function: str, row: Record, table: TopicSpec) -> Record:
    """Place a row. ``ConfigError`` without a key."""
    if row.key is None:
        raise ConfigError(f"--events {function!r} yields a row of {row.topic!r} without a key")
    if row.partition is None:
        return replace(row, partition=partition_of(row.key, table.partitions))
    return row if table.may_have_more and row.partition >= 0 else _checked(function, row, table.partitions)


def _record(function: str, item: Any, config: EventSourceConfig) -> Record:
    """Make a record of one yield of the user's function: a record as it is, an event, or a pair of key and event."""
    partitions = config.num_partitions
    key, event = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(key, str | bytes | None):
        raise ConfigError(f"--events {function!r} yields a key that is {type(key).__name__}; use str or bytes")
    if isinstance(event, Record):
        if event.topic not in ("", config.topic):
            raise ConfigError(
                f"--events {function!r} yields a record of {event.topic!r}, which this source does not read"
            )
        return _checked(function, event, partitions)
    kind = event_type_of(type(event))
    encoded = key.encode() if isinstance(key, str) else key
    place = None if encoded is None else partition_of(encoded, partitions)
    return Record("", kind.encode(event), encoded, list(kind.headers), place)


def _checked(function: str, record: Record, partitions: int) -> Record:
    if record.partition is not None and not 0 <= record.partition < partitions:
        raise ConfigError(f"--events {function!r} yields a record for partition {record.partition} of {partitions}")
    return record


def _copied(config: EventSourceConfig, servers: str, limit: int, tables: Mapping[str, TopicSpec]) -> Input:
    """The beginning of the source topic, the same share of each partition, and all of the tables' topics. Nothing is
    written, no group is joined."""
    share, rows = -(-limit // config.num_partitions), list[Record]()
    home, own = "" if config.source_is_elsewhere else servers, config.client_settings
    if tables:  # where the source writes, also if its topic is elsewhere
        rows = _read(brokers(home, config), own, tables)
    if config.source_is_elsewhere:
        away = servers or config.source_bootstrap_servers
        return _read(away, config.source_client_settings, [config.topic], share), rows
    return _read(brokers(servers, config), own, [config.topic], share), rows


def _read(servers: str, overrides: Mapping[str, Any], topics: Iterable[str], share: int | None = None) -> list[Record]:
    """The first ``share`` records of each partition (``None``: all that are committed): those of one in their order,
    beside each other by time."""
    settings, records = ClientSettings(servers, overrides, client_id="kes-verify"), list[Record]()
    with closing(TopicAdmin(settings)) as admin, closing(PartitionReader(settings)) as reader:
        for topic in topics:
            spans = {
                number: (mark.start, mark.stable if share is None else min(mark.stable, mark.start + share))
                for number, mark in admin.watermarks(topic).items()
            }
            found = reader.read_all(topic, spans, stalled_after_seconds=30.0)
            together = merge(*found.values(), key=lambda record: (record.timestamp_ms, record.partition))
            records += [Record(topic, each.value, each.key, each.headers, each.partition) for each in together]
    return records


def _text(verdict: Verdict) -> Text:
    facts = (
        f"{verdict.records:,} records, {verdict.kills} kills, {verdict.freezes} freezes in {verdict.seconds:.0f} s: "
        f"{verdict.outputs:,} outputs and {verdict.keys:,} keys of state compared"
    )
    seed = f" (seed {verdict.seed})"
    if verdict.timers:
        seed += f"\n{verdict.timers:,} timers were not due: they did not fire, and what they lead to was not compared"
    if not verdict.differences:
        return Text.assemble(facts, ", ", ("all equal", "bold green"), seed, no_wrap=True)
    lines = "".join(f"\n  - {text}" for text in verdict.differences) + f"\nlogs of the workers: {verdict.logs}"
    return Text.assemble(facts, ", ", ("not the same", "bold red"), seed, lines, no_wrap=True)
