"""Record batches of the wire producer, read by another decoder (kafka-python's), for any records."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from streams.kafka.wire import messages
from streams.kafka.wire.compression import Compression, compression_of
from streams.kafka.wire.placement import Placement
from streams.kafka.writing.record_batch import EncodedRecords
from streams.records import Change, Output, Record, changelog_record
from streams.sak.murmur2 import partition_of
from streams.source.event_producer import TransactionRecords

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.protocol.producer import (
        AddOffsetsToTxnRequest,
        AddPartitionsToTxnRequest,
        EndTxnRequest,
        ProduceRequest,
        TxnOffsetCommitRequest,
    )
    from kafka.record import MemoryRecords

PARTITIONS = 3
START = 1_700_000_000_000
sizes = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 8190, 8191, 8192, 8193, 16_383, 16_384]))
contents = st.one_of(st.none(), st.binary(max_size=20), st.builds(lambda size: b"x" * size, sizes))
headers = st.one_of(
    st.none(), st.lists(st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=5))), max_size=3)
)
outputs = st.builds(
    Output,
    topic=st.just("t"),
    value=contents,
    key=contents,
    headers=headers,
    partition=st.integers(-1, PARTITIONS - 1),
    timestamp_ms=st.sampled_from([0, START, START - 100_000, START + 9_000, 1]),
    origin_partition=st.just(0),
    origin=st.just(0),
)


def decoded(batch: Any, compression: Compression | None) -> list[Any]:
    data = b"".join(batch.encode(7, 3, 11, compression))
    records = MemoryRecords(data)
    (read,) = list(iter(records.next_batch, None))
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (7, 3, 11)
    assert read.is_transactional
    assert read.validate_crc()
    found = list(read)
    assert read.last_offset_delta == len(found) - 1
    assert read.max_timestamp == max(record.timestamp for record in found)
    return found


@given(
    st.lists(outputs, max_size=30),
    st.sampled_from([100, 400, 20_000, 900_000]),
    st.sampled_from(["none", "gzip"]),
)
@example([Output("t", b"v", b"k", None, -1, 0, 0, 0)] * 200, 900_000, "none")
def test_what_is_encoded_is_read(sent: list[Output], limit: int, codec: str) -> None:
    placements = {"t": Placement("t", PARTITIONS, limit)}
    encoded = EncodedRecords(placements, 1_000_000)
    half = encoded.add(sent, 0, START) if len(sent) < 2 else encoded.add(sent[: len(sent) // 2], 0, START)
    assert encoded.add(sent, half, START) == len(sent)
    found: dict[int, list[Any]] = {}
    for part in chain(*encoded.rounds({})):
        assert part.topic == "t"
        assert part.batch.size <= limit or part.batch.records == 1
        records = decoded(part.batch, compression_of({"compression.type": codec}))
        assert len(records) == part.batch.records
        found.setdefault(part.partition, []).extend(records)
    without_key = {number for number in found if any(r.key is None for r in found[number])}
    for number, records in found.items():
        for index, record in enumerate(records):
            output = encoded.output_at("t", number, index)
            assert output is not None
            assert (record.key, record.value) == (output.key, output.value)
            assert list(record.headers) == list(output.headers or ())
            assert record.timestamp == (output.timestamp_ms or START)
            if output.partition >= 0:
                assert number == output.partition
            elif output.key is not None:
                assert number == partition_of(output.key, PARTITIONS)
            else:
                assert number in without_key
        assert encoded.output_at("t", number, len(records)) is None
    assert sum(map(len, found.values())) == len(sent)


changes = st.builds(Change, key=st.binary(max_size=20), value=contents, type=st.sampled_from(["", "", "", "Account"]))


@given(
    st.lists(changes, min_size=1, max_size=40),
    st.sampled_from([100, 400, 900_000]),
    st.sampled_from([90, 9_000, 1_000_000]),
    st.sampled_from([0, 9, -9, 9_000]),
)
@example([Change(b"k%d" % number, b"v") for number in range(9_000)], 900_000, 1_000_000, 0)
@example([Change(b"k", b"v")] * 3 + [Change(b"k", 7)] * 2, 900_000, 1_000_000, 0)  # type: ignore[arg-type]
def test_changes_are_encoded_as_their_records_are(
    sent: list[Change], limit: int, message_limit: int, later_ms: int
) -> None:
    """Byte for byte, up to the first that is refused, and found again by their positions."""
    placements = {"c": Placement("c", PARTITIONS, limit)}
    one, other = (EncodedRecords(placements, message_limit) for _ in range(2))
    records = [changelog_record("c", 1, change) for change in sent]
    half = one.add(records[: len(records) // 2], 0, START)
    assert other.add_changes("c", 1, sent[: len(sent) // 2], 0, START) == half
    assert other.add_changes("c", 1, sent, half, START + later_ms) == one.add(records, half, START + later_ms)
    assert [(part.partition, part.batch) for part in chain(*other.rounds({}))] == [
        (part.partition, part.batch) for part in chain(*one.rounds({}))
    ]
    for index in {*range(min(len(sent), 40)), len(sent) - 1, len(sent)}:
        assert other.output_at("c", 1, index) == one.output_at("c", 1, index)
        assert other.output_at("c", 2, index) is None


def test_requests_are_those_of_the_schema() -> None:
    """Field by field against kafka-python, which is generated from Kafka's own definitions."""
    who = messages.Identity("id", 1 << 40, 32_000)
    topics = {"t": [(0, [b"abc", b"d"]), (7, [b"x" * 300])], "größe": [(1, [b""])]}
    of = ProduceRequest.TopicProduceData
    data = [
        of(name=name, partition_data=[of.PartitionProduceData(index=n, records=b"".join(b)) for n, b in parts])
        for name, parts in topics.items()
    ]
    wanted = ProduceRequest(transactional_id="id", acks=-1, timeout_ms=5000, topic_data=data)
    for version in (9, 11, 12):
        assert b"".join(messages.produce("id", 5000, topics)) == bytes(wanted.encode(version=version))
    partitions = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id="id",
        v3_and_below_producer_id=who.producer_id,
        v3_and_below_producer_epoch=who.epoch,
        v3_and_below_topics=[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name="t", partitions=[3, 200])],
    )
    assert b"".join(messages.add_partitions(who, {"t": [3, 200]})) == bytes(partitions.encode(version=3))
    ids: dict[str, Any] = {"transactional_id": "id", "producer_id": who.producer_id, "producer_epoch": who.epoch}
    group = AddOffsetsToTxnRequest(**ids, group_id="g" * 200)
    assert b"".join(messages.add_offsets(who, "g" * 200)) == bytes(group.encode(version=3))
    for version in (3, 5):
        for commit in (True, False):
            end = EndTxnRequest(**ids, committed=commit)
            assert b"".join(messages.end(who, commit=commit)) == bytes(end.encode(version=version))
        for instance in (None, "i"):
            topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
            position = topic.TxnOffsetCommitRequestPartition(
                partition_index=3, committed_offset=1 << 50, committed_leader_epoch=-1, committed_metadata=""
            )
            offsets = TxnOffsetCommitRequest(
                **ids,
                group_id="g",
                generation_id=9,
                member_id="m",
                group_instance_id=instance,
                topics=[topic(name="in", partitions=[position])],
            )
            made = messages.commit_offsets(who, "g", 9, "m", instance, {"in": {3: 1 << 50}})
            assert b"".join(made) == bytes(offsets.encode(version=version))


def test_buffers_of_a_transactions_records_are_copied_when_they_are_sent() -> None:
    records, buffer = TransactionRecords("t", 10, None), bytearray(b"one")
    for content in (b"one", b"two"):
        buffer[:] = content
        records.send(Record("t", memoryview(buffer), buffer))  # type: ignore[arg-type]
    assert [(sent.key, sent.value) for sent in records.outputs] == [(b"one", b"one"), (b"two", b"two")]
