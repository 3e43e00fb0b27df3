"""The rows of the table of least rights for views, readers of state, journals, and commands about them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from streams import EventSource, Journal, Table, View
from streams.queries import QueryServer, StateReader
from streams.queries.operating import ParkedClient
from streams.settings.groups import QueryConfig
from tests.broker.engine_kit import Running
from tests.broker.permissions_commands import SEEN
from tests.broker.permissions_kit import (
    POSITION,
    Kes,
    Office,
    all_topics,
    command,
    each,
    feature,
    has_run,
    nothing,
    picky,
    run,
    until_noted,
)
from tests.unit.private_kit import private
from tests.vocabulary import Added, added, count, register

FOLDER = tempfile.TemporaryDirectory(prefix="reading-rights-")

# -- views and queries -------------------------------------------------------------------------------------------------


@feature("`View.of(source)`", "Read topic CHANGELOG", prepare=has_run)
async def view_of(office: Office, kes: Kes) -> None:
    async with View.of(office.lab.source(**office.user)) as view:
        await view.ready(timeout_seconds=10)


@feature(
    "`StateReader`, `kes state get --ask-owner`; `kes parked retry`, `skip-head`, `drop` and `kes jobs retry`, "
    "`cancel` by running members",
    "Describe topic SOURCE",
    "Describe group GROUP",
    "Describe group GROUP.*",
    prepare=all_topics,
)
async def state_reader(office: Office, kes: Kes) -> None:
    queries = QueryConfig(
        secret_file=str(private(Path(FOLDER.name) / office.names["ID"], "the secret of this group\n"))
    )
    source = EventSource(office.lab.config(queries=queries), Table.factory(key=str, value=int))
    register(source, count)
    await office.lab.add("a")
    server = QueryServer(source, "127.0.0.1:0")
    try:
        async with Running(source) as running:  # a member of others
            await running.until_handled(1)
            await until_noted(office, running)
            config = office.lab.config(queries=queries, **office.user)
            async with StateReader(config, key=str, value=int) as reader:
                assert (await reader.get("a")).value == 1
            async with ParkedClient(config) as operators:
                assert await operators.find(10.0) == []
    finally:
        await asyncio.to_thread(server.close)


command("view", "scan", rights=["Read topic CHANGELOG"], name="`kes view get`, `scan`, `watch`")


# -- journals ----------------------------------------------------------------------------------------------------------


def journal_of(office: Office, **settings: Any) -> Journal:
    """The journal of this test, of the user's unless other settings are given."""
    return Journal(office.names["ID"], replication_factor=1, min_insync_replicas=1, **{**office.user, **settings})


async def has_journal(office: Office, kes: Kes) -> None:
    """A journal with an entry and a checkpoint."""
    journal = journal_of(office, bootstrap_servers=office.broker.plain_bootstrap_servers, client_settings={})
    await journal.create()
    async with journal.lead() as term:
        await term.append(b"x")
        async with term.checkpoint():
            pass


READ = "Read topic ID", "DescribeConfigs topic ID"


@feature("a reader of a journal with the name `ID`", *READ, prepare=has_journal)
async def journal_reader(office: Office, kes: Kes) -> None:
    async with journal_of(office).reader() as reader:
        assert [item async for item in reader.catch_up()]


@feature(
    "a writer of a journal, or `Replicated`, with the name `ID`",
    *READ,
    "Write topic ID",
    "Read group ID.leader",
    "Write transactional-id ID.writer",
    prepare=has_journal,
)
async def journal_writer(office: Office, kes: Kes) -> None:
    async with journal_of(office).lead() as term:
        await term.append(b"y")


@feature("`Journal.create`", "Create topic ID", "DescribeConfigs topic ID", "Describe topic ID", prepare=nothing)
async def journal_made(office: Office, kes: Kes) -> None:
    assert await journal_of(office).create()


async def about_journal(office: Office, kes: Kes, *words: str) -> None:
    """A command about the journal, with settings from the environment."""
    with patch.dict(os.environ, office.environment):
        await run(kes, None, "journal", words[0], office.names["ID"], *words[1:])


@feature("`kes journal status`, `follow`, `verify`", *READ, prepare=has_journal)
async def look_at_journal(office: Office, kes: Kes) -> None:
    lines = (["status"], ["follow", "--after", "0", "--limit", "1"], ["verify"])
    await each(*(about_journal(office, kes, *words) for words in lines))


@feature("`kes journal trim`", *READ, "Delete topic ID", prepare=has_journal)
async def trimming(office: Office, kes: Kes) -> None:
    await about_journal(office, kes, "trim", "--keep", "1", "--yes")


# -- topics ------------------------------------------------------------------------------------------------------------


def on_topics(operation: str) -> list[str]:
    return [f"{operation} topic {name}" for name in ("SOURCE", "CHANGELOG", "DEAD_LETTERS")]


command("topics", "grow", "--partitions", "2", "--yes", rights=[*on_topics("Alter"), "Describe group GROUP"])
command(
    "topics",
    "regrow",
    "--partitions",
    "2",
    "--still",
    "0",
    "--yes",
    rights=[
        *on_topics("Alter"),
        *POSITION,
        "Write topic CHANGELOG",
        "Write transactional-id CHANGELOG.kes-regrow",
    ],
)


async def no_topics(office: Office, kes: Kes) -> None:
    """All of them are missing."""


@feature("`create_source`", *SEEN, *on_topics("Create"), prepare=no_topics)
async def created(office: Office, kes: Kes) -> None:
    assert len(await office.lab.source(**office.user).create_source()) == 3


@feature("`delete_source`", *on_topics("Delete"), prepare=all_topics)
async def deleted(office: Office, kes: Kes) -> None:
    assert len(await office.lab.source(**office.user).delete_source()) == 3


# -- a joined table that is not declared any more ----------------------------------------------------------------------


async def was_joined(office: Office, kes: Kes) -> None:
    """A source that has run with a joined table which has a row."""
    await office.lab.create()
    await office.lab.create(office.names["INPUT"], cleanup_policy="compact")
    source = picky(office.lab.source())
    source.join(office.names["INPUT"], key=str, value=Added)
    await office.lab.send(added("a"), b"a", topic=office.names["INPUT"])
    await office.lab.add("a")
    async with Running(source) as running:
        await running.until_handled(1)


command(
    "state",
    "forget",
    "--join",
    "INPUT",
    "--yes",
    rights=[
        *POSITION,
        "Read topic INPUT",
        "Delete group GROUP",
        "Write topic CHANGELOG",
        "Write transactional-id CHANGELOG.kes-state",
    ],
    prepare=was_joined,
)
