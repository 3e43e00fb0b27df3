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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal
from confluent_kafka import KafkaError, KafkaException

from streams.errors import TransactionFailed
from streams.kafka import permissions
from streams.kafka.permissions import Right, denied
from streams.kafka.wire import answers, messages
from streams.kafka.wire.answers import Meaning
from streams.kafka.wire.cluster import GROUP, TRANSACTION, UNKNOWN_SECONDS, Cluster, SlotConnections
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.messages import Identity, MalformedAnswer, WirePartition
from streams.kafka.wire.protocol import V1, Pauses, TransactionProtocol, protocol_of
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.security import Security
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.made_batch import MadeBatch
from streams.records import DEFAULT_MESSAGE_LIMIT

REQUEST_BYTES: Final = 16 << 20
"""Bytes of the batches in one round of requests. A broker takes 100 MiB in one (``socket.request.max.bytes``)."""
_INIT_VERSION: Final = 5  # of InitProducerId, at most; a broker that takes less gets less
_ABORT_SECONDS: Final = 5.0  # for the abort at the end; what it leaves open is ended by the next owner of the id
# Answers to what had no effect. All others, and no answer, may have had one: what is sent again would be there twice.
_AGAIN: Final = (Meaning.AGAIN, Meaning.AGAIN_LEADER, Meaning.AGAIN_COORDINATOR)
T = TypeVar("T")


def settings_of(kafka: Mapping[str, str], client_id: str) -> ProducerSettings:
    """Read what a forwarder needs of librdkafka's settings: servers and security. Raises ``ConfigError``."""
    return ProducerSettings(kafka["bootstrap.servers"], client_id, Security.of(kafka), DEFAULT_MESSAGE_LIMIT, None)


class _Part(NamedTuple):
    """A batch of this transaction: in the pieces that are sent."""

    topic: str
    partition: int
    records: int
    pieces: list[bytes]

    @property
    def name(self) -> str:
        return f"{self.topic}[{self.partition}]"


class BatchForwarder:
    """One transaction under one transactional id. Blocks; on any one thread, with an event loop on a thread of its own.

    ``seconds``: of the transaction, from its first batch to its end. Raises ``KafkaException`` for what a broker
    answers, and where time is up (``_TIMED_OUT``); ``TransactionFailed`` (``"unknown"``) for a doubt. After either the
    forwarder can only be closed, which aborts the transaction where that is safe.
    """

    def __init__(self, settings: ProducerSettings, transactional_id: str, seconds: float) -> None:
        self._settings = settings
        self._seconds = seconds
        self._who = Identity(transactional_id, -1, -1)
        self._protocol: TransactionProtocol = V1
        self._coordinator = -1
        self._enlisted: set[WirePartition] = set()
        self._sequences: dict[WirePartition, int] = {}
        self._ends_at = 0.0
        self._is_open = self._is_in_doubt = False  # an open transaction; a request without an answer
        self._last_answer = ""
        self._stack = contextlib.ExitStack()

    # -- opening and closing -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal())
            self._cluster, self._connections = self._portal.call(self._clients)
            stack.callback(self._portal.call, self._connections.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack, contextlib.suppress(KafkaException, TransactionFailed):
            # What a broker may still have before it would come behind the abort: the next owner's fence refuses it.
            if self._is_open and not self._is_in_doubt:
                self._call("abort_transaction", _ABORT_SECONDS, lambda: self._end(commit=False))

    async def _clients(self) -> tuple[Cluster, SlotConnections]:
        cluster = Cluster(self._settings)
        return cluster, SlotConnections(cluster)

    def init_transactions(self, seconds: float) -> None:
        """Take the transactional id: when this returns, what was left open is decided, and its owner is fenced."""
        self._call("init_transactions", seconds, self._initialize)

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions; ``None``: there is no such topic. Requests it once."""
        if topic not in self._cluster.placements:
            self._timed("list_topics", lambda: self._cluster.refresh([topic]))
        found = self._cluster.placements.get(topic)
        return None if found is None else found.count

    async def _initialize(self) -> None:
        transactional_id = self._who.transactional_id
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=int(self._seconds * 1000),
            producer_id=-1,
            producer_epoch=-1,
        )
        pauses = Pauses()
        while True:
            try:
                self._coordinator = await self._cluster.coordinator(TRANSACTION, transactional_id)
                connection = await self._connections.get(self._coordinator)
                answer = await connection.ask(request, _INIT_VERSION)
            except LostConnection as lost:  # repeated at will: it opens nothing, and fences only
                if lost.code != "_TRANSPORT":
                    raise
                self._last_answer = str(lost)
                await pauses.next()
                continue
            if not answer.error_code:
                break
            needed = [permissions.on_transactional_id("Write", self._who.transactional_id)]
            await self._again_or_raise(answer.error_code, answers.INIT, pauses, "", needed)
        self._protocol = protocol_of(connection)
        self._who = Identity(transactional_id, answer.producer_id, answer.producer_epoch)

    # -- the transaction -----------------------------------------------------------------------------------------------

    def send(self, batches: Iterable[MadeBatch]) -> int:
        """Send batches, in their order where they are of one partition; return the number of their records. When this
        returns, all in-sync replicas have them."""
        records = 0
        for parts in self._rounds(batches):
            # The call blocks, so ``parts`` are still those of this turn when it reads them.
            self._timed("flush", lambda: self._send(parts))  # noqa: B023
            records += sum(part.records for part in parts)
        return records

    def send_offsets(self, group_id: str, topic: str, offsets: Mapping[int, int], metadata: str = "") -> None:
        """Put offsets of a group without members into the transaction. ``metadata``: kept with each."""
        self._timed("send_offsets_to_transaction", lambda: self._send_offsets(group_id, topic, offsets, metadata))

    def commit(self) -> None:
        """Commit."""
        self._timed("commit_transaction", lambda: self._end(commit=True))

    def _rounds(self, batches: Iterable[MadeBatch]) -> Iterator[list[_Part]]:
        """Group batches, each partition at most once: a request takes one of each."""
        parts: list[_Part] = []
        partitions: set[WirePartition] = set()
        size = 0
        for batch in batches:
            where = batch.topic, batch.partition
            if parts and (where in partitions or size + batch.size > REQUEST_BYTES):
                yield parts
                parts, partitions, size = [], set(), 0
            sequence, records = self._sequences.get(where, 0), batch.records
            self._sequences[where] = (sequence + records) & 0x7FFFFFFF  # behind 2**31 - 1 they begin at 0 again
            pieces = batch.stamped(self._who.producer_id, self._who.epoch, sequence)
            parts.append(_Part(batch.topic, batch.partition, records, pieces))
            partitions.add(where)
            size += batch.size
        if parts:
            yield parts

    async def _send(self, parts: list[_Part]) -> None:
        await self._enlist({(part.topic, part.partition) for part in parts} - self._enlisted)
        pauses = Pauses()
        while parts:
            failed = await self._produce(parts)
            again = []
            is_moved = False
            for part in parts:
                answer = failed.get((part.topic, part.partition))
                if answer is None:
                    continue
                meaning = answers.PRODUCE.get(answer.code)
                is_missing = answer.code == KafkaError.UNKNOWN_TOPIC_OR_PART and pauses.elapsed > UNKNOWN_SECONDS
                if meaning not in _AGAIN or is_missing:
                    needed = [permissions.on_topic("Write", part.topic)]
                    raise _failure(answer.code, _described(part, answer), needed)
                again.append(part)
                self._last_answer = answers.described(answer.code, part.name)
                is_moved = is_moved or meaning is Meaning.AGAIN_LEADER
            if again:
                await pauses.next()
                if is_moved:
                    await self._cluster.refresh({part.topic for part in again})
            parts = again

    async def _produce(self, parts: Iterable[_Part]) -> dict[WirePartition, messages.PartitionError]:
        """Send each broker its batches, all at once; return the partitions that failed."""
        failed: dict[WirePartition, messages.PartitionError] = {}
        by_broker: dict[int, list[_Part]] = {}
        for part in parts:
            leaders = self._cluster.leaders.get(part.topic, ())
            leader = leaders[part.partition] if part.partition < len(leaders) else -1
            if leader < 0:
                failed[part.topic, part.partition] = messages.PartitionError(KafkaError.LEADER_NOT_AVAILABLE, "", ())
            else:
                by_broker.setdefault(leader, []).append(part)
        calls = [self._produce_at(node, own) for node, own in by_broker.items()]
        for found in await asyncio.gather(*calls):
            failed |= found
        return failed

    async def _produce_at(self, node: int, parts: list[_Part]) -> dict[WirePartition, messages.PartitionError]:
        try:
            connection = await self._connections.get(node)
        except LostConnection as lost:  # nothing was sent; a partition whose leader has died gets another one
            if lost.code != "_TRANSPORT":
                raise
            answer = messages.PartitionError(KafkaError.LEADER_NOT_AVAILABLE, str(lost), ())
            return {(part.topic, part.partition): answer for part in parts}
        topics: dict[str, list[tuple[int, list[bytes]]]] = {}
        for part in parts:
            topics.setdefault(part.topic, []).append((part.partition, part.pieces))
        request = messages.produce(self._who.transactional_id, int(self._seconds * 1000), topics)
        frame = await connection.call(messages.PRODUCE, self._protocol.version(connection, messages.PRODUCE), request)
        return messages.refused(frame, [(part.topic, part.partition) for part in parts])

    async def _enlist(self, partitions: set[WirePartition]) -> None:
        if not partitions:
            return
        topics: dict[str, list[int]] = {}
        for topic, partition in sorted(partitions):
            topics.setdefault(topic, []).append(partition)
        pauses = Pauses()
        while True:
            self._open()  # before the request: without an answer to it the broker may have a transaction open
            connection = await self._connections.get(self._coordinator)
            frame = await connection.call(messages.ADD_PARTITIONS, 3, messages.add_partitions(self._who, topics))
            codes = {code: f"{topic}[{n}]" for (topic, n), code in messages.partition_codes(frame, partitions).items()}
            codes.pop(KafkaError.OPERATION_NOT_ATTEMPTED, None)  # because another partition of the request failed
            if not codes:
                self._enlisted |= partitions
                return
            for code, name in codes.items():
                is_missing = code == KafkaError.UNKNOWN_TOPIC_OR_PART and pauses.elapsed > UNKNOWN_SECONDS
                needed = [permissions.on_topic("Write", name.rpartition("[")[0])]
                await self._again_or_raise(code, {} if is_missing else answers.ENLIST, pauses, name, needed)

    async def _send_offsets(self, group_id: str, topic: str, offsets: Mapping[int, int], metadata: str) -> None:
        pauses = Pauses()
        needed = permissions.on_group("Read", group_id), permissions.on_topic("Read", topic)
        while True:
            self._open()
            connection = await self._connections.get(self._coordinator)
            code = messages.code_of(
                await connection.call(messages.ADD_OFFSETS, 3, messages.add_offsets(self._who, group_id))
            )
            if not code:
                break
            await self._again_or_raise(code, answers.ENLIST, pauses, f"group {group_id}", needed)
        while True:
            connection = await self._connections.get(await self._cluster.coordinator(GROUP, group_id))
            version = self._protocol.version(connection, messages.COMMIT_OFFSETS)
            # Generation -1, no member: the group has none, so the transactional id is the only fence.
            request = messages.commit_offsets(self._who, group_id, -1, "", None, {topic: offsets}, metadata)
            frame = await connection.call(messages.COMMIT_OFFSETS, version, request)
            codes = set(messages.partition_codes(frame, [(topic, partition) for partition in offsets]).values())
            if not codes:
                return
            for code in codes:
                await self._again_or_raise(code, answers.OFFSETS, pauses, f"group {group_id}", needed)

    async def _end(self, *, commit: bool) -> None:
        if not self._is_open:
            return
        pauses = Pauses()
        while True:
            connection = await self._connections.get(self._coordinator)
            version = self._protocol.version(connection, messages.END)
            frame = await connection.call(messages.END, version, messages.end(self._who, commit=commit))
            code = messages.ended(frame)[0] if self._protocol.bumps_epoch else messages.code_of(frame)
            if not code:
                self._is_open = False
                return
            await self._again_or_raise(code, answers.END, pauses)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _again_or_raise(
        self, code: int, table: Mapping[int, Meaning], pauses: Pauses, where: str = "", needed: Sequence[Right] = ()
    ) -> None:
        """Return when the request may be made again; else raise the broker's answer."""
        meaning = table.get(code)
        if meaning not in _AGAIN:
            raise _failure(code, answers.described(code, where), needed)
        self._last_answer = answers.described(code, where)
        await pauses.next()
        if meaning is Meaning.AGAIN_COORDINATOR:
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self._who.transactional_id)

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
        self._last_answer = ""
        is_answered = False
        try:
            async with asyncio.timeout(seconds):
                result = await call()
            is_answered = True
            return result
        except KafkaException:
            is_answered = True  # every request that was sent: the answers of a round are waited for together
            raise
        except TimeoutError:
            silence = f"no answer within {seconds:g} seconds" if seconds > 0 else "its time was over before"
            reason = self._last_answer or silence
            raise _failure(KafkaError._TIMED_OUT, reason) from None
        except (LostConnection, MalformedAnswer) as error:
            code = getattr(KafkaError, getattr(error, "code", ""), KafkaError._TRANSPORT)
            if code != KafkaError._TRANSPORT:
                raise _failure(code, str(error)) from None
            raise TransactionFailed(name, "_TRANSPORT", "unknown", f"{self._who.transactional_id}: {error}") from None
        finally:
            self._is_in_doubt = self._is_in_doubt or not is_answered


def _failure(code: int, reason: str, needed: Sequence[Right] = ()) -> KafkaException:
    name = KafkaError(code).name()
    why = f"; {denied(name, needed)}" if permissions.is_denial(name) else ""
    return KafkaException(KafkaError(code, reason + why))


def _described(part: _Part, answer: messages.PartitionError) -> str:
    """Describe a refused batch, and the records in it that the broker names."""
    size = sum(map(len, part.pieces))
    named = "; ".join(f"record {index}: {reason}" for index, reason in answer.records)
    said = named or answer.message or answers.described(answer.code)
    return f"{part.name}, a batch of {part.records} records ({size} bytes): {said}"
