"""A joined table whose rows were deleted while no member ran, with real compaction."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from streams import EventSource, Table
from streams.runtime.partition.joined_rows import row_key
from streams.testing.fixtures import OwnBroker
from tests.broker.engine_kit import Lab, Running
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(180)]

DAY_MS = 86_400_000
COMPACTED_SOON = {"cleanup_policy": "compact", "segment_ms": "100", "min_cleanable_dirty_ratio": "0.001"}


def build(lab: Lab, table: str) -> EventSource[Any]:
    source = EventSource(lab.config(), Table.factory(key=str, value=int))
    source.join(table, key=str, value=str)
    return source


async def test_a_row_whose_tombstone_is_compacted_away_is_deleted_at_the_start(
    own_broker: OwnBroker, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    lab = Lab(own_broker(properties={"log.cleaner.backoff.ms": "100"}).bootstrap_servers, topic_prefix)
    table = topic_prefix + "table"
    await lab.create()
    await lab.create(table, **COMPACTED_SOON, delete_retention_ms="0")

    async def put(key: str, value: int | None, age_ms: int) -> None:
        data = None if value is None else b"%d" % value
        lab._producer.produce(table, data, key.encode(), 0, timestamp=int(time.time() * 1000) - age_ms)
        await lab.flush()

    async def until_rows(ann: bytes | None, bob: bytes) -> None:
        """Wait until the changelog has these values."""
        keys, wanted = {row_key(table, name): name for name in (b"ann", b"bob")}, {b"ann": ann, b"bob": bob}

        def are_there() -> bool:
            records = lab._records(lab.changelog, None)
            return {keys[record.key]: record.value for record in records if record.key in keys} == wanted

        await asyncio.to_thread(wait_until, are_there, "the rows are in the changelog", step=0.05)

    await put("ann", 1, 3 * DAY_MS)
    await put("bob", 1, 3 * DAY_MS)
    async with Running(build(lab, table)):
        await until_rows(b"1", b"1")
    await put("ann", None, 2 * DAY_MS)
    deadline, number = time.monotonic() + 60, 1
    while {record.key for record in await lab.records(table)} != {b"bob"}:  # only what is behind a segment is compacted
        assert time.monotonic() < deadline, "the tombstone is still there"
        number += 1
        await put("bob", number, 0)
    admin: Any = AdminClient({"bootstrap.servers": lab.bootstrap})
    life = ConfigEntry("delete.retention.ms", str(DAY_MS), incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ResourceType.TOPIC, table, incremental_configs=[life])
    for answer in admin.incremental_alter_configs([change]).values():
        answer.result(30)
    async with Running(build(lab, table)):
        await until_rows(None, b"%d" % number)
    assert "1 rows were deleted while no member read, and their tombstones are gone" in caplog.text
    assert "They are deleted now: b'ann'" in caplog.text
    await lab.check_settled(lab.topic, lab.changelog)
