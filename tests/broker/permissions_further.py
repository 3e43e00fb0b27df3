"""The rows of the table of least rights for inputs, joined tables, lookups, loops, visits, imports of state, and the
monitor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from streams import EventContext, EventSource, Table
from streams.runtime.ownership import loop_purge
from streams.web.group_look import GroupLook
from tests.broker.engine_kit import Running
from tests.broker.permissions_kit import (
    POSITION,
    SOURCE,
    Kes,
    Office,
    Refused,
    all_topics,
    command,
    feature,
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
)


@feature(
    "the monitor: `kes web`, `kes run --http`",
    "Describe topic SOURCE",
    "Describe group GROUP",
    "Describe group GROUP.*",
    prepare=has_run,
)
async def monitor(office: Office, kes: Kes) -> None:
    look = GroupLook(office.lab.group, office.lab.config(**office.user).resolved())
    try:
        async with Running(picky(office.lab.source())):  # a member of others
            picture = await asyncio.to_thread(look.look)
    finally:
        look.close()
    if picture.notes:
        raise Refused("; ".join(picture.notes))
