"""Where a partition goes on after a take-over, at the changelog's offset or not at all; and what holds up a restore."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from streams import EventSourceConfig, TopicPartition
from streams.core.position import Position
from streams.errors import OffsetError
from streams.metrics import Measurement, OffsetMismatch
from streams.model.group import OpenTransaction
from streams.runtime.changelog import OffsetRecord, TopicIds
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.stalls import Stalls
from streams.runtime.ownership.takeover import InputStand, TakeOvers
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.reading.log_follower import FROM_START

LOG = (10, 100)
HERE = TopicIds("in-1", "log-1")


def start(
    offset: int | None,
    group_offset: int | None,
    log: tuple[int, int] = LOG,
    *,
    ids: tuple[TopicIds, TopicIds] = (HERE, HERE),
    reset: str = "earliest",
    started_at: int | None = None,
) -> tuple[Position, list[Measurement]]:
    """(Where it starts, what was measured); ``ids``: of the topics when ``offset`` was written, and now;
    ``started_at``: where the worker began before it was restarted."""
    measured: list[Measurement] = []
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1, auto_offset_reset=reset)
    member: Any = SimpleNamespace(config=config, measure=measured.append, thread=lambda _: None)
    record = None if offset is None else OffsetRecord(offset, "writer", 7, 1, *ids[0])
    began = {} if started_at is None else {"t": started_at}
    worker: Any = SimpleNamespace(
        topic_partition=TopicPartition("t", 0), partition=0, offset_record=record, started_at=began, joined=JoinedRows()
    )
    unused: Any = None
    found = [InputStand("t", "", group_offset, log)]
    return TakeOvers(member, unused, unused, unused, unused)._start_position(worker, found, ids[1]), measured


@pytest.mark.parametrize(
    ("arguments", "offset", "reported"),
    [
        ({"offset": 10, "group_offset": 10}, 10, None),  # both agree
        ({"offset": 55, "group_offset": 55}, 55, None),
        ({"offset": 100, "group_offset": 100}, 100, None),
        ({"offset": 55, "group_offset": 3}, 55, 3),  # the changelog is right
        ({"offset": 55, "group_offset": None}, 55, -1),
        ({"offset": None, "group_offset": None}, 10, None),  # a new partition starts as the settings say
        ({"offset": None, "group_offset": None, "reset": "latest"}, 100, None),
        # Nothing of it is committed yet, and ``latest`` has moved on: the records between would be passed over.
        ({"offset": None, "group_offset": None, "reset": "latest", "started_at": 40}, 40, None),
        # Offset records of older versions name no changelog, or nothing at all.
        ({"offset": 55, "group_offset": 55, "ids": (TopicIds(), HERE)}, 55, None),
        ({"offset": 55, "group_offset": 55, "ids": (TopicIds("in-1"), HERE)}, 55, None),
    ],
)
def test_where_it_starts(
    arguments: dict[str, Any], offset: int, reported: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    mismatch = [] if reported is None else [OffsetMismatch(0, reported, 55)]
    assert start(**arguments) == (offset, mismatch)
    assert caplog.text.count("the changelog is right") == len(mismatch)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"offset": 9, "group_offset": 9}, "records 9 to 9 are gone"),  # retention, or the source was truncated
        ({"offset": 101, "group_offset": 101}, "it ends at 100"),
        ({"offset": 55, "group_offset": 55, "ids": (HERE, TopicIds("in-2", "log-1"))}, "id in-1, .* id in-2 now"),
        ({"offset": 55, "group_offset": 55, "ids": (HERE, TopicIds("in-1", "log-2"))}, "id log-1, .* id log-2 now"),
        ({"offset": 55, "group_offset": 55, "ids": (TopicIds("in-1"), TopicIds("in-2", "log-1"))}, "in-1"),
        ({"offset": 55, "group_offset": 99}, "committed offset 99, .* at offset 55: .* records 55 to 98 .*kes offsets"),
        (
            {"offset": None, "group_offset": 55},
            r"g.t.changelog\[0\] holds no offset of t: the changelog was deleted",
        ),
        ({"offset": None, "group_offset": None, "reset": "error"}, "auto_offset_reset is 'error'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OffsetError) as caught:
        start(**arguments)
    assert re.search(said, str(caught.value))
    assert "t[0]" in str(caught.value)


@pytest.mark.parametrize(
    ("begun_at", "log", "warned"),
    [
        (FROM_START, (0, 100), False),
        (FROM_START, (40, 100), True),
        (40, (40, 100), False),  # of a folder, or of a partition that was worked on here: it has what lies below
    ],
)
def test_a_changelog_without_its_beginning_is_reported(
    begun_at: int, log: tuple[int, int], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1)
    member: Any = SimpleNamespace(config=config, thread=lambda _: None)
    copy = Replica(3, 1, None, 0.0)
    copy.begin_at(begun_at)
    unused: Any = None
    TakeOvers(member, unused, unused, unused, unused)._report_trimmed(copy, log)
    assert ("g.t.changelog[3]: the log starts at 40 (end 100)" in caplog.text) == warned


async def test_take_overs_that_stand_still_at_the_same_time_each_name_what_holds_them_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0

    async def call(question: Any, topic: str, partitions: list[int], deadline: float) -> list[OpenTransaction]:
        place = {"producer_id": 1, "producer_epoch": 0, "coordinator_epoch": 0, "start_offset": 7}
        told = {"last_timestamp_ms": 0, "transactional_id": "other", "state": "Ongoing"}
        return [OpenTransaction(topic=topic, partition=number, **place, **told) for number in partitions]

    engine: Any = SimpleNamespace(
        config=SimpleNamespace(timeouts=SimpleNamespace(transaction_timeout_seconds=10.0), changelog="log"),
        thread=lambda name: SimpleNamespace(call=call),
        takeover_client=SimpleNamespace(open_transactions=None),
        now=lambda: now,
    )
    stalls = Stalls(engine)
    named: list[list[str]] = []
    for _ in range(4):
        since, now = now, now + 5.0
        await stalls.check({0: 7}, since)
        await stalls.check({1: 9}, since)
        named.append([record.getMessage().split()[0] for record in caplog.records])
    assert named == [[], [], ["log[0]", "log[1]"], ["log[0]", "log[1]"]], "once the time of a transaction is over"
