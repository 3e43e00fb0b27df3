"""A slot of the wire producer against scripted brokers: each row of the error table, and connections that fail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams.core.recovery import Patience
from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka.wire import protocol
from streams.kafka.writing.slot import WireSlot
from streams.model.group import GroupMetadata
from streams.records import Output, RefusedRecord
from tests.unit.scripted_broker import (
    GARBAGE,
    GONE,
    METADATA,
    MUTE,
    SHORT,
    STEPS,
    TORN,
    TWICE,
    WEB,
    ScriptedBroker,
    encoded,
    flush,
    named,
    opened,
    output,
    transact,
)
from tests.unit.waiting import PATIENCE

pytestmark = pytest.mark.asyncio


ROWS = [
    # request, codes of its answer, what the slot makes of it, requests of that kind in all
    ("Produce", (51, 19, 14, 15, 16, 56, 3, 5, 6, 9, 74, 75), "", 2),
    ("Produce", (46,), "", 1),
    ("Produce", (7, 20, 13, 120, 45, 48, 49, 59, 77, 999), "abortable", 1),
    ("Produce", (10, 18, 87, 17), "abortable", 1),
    ("Produce", (29, 32, 44), "abortable or blocked", 1),
    ("Produce", (47, 90), "fenced", 1),
    ("AddPartitions", (51, 14, 15, 16, 7, 3), "", 2),
    ("AddPartitions", (47, 90), "fenced", 1),
    ("AddPartitions", (29, 53), "blocked", 1),
    ("AddPartitions", (48, 49, 77, 999, 55), "abortable", 1),
    ("AddOffsets", (51, 14, 15, 16, 7), "", 2),
    ("AddOffsets", (47, 90), "fenced", 1),
    ("AddOffsets", (30, 53), "blocked", 1),
    ("TxnOffsetCommit", (51, 7, 3, 14, 15, 16), "", 2),
    ("TxnOffsetCommit", (22, 27, 113), "stale", 1),
    ("TxnOffsetCommit", (25, 82, 110), "lost", 1),
    ("TxnOffsetCommit", (47, 90), "fenced", 1),
    ("TxnOffsetCommit", (30,), "blocked", 1),
    ("TxnOffsetCommit", (120, 77, 999), "abortable", 1),
    ("EndTxn", (51, 7, 14, 15, 16), "", 2),
    ("EndTxn", (47, 90), "fenced", 1),
    ("EndTxn", (48, 49, 120, 77, 999), "unknown", 1),
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
                await slot.abort() if kind else await transact(slot)


@pytest.mark.parametrize("code", [51, 7, 14, 15, 16])
async def test_opening_waits_for_the_coordinator(code: int) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("InitProducerId", code, code)
        async with opened(broker):
            assert len(broker.asked("InitProducerId")) == 3


@pytest.mark.parametrize(
    ("code", "name"),
    [(53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"), (50, "INVALID_TRANSACTION_TIMEOUT"), (999, "ERR_999?")],
)
async def test_opening_that_is_hopeless_says_why(code: int, name: str) -> None:
    async with ScriptedBroker() as broker:
        broker.answer("InitProducerId", code)
        with pytest.raises(TransactionFailed) as failed:
            async with opened(broker):
                pass
        assert failed.value.code == name


async def test_an_id_that_works_alone_enlists_where_markers_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that meets unfinished ones looks again after 20 ms only, the slot after 1: for the next transactions."""
    monkeypatch.setattr(protocol, "MARKER_SECONDS", 3600.0)
    monkeypatch.setattr(protocol, "WARY_TRANSACTIONS", 2)
    async with ScriptedBroker() as broker, opened(broker, alone=True) as slot:
        monkeypatch.setattr(protocol, "LEADER_PAUSE_SECONDS", 3600.0)
        await transact(slot)
        await transact(slot)  # in time
        monkeypatch.setattr(protocol, "LEADER_PAUSE_SECONDS", 0.0)
        await transact(slot)  # late
        monkeypatch.setattr(protocol, "LEADER_PAUSE_SECONDS", 3600.0)
        broker.answer("AddPartitions", 51, 51)
        await transact(slot)
        await flush(slot, output(1))
        await transact(slot)  # the transaction's second records: they know that its first ones were taken
        await transact(slot)
        each, enlisted = ["Produce", "TxnOffsetCommit", "EndTxn"], ["AddPartitions", "AddOffsets"]
        more = [*enlisted, *each[:2], *each]
        assert broker.asked(*STEPS) == ["InitProducerId", *each * 3, *enlisted * 3, *each, *more, *each]


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
        assert steps[:3] == ["InitProducerId", "AddPartitions", "AddOffsets"]
        assert sorted(steps[3:]) == ["EndTxn", *["Produce"] * 3, "TxnOffsetCommit"]
        assert steps[-1] == "EndTxn", "the offsets travel beside the records"
        enlisted = next(request for _, name, request in broker.requests if name == "AddPartitions")
        assert sorted(enlisted.v3_and_below_topics[0].partitions) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", [GONE, GARBAGE, MUTE, SHORT, WEB])
@pytest.mark.parametrize("request_name", ["Produce", "TxnOffsetCommit", "EndTxn"])
@pytest.mark.parametrize("version", [1, 2])
async def test_no_answer(fault: str, request_name: str, version: int) -> None:
    """Nothing is sent twice under one epoch. The end alone is asked for again, where the epoch tells the ends apart."""
    seconds = 0.5 if fault in (MUTE, SHORT) else PATIENCE
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker, timeout=seconds) as slot:
        broker.answer(request_name, fault)
        again = request_name == "EndTxn" and version == 2 and fault not in (MUTE, SHORT)
        if again:
            assert await transact(slot) == ["requested"]
        else:
            with pytest.raises(TransactionFailed) as failed:
                await transact(slot)
            assert failed.value.kind == "unknown"
            assert failed.value.code == {MUTE: "_TIMED_OUT", SHORT: "_BAD_MSG"}.get(fault, "_TRANSPORT")
            assert broker.bootstrap_servers in str(failed.value) or fault in (MUTE, SHORT)
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
    async with ScriptedBroker() as broker:
        for step in (*STEPS, "ApiVersions", "Metadata", "FindCoordinator"):
            broker.answer(step, TORN)
        async with opened(broker) as slot:
            await transact(slot)
            await transact(slot)


@pytest.mark.parametrize("request_name", ["TxnOffsetCommit", "EndTxn", "InitProducerId", "Metadata"])
async def test_an_answer_that_comes_twice_meets_no_other_request(request_name: str) -> None:
    async with ScriptedBroker() as broker:
        broker.answer(request_name, TWICE)
        async with opened(broker) as slot:
            await transact(slot)
            await transact(slot)
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", TWICE)  # the offsets are under way behind it
        with pytest.raises(TransactionFailed, match="a request that was not made"):
            await transact(slot)
        await slot.reopen(["t"])
        await transact(slot)


@pytest.mark.parametrize("fault", [GONE, GARBAGE, SHORT, WEB])
@pytest.mark.parametrize("request_name", ["ApiVersions", "Metadata", "FindCoordinator", "InitProducerId"])
async def test_no_answer_while_a_slot_opens(fault: str, request_name: str) -> None:
    """Another broker is asked, but for the identity, which one alone can give."""
    async with ScriptedBroker() as broker:
        broker.answer(request_name, fault)
        if request_name == "InitProducerId":
            with pytest.raises(TransactionFailed, match=broker.bootstrap_servers) as failed:
                async with opened(broker):
                    pass
            assert failed.value.kind == "unknown"
        async with opened(broker) as slot:
            await transact(slot)


NAMED = [
    # request, code, in the message
    ("Produce", 999, r"id: t\[0\]: the broker answers with error 999"),
    ("Produce", 45, r"id: t\[0\]: .*Out of order"),
    ("Produce", 29, r"id: t\[0\]: .*needs Write on topic t: kafka-acls"),
    ("Produce", 19, r"no success within 0\.3 seconds: t\[3\]: .*Not enough replicas"),
    ("AddPartitions", 29, r"id: t\[0\]: .*needs Write on topic t: kafka-acls"),
    ("AddOffsets", 30, r"id: group group: .*Group authorization failed"),
    ("AddOffsets", 15, r"no success within 0\.3 seconds: group group: .*oordinator not available"),
    ("TxnOffsetCommit", 30, r"id: group group, in\[0\]: .*Group authorization failed"),
    ("TxnOffsetCommit", 3, r"no success within 0\.3 seconds: group group, in\[0\]: .*Unknown topic"),
    ("EndTxn", 51, r"no success within 0\.3 seconds: .*Concurrent"),
]


@pytest.mark.parametrize(("request_name", "code", "said"), NAMED)
async def test_a_failure_names_what_it_is_about(request_name: str, code: int, said: str) -> None:
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker, timeout=0.3) as slot:
        broker.answer(request_name, *[code] * 1000)
        with pytest.raises(TransactionFailed, match=said):
            await transact(slot)


async def test_a_member_id_of_one_kilobyte() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        member = "m" * 1024
        metadata = GroupMetadata(1, 5, member, "i" * 249)
        await flush(slot, output(1), fence=lambda: metadata)
        (offsets,) = [request for _, name, request in broker.requests if name == "TxnOffsetCommit"]
        assert (offsets.member_id, offsets.group_instance_id) == (member, "i" * 249)


def is_lost() -> GroupMetadata:
    raise TransactionFailed("send_offsets_to_transaction", "LOST", "lost")


async def test_the_membership_is_looked_at_before_the_offsets_and_before_the_end() -> None:
    """What is not requested can be aborted."""
    async with ScriptedBroker() as broker, opened(broker) as slot:
        with pytest.raises(TransactionFailed) as failed:
            await flush(slot, output(1), fence=is_lost)
        assert failed.value.kind == "lost"
        await slot.abort()
        assert broker.asked("Produce", "TxnOffsetCommit", "EndTxn") == ["EndTxn"]
        await flush(slot, output(1))
        with pytest.raises(TransactionFailed) as failed:
            await slot.commit(is_lost)
        assert failed.value.kind == "lost"
        await slot.abort()
        ends = [request.committed for _, name, request in broker.requests if name == "EndTxn"]
        assert ends == [False, False]


async def test_a_process_that_is_not_in_the_group_sends_nothing() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        with pytest.raises(TransactionFailed, match="NO_MEMBER") as failed:
            await flush(slot, output(1), fence=lambda: GroupMetadata(1, -1, ""))
        assert failed.value.kind == "stale"
        assert broker.asked("Produce", "TxnOffsetCommit") == []


async def test_all_requests_are_answered_before_an_error_is_raised() -> None:
    """Under v1 offsets that come after the abort would belong to the next transaction."""
    async with ScriptedBroker(brokers=2, transaction_version=1) as broker, opened(broker) as slot:
        broker.group_coordinator = 1
        await slot.reopen(["t"])
        broker.answer("Produce", 87)
        broker.answer("TxnOffsetCommit", 51)
        with pytest.raises(RecordsRefused):
            await flush(slot, output(1, 0))
        await slot.abort()
        assert broker.asked("TxnOffsetCommit", "EndTxn") == ["TxnOffsetCommit", "EndTxn"]
        assert not slot.is_open, "its sequences are in doubt"


async def test_under_v2_a_slot_goes_on_after_an_abort() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        await flush(slot, output(1))
        await slot.abort()
        assert slot.is_open
        await slot.abort()  # nothing has begun
        await transact(slot)
        assert broker.asked("InitProducerId", "EndTxn") == ["InitProducerId", "EndTxn", "EndTxn"]


async def test_a_transaction_without_offsets_is_refused() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        with pytest.raises(ValueError, match="not fenced"):
            await slot.flush(await encoded(slot, output(1)), {}, lambda: METADATA)


async def refused_by(slot: WireSlot, *outputs: Output) -> list[RefusedRecord]:
    with pytest.raises(RecordsRefused) as failed:
        await flush(slot, *outputs)
    assert failed.value.kind == "abortable"
    await slot.abort()
    return list(failed.value.refused)


async def test_the_refused_record_is_named() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", named(2, "no key"))
        outputs = [output(n, 0) for n in range(5)]
        (refused,) = await refused_by(slot, *outputs)
        assert refused.output is outputs[2]
        assert refused.is_own
        assert "no key" in refused.reason


@pytest.mark.parametrize("known", [True, False], ids=["limit known", "limit not known"])
async def test_a_record_that_is_too_large_for_its_topic_is_named(known: bool) -> None:
    """By the topic's limit; without the right to read that, when its batch has shrunk to it alone."""
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.batch_limit = 5_000
        outputs = [output(n, 0, size=6_000 if n == 3 else 10) for n in range(9)]
        found: list[RefusedRecord] = []
        while not found:
            broker.answer("Produce", 10)
            if not known:
                broker.answer("DescribeConfigs", 29)
            found = [refused for refused in await refused_by(slot, *outputs) if refused.output is not None]
        assert [refused.output for refused in found] == [outputs[3] if known else outputs[0]]
        assert (len(broker.asked("Produce")) == 1) == known


async def test_the_smallest_limit_is_found_in_few_attempts_where_it_may_not_be_read() -> None:
    def limited(answer: Any) -> None:
        sent = broker.requests[-1][2].topic_data[0].partition_data[0].records
        answer.responses[0].partition_responses[0].error_code = 10 if len(sent) > 1_000 else 0

    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("DescribeConfigs", *[29] * 20)
        broker.answer("Produce", *[limited] * 2_000)
        outputs = [output(n, 0, size=500) for n in range(1_500)]
        attempts = 1
        while True:
            try:
                await flush(slot, *outputs)
                break
            except RecordsRefused:
                await slot.abort()
                attempts += 1
        assert attempts < Patience().attempts


async def test_a_batch_that_is_too_large_names_no_record_and_makes_the_next_ones_smaller() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        outputs = [output(n, 0, size=1000) for n in range(100)]
        broker.batch_limit = 30_000
        broker.answer("Produce", 10)
        assert [refused.output for refused in await refused_by(slot, *outputs)] == [None]
        batches = [part.batch for parts in (await encoded(slot, *outputs)).encoded.rounds({}) for part in parts]
        assert len(batches) == 4
        assert max(batch.size for batch in batches) < 30_000
        await transact(slot, outputs)


async def test_the_largest_record_stands_alone_and_is_named() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        broker.answer("Produce", 10)
        large = output(1, 0, size=900_000)
        assert [refused.output for refused in await refused_by(slot, large)] == [large]


async def test_records_that_the_client_refuses() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        good, bad = output(1), output(2, size=1_000_000)
        for wrong, reason in [
            (bad, "MESSAGE_TOO_LARGE"),
            (output(1, 4), "4 partitions"),
            (output(1, -2), "partitions count from 0"),
            (output(1, topic="t\ud800"), "its name must be text"),
            (msgspec.structs.replace(good, topic=5), "its name must be text"),
            (msgspec.structs.replace(good, timestamp_ms=1 << 63), "must be a whole number"),
            (msgspec.structs.replace(good, partition=1.0), "must be a whole number"),
            (msgspec.structs.replace(good, value=5), "value must be bytes"),
        ]:
            with pytest.raises(RecordsRefused, match=reason) as failed:
                await encoded(slot, wrong, good)
            (refused,) = failed.value.refused
            assert refused.output is wrong


async def test_text_and_buffers_are_taken_as_librdkafka_takes_them() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        parts: list[tuple[Any, Any]] = [
            ("text", "größe"),
            (bytearray(b"k"), memoryview(b"v")),
            (None, bytearray(b"x" * 9000)),
        ]
        await flush(slot, *(Output("t", value, key, [("h", "text")], -1, 0, 0, 0) for key, value in parts))  # type: ignore[list-item]
