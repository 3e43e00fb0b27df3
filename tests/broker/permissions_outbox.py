"""The rows of the table of least rights for an outbox's relay and for elections."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from streams import Election, Outbox, Record, Relay, RelayConfig
from streams.outbox.relay import apply
from tests.broker.permissions_kit import Kes, Office, feature, nothing, run
from tests.unit.waiting import PATIENCE, until

FOLDER = tempfile.TemporaryDirectory(prefix="outbox-rights-")


def config_of(office: Office, **settings: object) -> RelayConfig:
    """Settings of a relay on a file of this test's own, as the user has them unless others are given."""
    file = Path(FOLDER.name) / f"{office.names['ID']}.db"
    return RelayConfig(name=office.names["ID"], database=f"sqlite:{file}", **{**office.user, **settings})  # type: ignore[arg-type]


async def has_outbox(office: Office, kes: Kes) -> None:
    """Tables and topics, made by the administrator, and a row that was sent."""
    await office.lab.create()
    config = config_of(office, bootstrap_servers=office.broker.plain_bootstrap_servers, client_settings={})
    apply(config, 1)
    await send(office, config)


async def send(office: Office, config: RelayConfig) -> None:
    """Stash a row, and relay until it is sent."""
    db = sqlite3.connect(config.database.removeprefix("sqlite:"))
    try:
        with db:
            Outbox().stash_many(db, [Record(office.names["OUTPUT"], b"x", b"k")])
        async with Relay(config) as running:

            def is_sent() -> bool:
                running.wait(0)
                text = "SELECT (SELECT count(*) FROM kes_outbox) + (SELECT count(*) FROM kes_outbox_parked)"
                return bool(db.execute(text).fetchone() == (0,))

            await until(is_sent, "the row is sent", 2 * PATIENCE)
    finally:
        db.close()


@feature(
    "a relay of an outbox, with the name `ID`",
    "Read topic ID.outbox",
    "Write topic ID.outbox",
    "Write topic OUTPUT",
    "Read group ID.outbox",
    "Write transactional-id ID.outbox.*",
    prepare=has_outbox,
)
async def relay(office: Office, kes: Kes) -> None:
    await send(office, config_of(office))


@feature(
    "`kes outbox apply`, with the name `ID`",
    "Create topic ID.outbox",
    "DescribeConfigs topic ID.outbox",
    "Describe topic ID.outbox",
    prepare=nothing,
)
async def applied(office: Office, kes: Kes) -> None:
    await asyncio.to_thread(apply, config_of(office), 1)


@feature(
    "`kes outbox purge`, with the name `ID`",
    "Read topic ID.outbox",
    "Write transactional-id ID.outbox.*",
    prepare=has_outbox,
)
async def purged(office: Office, kes: Kes, *words: str) -> None:
    config = config_of(office)
    with patch.dict(os.environ, office.environment):
        names = "--name", config.name, "--database", config.database
        await run(kes, None, "outbox", "purge", *names, "--yes", *words)


async def has_lost_batches(office: Office, kes: Kes) -> None:
    """The same as ``has_outbox``, as if the topic had lost its last batches."""
    await has_outbox(office, kes)
    with closing(sqlite3.connect(config_of(office).database.removeprefix("sqlite:"))) as db, db:
        db.execute("UPDATE kes_outbox_shards SET serial = serial + 5")


@feature(
    "`kes outbox purge --after-restore`, with the name `ID`",
    "Read topic ID.outbox",
    "Write topic ID.outbox",
    "Write transactional-id ID.outbox.*",
    prepare=has_lost_batches,
)
async def purged_after_restore(office: Office, kes: Kes) -> None:
    await purged(office, kes, "--after-restore", "send")


async def has_election(office: Office, kes: Kes) -> None:
    """The topic, made by a first candidate of the administrator's."""
    async with Election(
        office.names["ID"], bootstrap_servers=office.broker.plain_bootstrap_servers, client_settings={}
    ):
        pass


@feature(
    "`Election` with the name `ID`, its topic made before",
    "Write topic ID.election",
    "Read group ID.election",
    "Write transactional-id ID.election",
    prepare=has_election,
)
async def election(office: Office, kes: Kes) -> None:
    async with Election(office.names["ID"], **office.user) as candidate, candidate.term() as term:  # type: ignore[arg-type]
        assert term.token > 0


@feature(
    "`Election` that makes its topic",
    "Create topic ID.election",
    "Write topic ID.election",
    "Read group ID.election",
    "Write transactional-id ID.election",
    prepare=nothing,
)
async def first_election(office: Office, kes: Kes) -> None:
    await election(office, kes)
