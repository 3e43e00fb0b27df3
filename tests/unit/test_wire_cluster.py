"""What the slots of the wire producer know of the cluster: topics, brokers and settings that change or are wrong."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError

from streams.errors import ConfigError, RecordsRefused, TransactionFailed
from streams.kafka.wire import answers
from streams.kafka.wire import cluster as cluster_module
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing import encoded_transaction, session
from streams.kafka.writing.slot import WireSlot
from tests.unit.scripted_broker import (
    GONE,
    METADATA,
    MUTE,
    ScriptedBroker,
    encoded,
    flush,
    opened,
    output,
    transact,
)
from tests.unit.waiting import PATIENCE

pytestmark = pytest.mark.asyncio


async def test_a_topic_that_does_not_exist_is_waited_for_and_then_blocks() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        with pytest.raises(TransactionFailed, match="create the topic") as failed:
            await encoded(slot, output(1, topic="later"))
        assert failed.value.kind == "blocked"
        broker.topics["later"] = 1
        async with asyncio.timeout(PATIENCE):
            while "later" not in slot._cluster.placements:
                slot._cluster.refresh_topic("later")
                await asyncio.sleep(0.01)
        await flush(slot, output(1, topic="later"))


async def test_partitions_that_are_added_are_used_by_the_next_transaction() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        outputs = [output(n) for n in range(50)]
        records = await encoded(slot, *outputs)
        broker.topics["t"] = 40
        await slot._cluster.refresh(["t"])
        await records.complete([*outputs, *outputs])
        assert max(part.partition for part in records.encoded.rounds({})[0]) < 4
        assert max(part.partition for part in (await encoded(slot, *outputs)).encoded.rounds({})[0]) > 4


async def test_a_partition_that_was_just_added_is_looked_for_before_a_record_is_refused() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        await transact(slot)
        broker.topics["t"] = 6
        with pytest.raises(TransactionFailed, match="sent again") as failed:
            await transact(slot, [output(1, 5)])
        assert failed.value.kind == "abortable"
        await transact(slot, [output(1, 5)])
        del broker.topics["t"]
        with pytest.raises(RecordsRefused, match=r"t\[6\], key .*: the topic has 6 partitions"):
            await transact(slot, [output(1, 6)])


async def cancelled_flush(broker: ScriptedBroker, slot: WireSlot) -> asyncio.Task[None]:
    """Cancel a flush whose Produce was sent; it has not noticed yet."""
    broker.answer("Produce", MUTE)
    flushing = asyncio.create_task(flush(slot, output(1)))
    async with asyncio.timeout(PATIENCE):
        while not broker.asked("Produce"):
            await asyncio.sleep(0)
    flushing.cancel()
    return flushing


async def test_an_abort_does_not_overtake_what_a_cancelled_call_has_sent() -> None:
    """Under v1 a record that comes after the abort, under the same epoch, would hang in the log."""
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker) as slot:
        flushing = await cancelled_flush(broker, slot)
        with pytest.raises(TransactionFailed, match="being replaced"):
            await slot.abort()
        await slot.reopen(["t"])
        await asyncio.wait([flushing])
        await transact(slot)
        assert broker.asked("EndTxn", "InitProducerId") == [*["InitProducerId"] * 2, *["EndTxn"] * 2]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("version", [1, 2])
async def test_the_last_transaction_is_ended_again_where_its_markers_may_be_missing(
    version: int, committed: bool
) -> None:
    """A connection is lost after its end; a slot is opened again in the middle of it; its commit has no answer."""
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker, timeout=2.0) as slot:

        def ends() -> list[bool]:
            found = [request.committed for _, name, request in broker.requests if name == "EndTxn"]
            broker.requests.clear()
            return found

        await transact(slot)
        before = slot.is_shaken
        next(iter(slot._session.connections.values())).close()
        assert (before, slot.is_shaken) == (False, True)
        await transact(slot)
        assert ends() == [True, True, True]
        await flush(slot, output(1))
        await slot.reopen(["t"])
        assert ends() == [False]
        await flush(slot, output(1))
        broker.answer("EndTxn", MUTE)
        with pytest.raises(TransactionFailed):
            await slot.commit(lambda: None)
        await slot.reopen(["t"])
        assert ends() == [True], "it is not known yet which way"
        slot.settled(committed)
        assert slot.is_shaken
        await transact(slot)
        enlisted = next(request for _, name, request in broker.requests if name == "AddPartitions")
        assert [topic.name for topic in enlisted.v3_and_below_topics] == ["t"]
        assert ends() == [committed, True]


async def of_one_that_did_not_begin(broker: ScriptedBroker, slot: WireSlot) -> None:
    """The markers of the last one were not written yet; then the broker was killed."""
    enlists = "Produce" if slot._session.protocol.bumps_epoch else "AddPartitions"
    broker.answer(enlists, KafkaError.CONCURRENT_TRANSACTIONS, GONE)
    with pytest.raises(TransactionFailed):
        await flush(slot, output(1))
    broker._epoch += enlists != "Produce"  # somebody took the id for a moment: then the epoch does not tell
    await slot.reopen(["t"])


async def of_one_that_was_aborted_before_it_began(broker: ScriptedBroker, slot: WireSlot) -> None:
    if slot._session.protocol.bumps_epoch:
        slot._markers = Mock(may_be_late=lambda: True)  # it enlists
    broker.answer("AddPartitions", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(RecordsRefused):
        await flush(slot, output(1))
    await slot.abort()
    broker.requests.clear()
    await slot.reopen(["t"])
    assert not broker.asked("EndTxn"), "nothing was lost"
    next(iter(slot._session.connections.values())).close()
    await slot.reopen(["t"])


async def after_an_end_that_is_refused(broker: ScriptedBroker, slot: WireSlot) -> None:
    """The second end fails; the connections are there."""
    next(iter(slot._session.connections.values())).close()
    broker.answer("EndTxn", KafkaError.INVALID_TXN_STATE)
    with pytest.raises(TransactionFailed):
        await slot.reopen(["t"])
    broker.requests.clear()
    await slot.reopen(["t"])


async def after_an_opening_that_is_refused(broker: ScriptedBroker, slot: WireSlot) -> None:
    next(iter(slot._session.connections.values())).close()
    broker.answer("InitProducerId", KafkaError.INVALID_TXN_STATE)
    with pytest.raises(TransactionFailed):
        await slot.reopen(["t"])
    await slot.reopen(["t"])


@pytest.mark.parametrize(
    "happens",
    [
        of_one_that_did_not_begin,
        of_one_that_was_aborted_before_it_began,
        after_an_end_that_is_refused,
        after_an_opening_that_is_refused,
    ],
)
@pytest.mark.parametrize("version", [1, 2])
async def test_the_last_transaction_is_remembered_until_it_is_ended_again(version: int, happens: Any) -> None:
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker, timeout=2.0) as slot:
        await transact(slot)
        broker.requests.clear()
        await happens(broker, slot)
        assert [request.committed for _, name, request in broker.requests if name == "EndTxn"] == [True]
        assert not slot.is_shaken


async def test_a_broker_that_is_gone_costs_one_more_end_and_not_one_each_time() -> None:
    async with ScriptedBroker(brokers=2) as broker, opened(broker) as slot:
        await transact(slot, [output(1, 1)])
        broker.kill(1)
        async with asyncio.timeout(PATIENCE):
            while not slot.is_shaken:
                await asyncio.sleep(0)
        await slot._cluster.refresh(["t"])
        broker.requests.clear()
        for _ in range(3):
            await transact(slot, [output(1, 1)])
        assert len(broker.asked("EndTxn")) == 3 + 1


async def test_a_call_that_ended_the_last_one_again_is_still_under_way() -> None:
    """An abort would overtake what it has sent, were it taken for over."""
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker) as slot:
        await transact(slot)
        next(iter(slot._session.connections.values())).close()
        broker.requests.clear()
        flushing = await cancelled_flush(broker, slot)
        with pytest.raises(TransactionFailed, match="being replaced"):
            await slot.abort()
        await asyncio.wait([flushing])


async def test_a_topic_that_has_fewer_partitions_now_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedBroker() as broker, opened(broker, timeout=0.3) as slot:
        records = await encoded(slot, output(1, 3))
        broker.topics["t"] = 1
        await slot._cluster.refresh(["t"])
        with pytest.raises(TransactionFailed, match=r"no success within 0\.3 seconds: t\[3\]: .*eader") as failed:
            await slot.flush(records, {"in": {0: 1}}, lambda: METADATA)
        assert failed.value.kind == "unknown"


async def test_a_topic_that_is_deleted_is_named_also_where_partitions_are_enlisted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "UNKNOWN_SECONDS", 0.1)
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker) as slot:
        broker.answer("AddPartitions", *[3] * 1000)
        with pytest.raises(RecordsRefused, match="create the topic") as failed:
            await transact(slot)
        assert failed.value.kind == "blocked"
        assert failed.value.refused[0].topic == "t"


async def test_a_topic_that_nobody_answers_for_ends_the_wait() -> None:
    async with ScriptedBroker() as broker, opened(broker, timeout=0.2) as slot:
        broker.answer("Metadata", *[GONE] * 1000)
        with pytest.raises(TransactionFailed, match="no metadata of later") as failed:
            await encoded(slot, output(1, topic="later"))
        assert failed.value.kind == "unknown"


@pytest.mark.parametrize("version", [1, 2])
async def test_a_leader_that_dies_between_transactions_is_replaced_within_the_next_one(version: int) -> None:
    async with ScriptedBroker(brokers=2, transaction_version=version) as broker, opened(broker) as slot:
        await transact(slot)
        broker.kill(1)
        async with asyncio.timeout(PATIENCE):
            while all(connection.lost is None for connection in slot._session.connections.values()):
                await asyncio.sleep(0)
        await transact(slot)


@pytest.mark.parametrize("code", [3, 5, 6, 9, 56, 74, 75])
async def test_what_the_former_leader_does_not_take_goes_to_the_new_one(code: int) -> None:
    async with ScriptedBroker(brokers=2) as broker, opened(broker) as slot:
        broker.answer("Produce", *[lambda answer: moved(broker, answer, code)] * 2)  # for good: 56, a disk that failed
        await flush(slot, output(1, 0))
        assert [number for number, name, _ in broker.requests if name == "Produce"] == [0, 1]


def moved(broker: ScriptedBroker, answer: Any, code: int) -> None:
    """Refuse a batch if its partition was at broker 0, and have it led by broker 1 from now on."""
    if broker.requests[-1][0] == 0:
        broker.lead_by(1)
        answer.responses[0].partition_responses[0].error_code = code


async def test_reopening_looks_for_the_leaders_of_all_topics_in_use() -> None:
    async with ScriptedBroker(brokers=2, topics={"t": 4, "changelog": 4}) as broker, opened(broker) as slot:
        broker.kill(1)
        await slot.reopen(["changelog"])
        assert slot._cluster.leaders == {"t": [0] * 4, "changelog": [0] * 4}


@pytest.mark.parametrize("code", [-1, 5, 41])
async def test_a_topic_that_cannot_be_used_for_any_reason_blocks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(encoded_transaction, "UNKNOWN_SECONDS", 0.1)
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Metadata", *[code] * 1000)
        with pytest.raises(RecordsRefused, match=rf"\(missing: {answers.described(code)}\)") as failed:
            await encoded(slot, output(1, topic="missing"))
        assert failed.value.kind == "blocked"


async def test_the_newest_reason_why_a_topic_cannot_be_used_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_transaction, "UNKNOWN_SECONDS", 0.1)
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Metadata", 5)
        with pytest.raises(RecordsRefused, match=r"missing: .*create the topic"):
            await encoded(slot, output(1, topic="missing"))


async def test_a_periodic_refresh_that_was_cut_off_is_made_again() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot._cluster._refreshed_at -= cluster_module.REFRESH_SECONDS + 1
        slot._cluster.refresh_if_old()
        slot.abandon()  # of any slot
        while not slot._cluster._refreshes[""].done():
            await asyncio.sleep(0)
        assert broker.asked("Metadata") == ["Metadata"]
        slot._cluster.refresh_if_old()
        async with asyncio.timeout(PATIENCE):
            while slot._cluster._refreshed_at < asyncio.get_running_loop().time() - 10:
                await asyncio.sleep(0.01)
        assert broker.asked("Metadata") == ["Metadata"] * 2


async def test_brokers_that_take_older_versions_get_those() -> None:
    async with ScriptedBroker(transaction_version=1) as broker:
        broker.most |= {"Produce": 9, "TxnOffsetCommit": 3, "EndTxn": 3, "FindCoordinator": 3, "Metadata": 11}
        broker.most["InitProducerId"] = 4
        async with opened(broker) as slot:
            await transact(slot)
        versions = {name: request.API_VERSION for _, name, request in broker.requests}
        assert {versions[name] for name in ("Produce", "TxnOffsetCommit", "EndTxn")} == {9, 3}


@pytest.mark.parametrize(
    ("request_name", "most"), [("Produce", 8), ("AddPartitions", 2), ("AddOffsets", 2), ("EndTxn", 2)]
)
async def test_a_broker_that_is_too_old_is_refused(request_name: str, most: int) -> None:
    async with ScriptedBroker() as broker:
        broker.most[request_name] = most
        with pytest.raises(TransactionFailed, match=rf"{request_name}.* version .*Kafka 3\.0 or newer") as failed:
            async with opened(broker):
                pass
        assert failed.value.code == "UNSUPPORTED_VERSION"  # hopeless: it is not tried again


async def test_an_answer_without_a_coordinator_is_none() -> None:
    async with ScriptedBroker() as broker:
        broker.answer("FindCoordinator", lambda answer: answer.coordinators.clear())
        with pytest.raises(TransactionFailed, match="no coordinator for id: the answer names none") as failed:
            async with opened(broker):
                pass
        assert failed.value.kind == "unknown"
        async with opened(broker) as slot:
            await transact(slot)


async def test_a_topic_without_partitions_is_none() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Metadata", lambda answer: setattr(answer.topics[0], "error_code", 0))
        await slot._cluster.refresh(["empty"])
        assert "empty" not in slot._cluster.placements


@pytest.mark.parametrize("index", [-1, 0, 7, 2**31 - 1])
async def test_partitions_that_cannot_be_are_no_metadata(index: int) -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Metadata", lambda answer: setattr(answer.topics[0].partitions[1], "partition_index", index))
        with pytest.raises(LostConnection, match="metadata of t skip partitions"):
            await slot._cluster.refresh(["t"])
        await transact(slot)


async def test_a_question_in_the_background_holds_up_no_other_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(cluster_module, "_TOPIC_SECONDS", 0.3)
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Metadata", MUTE, MUTE)  # one try has a bound, and the last one has none
        broker.requests.clear()
        slot._cluster.refresh_topic("later")
        async with asyncio.timeout(PATIENCE):
            while len(broker.asked("Metadata")) < 2:
                await asyncio.sleep(0.01)
            await slot._cluster.refresh(["t"])


async def test_a_call_that_is_cancelled_leaves_no_connection() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        flushing = await cancelled_flush(broker, slot)
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
