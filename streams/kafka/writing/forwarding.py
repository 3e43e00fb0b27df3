"""Forward record batches that others have made, in one transaction. Their records are not touched.

A batch comes whole (format 2) and without a producer. Its head gets the producer's id and epoch, a sequence and the
checksum that follows from them; the rest goes out as it came. So a batch costs the same for one row and for 10,000.

A forwarder serves one transaction and is thrown away. A request without an answer is never sent again. It leaves a
doubt, which the caller resolves behind the fence of a new forwarder, by the marker that was committed with the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from streams.errors import TransactionFailed
from streams.kafka.wire import answers
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.messages import MalformedAnswer, PartitionError, WirePartition
from streams.kafka.wire.security import Security
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.last_transaction import by_topic
from streams.kafka.writing.made_batch import MadeBatch
from streams.kafka.writing.offsets import OffsetsOfNoMember, SentOffsets
from streams.kafka.writing.session import INIT, TransactionSession
from streams.records import DEFAULT_MESSAGE_LIMIT, RefusedRecord

REQUEST_BYTES: Final = 16 << 20
"""Bytes of the batches in one round of requests. A broker takes 100 MiB in one (``socket.request.max.bytes``)."""
_ABORT_SECONDS: Final = 5.0  # for the abort at the end; what it leaves open is ended by the next owner of the id
T = TypeVar("T")


def settings_of(kafka: Mapping[str, str], client_id: str) -> ProducerSettings:
    """Read what a forwarder needs of librdkafka's settings: servers and security. Raises ``ConfigError``."""
    return ProducerSettings(kafka["bootstrap.servers"], client_id, Security.of(kafka), DEFAULT_MESSAGE_LIMIT, None)


class _Part(NamedTuple):
    """A batch of this transaction."""

    topic: str
    partition: int
    records: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.topic}[{self.partition}]"


_Pieces = dict[_Part, list[bytes]]


class BatchForwarder:
    """One transaction under one transactional id. Blocks; on any one thread, with an event loop on a thread of its own.

    ``seconds``: of the transaction, from its first batch to its end. Raises ``TransactionFailed``, by whose ``code`` a
    doubt is known: ``_TRANSPORT``, and ``_TIMED_OUT`` where time is up. After it the forwarder can only be closed,
    which aborts the transaction where that is safe.
    """

    def __init__(self, settings: ProducerSettings, transactional_id: str, seconds: float) -> None:
        self._settings = settings
        self._transactional_id = transactional_id
        self._seconds = seconds
        self._enlisted: set[WirePartition] = set()
        self._sequences: dict[WirePartition, int] = {}
        self._ends_at = 0.0
        self._is_open = self._is_in_doubt = False  # an open transaction; a request without an answer
        self._stack = contextlib.ExitStack()

    # -- opening and closing -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal())
            self._cluster, self._session = self._portal.call(self._clients)
            stack.callback(self._portal.call, self._session.connections.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack, contextlib.suppress(TransactionFailed):
            # What a broker may still have before it would come behind the abort: the next owner's fence refuses it.
            if self._is_open and not self._is_in_doubt:
                self._call("abort_transaction", _ABORT_SECONDS, lambda: self._end(commit=False))

    async def _clients(self) -> tuple[Cluster, TransactionSession]:
        cluster, milliseconds = Cluster(self._settings), int(self._seconds * 1000)
        # Of all requests without an answer the fence alone is made again: what is sent again may be there twice.
        return cluster, TransactionSession(
            self._transactional_id, cluster, transaction_ms=milliseconds, delivery_ms=milliseconds, in_doubt=(INIT,)
        )

    def init_transactions(self, seconds: float) -> None:
        """Take the transactional id: when this returns, what was left open is decided, and its owner is fenced."""
        self._call("init_transactions", seconds, self._session.initialize)

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions; ``None``: there is no such topic. Requests it once."""
        if topic not in self._cluster.placements:
            self._timed("list_topics", lambda: self._cluster.refresh([topic]))
        found = self._cluster.placements.get(topic)
        return None if found is None else found.count

    def committed(self, group_id: str, topic: str, partition: int, seconds: float) -> tuple[int, str] | None:
        """Fetch the offset that a group has committed in a partition, with the text beside it (see ``send_offsets``);
        ``None``: none. Behind ``init_transactions``, so what the id's last owner left open is decided."""
        self._session.group_id = group_id
        return self._call("fetch_offsets", seconds, lambda: self._session.committed(topic, partition))

    # -- the transaction -----------------------------------------------------------------------------------------------

    def send(self, batches: Iterable[MadeBatch]) -> int:
        """Send batches, in their order where they are of one partition; return the number of their records. When this
        returns, all in-sync replicas have them."""
        records = 0
        for pieces in self._rounds(batches):
            # The call blocks, so ``pieces`` are still those of this turn when it reads them.
            self._timed("flush", lambda: self._send(pieces))  # noqa: B023
            records += sum(part.records for part in pieces)
        return records

    def send_offsets(self, group_id: str, topic: str, offsets: Mapping[int, int], metadata: str = "") -> None:
        """Put offsets of a group without members into the transaction. ``metadata``: kept with each."""
        sent = OffsetsOfNoMember({topic: offsets}, metadata)
        self._timed("send_offsets_to_transaction", lambda: self._send_offsets(group_id, sent))

    def commit(self) -> None:
        """Commit."""
        self._timed("commit_transaction", lambda: self._end(commit=True))

    def _rounds(self, batches: Iterable[MadeBatch]) -> Iterator[_Pieces]:
        """Group batches, each partition at most once: a request takes one of each."""
        pieces: _Pieces = {}
        partitions: set[WirePartition] = set()
        size = 0
        for batch in batches:
            where = batch.topic, batch.partition
            if pieces and (where in partitions or size + batch.size > REQUEST_BYTES):
                yield pieces
                pieces, partitions, size = {}, set(), 0
            sequence, records = self._sequences.get(where, 0), batch.records
            self._sequences[where] = (sequence + records) & 0x7FFFFFFF  # behind 2**31 - 1 they begin at 0 again
            _, producer_id, epoch = self._session.who
            pieces[_Part(*where, records, batch.size)] = batch.stamped(producer_id, epoch, sequence)
            partitions.add(where)
            size += batch.size
        if pieces:
            yield pieces

    async def _send(self, pieces: _Pieces) -> None:
        await self._enlist({(part.topic, part.partition) for part in pieces} - self._enlisted)
        await self._session.deliver(pieces, None, self._refused_by)

    async def _enlist(self, partitions: set[WirePartition]) -> None:
        if partitions:
            self._open()  # before the request: without an answer to it the broker may have a transaction open
            await self._session.enlist(by_topic(sorted(partitions)), with_offsets=False)
            self._enlisted |= partitions

    async def _send_offsets(self, group_id: str, offsets: SentOffsets) -> None:
        self._open()
        self._session.group_id = group_id
        await self._session.enlist({}, with_offsets=True)
        await self._session.locate_group()
        await self._session.deliver({}, offsets, self._refused_by)

    async def _end(self, *, commit: bool) -> None:
        if self._is_open:
            await self._session.end(commit=commit, requested=lambda: None)
            self._is_open = False

    async def _refused_by(self, part: _Part, answer: PartitionError) -> list[RefusedRecord]:
        """Describe a refused batch, and the records in it that the broker names."""
        named = "; ".join(f"record {index}: {reason}" for index, reason in answer.records)
        said = named or answer.message or answers.described(answer.code)
        reason = f"a batch of {part.records} records ({part.size} bytes): {said}"
        return [answers.refused_record(part.topic, part.partition, answer.code, reason, None)]

    # -- time ----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Note that the broker may have an open transaction from now on."""
        if not self._is_open:
            self._is_open = True
            self._ends_at = time.monotonic() + self._seconds

    def _timed(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call of the transaction: all of them together have its time."""
        return self._call(name, self._ends_at - time.monotonic() if self._is_open else self._seconds, call)

    def _call(self, name: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        return self._portal.call(self._bounded, name, seconds, call)

    async def _bounded(self, name: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        self._session.last_answer = ""
        is_answered = False
        try:
            async with asyncio.timeout(seconds):
                result = await call()
            is_answered = True
            return result
        except TransactionFailed:
            is_answered = True  # every request that was sent: the answers of a round are waited for together
            raise
        except (LostConnection, MalformedAnswer, TimeoutError) as error:
            raise self._session.unanswered(name, error, seconds) from None
        finally:
            self._is_in_doubt = self._is_in_doubt or not is_answered
