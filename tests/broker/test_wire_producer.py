"""The wire producer on real brokers: transactions v1 and v2, three brokers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from streams.broker import KafkaBroker, KafkaCluster
from streams.broker.probe import HOST
from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.connection import connect
from streams.kafka.wire.messages import ADD_OFFSETS, END, PRODUCE, code_of, partition_codes, refused
from streams.kafka.wire.security import PLAINTEXT
from streams.kafka.writing.slot import WireSlot
from streams.model.group import GroupMetadata
from streams.model.topics import TopicSpec
from streams.records import DEFAULT_MESSAGE_LIMIT, RECORD_OVERHEAD, Headers, Output
from streams.testing.fixtures import BrokerAddress
from tests.broker.wire_kit import (
    committed,
    committed_records,
    create,
    encoded,
    encoding,
    send,
    set_transaction_version,
    slot_at,
    transact,
)
from tests.unit.waiting import PATIENCE

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

NOBODY = GroupMetadata(1, 5, "nobody")


@pytest.fixture
def topic(kafka_broker: BrokerAddress, topic_prefix: str) -> str:
    name = topic_prefix + "t"
    create(ClientSettings(kafka_broker.bootstrap_servers), TopicSpec(name=name, partitions=3, replication_factor=1))
    return name


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_what_is_committed_is_there_and_what_is_aborted_is_not(
    kafka_broker: BrokerAddress, topic: str, codec: str
) -> None:
    address = kafka_broker.bootstrap_servers
    async with slot_at(address, topic + ".id", {"compression.type": codec}, topic) as slot:
        for number in range(6):
            await transact(slot, topic, number * 20, commit=number % 3 != 1)
        async with slot_at(address, topic + ".id", topic=topic) as second:
            with pytest.raises(TransactionFailed) as failed:
                await transact(slot, topic, 900)
            assert failed.value.kind == "fenced"
            await transact(second, topic, 120)
            with pytest.raises(TransactionFailed, match="UNKNOWN_MEMBER_ID") as failed:
                await second.flush(await encoded(second, topic, 200), {topic: {0: 220}}, lambda: NOBODY)
            assert failed.value.kind == "lost"
            await second.abort()
    wanted = [n for number in (0, 2, 3, 5, 6) for n in range(number * 20, number * 20 + 20)]
    assert committed(ClientSettings(address), topic) == wanted
    assert TopicAdmin(ClientSettings(address)).committed("group", topic) == {0: 140}


SHAPES: list[tuple[bytes | None, bytes | None, Headers | None]] = [
    (b"", b"", None),
    (None, None, [("", None), ("h", b"")]),
    (b"k" * 100_000, b"v", None),
    (b"k", None, [(f"name {n}", b"%d" % n) for n in range(10_000)]),
    (b"k", b"v" * (DEFAULT_MESSAGE_LIMIT - RECORD_OVERHEAD - 1), None),
]


async def test_records_of_any_shape_are_read_as_they_were_sent(kafka_broker: BrokerAddress, topic: str) -> None:
    address = kafka_broker.bootstrap_servers
    outputs = [Output(topic, value, key, headers, 1, 0, 0, n) for n, (key, value, headers) in enumerate(SHAPES)]
    async with slot_at(address, topic + ".id", topic=topic) as slot:
        await slot.flush(await encoding(slot, outputs), {topic: {0: 1}}, None)
        await slot.commit(lambda: None)
    found = committed_records(ClientSettings(address), topic)
    assert [(record.key, record.value, list(record.headers or []) or None) for record in found] == SHAPES


async def test_clocks_and_kinds_of_timestamps(kafka_broker: BrokerAddress, topic: str) -> None:
    """A clock that is two hours ahead blocks until it is set; a time that a record has itself is its own fault;
    a topic may begin to take the broker's time."""
    address, hours = kafka_broker.bootstrap_servers, 3_600_000
    alter(address, topic, {"message.timestamp.after.max.ms": str(hours)})
    async with slot_at(address, topic + ".id", topic=topic) as slot:
        early = Output(topic, b"1", b"k", None, 1, slot._cluster.now_ms() + 2 * hours, 0, 0)
        for outputs, ahead in (([early], 0), ([msgspec.structs.replace(early, timestamp_ms=0)], 7_200)):
            slot._cluster._wall_seconds = lambda ahead=ahead: time.time() + ahead  # type: ignore[misc]
            with pytest.raises(RecordsRefused, match="timestamp") as failed:
                await slot.flush(await encoding(slot, outputs), {topic: {0: 1}}, None)
            assert failed.value.refused[0].is_own == (not ahead)
            assert ("set the wrong one (NTP)" in str(failed.value)) == bool(ahead)
            await slot.abort()
        alter(address, topic, {"message.timestamp.type": "LogAppendTime"})
        deadline = time.monotonic() + PATIENCE
        while True:  # the controller has the setting by now, the leader a moment later
            try:
                await transact(slot, topic, 0)
                break
            except RecordsRefused:
                assert time.monotonic() < deadline, "the topic takes the broker's time"
                await slot.abort()
    assert committed(ClientSettings(address), topic) == list(range(20))


def alter(address: str, topic: str, settings: dict[str, str]) -> None:
    kind = AlterConfigOpType.SET
    entries = [ConfigEntry(name, value, incremental_operation=kind) for name, value in settings.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": address})  # kept until the answer is there
    admin.incremental_alter_configs([resource])[resource].result(20)


@pytest.mark.nightly
async def test_an_identity_whose_epochs_are_used_up(kafka_broker: BrokerAddress, topic: str) -> None:
    """After 32,766 ends the broker gives another producer id."""
    async with slot_at(kafka_broker.bootstrap_servers, topic + ".id", topic=topic) as slot:
        first = slot._session.who.producer_id
        while slot._session.who.producer_id == first:
            slot._has_begun = True
            await slot.abort()
        await transact(slot, topic, 0)
    assert committed(ClientSettings(kafka_broker.bootstrap_servers), topic) == list(range(20))


@pytest.fixture(scope="module")
def leveled_broker() -> Iterator[KafkaBroker]:
    """A broker whose ``transaction.version`` changes; it looks for transactions that are out of time all the time."""
    with KafkaBroker(properties={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "100"}) as broker:
        yield broker


@pytest.fixture(params=[1, 2])
def either(request: pytest.FixtureRequest, leveled_broker: KafkaBroker, topic_prefix: str) -> tuple[str, str]:
    """The address of a broker at this ``transaction.version``, and a topic. A cluster that was upgraded and is not yet
    finalized has version 1."""
    address, topic = leveled_broker.bootstrap_servers, topic_prefix + "t"
    asyncio.run(set_transaction_version(address, request.param))
    create(ClientSettings(address), TopicSpec(name=topic, partitions=3, replication_factor=1))
    return address, topic


async def test_requests_that_come_late_or_twice_do_nothing(either: tuple[str, str]) -> None:
    """All requests of a transaction are sent again in the middle of the next one. Under v1 the slot was opened in
    between, as it is whenever an answer did not come."""
    address, topic = either
    sent: list[tuple[int, int, Sequence[bytes]]] = []
    async with slot_at(address, topic + ".id", topic=topic) as slot:
        (connection,) = slot._session.connections.values()
        calls = connection.calls
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "calls", lambda requests, **how: sent.extend(requests) or calls(requests, **how))
            await transact(slot, topic, 0)
        if not slot._session.protocol.bumps_epoch:
            await slot.reopen([topic])
        await send(slot, topic, 20)
        late = await connect(HOST, int(address.rpartition(":")[2]), "late", PLAINTEXT)
        refusals = {}
        for key, version, parts in sent:
            frame = await late.call(key, version, parts)
            read = {PRODUCE: partial(refused, asked=()), ADD_OFFSETS: code_of, END: code_of}
            refusals[key] = bool(read.get(key, partial(partition_codes, asked=()))(frame))
        late.close()
        await slot.commit(lambda: None)
    assert len(refusals) >= 3
    assert all(refusals.values()), refusals
    settings = ClientSettings(address)
    assert committed(settings, topic) == list(range(40))
    assert TopicAdmin(settings).committed("group", topic) == {0: 40}


async def test_a_transaction_that_the_broker_has_timed_out(either: tuple[str, str]) -> None:
    address, topic = either
    settings = ClientSettings(address)
    async with slot_at(address, topic + ".id", topic=topic, transaction_seconds=1) as slot:
        await send(slot, topic, 0)
        assert await asyncio.to_thread(committed, settings, topic) == []  # waits for its end
        with pytest.raises(TransactionFailed) as failed:
            await slot.commit(lambda: None)
        # Under v2 the epoch before is known to be that of a transaction that ended otherwise: the changelog says how.
        if slot._session.protocol.bumps_epoch:
            assert (failed.value.kind, failed.value.code) == ("unknown", "INVALID_TXN_STATE")
        else:
            assert failed.value.kind == "fenced"
            assert "the broker timed the transaction out" in str(failed.value)
        await slot.reopen([topic])
        await transact(slot, topic, 20)
    assert committed(settings, topic) == list(range(20, 40))


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_topic_that_is_deleted_in_mid_transaction(either: tuple[str, str], is_sent: bool) -> None:
    address, topic = either
    settings, admin = ClientSettings(address), AdminClient({"bootstrap.servers": address})
    spec = TopicSpec(name=topic + ".out", partitions=3, replication_factor=1)
    create(settings, spec)
    async with slot_at(address, topic + ".id", topic=spec.name) as slot:
        records = await encoded(slot, spec.name, 0)
        if is_sent:
            await slot.flush(records, {topic: {0: 1}}, None)
        admin.delete_topics([spec.name])[spec.name].result(20)
        if is_sent:
            await slot.commit(lambda: None)
        else:
            with pytest.raises(TransactionFailed, match=rf"{spec.name}.*create the topic") as failed:
                await slot.flush(records, {topic: {0: 1}}, None)
            assert failed.value.kind == "blocked"
            await slot.reopen([topic])
        create(settings, spec)
        await transact(slot, spec.name, 20, source=topic)
    assert committed(settings, spec.name) == list(range(20, 40))


@pytest.mark.parametrize("either", [1], indirect=True)
async def test_transactions_of_version_1_on_the_same_code(either: tuple[str, str]) -> None:
    address, topic = either
    async with slot_at(address, "id", topic=topic) as slot:
        assert not slot._session.protocol.bumps_epoch
        for number in range(6):
            await transact(slot, topic, number * 20, commit=number % 3 != 1)
        await set_transaction_version(address, 2)
        await transact(slot, topic, 120)
        slot.abandon()  # a level is learnt when a connection is made
        await slot.reopen([topic])
        assert slot._session.protocol.bumps_epoch
        await transact(slot, topic, 140)
        await set_transaction_version(address, 1)  # taken back
        await transact(slot, topic, 160, commit=False)
        await transact(slot, topic, 180)
    wanted = [n for number in (0, 2, 3, 5, 6, 7, 9) for n in range(number * 20, number * 20 + 20)]
    assert committed(ClientSettings(address), topic) == wanted


@pytest.mark.slow
async def test_one_of_three_brokers_dies_and_comes_back(topic_prefix: str) -> None:
    """Leaders and coordinators move while transactions go on; each is tried until it is known to be committed."""
    with KafkaCluster() as cluster:
        topic = topic_prefix + "t"
        settings = ClientSettings(cluster.bootstrap_servers)
        create(settings, TopicSpec(name=topic, partitions=6, replication_factor=3))
        async with slot_at(cluster.bootstrap_servers, "id", topic=topic) as slot:
            await transact(slot, topic, 0)
            victim = cluster.transaction_coordinator("id")
            steps = (cluster.node(victim).kill, cluster.node(victim).restart)
            first, committed_here, doubtful = 20, set(range(20)), set[int]()
            for step in steps:
                changing = asyncio.create_task(asyncio.to_thread(step))
                deadline = time.monotonic() + 60
                done = 0
                while not changing.done() or done < 10:
                    assert time.monotonic() < deadline, "transactions go on"
                    try:
                        await transact(slot, topic, first)
                        committed_here |= set(range(first, first + 20))
                        done += 1
                    except TransactionFailed as failure:
                        if failure.call == "commit_transaction":
                            doubtful |= set(range(first, first + 20))
                        await reopened(slot, topic, deadline)
                    first += 20
                await changing
        found = committed(settings, topic)
    assert len(found) == len(set(found)), "nothing is there twice"
    assert committed_here <= set(found) <= committed_here | doubtful


async def reopened(slot: WireSlot, topic: str, deadline: float) -> None:
    while True:
        try:
            return await slot.reopen([topic])
        except TransactionFailed:
            assert time.monotonic() < deadline, "the slot can be opened again"
            await asyncio.sleep(0.1)
