"""When which events had come how far, as a system under test saw it: a line per batch, slice and transaction, none per
event.

A mark is a point of the way, a time, and how far each partition was then: an event had passed the point once its
partition was beyond its offset. So what is traced costs next to nothing, and untraced the engine is as it always is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import msgspec

OPTION = "trace"
"""Of a system: the file to write."""
POINTS = ("received", "handled", "sealed", "flushing", "flushed", "began", "offsets", "committed")
"""What a system under test tells, in the order of an event's way."""

Marks = dict[str, dict[int, list[tuple[int, float]]]]
"""By point and partition: the next offset, and the time (seconds since the epoch) from which on it was so."""


class Trace:
    """Collects marks. May be used by several threads."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float, dict[int, int]]] = []

    def at(self, point: str, offsets: Mapping[int, int], seconds: float | None = None) -> None:
        """These partitions were so far (next offset) at this time; now if none is said."""
        self._marks.append((point, time.time() if seconds is None else seconds, dict(offsets)))

    def marks(self) -> Marks:
        """All, as they came."""
        found: Marks = {point: {} for point in POINTS}
        for point, seconds, offsets in self._marks:
            for partition, offset in offsets.items():
                found[point].setdefault(partition, []).append((offset, seconds))
        return found

    def write(self, path: str | Path) -> None:
        """As JSON, for whoever started the system."""
        Path(path).write_bytes(msgspec.json.encode(self.marks()))


def read(path: str | Path) -> Marks:
    """What ``Trace.write`` wrote. Raises ``OSError`` and ``msgspec.DecodeError``."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Marks)


@contextlib.contextmanager
def engine_traced(trace: Trace) -> Iterator[None]:
    """Event sources of this process tell how far they are. Raises ``AttributeError`` if the engine has changed so much
    that there is nothing to listen to."""
    from streams.clients.consumer import InputConsumer
    from streams.clients.transactional import TransactionalProducer
    from streams.core.transaction import Transaction
    from streams.runtime.transaction_pool import TransactionPool

    poll, admit, seal = InputConsumer.poll_batch, TransactionPool.admit, Transaction.seal
    flush, send_offsets = TransactionalProducer.flush, TransactionalProducer.send_offsets
    commit = TransactionalProducer.commit
    flushes: WeakKeyDictionary[TransactionalProducer, tuple[float, float]] = WeakKeyDictionary()
    sending: WeakKeyDictionary[TransactionalProducer, Mapping[int, int]] = WeakKeyDictionary()

    def traced_poll(consumer: InputConsumer, *args: Any, **named: Any) -> Mapping[int, Sequence[Any]] | None:
        batch = poll(consumer, *args, **named)
        if batch:
            trace.at("received", {partition: records[-1].offset + 1 for partition, records in batch.items()})
        return batch

    def traced_admit(pool: TransactionPool, partition: int, offset: int, *args: Any, **named: Any) -> None:
        trace.at("handled", {partition: offset})
        admit(pool, partition, offset, *args, **named)

    def traced_seal(txn: Transaction, *args: Any, **named: Any) -> None:
        seal(txn, *args, **named)
        trace.at("sealed", {partition: cut.offset for partition, cut in txn.cuts.items()})

    def traced_flush(producer: TransactionalProducer, *args: Any, **named: Any) -> None:
        began = time.time()
        flush(producer, *args, **named)
        flushes[producer] = began, time.time()

    def traced_send_offsets(
        producer: TransactionalProducer, topic: str, offsets: Mapping[int, int], *args: Any, **named: Any
    ) -> None:
        began = time.time()
        if producer in flushes:  # of which offsets is known only now
            for point, seconds in zip(("flushing", "flushed"), flushes.pop(producer), strict=True):
                trace.at(point, offsets, seconds)
        trace.at("began", offsets, began)
        send_offsets(producer, topic, offsets, *args, **named)
        trace.at("offsets", offsets)
        sending[producer] = offsets

    def traced_commit(producer: TransactionalProducer, *args: Any, **named: Any) -> None:
        commit(producer, *args, **named)
        trace.at("committed", sending.pop(producer, {}))

    with (
        mock.patch.object(InputConsumer, "poll_batch", traced_poll),
        mock.patch.object(TransactionPool, "admit", traced_admit),
        mock.patch.object(Transaction, "seal", traced_seal),
        mock.patch.object(TransactionalProducer, "flush", traced_flush),
        mock.patch.object(TransactionalProducer, "send_offsets", traced_send_offsets),
        mock.patch.object(TransactionalProducer, "commit", traced_commit),
    ):
        yield
