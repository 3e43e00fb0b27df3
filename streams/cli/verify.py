"""``kes verify module:source``: is this event source exactly-once under kills and freezes?"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib import import_module
from itertools import chain, islice
from types import FrameType
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.text import Text

from streams.cli.cluster import brokers, named_source, topic_option
from streams.cli.console import emit, notices, progress
from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.config import EventSourceConfig
from streams.errors import ConfigError
from streams.event_source import EventSource
from streams.events import event_type_of
from streams.loading import described
from streams.records import Record
from streams.runtime.replay import refuse_several_inputs
from streams.sak.murmur2 import partition_of
from streams.testing.verification import Attack, Trial, Verdict

app = typer.Typer()


@app.command()
def verify(
    source: Annotated[str, typer.Argument(metavar="MODULE:SOURCE", help="The event source, as for kes run.")],
    events: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A function that yields the input: events, or (key, event). Default: copy."
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="So many records of the input, at most.")] = 20_000,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Processes under attack.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs.")] = 5,
    freezes: Annotated[int, typer.Option(min=0, help="SIGSTOPs past the session timeout.")] = 2,
    output: Annotated[
        list[str] | None, typer.Option(metavar="NAME:PARTITIONS", help="A topic that the handlers write to.")
    ] = None,
    any_order: Annotated[bool, typer.Option(help="Outputs of one key come from several partitions.")] = False,
    seed: Annotated[int | None, typer.Option(help="The seed of an earlier trial. Default: a new one.")] = None,
    patience: Annotated[
        float, typer.Option(min=1.0, max=86_400, help="Seconds without progress until it has failed.")
    ] = 90.0,
    bootstrap_servers: Annotated[str, typer.Option(help="Where the input is copied from. Default: the source's.")] = "",
    json: Annotated[bool, typer.Option("--json", help="A line of JSON instead of text.")] = False,
) -> None:
    """Kill and freeze an event source at random moments, and compare what it leaves behind.

    The input (by default a copy of the source topic's beginning) goes to two throw-away brokers on this machine. On one
    of them a single worker handles it in peace; on the other one several do, under attack. Outputs per key and the
    state have to be the same. Nothing is written to your cluster. Handlers must be deterministic, and what they do
    outside of Kafka is done again. Time is real: timers that are not due when the input is handled do not fire, and
    the answer counts them.

    Exit codes: 0 the same; 1 differences, or the trial could not be done (the workers' logs are kept then, the answer
    names their folder); 2 wrong usage; 130, 143: ended by SIGINT, SIGTERM.
    """
    found = named_source(source)
    config = found.config
    refuse_several_inputs("kes verify", found.inputs, found.lookups)
    drawn = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    records = _made(events, limit, config.num_partitions) if events else _copied(config, bootstrap_servers, limit)
    if not records:
        raise ConfigError("there is no input to verify with: the topic is empty, or the function yields nothing")
    attack = Attack(workers=workers, kills=kills, freezes=freezes, seed=drawn, patience_seconds=patience)
    notices().print(Text(f"{len(records):,} records, {kills} kills, {freezes} freezes, seed {drawn}"), soft_wrap=True)
    signal.signal(signal.SIGTERM, _terminated)  # what was started is ended, and what was written removed
    with progress() as report:
        trial = Trial(source, config, records, outputs=_outputs(found, output or []), any_order=any_order, say=report)
        verdict = trial.run(attack)
    emit(msgspec.to_builtins(verdict), json, lambda: _text(verdict))
    if verdict.differences:
        raise typer.Exit(1)


def _outputs(source: EventSource[Any], options: list[str]) -> dict[str, int]:
    """The partitions of the topics that handlers write to: declared ones, and those of the option."""
    return {spec.name: spec.partitions for spec in source.outputs} | dict(map(topic_option, options))


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _made(function: str, limit: int, partitions: int) -> list[Record]:
    """Make records of the yields of the user's function. ``ConfigError``: for all that goes wrong in it."""
    module, _, name = function.partition(":")
    try:
        make: Callable[[], Iterable[Any]] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--events {function!r}: {error}; name a function as module:function") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--events {function!r}: cannot import {module!r}: {described(error)}") from error
    try:
        items = list(islice(make(), limit))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--events {function!r} failed: {described(error)}") from error
    return [_record(function, item, partitions) for item in items]


def _record(function: str, item: Any, partitions: int) -> Record:
    """Make a record of one yield of the user's function: a record as it is, an event, or a pair of key and event."""
    key, event = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(key, str | bytes | None):
        raise ConfigError(f"--events {function!r} yields a key that is {type(key).__name__}; use str or bytes")
    if isinstance(event, Record):
        if event.partition is not None and not 0 <= event.partition < partitions:
            raise ConfigError(f"--events {function!r} yields a record for partition {event.partition} of {partitions}")
        return event
    kind = event_type_of(type(event))
    encoded = key.encode() if isinstance(key, str) else key
    place = None if encoded is None else partition_of(encoded, partitions)
    return Record("", kind.encode(event), encoded, list(kind.headers), place)


def _copied(config: EventSourceConfig, servers: str, limit: int) -> list[Record]:
    """The beginning of the source topic, the same share of each partition. Nothing is written, no group is joined."""
    addresses = servers or config.source_bootstrap_servers or brokers("", config)
    elsewhere = config.source_is_elsewhere
    settings = ClientSettings(
        addresses, config.source_client_settings if elsewhere else config.client_settings, client_id="kes-verify"
    )
    share = -(-limit // config.num_partitions)
    with closing(TopicAdmin(settings)) as admin, closing(PartitionReader(settings)) as reader:
        marks = admin.watermarks(config.topic)
        ranges = {n: (m.start, min(m.stable, m.start + share)) for n, m in marks.items()}
        by_partition = reader.read_all(config.topic, ranges, stalled_after_seconds=30.0)
    found = sorted(
        chain.from_iterable(by_partition.values()),
        key=lambda record: (record.timestamp_ms, record.partition, record.offset),
    )
    return [Record("", record.value, record.key, record.headers, record.partition) for record in found]


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
