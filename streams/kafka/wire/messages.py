"""Encode the requests of a transaction and decode their answers. Pure: bytes in, values out.

Four requests are made for every transaction, so they are written by hand, in the versions below; everything else goes
by the classes of ``streams/kafka/wire/schemas``. Fields and their order: Kafka's message definitions
(``clients/src/main/resources/common/message``); all versions here are flexible (lengths as unsigned varints, plus one).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from streams.kafka.wire.codec import MalformedAnswer as MalformedAnswer
from streams.kafka.wire.codec import WireBytes, put_unsigned

PRODUCE: Final = 0
ADD_PARTITIONS: Final = 24
ADD_OFFSETS: Final = 25
END: Final = 26
COMMIT_OFFSETS: Final = 28
LEAST_VERSIONS: Final[Mapping[int, tuple[str, int]]] = {
    PRODUCE: ("Produce", 9),
    ADD_PARTITIONS: ("AddPartitionsToTxn", 3),
    ADD_OFFSETS: ("AddOffsetsToTxn", 3),
    END: ("EndTxn", 3),
    COMMIT_OFFSETS: ("TxnOffsetCommit", 3),
}
"""The name, and the least version, of the requests that are encoded here: below it they have other fields."""
_NO_TAGS: Final = b"\0"
_BYTES: Final = [bytes((number,)) for number in range(128)]
WirePartition = tuple[str, int]
"""Topic and partition."""


class Identity(NamedTuple):
    """The identity of a transactional producer, as the broker gave it."""

    transactional_id: str
    producer_id: int
    epoch: int


class PartitionError(NamedTuple):
    """The answer of a Produce request for one partition that failed. ``records``: index in the batch and reason of the
    records at fault, if the broker names them."""

    code: int
    message: str
    records: Sequence[tuple[int, str]]


def unsigned(number: int) -> bytes:
    """Encode an unsigned varint."""
    if number < 128:
        return _BYTES[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    encoded = bytearray()
    put_unsigned(encoded, number)
    return bytes(encoded)


def compact(text: str | None) -> bytes:
    """Encode a compact string; ``None`` is null."""
    if text is None:
        return b"\0"
    raw = text.encode()
    return unsigned(len(raw) + 1) + raw


def produce(
    transactional_id: str, timeout_ms: int, topics: Mapping[str, Sequence[tuple[int, Sequence[bytes]]]]
) -> list[bytes]:
    """Encode Produce (v9 to v12), acknowledged by all in-sync replicas. ``topics``: partition and pieces of its batch,
    by topic."""
    parts = [compact(transactional_id), struct.pack(">hi", -1, timeout_ms), unsigned(len(topics) + 1)]
    for topic, batches in topics.items():
        parts += [compact(topic), unsigned(len(batches) + 1)]
        for partition, pieces in batches:
            parts.append(struct.pack(">i", partition) + unsigned(sum(map(len, pieces)) + 1))
            parts += pieces
            parts.append(_NO_TAGS)
        parts.append(_NO_TAGS)
    parts.append(_NO_TAGS)
    return parts


def refused(
    frame: bytes, asked: Iterable[WirePartition], bases: dict[WirePartition, int] | None = None
) -> dict[WirePartition, PartitionError]:
    """Decode the answer of Produce: the partitions that failed. Each that was ``asked`` for must be in it. ``bases``
    gets the offset of the first record, of those that did not fail."""
    answer, failed, left = _Answer(frame), {}, set(asked)
    for _ in range(answer.array()):
        topic, partitions = answer.text(), answer.array()
        # As a whole where nothing failed: of live traffic a request has as many partitions as records.
        if done := answer.take_done(partitions, _WRITTEN, _WRITTEN_ENDS):
            written = {(topic, values[0]): values[2] for values in done}
            left -= written.keys()
            if bases is not None:
                bases |= written
            partitions = 0
        for _ in range(partitions):
            partition, code = answer.take(_PARTITION)
            (base,) = answer.take(_INT64)
            answer.skip(16)  # append time, start of the log
            records = []
            for _ in range(answer.array()):
                (index,) = answer.take(_INT32)
                records.append((index, answer.text()))
                answer.tags()
            message = answer.text()
            answer.tags()
            left.discard((topic, partition))
            if code:
                failed[topic, partition] = PartitionError(code, message, records)
            elif bases is not None:
                bases[topic, partition] = base
        answer.tags()
    _check_complete(left)
    return failed


def add_partitions(who: Identity, topics: Mapping[str, Iterable[int]]) -> list[bytes]:
    """Encode AddPartitionsToTxn (v3)."""
    parts = [_who(who), unsigned(len(topics) + 1)]
    for topic, partitions in topics.items():
        numbers = [struct.pack(">i", partition) for partition in partitions]
        parts += [compact(topic), unsigned(len(numbers) + 1), *numbers, _NO_TAGS]
    parts.append(_NO_TAGS)
    return parts


def partition_codes(frame: bytes, asked: Iterable[WirePartition]) -> dict[WirePartition, int]:
    """Decode the answer of AddPartitionsToTxn or TxnOffsetCommit: the codes of the partitions that failed. Each that
    was ``asked`` for must be in it."""
    answer, failed, left = _Answer(frame), {}, set(asked)
    answer.skip(4)  # throttle time
    for _ in range(answer.array()):
        topic, partitions = answer.text(), answer.array()
        if done := answer.take_done(partitions, _NOTED, _NOTED_ENDS):
            left -= {(topic, values[0]) for values in done}
            partitions = 0
        for _ in range(partitions):
            partition, code = answer.take(_PARTITION)
            answer.tags()
            left.discard((topic, partition))
            if code:
                failed[topic, partition] = code
        answer.tags()
    _check_complete(left)
    return failed


def _check_complete(left: Collection[WirePartition]) -> None:
    for topic, partition in left:
        raise MalformedAnswer(f"the answer says nothing of {topic}[{partition}]")


def add_offsets(who: Identity, group_id: str) -> list[bytes]:
    """Encode AddOffsetsToTxn (v3)."""
    return [_who(who), compact(group_id), _NO_TAGS]


def commit_offsets(
    who: Identity,
    group_id: str,
    generation: int,
    member_id: str,
    instance_id: str | None,
    offsets: Mapping[str, Mapping[int, int]],
    metadata: str = "",
) -> list[bytes]:
    """Encode TxnOffsetCommit (v3 to v5). ``offsets``: the next offset to read, by topic and partition. ``metadata``: of
    each."""
    parts = [
        compact(who.transactional_id),
        compact(group_id),
        struct.pack(">qhi", who.producer_id, who.epoch, generation),
        compact(member_id),
        compact(instance_id),
        unsigned(len(offsets) + 1),
    ]
    end = compact(metadata) + _NO_TAGS
    for topic, positions in offsets.items():
        parts += [compact(topic), unsigned(len(positions) + 1)]
        parts += [
            struct.pack(">iqi", partition, offset, -1) + end for partition, offset in positions.items()
        ]  # no leader epoch
        parts.append(_NO_TAGS)
    parts.append(_NO_TAGS)
    return parts


def end(who: Identity, *, commit: bool) -> list[bytes]:
    """Encode EndTxn (v3 to v5)."""
    return [_who(who), struct.pack(">?", commit), _NO_TAGS]


def code_of(frame: bytes) -> int:
    """Decode the answer of AddOffsetsToTxn, or of EndTxn before v5: its code."""
    answer = _Answer(frame)
    answer.skip(4)
    return int(answer.take(_INT16)[0])


def ended(frame: bytes) -> tuple[int, int, int]:
    """Decode the answer of EndTxn v5: code, and the producer id and epoch of the next transaction."""
    answer = _Answer(frame)
    answer.skip(4)
    code, producer_id, epoch = answer.take(_ENDED)
    return code, producer_id, epoch


def _who(who: Identity) -> bytes:
    return compact(who.transactional_id) + struct.pack(">qh", who.producer_id, who.epoch)


_PARTITION: Final = struct.Struct(">ih")
# Partition and code; of Produce also base offset, append time, start of the log, records at fault, message; tags.
_NOTED: Final = struct.Struct(">ih1s")
_NOTED_ENDS: Final = (b"\0",)
_WRITTEN: Final = struct.Struct(">ihqqq3s")
_WRITTEN_ENDS: Final = (b"\1\0\0", b"\1\1\0")  # no record, and no message, or an empty one
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_INT16: Final = struct.Struct(">h")
_ENDED: Final = struct.Struct(">hqh")


class Fields(WireBytes):
    """Bytes in Kafka's flexible encoding, read field by field."""

    __slots__ = ()

    def take_done(self, partitions: int, shape: struct.Struct, ends: tuple[bytes, ...]) -> list[tuple[Any, ...]]:
        """Take the values of so many partitions, which begin with number and code, if all codes are 0 and all end so;
        else none."""
        end = self.at + shape.size * partitions
        if end > self.end:
            return []
        # A partition with other values has another size. What is behind it is read amiss here, but itself is not.
        found = list(shape.iter_unpack(self.data[self.at : end]))
        for values in found:
            if values[1] or values[-1] not in ends:
                return []
        self.at = end
        return found

    def array(self) -> int:
        return max(0, self.unsigned() - 1)

    def text(self) -> str:
        return self.cut(self.array()).decode(errors="replace")  # a broker's words, for people


class _Answer(Fields):
    """A frame, read from its head on: correlation id and tags were checked by the connection."""

    __slots__ = ()

    def __init__(self, frame: bytes) -> None:
        super().__init__(frame, 4)
        self.tags()
