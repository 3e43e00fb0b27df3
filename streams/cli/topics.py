"""``kes topics``: the topics of an event source, as they must be and as they are. Only ``grow`` changes what exists."""

from __future__ import annotations

from contextlib import closing
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
    named_source,
    refuse_to_ask,
    source_admin_of,
    topic_option,
)
from streams.cli.console import complain, emit, notices, plain_table, print_whole
from streams.cli.growth import growth_table, planned
from streams.cli.regrow import regrow
from streams.errors import ConfigError, TopicError
from streams.kafka.questions.admin import TopicAdmin, differences
from streams.kafka.questions.group_view import GroupQuestions
from streams.kafka.wire.security import Security
from streams.looks.addresses import brokers
from streams.model.topics import TopicSpec
from streams.runtime import source_topics
from streams.runtime.source_topics import INPUT, LOOKUP, OUTPUT, SOURCE
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

app = typer.Typer(no_args_is_help=True)
app.command()(regrow)

AS_WANTED: Final = "as wanted"
MISSING: Final = "missing"
CREATED: Final = "created"
DIFFERS: Final = "differs"
_STYLES: Final = {AS_WANTED: "", MISSING: "yellow", CREATED: "green", DIFFERS: "bold red"}

_Output = Annotated[
    list[str] | None,
    typer.Option("--output", metavar="NAME:PARTITIONS", help="Another output topic of the handlers. Repeatable."),
]


KEYS_MOVE: Final = (
    "Partitions can never be taken away again. Keys move: from now on most keys belong to other partitions than those "
    "that hold their state, and begin there without any. For a source with state there is kes topics regrow, which "
    "moves the state with its keys."
)


class Wanted(NamedTuple):
    """A topic that is needed, and its purpose."""

    purpose: str
    spec: TopicSpec


class TopicCheck(NamedTuple):
    """State of one topic, and each difference as a sentence."""

    wanted: Wanted
    state: str
    differences: list[str]


@app.command()
def plan(
    source: SourceName,
    output: _Output = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 10.0,
    json: Json = False,
) -> None:
    """Show the topics that `apply` would create, and existing ones that differ from the settings. Changes nothing.

    Exit codes: 0 nothing differs (topics may be missing); 1 an existing topic differs, or no broker answers; 2 wrong
    usage.
    """
    _run(source, output or [], bootstrap_servers, timeout, json=json, create=False)


@app.command()
def apply(
    source: SourceName,
    output: _Output = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Create missing topics. Existing topics are never changed, even if they differ from the settings.

    Exit codes: 0 all exist and match; 1 an existing topic differs, or no broker answers; 2 wrong usage.
    """
    _run(source, output or [], bootstrap_servers, timeout, json=json, create=True)


@app.command()
def grow(
    source: SourceName,
    partitions: Annotated[
        int | None,
        typer.Option(min=1, help="New number of partitions. Default: that of the source topic."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Add partitions to the topics of a stopped event source, inputs included, until all have the same number.

    Keys move: most new records go to other partitions than the state of their keys. Use it for sources without state,
    or with new keys every day; for others `regrow` moves the state, too.

    Exit codes: 0 all have the same number; 1 members are running, a topic is missing or has more partitions, or not
    confirmed; 2 wrong usage.
    """
    refuse_to_ask(json=json, yes=yes)
    found = named_source(source)
    config = found.config
    addresses = brokers(bootstrap_servers, config)
    with admin_of(addresses, config, timeout) as admin, source_admin_of(config, admin, timeout) as source_admin:
        _refuse_members(addresses, config, timeout)
        specs = [*found.specs(), *found.input_topics()]
        by_topic = {spec.name: source_admin if spec.name == config.topic else admin for spec in specs}
        growth = planned(by_topic, config, partitions or 0, timeout)
        if growth.steps and not yes:
            print_whole(notices(), growth_table(growth))
            notices().print(Text(KEYS_MOVE))
            typer.confirm("Add the partitions?", abort=True, err=True)
            _refuse_members(addresses, config, timeout)  # one may have started while the question stood
        for name, before in growth.steps.items():
            by_topic[name].grow(name, growth.partitions, timeout)
            notices().print(Text(f"{name}: {before} -> {growth.partitions} partitions"), soft_wrap=True)
    next_step = f"set num_partitions={growth.partitions} in the settings of {source} before it is started again"
    emit({**msgspec.structs.asdict(growth), "next": next_step}, json, lambda: Text(next_step))


def _refuse_members(servers: str, config: EventSourceConfig, timeout_seconds: float) -> None:
    """Raise ``TopicError`` if the group has members: members share out the partitions that they started with."""
    security = Security.of(config.client_settings)
    with closing(GroupQuestions(servers, security)) as questions:
        members = questions.describe_group(config.group_id, timeout_seconds).members
    if members:
        named = ", ".join(sorted(member.instance for member in members))
        raise TopicError(
            f"the group {config.group_id} has members ({named}): stop all of them first, or wait until the sessions of "
            f"those that died have expired (kes group {config.group_id})"
        )


def wanted_topics(source: EventSource[Any], outputs: list[str]) -> list[Wanted]:
    """Source, changelog and dead letters, then the declared inputs and lookups, and the outputs: declared ones, and
    those of the option. ``ConfigError``: an output that makes no sense."""
    purposes = source_topics.purposes(source.config)
    wanted = [Wanted(purposes[spec.name], spec) for spec in source.specs()]
    wanted += [Wanted(INPUT, spec) for spec in source.input_topics()]
    wanted += [Wanted(LOOKUP, spec) for spec in source.lookup_topics()]
    wanted += [Wanted(OUTPUT, spec) for spec in source.outputs]
    for text in outputs:
        name, partitions = topic_option(text)
        if any(entry.spec.name == name for entry in wanted):
            raise ConfigError(f"--output {text!r}: the topic is named twice, declared, or the source's own")
        wanted.append(Wanted(OUTPUT, source_topics.spec(source.config, name, partitions)))
    return wanted


def examine(admin: TopicAdmin, wanted: list[Wanted], timeout_seconds: float, *, create: bool) -> list[TopicCheck]:
    """Compare, after creating what is missing if ``create``. Raises ``BrokerUnavailable``, ``TopicError``."""
    created = admin.create([entry.spec for entry in wanted], timeout_seconds) if create else []
    found = admin.describe([entry.spec.name for entry in wanted], timeout_seconds)
    return [_verdict(entry, found[entry.spec.name], entry.spec.name in created) for entry in wanted]


def _verdict(wanted: Wanted, found: Any, created: bool) -> TopicCheck:
    if found is None:
        return TopicCheck(wanted, MISSING, [])
    sentences = differences(wanted.spec, found)
    return TopicCheck(wanted, DIFFERS if sentences else CREATED if created else AS_WANTED, sentences)


def _run(name: str, outputs: list[str], servers: str, timeout: float, *, json: bool, create: bool) -> None:
    source = named_source(name)
    wanted = wanted_topics(source, outputs)
    addresses = brokers(servers, source.config)
    with (
        admin_of(addresses, source.config, timeout) as admin,
        source_admin_of(source.config, admin, timeout) as source_admin,
    ):
        if source_admin is admin:
            verdicts = examine(admin, wanted, timeout, create=create)
        else:
            verdicts = examine(
                source_admin, [entry for entry in wanted if entry.purpose == SOURCE], timeout, create=create
            )
            verdicts += examine(admin, [entry for entry in wanted if entry.purpose != SOURCE], timeout, create=create)
    emit(
        {"bootstrap_servers": addresses, "topics": [_facts(verdict) for verdict in verdicts]},
        json,
        lambda: _table(verdicts, create),
    )
    sentences = [sentence for verdict in verdicts for sentence in verdict.differences]
    for sentence in sentences:
        complain(sentence)
    if sentences:
        complain("existing topics are never changed", hint="Change the settings of the source, or the topic, by hand.")
        raise typer.Exit(1)


def _facts(verdict: TopicCheck) -> dict[str, Any]:
    spec = msgspec.structs.asdict(verdict.wanted.spec)
    del spec["may_have_more"]
    return {**spec, "purpose": verdict.wanted.purpose, "state": verdict.state, "differences": verdict.differences}


def _table(verdicts: list[TopicCheck], create: bool) -> Table:
    table = plain_table("topic", "purpose", "partitions", "replicas", "state", folded=("topic",))
    for wanted, state, _ in verdicts:
        spec = wanted.spec
        name = "\n".join([spec.name, *(f"  {key}={value}" for key, value in spec.configs.items())])
        shown = "would be created" if state == MISSING and not create else state
        numbers = str(spec.partitions), str(spec.replication_factor)
        table.add_row(name, wanted.purpose, *numbers, shown, style=_STYLES[state])
    return table
