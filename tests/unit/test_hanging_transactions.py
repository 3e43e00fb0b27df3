"""What the log of the coordinators proves of a hanging transaction, and what it does not."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from streams.errors import OffsetError
from streams.kafka.questions import hanging_transactions
from streams.kafka.questions.hanging_transactions import HangingTransactions, _Finding
from streams.kafka.questions.raw_log import LogBatch, Stretch
from streams.model.group import OpenTransaction

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


def written(epoch: int, marker: bool | None = None, producer_id: int = 7) -> LogBatch:
    """Records, or a marker (of a commit)."""
    return LogBatch(0, 0, 1, producer_id, epoch, marker is not None, marker, SINCE, b"")


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
    ("an entry is cut short", [OLD, batch(1, V2_COMMIT[:12])], [Stretch(0, 0, 2, True)], None, True),
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
    async def partitions(deadline: float) -> dict[int, int]:
        return {stretch.partition: 1 for stretch in stretches}

    async def asked(*_: object) -> list[Stretch]:
        return stretches

    async def walk(topic: str, partition: int, *_: object) -> AsyncIterator[LogBatch]:
        for each in log if partition == 0 else ():
            yield each

    judge: Any = HangingTransactions(Mock())
    for name, fake in (("_log_leaders", partitions), ("_stretches", asked), ("_walk", walk)):
        monkeypatch.setattr(judge, name, fake)
    monkeypatch.setattr(hanging_transactions, "values", lambda batch, *_: [batch.content])
    said = await judge._coordinators_say(TXN, BEFORE, 0.0)
    assert (said.commit, said.is_doubtful) == (commit, is_doubtful), said.words


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("log", "commit", "is_doubtful"),
    [
        ([written(3), written(4, True)], True, False),
        ([written(2), written(3), written(4, True)], True, False),  # the one before lacked its marker, too
        ([written(3), written(4, False)], None, False),
        ([written(3), written(3, True)], None, True),  # v1, or one that was ended by proof
        ([written(4), written(5, True)], None, False),
        ([written(3), written(4), written(4, True)], None, True),  # v1: of the later one, and ended both
        ([written(4, True)], None, True),  # its records are compacted
        ([written(3, None, 8), written(4, True, 8)], None, False),
    ],
)
async def test_what_a_marker_in_another_partition_says(
    log: list[LogBatch], commit: bool | None, is_doubtful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def walk(*_: object) -> AsyncIterator[LogBatch]:
        for each in log:
            yield each

    judge: Any = HangingTransactions(Mock())
    monkeypatch.setattr(judge, "_walk", walk)
    said = await judge._marker_says(TXN, "t", Stretch(0, 0, 9, True), 0.0)
    assert (said.commit, said.is_doubtful) == (commit, is_doubtful), said.words


UNREAD, SILENT, SHARED = _Finding(None, "log", True, True), _Finding(None, "log"), _Finding(None, "log", True)
FOUND, NOTHING, DOUBT = _Finding(True, "marker"), _Finding(None, "none"), _Finding(None, "may be", True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("log", "markers", "commit"),
    [
        (UNREAD, FOUND, True),
        (UNREAD, NOTHING, None),
        (SHARED, FOUND, None),  # of the other transaction that has the epoch
        (SILENT, FOUND, None),  # of one that is not in the log: they contradict each other
        (SILENT, DOUBT, None),
        (SILENT, NOTHING, False),
    ],
)
async def test_a_marker_proves_a_commit_where_the_log_is_not_there(
    log: _Finding, markers: _Finding, commit: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge: Any = HangingTransactions(Mock())
    monkeypatch.setattr(judge, "_surroundings", AsyncMock(return_value=({3}, 0)))
    monkeypatch.setattr(judge, "_coordinators_say", AsyncMock(return_value=log))
    monkeypatch.setattr(judge, "_markers_say", AsyncMock(return_value=markers))
    if commit is None:
        with pytest.raises(OffsetError, match="neither committed nor aborted: log; "):
            await judge._proved(TXN, 900.0, 0.0)
    else:
        assert (await judge._proved(TXN, 900.0, 0.0)).commit is commit
