"""A slot of the wire producer against scripted brokers: each row of the error table, and connections that fail."""

from __future__ import annotations

import pytest

from streams.clients.group_wire import group_metadata
from streams.errors import RecordRefused, TransactionFailed
from streams.group import Snapshot
from streams.records import Output
from tests.unit.scripted_broker import (
    GARBAGE,
    GONE,
    MUTE,
    SHORT,
    SNAPSHOT,
    STEPS,
    TORN,
    TWICE,
    WEB,
    ScriptedBroker,
    named,
    opened,
    output,
    transact,
)

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
    ("AddPartitions", (48, 49, 77, 999), "abortable", 1),
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
                slot.begin()
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


@pytest.mark.parametrize("fault", [GONE, GARBAGE, MUTE, SHORT, WEB])
@pytest.mark.parametrize("request_name", ["Produce", "TxnOffsetCommit", "EndTxn"])
@pytest.mark.parametrize("version", [1, 2])
async def test_no_answer(fault: str, request_name: str, version: int) -> None:
    """Nothing is sent twice under one epoch. The end alone is asked for again, where the epoch tells the ends apart."""
    async with ScriptedBroker(transaction_version=version) as broker, opened(broker, timeout=0.5) as slot:
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


@pytest.mark.parametrize("fault", [TORN, TWICE])
async def test_an_answer_may_come_in_pieces_or_twice(fault: str) -> None:
    async with ScriptedBroker() as broker:
        for step in (*STEPS, "ApiVersions", "Metadata", "FindCoordinator"):
            broker.answer(step, fault)
        async with opened(broker) as slot:
            await transact(slot)
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
    ("Produce", 45, r"id: t\[0\]: .*out of order"),
    ("Produce", 29, r"id: t\[0\]: .*grant the principal the right to write"),
    ("Produce", 19, r"no success within 0\.3 seconds: t\[3\]: .*Not enough in-sync replicas"),
    ("AddPartitions", 29, r"id: t\[0\]: .*grant the principal"),
    ("AddOffsets", 30, r"id: group group: .*Group authorization failed"),
    ("AddOffsets", 15, r"no success within 0\.3 seconds: group group: .*oordinator not available"),
    ("TxnOffsetCommit", 30, r"id: group group, in\[0\]: .*Group authorization failed"),
    ("TxnOffsetCommit", 3, r"no success within 0\.3 seconds: group group, in\[0\]: .*Unknown topic"),
    ("EndTxn", 51, r"no success within 0\.3 seconds: .*concurrent"),
]


@pytest.mark.parametrize(("request_name", "code", "said"), NAMED)
async def test_a_failure_names_what_it_is_about(request_name: str, code: int, said: str) -> None:
    async with ScriptedBroker(transaction_version=1) as broker, opened(broker, timeout=0.3) as slot:
        broker.answer(request_name, *[code] * 1000)
        with pytest.raises(TransactionFailed, match=said):
            await transact(slot)


async def test_a_member_id_of_one_kilobyte() -> None:
    async with ScriptedBroker() as broker, opened(broker) as slot:
        slot.begin()
        slot.produce_many([output(1)], 0)
        await slot.flush()
        member = "m" * 1024
        snapshot = Snapshot(1, 5, member, group_metadata("group", 5, member, "i" * 249))
        await slot.commit("in", {0: 7}, lambda: snapshot, lambda: None)
        (offsets,) = [request for _, name, request in broker.requests if name == "TxnOffsetCommit"]
        assert (offsets.member_id, offsets.group_instance_id) == (member, "i" * 249)


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
