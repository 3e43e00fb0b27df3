"""One transactional id that speaks Kafka's protocol itself: a slot of the transaction pool, on the event loop.

A transaction's records are encoded when they come here. ``flush`` sends them, one request per broker, and the offsets
beside them; ``commit`` ends the transaction. Which protocol is spoken is decided when the slot opens: transactions v2
(KIP-890) where the cluster has finalized it, else v1. With v2 each transaction has an epoch of its own, so a request
that comes late is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from confluent_kafka import KafkaError

from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka import permissions
from streams.kafka.permissions import Right
from streams.kafka.translate import BLOCKED, NO_SUCH_TOPIC
from streams.kafka.wire import answers, messages
from streams.kafka.wire.answers import Meaning
from streams.kafka.wire.cluster import GROUP, TRANSACTION, UNKNOWN_SECONDS, Cluster, SlotConnections
from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.messages import Identity, MalformedAnswer
from streams.kafka.wire.protocol import V1, Markers, Pauses, TransactionProtocol, protocol_of
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.last_transaction import LastTransaction, by_topic, until_led
from streams.kafka.writing.offsets import Offsets
from streams.kafka.writing.record_batch import Part
from streams.model.group import GroupMetadata
from streams.records import RefusedRecord
from streams.settings.groups import DELIVERY_SHARE

_log = logging.getLogger(__name__)

_INIT_VERSION: Final = 5  # of InitProducerId, at most; a broker that takes less gets less
_AGAIN: Final = (Meaning.AGAIN, Meaning.AGAIN_LEADER, Meaning.AGAIN_COORDINATOR)


class WireSlot:
    """One transactional id, used by one transaction at a time. On the loop; ``TransactionFailed`` where a call fails.

    A call that is cancelled or out of time closes its connections: the slot must then be opened again.
    """

    def __init__(
        self,
        transactional_id: str,
        cluster: Cluster,
        group_id: str,
        *,
        call_timeout_seconds: float,
        transaction_timeout_seconds: float,
        alone: bool = False,
    ) -> None:
        """``group_id`` fences its transactions, by offsets; empty: none. ``alone``: no other id takes turns with it."""
        self.transactional_id = transactional_id
        self.is_open = False
        """Whether it can begin a transaction; else it is to be opened."""
        self._cluster, self._group_id = cluster, group_id
        self._timeout = call_timeout_seconds
        self._transaction_ms = int(transaction_timeout_seconds * 1000)
        self._delivery_seconds = min(call_timeout_seconds, transaction_timeout_seconds * DELIVERY_SHARE)
        self._connections = SlotConnections(cluster)
        self._has_begun = False  # a transaction that is not ended yet
        self._last = LastTransaction()
        self._markers = Markers(alone)
        self._under_way: object | None = None  # the call that is running
        self._last_answer = ""  # of that call
        self._who = Identity(transactional_id, -1, -1)
        self._protocol: TransactionProtocol = V1
        self._coordinator = self._group_coordinator = -1
        self._sequences: dict[tuple[str, int], int] = {}

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def reopen(self, topics: Collection[str], *, may_open: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take the transactional id: when this returns, what it left open is aborted, and its last user is fenced.
        ``topics``: whose metadata are fetched before, beside those in use. ``may_open``: awaited right before the id
        is taken."""
        if self._under_way:  # cancelled, and not over yet
            self.abandon()
        is_shaken, self.is_open = self.is_shaken, False
        async with self._bounded("list_topics", self._timeout):
            # A leader that died is replaced by new metadata only.
            await self._cluster.refresh({*topics, *self._cluster.placements})
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)
            await self._connections.get(self._coordinator)
            if self._group_id:
                self._group_coordinator = await self._cluster.coordinator(GROUP, self._group_id)
                await self._connections.get(self._group_coordinator)
        if may_open is not None:
            await may_open()
        before = self._who
        async with self._bounded("init_transactions", self._timeout):
            await self._initialize()
        self._sequences.clear()  # a new epoch, in which brokers take no first sequence but 0
        self._has_begun = False
        # To abort an open transaction takes an epoch, and so does each new owner of the id.
        has_begun = self._who != before._replace(epoch=before.epoch + 1)
        if self._last.reopened(has_begun=has_begun) or is_shaken:
            async with self._bounded("init_transactions", self._timeout):
                await self._end_again()
        self.is_open = True

    @property
    def is_shaken(self) -> bool:
        """Check whether a broker was lost since the last transaction ended, so that markers of it may be missing."""
        return self._last.is_shaken or self._connections.are_lost

    def settled(self, committed: bool) -> None:
        """Note what became of the transaction that was under way when the slot was opened again."""
        self._last.settled(committed)

    async def _end_again(self) -> None:
        """End the last transaction a second time (``LastTransaction``), without records, so no fence is needed."""
        topics, committed = self._last.again()
        self._connections.forget_lost()  # what they may have cost is made good now
        try:
            if topics:
                await until_led(topics, self._cluster)
                await self._enlist(topics, bool(self._group_id))
                await self._end(commit=committed)
        except RecordsRefused as refused:
            _log.warning("%s: markers that may be missing are not written: %s", self.transactional_id, refused)
            self._last.forget()

    def abandon(self) -> None:
        """Close at once. A transaction that is open is left to the next owner of the id."""
        self.is_open = False
        self._under_way = None
        self._connections.close()

    async def _initialize(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._transaction_ms,
            producer_id=-1,
            producer_epoch=-1,
        )
        pauses = Pauses()
        while True:
            connection = await self._connections.get(self._coordinator)
            answer = await connection.ask(request, _INIT_VERSION)
            if not answer.error_code:
                break
            await self._again_or_raise("init_transactions", answer.error_code, answers.INIT, pauses, "unknown")
        protocol = protocol_of(connection)
        if protocol is not self._protocol or self._who.producer_id < 0:
            _log.info("%s: transactions v%d", self.transactional_id, 2 if protocol.bumps_epoch else 1)
        self._protocol = protocol
        self._who = Identity(self.transactional_id, answer.producer_id, answer.producer_epoch)

    # -- sending -------------------------------------------------------------------------------------------------------

    async def flush(
        self, records: EncodedTransaction, offsets: Mapping[str, Mapping[int, int]], fence: Callable[[], GroupMetadata]
    ) -> None:
        """Send all records and, beside them, the offsets under the newest group metadata; wait until all in-sync
        replicas have them. The first call begins a transaction, further ones add to it.

        ``offsets``: the next offset to read, by topic and partition, all in one request. ``fence`` is called right
        before they are sent; an error of it is raised here. After a failure the transaction is to be aborted.
        """
        if not offsets and self._group_id and not self._has_begun:
            raise ValueError("a transaction without offsets is not fenced by the group")
        self._check_open("flush")
        self._cluster.refresh_if_old()
        async with self._bounded("flush", self._delivery_seconds):
            if not self._has_begun and self.is_shaken:
                await self._end_again()
            if self._protocol.bumps_epoch and not self._has_begun:
                # v1 stays in its epoch, so they go on: a broker would take 0 for a repetition, and drop the records.
                self._sequences.clear()
            rounds = records.encoded.rounds(self._sequences) or [[]]
            if not rounds[0] and not offsets:
                return
            self._has_begun = True
            self._last.begins()
            nodes = {self._cluster.leader_of(part.topic, part.partition) for part in rounds[0]}  # all of its partitions
            if offsets:
                nodes.add(self._group_coordinator)
            # v1 has no other way. Under v2 the leaders would enlist their partitions, one at a time, each after the
            # markers of the id's last transaction: with three brokers 73 ms (p50), and 29 when the slot does it first.
            # On one broker it only costs a round trip, unless markers are late.
            if self._markers.may_be_late() or not self._protocol.bumps_epoch or len(nodes) > 1:
                await self._enlist(by_topic((part.topic, part.partition) for part in rounds[0]), bool(offsets))
            # Not before it is enlisted: until then it has no records, and the one before is still the last.
            self._last.writes((part.topic, part.partition) for part in rounds[0])
            pending = Offsets(offsets, fence) if offsets else None
            for parts in rounds:
                await self._send(records, parts, pending)
                pending = None
        self._markers.sent()

    async def commit(self, requested: Callable[[], None]) -> None:
        """Commit the transaction. ``requested`` is called right before each request of it: after that the outcome may
        be unknown. An error of it is raised here, and then the request is not made."""
        self._check_open("commit_transaction")
        try:
            await self._end(commit=True, requested=requested)
        except TransactionFailed as failure:
            if failure.kind != "lost":  # else nothing was requested, and it can be aborted
                self.abandon()
            raise

    async def abort(self) -> None:
        """Abort the transaction, if one has begun. Under transactions v1 the slot is to be opened again then."""
        if self._under_way:  # cancelled, and not over yet: what it has sent may arrive after the abort
            self.abandon()
        self._check_open("abort_transaction")
        if not self._has_begun:
            return
        try:
            await self._end(commit=False)
        except TransactionFailed:
            self.abandon()
            raise
        # v1 stays in its epoch: some of its sequences are in the log, others are not, and the next ones would not fit.
        self.is_open = self._protocol.bumps_epoch

    def _call(self, connection: BrokerConnection, key: int, parts: Sequence[bytes]) -> asyncio.Future[bytes]:
        return connection.call(key, self._protocol.version(connection, key), parts)

    async def _enlist(self, topics: Mapping[str, Sequence[int]], with_offsets: bool) -> None:
        """Tell the coordinator which partitions take part, and that offsets do."""
        pauses = Pauses()
        while True:
            connection = await self._connections.get(self._coordinator)
            calls = []
            if topics:
                calls.append(connection.call(messages.ADD_PARTITIONS, 3, messages.add_partitions(self._who, topics)))
            if with_offsets:
                calls.append(connection.call(messages.ADD_OFFSETS, 3, messages.add_offsets(self._who, self._group_id)))
            added = await asyncio.gather(*calls)  # in a row on one connection: the coordinator takes them one by one
            partitions = [(topic, number) for topic, numbers in topics.items() for number in numbers]
            failed = messages.partition_codes(added[0], partitions) if topics else {}
            blocked = [
                answers.refused_record(*where, code, "", None)
                for where, code in failed.items()
                if code in BLOCKED and (code not in NO_SUCH_TOPIC or pauses.elapsed > UNKNOWN_SECONDS)
            ]
            if blocked:
                raise RecordsRefused("flush", blocked, self.transactional_id)
            codes = {code: "{}[{}]".format(*where) for where, code in failed.items()}
            if len(codes) > 1:
                codes.pop(KafkaError.OPERATION_NOT_ATTEMPTED, None)  # because another partition of the request failed
            if with_offsets and (code := messages.code_of(added[-1])):
                codes[code] = f"group {self._group_id}"
            if not codes:
                return
            for code, name in codes.items():
                await self._again_or_raise("flush", code, answers.ENLIST, pauses, "abortable", name)

    async def _send(self, records: EncodedTransaction, parts: list[Part], offsets: Offsets | None) -> None:
        """Send batches, one of each partition, and offsets, until the brokers have them."""
        pauses = Pauses()
        who, compression = self._who, self._cluster.settings.compression
        # Once, and not for each try: a broker knows what is in its log by its sequences, and does not write it twice.
        pieces = {part: part.batch.encode(who.producer_id, who.epoch, part.sequence, compression) for part in parts}
        while parts or offsets is not None:
            bases: dict[tuple[str, int], int] = {}
            failed, codes = await self._round(parts, pieces, offsets, bases)
            for part in parts:
                base = bases.get((part.topic, part.partition), -1)
                records.ends[part.topic, part.partition] = base + part.batch.records if base >= 0 else -1
            # All requests of the round are answered. Otherwise a late one could follow the abort, under v1.
            await self._check_offset_codes(codes, offsets)
            again = []
            look = False
            refused: list[RefusedRecord] = []
            for part in parts:
                answer = failed.get((part.topic, part.partition))
                meaning = Meaning.DONE if answer is None else answers.PRODUCE.get(answer.code, Meaning.ABORTABLE)
                if answer is None or meaning is Meaning.DONE:
                    continue
                missing = answer.code == KafkaError.UNKNOWN_TOPIC_OR_PART and pauses.elapsed > UNKNOWN_SECONDS
                if meaning in _AGAIN and not missing:
                    again.append(part)
                    self._last_answer = answers.described(answer.code, part.name)
                    if answer.message:
                        self._last_answer += f": {answer.message}"
                    look = look or meaning is Meaning.AGAIN_LEADER
                elif meaning in (Meaning.REFUSED, Meaning.BLOCKED) or missing:
                    refused += await records.refused_by(part, answer)
                else:
                    raise answers.failure(self.transactional_id, "flush", answer.code, meaning, part.name)
            if refused:
                raise RecordsRefused("flush", refused, self.transactional_id)
            if not codes:
                offsets = None
            if again or codes:
                _log.debug("%s: sent again: %s, %s", self.transactional_id, failed, codes)
                await pauses.next()
            if look:
                await self._cluster.refresh({part.topic for part in again})
            parts = again

    async def _round(
        self,
        parts: Iterable[Part],
        pieces: Mapping[Part, list[bytes]],
        offsets: Offsets | None,
        bases: dict[tuple[str, int], int],
    ) -> tuple[dict[tuple[str, int], messages.PartitionError], dict[int, str]]:
        """Send each broker its batches, and the group's coordinator the offsets, all at once.

        Returns the partitions that failed, and the codes of offsets that failed, each with a partition of it. ``bases``
        gets the offsets of the batches that are in their logs.
        """
        failed: dict[tuple[str, int], messages.PartitionError] = {}
        by_broker: dict[int, list[Part]] = {}
        for part in parts:
            leader = self._cluster.leader_of(part.topic, part.partition)
            if leader < 0:
                failed[part.topic, part.partition] = messages.PartitionError(KafkaError.LEADER_NOT_AVAILABLE, "", ())
            else:
                by_broker.setdefault(leader, []).append(part)
        connections = []
        for node in list(by_broker):
            try:
                connections.append(await self._connections.get(node))
            except LostConnection as lost:
                if lost.code != "_TRANSPORT":
                    raise
                # Nothing was sent: a partition whose leader has died gets another one.
                answer = messages.PartitionError(KafkaError.LEADER_NOT_AVAILABLE, str(lost), ())
                failed |= {(part.topic, part.partition): answer for part in by_broker.pop(node)}
        group = None if offsets is None else await self._connections.get(self._group_coordinator)
        # Nothing is awaited from here until all requests are made: the offsets go under the newest metadata.
        commit = [] if offsets is None else offsets.request(self._who, self._group_id)
        calls = []
        for connection, own in zip(connections, by_broker.values(), strict=True):
            topics: dict[str, list[tuple[int, list[bytes]]]] = {}
            for part in own:
                topics.setdefault(part.topic, []).append((part.partition, pieces[part]))
            request = messages.produce(self.transactional_id, int(self._delivery_seconds * 1000), topics)
            calls.append(self._call(connection, messages.PRODUCE, request))
        if group is not None:
            calls.append(self._call(group, messages.COMMIT_OFFSETS, commit))
        frames = await asyncio.gather(*calls)
        for frame, own in zip(frames, by_broker.values(), strict=False):
            failed |= messages.refused(frame, [(part.topic, part.partition) for part in own], bases)
        if offsets is None:
            return failed, {}
        partitions = [(topic, partition) for topic, positions in offsets.offsets.items() for partition in positions]
        codes = messages.partition_codes(frames[-1], partitions)
        return failed, {code: f"{topic}[{partition}]" for (topic, partition), code in codes.items()}

    async def _check_offset_codes(self, codes: Mapping[int, str], offsets: Offsets | None) -> None:
        """Return if offsets that failed may be sent again, else raise what the answer means."""
        for code, named in codes.items():
            meaning = answers.OFFSETS.get(code, Meaning.ABORTABLE)
            where = f"group {self._group_id}, {named}"
            if meaning not in _AGAIN:
                call = "send_offsets_to_transaction"
                needed = self._needed(() if offsets is None else offsets.offsets)
                raise answers.failure(self.transactional_id, call, code, meaning, where, needed)
            self._last_answer = answers.described(code, where)
            if meaning is Meaning.AGAIN_COORDINATOR:
                self._group_coordinator = await self._cluster.coordinator(GROUP, self._group_id)

    async def _end(self, *, commit: bool, requested: Callable[[], None] = lambda: None) -> None:
        """End the transaction. Without an answer the end is requested again under v2; under v1 the call fails."""
        call = "commit_transaction" if commit else "abort_transaction"
        pauses = Pauses()
        async with self._bounded(call, self._timeout):
            is_lost = False
            while True:
                try:
                    if is_lost:
                        self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)
                    connection = await self._connections.get(self._coordinator)
                    # Not before there is a connection: what was never requested needs no look-up of its outcome.
                    requested()
                    self._last.requested(commit=commit)
                    frame = await self._call(connection, messages.END, messages.end(self._who, commit=commit))
                except LostConnection as lost:
                    # v1: a late first request could end the next transaction, which has the same epoch. v2: the epoch
                    # names this one, and the coordinator answers what became of it.
                    if not self._protocol.bumps_epoch:
                        raise
                    level = logging.DEBUG if is_lost else logging.INFO
                    _log.log(level, "%s: the end is requested again: %s", self.transactional_id, lost)
                    is_lost = True
                    await pauses.next()
                    continue
                if self._protocol.bumps_epoch:
                    code, producer_id, epoch = messages.ended(frame)
                    if not code:
                        self._who = Identity(self.transactional_id, producer_id, epoch)
                else:
                    code = messages.code_of(frame)
                if not code:
                    break
                await self._again_or_raise(call, code, answers.END, pauses, "unknown")
        self._has_begun = False
        self._last.ended(commit, is_lost)
        self._markers.ended()

    # -- answers -------------------------------------------------------------------------------------------------------

    def _needed(self, topics: Iterable[str] = ()) -> list[Right]:
        return permissions.of_transaction(self.transactional_id, self._group_id, topics)

    async def _again_or_raise(
        self, call: str, code: int, table: Mapping[int, Meaning], pauses: Pauses, default: str, where: str = ""
    ) -> None:
        """Return when the request may be made again; else raise what the answer means."""
        meaning = table.get(code, Meaning(default))
        if meaning not in _AGAIN:
            raise answers.failure(self.transactional_id, call, code, meaning, where, self._needed())
        self._last_answer = answers.described(code, where)
        await pauses.next()
        if meaning is Meaning.AGAIN_COORDINATOR:
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)

    @asynccontextmanager
    async def _bounded(self, call: str, seconds: float) -> AsyncIterator[None]:
        """Bound a call in time. However it fails without an answer, the slot is closed."""
        mark = object()
        outer, self._under_way = self._under_way, mark
        self._last_answer = ""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TransactionFailed:
            raise
        except (LostConnection, MalformedAnswer, TimeoutError) as error:
            self._abandon_after(mark)
            code, why = answers.no_answer(error, seconds, self._last_answer, self._needed())
            raise TransactionFailed(call, code, "unknown", f"{self.transactional_id}: {why}") from None
        except BaseException:  # cancelled
            self._abandon_after(mark)
            raise
        finally:
            if self._under_way is mark:
                self._under_way = outer  # the call that this one is a part of

    def _abandon_after(self, mark: object) -> None:
        if self._under_way is mark:  # else a later call closed everything, and has connections of its own
            self.abandon()

    def _check_open(self, call: str) -> None:
        if not self.is_open:
            raise TransactionFailed(call, "NO_PRODUCER", "unknown", f"{self.transactional_id} is being replaced")
