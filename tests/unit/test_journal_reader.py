"""Readers of a journal that were closed."""

from __future__ import annotations

import asyncio

import pytest

from streams.clients.settings import ClientSettings
from streams.errors import Stopped
from streams.journal.entries import EntryTypes
from streams.journal.reader import JournalReader
from tests.unit.waiting import PATIENCE


async def test_a_reader_that_was_closed_says_so_and_may_be_closed_again() -> None:
    settings = ClientSettings("localhost:1", {}, client_id="reader")
    reader = JournalReader(settings, "ledger", EntryTypes([bytes]), 0)
    async with asyncio.timeout(PATIENCE / 3):
        await reader.close()
        await reader.close()
        for reading in (reader.end(), anext(reader.follow())):
            with pytest.raises(Stopped, match="kes-ledger-reader is closed"):
                await reading
