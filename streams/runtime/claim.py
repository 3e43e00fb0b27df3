"""Becoming the only writer of a partition: its transactional id taken, what a predecessor left ended, its log read.

A *claim* is a transactional id that belongs to one partition of a topic. Who takes the id is the partition's writer
until the next one takes it, whatever a frozen or cut-off predecessor still sends. The order is the protocol:

1. ``take`` the id, and look up the end of the log.
2. ``read`` up to that end: it tells what predecessors have committed, this process under an earlier claim among them.
3. ``append`` transactions.

After an error of ``append`` nothing is guessed: ``take`` once more settles it, and what is in the log behind the last
known position tells which way. A writer that was fenced does so only when it is the elected one *by an answer that is
younger than the error* (``Tenure.is_confirmed``): else two would take the claim from each other, again and again.

Nothing here decides who should write: that is a group's business (``runtime.ownership.tenure``), or an operator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final, Self

from streams.errors import RecordsRefused, TopicError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.writing.blocking import BlockingSlot
from streams.model.topics import missing
from streams.records import IncomingRecord, Output

TRANSACTION_SECONDS: Final = 60.0
"""The broker ends a transaction that has been open for so many seconds."""
CALL_SECONDS: Final = 30.0
"""A call takes so many seconds, at most."""


class Claim:
    """The claim of one partition. All calls block; one thread at a time; ``close`` it. On an event loop, call it
    through a ``bridge.Worker``.

    ``call_seconds``: no call takes longer, but for ``read``, which takes as long as records come. Raises
    ``ConfigError``.
    """

    def __init__(
        self,
        settings: ClientSettings,
        transactional_id: str,
        topic: str,
        partition: int = 0,
        *,
        transaction_seconds: float = TRANSACTION_SECONDS,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self.transactional_id, self.topic, self.partition = transactional_id, topic, partition
        self._seconds = call_seconds
        with ExitStack() as opened:
            self._admin, self._reader = TopicAdmin(settings), PartitionReader(settings)
            opened.callback(self._admin.close)
            opened.callback(self._reader.close)
            self._slot = BlockingSlot(
                settings, transactional_id, transaction_seconds=transaction_seconds, seconds=call_seconds
            )
            opened.callback(self._slot.close)
            self._opened = opened.pop_all()

    @property
    def where(self) -> str:
        """``topic[partition]``."""
        return f"{self.topic}[{self.partition}]"

    def identity(self) -> tuple[str, int]:
        """Return the topic's id, another one after the topic was recreated, and its number of partitions. Raises
        ``TopicError`` (there is none), ``BrokerUnavailable``."""
        found = self._admin.identity(self.topic, self._seconds)
        if found is None:
            raise TopicError(missing(self.topic))
        return found

    def take(self) -> Watermarks:
        """Take the claim, from its owner or anew after an error, and return where the log begins and ends.

        Raises ``TransactionFailed``, ``BrokerUnavailable``.
        """
        # The id comes first: when the broker answers, an open transaction of the predecessor is ended, and it is
        # fenced. Only then is the end of the log looked up: nothing of a predecessor can come behind it.
        self._slot.open([self.topic])
        return self.log_range()

    def log_range(self) -> Watermarks:
        """Return where the log begins and ends, without taking the claim: what predecessors have begun may be
        committed behind that end. Raises ``BrokerUnavailable``."""
        return self._admin.watermarks(self.topic, [self.partition], self._seconds)[self.partition]

    def read(self, start: int, end: int) -> list[IncomingRecord]:
        """Return the committed records from one offset up to another. The end of a log may be markers, aborted records
        and holes: positions count, not records. Raises as ``PartitionReader.read``."""
        spans = {self.partition: (start, end)}
        return self._reader.read_all(self.topic, spans, stalled_after_seconds=self._seconds)[self.partition]

    def append(self, outputs: Sequence[Output]) -> int:
        """Commit records in one transaction, one of them at least in this partition; return the position behind the
        last one there.

        Raises ``RecordsRefused`` (nothing is committed) and ``TransactionFailed`` (in doubt, whatever its kind says).
        After either the claim is to be taken again.
        """
        own = self.topic, self.partition
        # A record in this partition is needed: in doubt it tells whether the transaction was committed.
        if not any((output.topic, output.partition) == own for output in reversed(outputs)):
            raise ValueError(f"a transaction of {self.transactional_id} without a record in {self.where}")
        try:
            end = self._slot.send(outputs)[own]
        except RecordsRefused:
            with suppress(TransactionFailed):  # else readers of committed records would wait for the next ``take``
                self._slot.abort()
            raise
        if end < 0:
            reason = f"{self.where}: the broker has not said where the records are"
            raise TransactionFailed("flush", "NO_OFFSET", "abortable", reason)
        self._slot.commit()
        return end

    def close(self) -> None:
        """End what is under way, and let go of everything. An open transaction is left to its time, or to the next
        owner. Repeating is harmless."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
