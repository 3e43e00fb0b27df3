"""The rows of the table of least rights for inputs, joined tables, lookups, loops, visits, a source on another cluster,
changes to state, and the monitor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from streams import EventContext, EventSource, NamedTable, StateConfig, Stores, Table
from streams.runtime.ownership import loop_purge
from streams.web.group_client import GroupClient
from tests.broker.engine_kit import Running
from tests.broker.permissions_kit import (
    POSITION,
    SOURCE,
    Kes,
    Office,
    Refused,
    all_topics,
    command,
    commands,
    feature,
    handles_one,
    has_run,
    picky,
    run,
    until_noted,
)
from tests.vocabulary import Added, Totals, added, count, register


async def is_exported(office: Office, kes: Kes) -> None:
    """A source that has run, and its state in a file; it has handled more since."""
    await office.lab.create()
    for handled in (1, 2):
        await office.lab.add("a")
        async with Running(office.lab.telling()) as running:
            await running.until_handled(handled)
        if handled == 1:
            await run(kes, office.lab.source(), "state", "export", office.names["FILE"])


async def has_input(office: Office, kes: Kes) -> None:
    """The topics of a source, and of another input."""
    await all_topics(office, kes)
    await office.lab.create(office.names["INPUT"], cleanup_policy="compact")


async def has_loop(office: Office, kes: Kes) -> None:
    """The topics of a source with a loop."""
    await office.lab.create()
    await run(kes, office.lab.source(loop=True), "topics", "apply")


MORE = "Read topic INPUT", "DescribeConfigs topic INPUT"


@feature("another input of a source, `INPUT`", *SOURCE, *MORE, prepare=has_input)
async def another_input(office: Office, kes: Kes) -> None:
    source, seen = office.lab.source(**office.user), list[str]()
    source.input(office.names["INPUT"], event=Added)
    source.register_event_type(Added, lambda ctx, event: seen.append(event.name))
    await office.lab.add("a")
    await office.lab.send(added("b"), topic=office.names["INPUT"])
    async with Running(source) as running:
        await running.until_handled(1)
        await running.until(lambda: {*seen} == {"a", "b"}, "both are handled")


@feature("a lookup of a source, the topic `INPUT`", *SOURCE, *MORE, prepare=has_input)
async def looking_up(office: Office, kes: Kes) -> None:
    source = picky(office.lab.source(**office.user))
    source.lookup(office.names["INPUT"], key=str, value=Added)
    await office.lab.add("a")
    async with Running(source) as running:
        await running.until_handled(1)


@feature("a joined table of a source, the topic `INPUT`", *SOURCE, *MORE, prepare=has_input)
async def joined_table(office: Office, kes: Kes) -> None:
    source = picky(office.lab.source(**office.user))
    source.join(office.names["INPUT"], key=str, value=Added)
    await office.lab.add("a")
    async with Running(source) as running:
        await running.until_handled(1)


LOOPED = tuple(f"{deed} topic LOOP" for deed in ("Read", "Write", "DescribeConfigs", "Delete"))


@feature("a source with a loop, whose topic is `LOOP`", *SOURCE, *LOOPED, prepare=has_loop)
async def looping(office: Office, kes: Kes) -> None:
    source = office.lab.source(loop=True, **office.user)

    def again(ctx: EventContext[Totals], event: Added) -> None:
        if event.amount:
            ctx.loop(Added(event.name, 0), key=event.name)

    source.register_event_type(Added, again)
    await office.lab.add("a")
    with patch.object(loop_purge, "PURGE_SECONDS", 0.2):
        async with Running(source) as running:
            await running.until_handled(1)
            await running.until(lambda: office.begins_at(office.names["LOOP"]) > 0, "its topic is purged")


async def has_commits(office: Office, kes: Kes) -> None:
    """The topics of a source that reads from another cluster; here the two are one."""
    await office.lab.create()
    await run(kes, office.lab.telling(source_bootstrap_servers=office.lab.bootstrap), "topics", "apply")


@feature(
    "a source whose topic is on another cluster: there",
    "Read topic SOURCE",
    "DescribeConfigs topic SOURCE",
    prepare=has_commits,
)
async def there(office: Office, kes: Kes) -> None:
    user = {f"source_{name}": value for name, value in office.user.items()}
    await handles_one(office, bootstrap_servers=office.lab.bootstrap, client_settings={}, **user)


@feature(
    "a source whose topic is on another cluster: where its group is",
    *(right for right in SOURCE if "SOURCE" not in right),
    "Read topic COMMITS",
    "DescribeConfigs topic COMMITS",
    prepare=has_commits,
)
async def here(office: Office, kes: Kes) -> None:
    await handles_one(office, source_bootstrap_servers=office.lab.bootstrap, **office.user)


async def has_visits(office: Office, kes: Kes) -> None:
    """The topics of a source with visits."""
    await office.lab.create()
    await run(kes, visited(office, {}, []), "topics", "apply")


async def is_visited(office: Office, kes: Kes) -> None:
    """The same, and it has run."""
    await has_visits(office, kes)
    await office.lab.add("a")
    async with Running(visited(office, {}, [])) as running:
        await running.until_handled(1)


def visited(office: Office, settings: Mapping[str, Any], seen: list[str]) -> EventSource[Totals]:
    """A source whose visit ``look`` notes each key."""
    source = EventSource(office.lab.config(visits=True, **settings), Table.factory(key=str, value=int, ordered=True))
    register(source, count)
    source.register_visit("look", lambda ctx, key, value: seen.append(key))
    return source


VISITED = tuple(f"{deed} topic VISITS" for deed in ("Read", "DescribeConfigs"))


@feature("a source with visits, whose topic is `VISITS`", *SOURCE, *VISITED, prepare=has_visits)
async def visiting(office: Office, kes: Kes) -> None:
    seen: list[str] = []
    await office.lab.add("a")
    async with Running(visited(office, office.user, seen)) as running:
        await running.until_handled(1)
        await visited(office, {}, []).start_visit("look")  # requested by another principal
        await running.until(lambda: seen == ["a"], "its key is visited")


command(
    "visit",
    "look",
    rights=["Write topic VISITS"],
    name="`start_visit`, `cancel_visit`, `kes visit`",
    prepare=is_visited,
    behind=1,
    source=lambda office: visited(office, office.user, []),
)


@feature(
    "`kes visit --status`",
    "Describe topic SOURCE",
    "Describe group GROUP",
    "Describe group GROUP.*",
    prepare=is_visited,
)
async def status_of_visits(office: Office, kes: Kes) -> None:
    async with Running(visited(office, {}, [])) as running:  # a member of others
        await until_noted(office, running)
        await run(kes, visited(office, office.user, []), "visit", "look", "--status", behind=1)


command(
    "state",
    "import",
    "FILE",
    "--yes",
    rights=[*POSITION, "Write topic CHANGELOG", "Write transactional-id CHANGELOG.kes-state"],
    prepare=is_exported,
    name="`kes state import`, `kes state repair`",
)


class Before(Stores):
    people = NamedTable.of(str, Added)


class After(Stores):
    people = NamedTable.of(str, Added, version=2, upcast={1: lambda old: old})


def release(office: Office, store: type[Stores], **settings: Any) -> EventSource[Any]:
    """A source with this version of its values."""
    source: EventSource[Any] = EventSource(office.lab.config(**settings), store.factory())
    register(source, lambda ctx, event: ctx.store.people.put(event.name, event))
    return source


async def has_old_values(office: Office, kes: Kes) -> None:
    """A release with an older version of values has run."""
    await office.lab.create()
    await office.lab.add("a")
    async with Running(release(office, Before)) as running:
        await running.until_handled(1)


command(
    "state",
    "migrate",
    "--yes",
    rights=[*POSITION, "Write topic CHANGELOG", "Write transactional-id CHANGELOG.kes-state"],
    prepare=has_old_values,
    name="`kes state migrate`, `kes state set-time`",  # both write in one way
    source=lambda office: release(office, After, **office.user),
)


async def has_snapshot(office: Office, kes: Kes) -> None:
    """A source with a folder and snapshots, that has run."""
    for name in ("FOLDER", "SNAPSHOTS", "ANOTHER"):
        office.names[name] = f"{office.names['FILE']}-{name.lower()}"
    state = StateConfig(folder=office.names["FOLDER"], snapshots=office.names["SNAPSHOTS"], checkpoint_seconds=0.1)
    source = picky(office.lab.source(state=state))
    await office.lab.create()
    await office.lab.add("a")
    async with Running(source) as running:
        await running.until_handled(1)
    await run(kes, source, "state", "snapshot")


commands(
    "`kes state restore`, `kes state verify --what snapshots`",
    "state restore --folder ANOTHER --snapshots SNAPSHOTS",
    "state verify --what snapshots --snapshots SNAPSHOTS",
    rights=["Describe topic CHANGELOG"],
    prepare=has_snapshot,
)


@feature(
    "the monitor: `kes web`, `kes run --http`",
    "Describe topic SOURCE",
    "Describe group GROUP",
    "Describe group GROUP.*",
    prepare=has_run,
)
async def monitor(office: Office, kes: Kes) -> None:
    client = GroupClient(office.lab.group, office.lab.config(**office.user).resolved())
    try:
        async with Running(picky(office.lab.source())):  # a member of others
            picture = await asyncio.to_thread(client.read)
    finally:
        client.close()
    if picture.notes:
        raise Refused("; ".join(picture.notes))
