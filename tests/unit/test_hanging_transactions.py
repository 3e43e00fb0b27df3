"""What the log of the coordinators proves of a hanging transaction, and what it does not."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from streams.clients import hanging_transactions
from streams.clients.hanging_transactions import HangingTransactions
from streams.clients.raw_log import LogBatch, Stretch
from streams.group import OpenTransaction

TXN = OpenTransaction(
    topic="t", partition=1, producer_id=7, producer_epoch=3, coordinator_epoch=0, start_offset=9, last_timestamp_ms=0
)
ONGOING, COMMIT, COMMITTED, ABORTED = 1, 2, 4, 5
BEFORE, SINCE = 1_000, 500_000
"""Of entries from before the transaction, and those since."""


def entry(status: int, epoch: int, version: int, partition: int = 1) -> bytes:
    """A ``TransactionLogValue`` of the flexible format."""
    head = struct.pack(">hqhib", 1, 7, epoch, 60_000, status)
    places = b"\x02\x02t\x02" + struct.pack(">i", partition) + b"\0"
    tags = b"\x02\0\x08" + struct.pack(">q", 6) + b"\x02\x02" + struct.pack(">h", version)
    return head + places + struct.pack(">qq", 0, 0) + tags


def batch(base: int, content: bytes, at: int = SINCE, records: int = 1) -> LogBatch:
    return LogBatch(base, base, records, -1, -1, False, None, at, content)


V2_COMMIT, V2_ABORT, V1_COMMIT = entry(COMMIT, 4, 2), entry(ABORTED, 4, 2), entry(COMMITTED, 3, 0)
OLD = batch(0, b"", BEFORE)
ROWS: list[tuple[str, list[LogBatch], list[Stretch], bool | None, bool]] = [
    # case, the log, its stretches, said, whether an abort is out of the question
    ("committed", [OLD, batch(1, V2_COMMIT)], [Stretch(0, 0, 2, True)], True, False),
    ("aborted", [OLD, batch(1, V2_ABORT)], [Stretch(0, 0, 2, True)], False, False),
    ("of the next epoch", [OLD, batch(1, entry(COMMIT, 5, 2))], [Stretch(0, 0, 2, True)], None, False),
    ("v1 shares the epoch", [OLD, batch(1, V1_COMMIT)], [Stretch(0, 0, 2, True)], None, True),
    ("v1, then v2 commits", [OLD, batch(1, entry(5, 3, 0)), batch(2, V2_COMMIT)], [Stretch(0, 0, 3, True)], None, True),
    ("v1, then v2 aborts", [OLD, batch(1, V1_COMMIT), batch(2, V2_ABORT)], [Stretch(0, 0, 3, True)], None, True),
    ("it goes on, unlisted", [OLD, batch(1, entry(ONGOING, 3, 2))], [Stretch(0, 0, 2, True)], None, True),
    ("goes on elsewhere (v1)", [OLD, batch(1, entry(ONGOING, 3, 0, 2))], [Stretch(0, 0, 2, True)], None, False),
    ("no word of it", [OLD], [Stretch(0, 0, 1, True)], None, False),
    ("begins later", [batch(0, b"")], [Stretch(0, 0, 1, True)], None, True),
    ("compacted", [OLD, batch(2, b"")], [Stretch(0, 0, 3, True)], None, True),
    ("compacted in a batch", [OLD, batch(1, b"", records=0)], [Stretch(0, 0, 2, True)], None, True),
    ("its end is not read", [OLD], [Stretch(0, 0, 2, True)], None, True),
    ("one is cut, one is older", [batch(5, b"")], [Stretch(0, 5, 6, True), Stretch(1, 8, 8, False)], None, True),
    ("all of one is deleted", [], [Stretch(0, 5, 5, True), Stretch(1, 8, 8, False)], None, True),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("log", "stretches", "commit", "is_doubtful"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
async def test_what_the_log_of_the_coordinators_says(
    log: list[LogBatch],
    stretches: list[Stretch],
    commit: bool | None,
    is_doubtful: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def partitions(deadline: float) -> list[Any]:
        return [Mock(partition_index=stretch.partition) for stretch in stretches]

    async def asked(*_: object) -> list[Stretch]:
        return stretches

    async def walk(topic: str, partition: int, *_: object) -> AsyncIterator[LogBatch]:
        for each in log if partition == 0 else ():
            yield each

    judge: Any = HangingTransactions(Mock())
    for name, fake in (("_log_partitions", partitions), ("_stretches", asked), ("_walk", walk)):
        monkeypatch.setattr(judge, name, fake)
    monkeypatch.setattr(hanging_transactions, "values", lambda batch: [batch.content])
    said = await judge._coordinators_say(TXN, BEFORE, 0.0)
    assert (said.commit, said.is_doubtful) == (commit, is_doubtful), said.words
