"""What a forwarder makes of each answer of a scripted broker: sent again only where nothing can have happened."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka.wire import answers
from streams.kafka.wire.answers import Meaning
from streams.kafka.wire.codes import name_of
from streams.kafka.wire.placement import BATCH_HEAD
from streams.kafka.writing import forwarding
from streams.kafka.writing.forwarding import BatchForwarder
from streams.kafka.writing.made_batch import MadeBatch
from streams.kafka.writing.rows import Rows
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE, SHORT, TORN, TWICE, WEB, ScriptedBroker, named
from tests.unit.topics_broker import TopicsBroker

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.record import MemoryRecords

CALLS = ("InitProducerId", "AddPartitions", "Produce", "AddOffsets", "TxnOffsetCommit", "EndTxn")
AGAIN = (Meaning.AGAIN, Meaning.AGAIN_LEADER, Meaning.AGAIN_COORDINATOR)
TABLES = dict(
    zip(
        CALLS,
        (answers.INIT, answers.ENLIST, answers.PRODUCE, answers.ENLIST, answers.OFFSETS, answers.END),
        strict=True,
    )
)


def made(partition: int, *values: bytes, topic: str = "t") -> MadeBatch:
    rows = Rows()
    for value in values:
        rows.add(1000, b"k", value, b"\0", 1_000_000)
    (batch,) = rows.batches()
    content = b"".join(batch.encode(-1, -1, -1, None))
    return MadeBatch(topic, partition, 4, content[:BATCH_HEAD], content[BATCH_HEAD:])


def write(broker: ScriptedBroker, batches: list[MadeBatch], seconds: float = 5.0) -> int:
    """One whole transaction, as a sink makes it."""
    settings = forwarding.settings_of({"bootstrap.servers": broker.bootstrap_servers}, "test")
    with BatchForwarder(settings, "id", seconds) as forwarder:
        forwarder.init_transactions(seconds)
        for batch in batches:
            assert forwarder.partitions(batch.topic) == broker.topics.get(batch.topic)
        sent = forwarder.send(batches)
        forwarder.send_offsets("g", "t", {0: 5}, "what was written\0")
        forwarder.commit()
        return sent


BATCHES = [made(0, b"a", b"b"), made(1, b"c"), made(0, b"d"), made(0, b"e"), made(1, b"f")]


@pytest.mark.parametrize("version", [1, 2])
async def test_batches_go_out_in_rounds_under_one_producer(version: int) -> None:
    async with ScriptedBroker(brokers=2, transaction_version=version) as broker:
        assert await asyncio.to_thread(write, broker, BATCHES) == 6
        requests = [request for _, name, request in broker.requests if name == "Produce"]
        assert broker.asked(*CALLS) == [
            "InitProducerId", "AddPartitions", "Produce", "Produce", "Produce", "Produce", "Produce", "AddOffsets",
            "TxnOffsetCommit", "EndTxn",
        ]  # fmt: skip
        seen: dict[int, list[Any]] = {0: [], 1: []}
        for request in requests:
            (topic,) = request.topic_data
            for part in topic.partition_data:
                records = MemoryRecords(bytes(part.records))
                (batch,) = list(iter(records.next_batch, None))
                assert (batch.producer_id, batch.producer_epoch) == (7, 0)
                assert batch.is_transactional
                assert batch.validate_crc()
                seen[part.index].append((batch.base_sequence, [record.value for record in batch]))
        assert seen == {0: [(0, [b"a", b"b"]), (2, [b"d"]), (3, [b"e"])], 1: [(0, [b"c"]), (1, [b"f"])]}
        (offsets,) = (request for _, name, request in broker.requests if name == "TxnOffsetCommit")
        (place,) = offsets.topics[0].partitions
        assert (offsets.group_id, offsets.generation_id, offsets.member_id) == ("g", -1, "")
        assert (place.committed_offset, place.committed_metadata) == (5, "what was written\0")
        (end,) = (request for _, name, request in broker.requests if name == "EndTxn")
        assert (end.committed, end.producer_epoch) == (True, 0)


def test_a_round_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "REQUEST_BYTES", 400)
    batches = [made(number, b"x" * 100) for number in range(4)]
    with BatchForwarder(forwarding.settings_of({"bootstrap.servers": "b:1"}, "test"), "id", 1.0) as forwarder:
        assert [len(pieces) for pieces in forwarder._rounds(batches)] == [2, 2]


ANSWERS = [(call, code) for call in CALLS for code in sorted({*TABLES[call], 7, 13, 20, 45, 46, 48, 55, 99})]


@pytest.mark.parametrize(("call", "code"), ANSWERS, ids=str)
async def test_each_answer(call: str, code: int) -> None:
    """The same again where it had no effect; else it is raised, and the open transaction is aborted."""
    async with ScriptedBroker() as broker:
        broker.answer(call, code)
        meaning = TABLES[call].get(code)
        if meaning in AGAIN or meaning is Meaning.DONE:
            assert await asyncio.to_thread(write, broker, BATCHES) == 6
            assert broker.asked("EndTxn")[1:] == (["EndTxn"] if call == "EndTxn" else [])
            return
        with pytest.raises(TransactionFailed) as raised:
            await asyncio.to_thread(write, broker, BATCHES)
        assert raised.value.code == name_of(code)
        assert (raised.value.kind == "fenced") == (meaning is Meaning.FENCED)
        ends = [request.committed for _, name, request in broker.requests if name == "EndTxn"]
        expected = {"InitProducerId": [], "EndTxn": [True, False]}
        assert ends == expected.get(call, [False])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("said", [GONE, MUTE, GARBAGE, SHORT, WEB])
async def test_no_answer_is_a_doubt_and_nothing_is_sent_after_it(call: str, said: str) -> None:
    """Only a fence is requested again, because it opens nothing."""
    async with ScriptedBroker() as broker:
        broker.answer(call, said)
        if call == "InitProducerId" and said != MUTE:
            assert await asyncio.to_thread(write, broker, BATCHES) == 6
            return
        with pytest.raises(TransactionFailed) as raised:
            await asyncio.to_thread(write, broker, BATCHES, 1.0)
        assert raised.value.kind == "unknown"
        assert raised.value.code in (("_TIMED_OUT",) if said == MUTE else ("_TRANSPORT", "_BAD_MSG"))
        assert broker.asked(*CALLS)[-1] == call
        assert len(broker.asked("EndTxn")) == (1 if call == "EndTxn" else 0)


@pytest.mark.parametrize("said", [TORN, TWICE])
async def test_an_answer_in_pieces_or_twice_is_one(said: str) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("AddPartitions", said)
        assert await asyncio.to_thread(write, broker, BATCHES) == 6
        assert len(broker.asked("AddPartitions")) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (87, r"t\[0\]: a batch of 2 records \(\d+ bytes\)"),
        (named(1, "too far ahead"), r"t\[0\]: a batch of 2 records .*: record 1: too far ahead"),
    ],
    ids=["batch", "record"],
)
async def test_a_refused_batch_is_described(answer: int | Callable[[Any], None], reason: str) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("Produce", answer)
        with pytest.raises(RecordsRefused, match=reason):
            await asyncio.to_thread(write, broker, [BATCHES[0]])


async def test_a_topic_that_is_not_there() -> None:
    async with ScriptedBroker(topics={"t": 4}) as broker:
        settings = forwarding.settings_of({"bootstrap.servers": broker.bootstrap_servers}, "test")

        def look() -> int | None:
            with BatchForwarder(settings, "id", 5.0) as forwarder:
                return forwarder.partitions("no")

        assert await asyncio.to_thread(look) is None


async def test_a_broker_that_is_away_is_waited_for_by_the_fence_alone() -> None:
    async with ScriptedBroker() as broker:
        servers = broker.bootstrap_servers
    settings = forwarding.settings_of({"bootstrap.servers": servers}, "test")

    def fence() -> None:
        with BatchForwarder(settings, "id", 5.0) as forwarder:
            forwarder.init_transactions(0.5)

    with pytest.raises(TransactionFailed, match=servers) as raised:
        await asyncio.to_thread(fence)
    assert raised.value.code == "_TIMED_OUT"


def look(broker: TopicsBroker, seconds: float = 5.0) -> tuple[int, str] | None:
    settings = forwarding.settings_of({"bootstrap.servers": broker.bootstrap_servers}, "test")
    with BatchForwarder(settings, "id", seconds) as forwarder:
        forwarder.init_transactions(seconds)
        return forwarder.committed("g", "t", 0, seconds)


def with_text(answer: Any) -> None:
    answer.groups[0].topics[0].partitions[0].metadata = "before\0"


def in_front(code: int) -> Callable[[Any], None]:
    def change(answer: Any) -> None:
        answer.groups[0].error_code, answer.groups[0].topics = code, []

    return change


async def test_the_offset_of_a_group_is_fetched_once_it_is_decided() -> None:
    async with TopicsBroker() as broker:
        assert await asyncio.to_thread(look, broker) is None
        broker.committed[0] = 5
        broker.answer("OffsetFetch", 88, in_front(14), 16, GONE, with_text)
        assert await asyncio.to_thread(look, broker) == (5, "before\0")
        requests = [request for _, name, request in broker.requests if name == "OffsetFetch"]
        assert [request.require_stable for request in requests] == [True] * 6
        broker.answer("OffsetFetch", in_front(69))
        assert await asyncio.to_thread(look, broker) is None


@pytest.mark.parametrize(
    ("said", "seconds", "code"),
    [
        ([in_front(30)], 5.0, "GROUP_AUTHORIZATION_FAILED"),
        ([29], 5.0, "TOPIC_AUTHORIZATION_FAILED"),
        ([lambda answer: answer.groups.clear()], 5.0, "_BAD_MSG"),
        ([MUTE], 0.3, "_TIMED_OUT"),
        ([88] * 100, 0.3, "_TIMED_OUT"),
    ],
)
async def test_an_offset_that_cannot_be_fetched(said: list[Any], seconds: float, code: str) -> None:
    async with TopicsBroker() as broker:
        broker.answer("OffsetFetch", *said)
        with pytest.raises(TransactionFailed) as raised:
            await asyncio.to_thread(look, broker, seconds)
        assert raised.value.code == code
