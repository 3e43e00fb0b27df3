"""The rows of the table of least rights for inputs, joined tables, loops, imports of state, and the
monitor."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from streams import EventContext
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
)
from tests.vocabulary import Added, Totals, added


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
