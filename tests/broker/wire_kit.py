"""Transactions of the wire producer on a real broker, and what a topic holds after them."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streams.broker.probe import HOST
from streams.errors import TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.connection import connect
from streams.kafka.wire.security import PLAINTEXT
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.slot import WireSlot
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord, Output
from tests.broker.client_kit import read_topic


@asynccontextmanager
async def slot_at(
    address: str,
    name: str,
    settings: dict[str, Any] | None = None,
    topic: str = "",
    transaction_seconds: float = 30,
) -> AsyncIterator[WireSlot]:
    cluster = Cluster(ProducerSettings.of(address, "client", settings or {}))
    slot = WireSlot(name, cluster, "group", call_timeout_seconds=20, transaction_timeout_seconds=transaction_seconds)
    try:
        await slot.reopen([topic])
        yield slot
    finally:
        sockets = [connection._transport.get_extra_info("socket") for connection in slot._session.connections.values()]
        slot.abandon()
        while any(sock.fileno() >= 0 for sock in sockets):
            await asyncio.sleep(0)


async def encoded(slot: WireSlot, topic: str, first: int, count: int = 20) -> EncodedTransaction:
    numbers = range(first, first + count)
    return await encoding(
        slot, [Output(topic, b"%d" % n, b"k%d" % (n % 7), [("h", b"x")], -1, 0, 0, n) for n in numbers]
    )


async def encoding(slot: WireSlot, outputs: list[Output]) -> EncodedTransaction:
    records = EncodedTransaction(slot._cluster, 20)
    await records.complete(outputs)
    return records


async def send(slot: WireSlot, topic: str, first: int, *, source: str = "") -> None:
    """Begin a transaction with records and offsets, all acknowledged."""
    await slot.flush(await encoded(slot, topic, first), {source or topic: {0: first + 20}}, None)


async def transact(slot: WireSlot, topic: str, first: int, *, commit: bool = True, source: str = "") -> None:
    await send(slot, topic, first, source=source)
    if commit:
        await slot.commit(lambda: None)
    else:
        await slot.abort()
        if not slot.is_open:
            await slot.reopen([topic])


def committed(settings: ClientSettings, topic: str) -> list[int]:
    return sorted(int(record.value or b"-1") for record in committed_records(settings, topic))


def committed_records(settings: ClientSettings, topic: str) -> list[IncomingRecord]:
    return [record for records in read_topic(settings, topic).values() for record in records]


def create(settings: ClientSettings, spec: TopicSpec) -> None:
    admin = TopicAdmin(settings)
    admin.create([spec])
    deadline = time.monotonic() + 30
    while True:
        try:
            admin.committed("group", spec.name)  # so that the group has a coordinator
            break
        except TopicError:  # not all of several brokers know the topic yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    admin.close()


async def set_transaction_version(address: str, level: int) -> None:
    """Finalize this level, and wait until the broker says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
        from kafka.protocol.admin import UpdateFeaturesRequest
    request: Any = UpdateFeaturesRequest
    update = request.FeatureUpdateKey(
        feature="transaction.version", max_version_level=level, upgrade_type=3 if level < 2 else 1
    )
    port, asked = int(address.rpartition(":")[2]), False
    while True:
        connection = await connect(HOST, port, "client", PLAINTEXT)  # the answer to each new one has the levels
        if connection.features.get("transaction.version", 0) == level:
            return connection.close()
        if not asked:
            asking = request(feature_updates=[update], timeout_ms=20_000)  # the toolkit itself never sends it
            frame = await connection.call(asking.API_KEY, 1, [bytes(asking.encode(version=1))])
            asking.with_header()
            answer = asking.header.get_response_class().decode(frame, header=True)
            assert not answer.error_code, answer
            asked = True
        connection.close()
