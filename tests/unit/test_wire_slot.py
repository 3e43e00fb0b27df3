"""A slot of the wire producer against scripted brokers: each row of the error table, and connections that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from streams.clients.group_wire import group_metadata
from streams.clients.producing import cluster as cluster_module
from streams.clients.producing import transactions as transactions_module
from streams.clients.producing.cluster import Cluster
from streams.clients.producing.settings import ProducerSettings
from streams.clients.producing.transactions import WireSlot
from streams.errors import ConfigError, RecordRefused, TransactionFailed
from streams.group import Snapshot
from streams.records import Output
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE, TORN, ScriptedBroker, named

pytestmark = pytest.mark.asyncio

PARTITIONS = 4
STEPS = ("Produce", "AddPartitions", "AddOffsets", "TxnOffsetCommit", "EndTxn", "InitProducerId")
SNAPSHOT = Snapshot(1, 5, "member", group_metadata("group", 5, "member", "instance"))


def output(number: int, partition: int = -1, topic: str = "t", size: int = 1) -> Output:
    return Output(topic, b"v" * size, b"k%d" % number, None, partition, 0, 0, number)


@asynccontextmanager
async def opened(broker: ScriptedBroker, timeout: float = 5.0) -> AsyncIterator[WireSlot]:
    cluster = Cluster(ProducerSettings.of(broker.bootstrap_servers, "client", {}))
    slot = WireSlot("id", cluster, "group", call_timeout_seconds=timeout, transaction_timeout_seconds=60)
    await slot.reopen(["t"])
    try:
        yield slot
    finally:
        slot.abandon()


async def transact(slot: WireSlot, outputs: list[Output] | None = None) -> list[str]:
    """Run one transaction; returns what happened on the way."""
    happened = []
    slot.begin()
    outputs = outputs or [output(n, n % PARTITIONS) for n in range(8)]
    assert slot.produce_many(outputs, 0) == len(outputs)
    await slot.flush()
    await slot.commit("in", {0: 7}, lambda: SNAPSHOT, lambda: happened.append("requested"))
    return happened


ROWS = [
    # request, codes of its answer, what the slot makes of it, requests of that kind in all
    ("Produce", (51, 19, 14, 15, 16, 56, 3, 5, 6, 9, 74, 75), "", 2),
    ("Produce", (46,), "", 1),
    ("Produce", (7, 20, 13, 120, 45, 48, 49, 59, 77), "abortable", 1),
    ("Produce", (10, 18, 87, 17), "abortable", 1),
    ("Produce", (29, 32, 44), "abortable or blocked", 1),
    ("Produce", (47, 90), "fenced", 1),
    ("AddPartitions", (51, 14, 15, 16, 7, 3), "", 2),
    ("AddPartitions", (47, 90), "fenced", 1),
    ("AddPartitions", (29, 53), "blocked", 1),
    ("AddPartitions", (48, 49, 77), "abortable", 1),
    ("AddOffsets", (51, 14, 15, 16, 7), "", 2),
    ("AddOffsets", (47, 90), "fenced", 1),
    ("AddOffsets", (30, 53), "blocked", 1),
    ("TxnOffsetCommit", (51, 7, 3, 14, 15, 16), "", 2),
    ("TxnOffsetCommit", (22, 27, 113), "stale", 1),
    ("TxnOffsetCommit", (25, 82, 110), "lost", 1),
    ("TxnOffsetCommit", (47, 90), "fenced", 1),
    ("TxnOffsetCommit", (30,), "blocked", 1),
    ("TxnOffsetCommit", (120, 77), "abortable", 1),
    ("EndTxn", (51, 7, 14, 15, 16), "", 2),
    ("EndTxn", (47, 90), "fenced", 1),
    ("EndTxn", (48, 49, 120, 77), "unknown", 1),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("request_name", "codes", "kind", "requests"), ROWS, ids=[f"{r[0]}-{r[2]}-{r[3]}" for r in ROWS]
)
async def test_each_answer(request_name: str, codes: tuple[int, ...], kind: str, requests: int, version: int) -> None:
    for code in codes:
        brokers = 2 if version == 2 else 1  # so that both enlist
        async with ScriptedBroker(brokers=brokers, transaction_version=version) as broker, opened(broker) as slot:
            broker.answer(request_name, code)
            failed = ""
            try:
                assert await transact(slot) == ["requested"]
            except TransactionFailed as failure:
                failed = failure.kind
            assert failed in kind if kind else not failed, (code, failed)
            asked = len(broker.asked(request_name))
            assert asked == requests + (request_name == "Produce") * (brokers - 1), code
            if kind in ("", "stale", "abortable"):
                slot.begin()
                await slot.abort() if kind else await transact(slot)


@pytest.mark.parametrize("code", [51, 7, 14, 15, 16])
async def test_opening_waits_for_the_coordinator(code: int) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("InitProducerId", code, code)
        async with opened(broker):
            assert len(broker.asked("InitProducerId")) == 3


@pytest.mark.parametrize(
    ("code", "name"), [(53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"), (50, "INVALID_TRANSACTION_TIMEOUT")]
)
async def test_opening_that_is_hopeless_says_why(code: int, name: str) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("InitProducerId", code)
        with pytest.raises(TransactionFailed) as failed:
            async with opened(broker):
                pass
        assert failed.value.code == name


@pytest.mark.parametrize("version", [1, 2])
async def test_requests_and_their_order(version: int) -> None:
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker) as slot:
        await transact(slot)
        await transact(slot)
        enlisted = ["AddPartitions", "AddOffsets"] if version == 1 else []
        each = [*enlisted, "Produce", "TxnOffsetCommit", "EndTxn"]
        assert broker.asked(*STEPS) == ["InitProducerId", *each, *each]
        produced = [request for _, name, request in broker.requests if name == "Produce"]
        ends = [request for _, name, request in broker.requests if name == "EndTxn"]
        assert {request.API_VERSION for request in produced} == {12 if version == 2 else 11}
        assert [request.producer_epoch for request in ends] == ([0, 1] if version == 2 else [0, 0])
        sequences = [
            int.from_bytes(bytes(part.records)[53:57], "big")
            for request in produced
            for part in request.topic_data[0].partition_data
        ]
        assert sequences == [0] * 8 if version == 2 else sequences == [0] * 4 + [2] * 4
        (offsets, _) = [request for _, name, request in broker.requests if name == "TxnOffsetCommit"]
        member = (offsets.group_id, offsets.generation_id, offsets.member_id, offsets.group_instance_id)
        assert member == ("group", 5, "member", "instance")


async def test_with_several_brokers_each_gets_one_request_and_the_coordinator_hears_first() -> None:
    async with ScriptedBroker(brokers=3) as broker, opened(broker) as slot:
        await transact(slot)
        steps = broker.asked(*STEPS)
        assert steps == ["InitProducerId", "AddPartitions", "AddOffsets", *["Produce"] * 3, "TxnOffsetCommit", "EndTxn"]
        enlisted = next(request for _, name, request in broker.requests if name == "AddPartitions")
        assert sorted(enlisted.v3_and_below_topics[0].partitions) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", [GONE, GARBAGE, MUTE])
@pytest.mark.parametrize("request_name", ["Produce", "TxnOffsetCommit", "EndTxn"])
@pytest.mark.parametrize("version", [1, 2])
async def test_no_answer(fault: str, request_name: str, version: int) -> None:
    """Nothing is sent twice under one epoch. The end alone is asked for again, where the epoch tells the ends apart."""
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker, timeout=0.5) as slot:
        broker.answer(request_name, fault)
        again = request_name == "EndTxn" and version == 2 and fault != MUTE
        if again:
            assert await transact(slot) == ["requested"]
        else:
            with pytest.raises(TransactionFailed) as failed:
                await transact(slot)
            assert failed.value.kind == "unknown"
            assert failed.value.code == ("_TIMED_OUT" if fault == MUTE else "_TRANSPORT")
        assert len(broker.asked(request_name)) == 1 + again
        await slot.reopen(["t"])
        await transact(slot)


async def test_the_end_is_asked_for_until_the_broker_is_back() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("EndTxn", GONE)
        broker.answer("FindCoordinator", GONE, GONE, 15)
        assert await transact(slot) == ["requested"]
        assert len(broker.asked("EndTxn")) == 2


async def test_an_answer_may_come_in_pieces() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        for step in ("Produce", "TxnOffsetCommit", "EndTxn"):
            broker.answer(step, TORN)
        await transact(slot)


async def test_the_membership_is_looked_at_before_the_offsets_and_before_the_end() -> None:
    for looks in (0, 1):
        async with ScriptedBroker() as broker, opened(broker) as slot:
            slot.begin()
            slot.produce_many([output(1)], 0)
            await slot.flush()
            seen = 0

            def fence(looks: int = looks) -> Snapshot:
                nonlocal seen
                seen += 1
                if seen > looks:
                    raise TransactionFailed("send_offsets_to_transaction", "LOST", "lost")
                return SNAPSHOT

            requested: list[None] = []
            with pytest.raises(TransactionFailed) as failed:
                await slot.commit("in", {0: 1}, fence, lambda requested=requested: requested.append(None))  # type: ignore[misc]
            assert failed.value.kind == "lost"
            assert requested == []
            assert broker.asked("TxnOffsetCommit", "EndTxn") == ["TxnOffsetCommit"] * looks


async def test_a_transaction_without_offsets_is_refused() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        with pytest.raises(ValueError, match="not fenced"):
            await slot.commit("in", {}, lambda: SNAPSHOT, lambda: None)


async def test_the_refused_record_is_named() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", named(2, "no key"))
        outputs = [output(n, 0) for n in range(5)]
        with pytest.raises(TransactionFailed) as failed:
            await transact(slot, outputs)
        assert failed.value.kind == "abortable"
        (refused,) = slot.refused
        assert refused.output is outputs[2]
        assert refused.is_own
        assert "no key" in refused.reason


async def test_a_batch_that_is_too_large_names_no_record_and_makes_the_next_ones_smaller() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        outputs = [output(n, 0, size=1000) for n in range(100)]
        batches = []
        for _ in range(3):
            broker.answer("Produce", 10)
            with pytest.raises(TransactionFailed):
                await transact(slot, outputs)
            assert [refused.output for refused in slot.refused] == [None]
            slot.begin()
            slot.produce_many(outputs, 0)
            batches.append(sum(len(own) for _, _, own in slot._records.parts()))
        assert batches[0] >= 2
        assert batches == sorted(batches)
        assert batches[-1] > batches[0]


async def test_the_largest_record_stands_alone_and_is_named() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", 10)
        large = output(1, 0, size=900_000)
        with pytest.raises(TransactionFailed):
            await transact(slot, [large])
        assert [refused.output for refused in slot.refused] == [large]


async def test_what_the_client_refuses() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        good, bad = output(1), output(2, size=1_000_000)
        assert slot.produce_many([good, bad, good], 0) == 1
        with pytest.raises(RecordRefused, match="MSG_SIZE_TOO_LARGE"):
            slot.produce(bad)
        for partition in (4, -2):
            with pytest.raises(RecordRefused, match="4 partitions"):
                slot.produce(output(1, partition))
        assert slot.produce_many([good, bad, good], 2) == 3
        await slot.flush()


async def test_text_and_buffers_are_taken_as_librdkafka_takes_them() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        for key, value in (("text", "größe"), (bytearray(b"k"), memoryview(b"v")), (None, bytearray(b"x" * 9000))):
            assert slot.produce(Output("t", value, key, [("h", "text")], -1, 0, 0, 0))  # type: ignore[arg-type, list-item]
        with pytest.raises(RecordRefused, match="value must be bytes"):
            slot.produce(Output("t", 5, None, None, -1, 0, 0, 0))  # type: ignore[arg-type]
        await slot.flush()


async def test_a_topic_that_does_not_exist_is_waited_for_and_then_blocks() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()

        async def produced() -> None:
            while not slot.produce(output(1, topic="later")):
                await asyncio.sleep(0.01)

        with pytest.raises(TransactionFailed, match="create the topic") as failed:
            await produced()
        assert failed.value.kind == "blocked"
        broker.topics["later"] = 1
        async with asyncio.timeout(5):
            while "later" not in slot._cluster.placements:
                slot._cluster.look_for("later")
                await asyncio.sleep(0.01)
        await produced()
        await slot.flush()


async def test_partitions_that_are_added_are_used_by_the_next_transaction() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        slot.produce_many([output(n) for n in range(50)], 0)
        broker.topics["t"] = 40
        await slot._cluster.refresh(["t"])
        slot.produce_many([output(n) for n in range(50)], 0)
        assert max(partition for _, partition, _ in slot._records.parts()) < 4
        slot.begin()
        slot.produce_many([output(n) for n in range(50)], 0)
        assert max(partition for _, partition, _ in slot._records.parts()) > 4


async def test_an_abort_does_not_overtake_what_a_cancelled_call_has_sent() -> None:
    """Under v1 a record that comes after the abort, under the same epoch, would hang in the log."""
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker) as slot:
        broker.answer("Produce", MUTE)
        slot.begin()
        slot.produce_many([output(1)], 0)
        flushing = asyncio.create_task(slot.flush())
        async with asyncio.timeout(5):
            while not broker.asked("Produce"):
                await asyncio.sleep(0)
        flushing.cancel()
        with pytest.raises(TransactionFailed, match="being replaced"):
            await slot.abort()
        await slot.reopen(["t"])
        await asyncio.wait([flushing])
        await transact(slot)
        assert broker.asked("EndTxn", "InitProducerId") == ["InitProducerId", "InitProducerId", "EndTxn"]


async def test_a_topic_that_has_fewer_partitions_now_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedBroker() as broker, opened(broker, timeout=0.3) as slot:
        slot.begin()
        slot.produce_many([output(1, 3)], 0)
        broker.topics["t"] = 1
        await slot._cluster.refresh(["t"])
        with pytest.raises(TransactionFailed, match="no answer within") as failed:
            await slot.flush()
        assert failed.value.kind == "unknown"


async def test_a_topic_that_is_deleted_is_named_also_where_partitions_are_enlisted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transactions_module, "UNKNOWN_SECONDS", 0.1)
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker) as slot:
        broker.answer("AddPartitions", *[3] * 1000)
        with pytest.raises(TransactionFailed, match="create the topic") as failed:
            await transact(slot)
        assert failed.value.kind == "blocked"
        assert slot.refused[0].topic == "t"


async def test_a_topic_that_nobody_answers_for_ends_the_wait() -> None:
    async with ScriptedBroker() as broker, opened(broker, timeout=0.2) as slot:
        slot.begin()
        broker.answer("Metadata", *[GONE] * 1000)

        async def produced() -> None:
            while not slot.produce(output(1, topic="later")):
                await asyncio.sleep(0.01)

        with pytest.raises(TransactionFailed, match="no metadata of later") as failed:
            await produced()
        assert failed.value.kind == "unknown"


async def test_brokers_that_take_older_versions_get_those() -> None:
    async with ScriptedBroker(transaction_version=1) as broker:
        broker.most |= {"Produce": 9, "TxnOffsetCommit": 3, "EndTxn": 3, "FindCoordinator": 3, "Metadata": 11}
        broker.most["InitProducerId"] = 4
        async with opened(broker) as slot:
            await transact(slot)
        versions = {name: request.API_VERSION for _, name, request in broker.requests}
        assert {versions[name] for name in ("Produce", "TxnOffsetCommit", "EndTxn")} == {9, 3}


@pytest.mark.parametrize("wrong", [{"timestamp_ms": 1 << 63}, {"partition": 1.0}, {"partition": 1.5}], ids=str)
async def test_numbers_that_no_batch_can_hold_are_refused(wrong: dict[str, int]) -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        record = msgspec.structs.replace(output(1), **wrong)
        assert slot.produce_many([record], 0) == 0
        with pytest.raises(RecordRefused, match="must be a whole number"):
            slot.produce(record)


async def test_a_call_that_is_cancelled_leaves_no_connection() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", MUTE)
        slot.begin()
        slot.produce_many([output(1)], 0)
        flushing = asyncio.create_task(slot.flush())
        async with asyncio.timeout(5):
            while not broker.asked("Produce"):
                await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait([flushing])
        with pytest.raises(TransactionFailed, match="being replaced"):
            await slot.abort()
        await slot.reopen(["t"])
        await transact(slot)


@pytest.mark.parametrize(
    ("servers", "settings", "said"),
    [
        ("nowhere", {}, "host:port"),
        ("h:1", {"linger.ms": 5}, "batch_delay_seconds"),
        ("h:1", {"compression.type": "zip"}, "none, gzip, snappy, lz4 or zstd"),
        (
            "h:1",
            {"sasl.mechanism": "PLAIN", "security.protocol": "sasl_ssl", "sasl.password": "s3cret"},
            "sasl.username",
        ),
    ],
)
async def test_settings_that_are_wrong(servers: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        ProducerSettings.of(servers, "client", settings)
    assert "s3cret" not in str(refused.value)


async def test_questions_pass_over_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 0.05)
    async with ScriptedBroker(brokers=2) as broker:
        broker.answer("ApiVersions", MUTE)
        async with opened(broker) as slot:
            assert [number for number, name, _ in broker.requests if name == "Metadata"] == [1]
            await transact(slot)


async def test_questions_at_one_time_share_a_connection() -> None:
    async with ScriptedBroker() as broker:
        cluster = Cluster(ProducerSettings.of(broker.bootstrap_servers, "client", {}))
        await asyncio.gather(*(cluster.refresh(["t"]) for _ in range(5)))
        assert broker.asked("ApiVersions", "Metadata") == ["ApiVersions", *["Metadata"] * 5]
        cluster.close()


async def test_a_broker_that_is_not_there_is_named() -> None:
    cluster = Cluster(ProducerSettings.of("127.0.0.1:1", "client", {}))
    slot = WireSlot("id", cluster, "g", call_timeout_seconds=2, transaction_timeout_seconds=9)
    with pytest.raises(TransactionFailed, match=r"127\.0\.0\.1:1: ") as failed:
        await slot.reopen(["t"])
    assert failed.value.kind == "unknown"
