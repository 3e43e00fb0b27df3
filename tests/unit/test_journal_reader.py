"""Readers of a journal: over scripted batches, and closed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from streams.core.journal import TERM_TYPE, EntryMark, Payload, TermRecord, control, output_of, outputs_of
from streams.errors import BrokerUnavailable, DecodeError, Stopped, StreamsError
from streams.journal import reader as module
from streams.journal.entries import EntryTypes, JournalEntry
from streams.journal.reader import JournalReader
from streams.kafka.reading.received import received
from streams.kafka.settings import ClientSettings
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, PolledPartition
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


class Event(msgspec.Struct, frozen=True):
    number: int


class ScriptedReader(JournalReader):
    """Reads batches of a list of records."""

    def __init__(self, records: list[IncomingRecord], batch: int) -> None:
        super().__init__(ClientSettings("localhost:1", {}, client_id="reader"), "ledger", EntryTypes([Event, bytes]), 0)
        self._records, self._batch = records, batch
        self.stop = len(records)

    def _poll(self) -> PolledPartition:
        at = self._read
        records = [record for record in self._records[at : at + self._batch] if record.offset < self.stop]
        return PolledPartition(records, at + len(records), len(self._records), False)

    def _end(self) -> int:
        return self.stop


def log_of(*payloads: Payload) -> list[IncomingRecord]:
    began = output_of("ledger", control(TERM_TYPE, TermRecord("me", 1)), EntryMark(-1, 0))
    outputs = [began, *outputs_of("ledger", payloads, 0, 1, [-1] * len(payloads))]
    return [
        IncomingRecord("ledger", 0, at, output.key, output.value, received(output.headers))
        for at, output in enumerate(outputs)
    ]


async def test_items_of_many_batches_come_in_order_and_only_up_to_the_end_of_that_moment() -> None:
    types = EntryTypes([Event, bytes])
    log = log_of(*(types.payload(Event(at) if at % 5 else b"%d" % at) for at in range(1, 40)))
    reader = ScriptedReader(log, 7)
    reader.stop = 17
    found = [item async for item in reader.catch_up()]
    assert (len(found), reader.position) == (17, 17)
    reader.stop = len(log)
    later = []
    async for item in reader.follow():
        assert reader.position == item.offset + 1
        later.append(item)
        if item.offset == len(log) - 1:
            break
    events = [item.event for item in [*found, *later] if isinstance(item, JournalEntry)]
    assert events == [Event(at) if at % 5 else b"%d" % at for at in range(1, 40)]
    await reader.close()


async def test_what_cannot_be_decoded_is_named_also_behind_entries_of_the_same_type() -> None:
    headers = EntryTypes([Event]).payload(Event(1)).headers
    fine = Payload(headers, b'{"number":1}')
    reader = ScriptedReader(log_of(fine, fine, Payload(headers, b"{}"), fine), 5)
    with pytest.raises(DecodeError, match=r"ledger\[0\]@3: not a Event"):
        async for _ in reader.catch_up():
            pass
    assert reader.position == 3
    await reader.close()


FOREIGN = {"key": b"key", "headers": []}
NEWER = {"headers": received([*EntryTypes([Event]).payload(Event(1)).headers, (VERSION_HEADER, b"2")])}
UNKNOWN = {"headers": received([(TYPE_HEADER, b"Gone")])}


@pytest.mark.parametrize(
    ("at", "change", "said"),
    [
        (0, FOREIGN, r"ledger\[0\]@0 is no entry of a journal"),
        (2, FOREIGN, r"ledger\[0\]@2 is no entry of a journal"),
        (4, FOREIGN, r"ledger\[0\]@4 is no entry of a journal"),
        (2, {"value": None}, r"ledger\[0\]@2: the value is null"),
        (2, NEWER, r"ledger\[0\]@2: Event version 2 is newer than version 1"),
        (2, UNKNOWN, r"ledger\[0\]@2: the type 'Gone' is none of"),
        (2, {"key": b"grj:0:9"}, r"ledger\[0\]@2 is number 9 of term 0, after number 1"),
    ],
    ids=["foreign-start", "foreign-middle", "foreign-tail", "null", "newer", "unknown", "missing"],
)
async def test_a_record_that_is_no_entry_is_never_passed_over(at: int, change: dict[str, Any], said: str) -> None:
    log = log_of(*(EntryTypes([Event]).payload(Event(number)) for number in range(4)))
    log[at] = msgspec.structs.replace(log[at], **change)
    reader = ScriptedReader(log, 3)
    for _ in range(2):
        with pytest.raises(StreamsError, match=said):
            async for _ in reader.catch_up():
                pass
        assert reader.position == at
    await reader.close()


async def test_a_catch_up_that_does_not_move_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALLED_SECONDS", 0.02)
    reader = ScriptedReader(log_of(), 5)
    reader.stop = 1
    assert len([item async for item in reader.catch_up()]) == 1
    monkeypatch.setattr(reader, "_end", lambda: 4)
    with pytest.raises(BrokerUnavailable, match="no progress at 1 of 4"):
        async for _ in reader.catch_up():
            pass
    await reader.close()
