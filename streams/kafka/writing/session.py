"""The requests of one transactional id, and what is done about each answer: initialize, enlist, produce, offsets, end.

Two use it: the slot of the transaction pool, for one transaction after the other (``writing.slot``), and Spark's sink,
for one alone (``writing.forwarding``). A request that certainly had no effect is made again; all else is raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby, starmap
from operator import itemgetter
from typing import Final, Protocol, TypeVar

from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka import permissions
from streams.kafka.permissions import Right
from streams.kafka.wire import answers, messages
from streams.kafka.wire.answers import Meaning
from streams.kafka.wire.cluster import GROUP, TRANSACTION, UNKNOWN_SECONDS, Cluster, SlotConnections
from streams.kafka.wire.codes import NO_SUCH_TOPIC, Code
from streams.kafka.wire.connection import BrokerConnection, EncodedRequest, LostConnection
from streams.kafka.wire.messages import Identity, PartitionError, WirePartition
from streams.kafka.wire.protocol import V1, Pauses, TransactionProtocol, protocol_of
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.schemas.offset_fetch import OffsetFetchRequest
from streams.kafka.writing.offsets import SentOffsets
from streams.records import RefusedRecord

_log = logging.getLogger(__name__)

INIT: Final = InitProducerIdRequest.API_KEY
_INIT_VERSION: Final = 5  # of InitProducerId, at most; a broker that takes less gets less
_FETCH_VERSION: Final = 8  # of OffsetFetch: the first one that names groups in a list
# Answers to what had no effect. All others, and no answer, may have had one: what is sent again would be there twice.
_AGAIN: Final = (Meaning.AGAIN, Meaning.AGAIN_LEADER, Meaning.AGAIN_COORDINATOR)


class Placed(Protocol):
    """A batch that goes to a partition. ``name``: the partition's in messages."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def name(self) -> str: ...


PartT = TypeVar("PartT", bound=Placed)


class TransactionSession:
    """One transactional id at the brokers. On the loop. Its calls raise ``TransactionFailed`` for an answer, and
    ``LostConnection`` or ``MalformedAnswer`` without one; ``unanswered`` makes a ``TransactionFailed`` of these, and of
    a ``TimeoutError``. Nothing here has a deadline.

    ``in_doubt``: the requests (``INIT``, ``messages.END``) that are made again where no answer came. An end is, under
    transactions v2 alone. ``transaction_ms``: the time of a transaction at the broker; ``delivery_ms``: that of a
    Produce request.
    """

    def __init__(
        self,
        transactional_id: str,
        cluster: Cluster,
        *,
        group_id: str = "",
        transaction_ms: int,
        delivery_ms: int,
        in_doubt: Container[int],
    ) -> None:
        self.who = Identity(transactional_id, -1, -1)
        self.group_id = group_id
        """The group whose offsets are sent; empty: none."""
        self.protocol: TransactionProtocol = V1
        self.connections = SlotConnections(cluster)
        self.last_answer = ""
        """The last answer after which a request was made again. The bound of a call empties it before."""
        self._cluster = cluster
        self._transaction_ms, self._delivery_ms = transaction_ms, delivery_ms
        self._in_doubt = in_doubt
        self._coordinator = self._group_coordinator = -1

    # -- opening -------------------------------------------------------------------------------------------------------

    async def locate(self) -> None:
        """Look for the coordinators, of the id and of the group, and connect to them."""
        self._coordinator = await self._cluster.coordinator(TRANSACTION, self.who.transactional_id)
        await self.connections.get(self._coordinator)
        if self.group_id:
            await self.locate_group()

    async def locate_group(self) -> None:
        """Look for the coordinator of the group, and connect to it."""
        self._group_coordinator = await self._cluster.coordinator(GROUP, self.group_id)
        await self.connections.get(self._group_coordinator)

    async def initialize(self) -> None:
        """Take the transactional id: when this returns, what it left open is decided, and its last user is fenced."""
        request = InitProducerIdRequest(
            transactional_id=self.who.transactional_id,
            transaction_timeout_ms=self._transaction_ms,
            producer_id=-1,
            producer_epoch=-1,
        )
        pauses = Pauses()
        while True:
            try:
                if self._coordinator < 0:
                    await self.locate()
                connection = await self.connections.get(self._coordinator)
                answer = await connection.ask(request, _INIT_VERSION)
            except LostConnection as lost:
                if INIT not in self._in_doubt or lost.code != "_TRANSPORT":
                    raise
                # Repeated at will: it opens nothing, and fences only.
                self.last_answer = str(lost)
                self._coordinator = -1
                await pauses.next()
                continue
            if not answer.error_code:
                break
            await self._again_or_raise("init_transactions", answer.error_code, answers.INIT, pauses, "unknown")
        protocol = protocol_of(connection)
        if protocol is not self.protocol or self.who.producer_id < 0:
            _log.info("%s: transactions v%d", self.who.transactional_id, 2 if protocol.bumps_epoch else 1)
        self.protocol = protocol
        self.who = self.who._replace(producer_id=answer.producer_id, epoch=answer.producer_epoch)

    async def committed(self, topic: str, partition: int) -> tuple[int, str] | None:
        """Fetch the group's offset in a partition, with the text beside it, as soon as no transaction holds it;
        ``None``: there is none."""
        group_of = OffsetFetchRequest.OffsetFetchRequestGroup
        wanted = group_of.OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])
        request = OffsetFetchRequest(groups=[group_of(group_id=self.group_id, topics=[wanted])], require_stable=True)
        pauses = Pauses()
        while True:
            try:
                if self._group_coordinator < 0:
                    await self.locate_group()
                connection = await self.connections.get(self._group_coordinator)
                answer = await connection.ask(request, _FETCH_VERSION, _FETCH_VERSION)
            except LostConnection as lost:  # a question, which may be repeated
                if lost.code != "_TRANSPORT":
                    raise
                self.last_answer, self._group_coordinator = str(lost), -1
                await pauses.next()
                continue
            codes = [group.error_code for group in answer.groups if group.error_code]
            entries = [entry for group in answer.groups for found in group.topics for entry in found.partitions]
            if len(codes) + len(entries) != 1:
                raise LostConnection(f"the answer does not have the one offset of group {self.group_id}", "_BAD_MSG")
            code = codes[0] if codes else entries[0].error_code
            if code == Code.GROUP_ID_NOT_FOUND:
                return None
            if not code:
                offset, text = entries[0].committed_offset, entries[0].metadata or ""
                return None if offset < 0 else (offset, text)
            await self._check_offset_codes({code: f"{topic}[{partition}]"}, answers.FETCH, "fetch_offsets", [topic])
            await pauses.next()

    # -- one transaction -----------------------------------------------------------------------------------------------

    def brokers_of(self, places: Iterable[WirePartition], *, with_offsets: bool) -> set[int]:
        """Return the brokers that a round of requests goes to."""
        nodes = set(starmap(self._cluster.leader_of, places))
        if with_offsets:
            nodes.add(self._group_coordinator)
        return nodes

    async def enlist(self, topics: Mapping[str, Sequence[int]], *, with_offsets: bool) -> None:
        """Tell the coordinator which partitions take part, and that offsets do. Raises ``RecordsRefused`` for topics
        that are not there, or may not be written."""
        pauses = Pauses()
        while True:
            connection = await self.connections.get(self._coordinator)
            requests = []
            if topics:
                requests.append((messages.ADD_PARTITIONS, 3, messages.add_partitions(self.who, topics)))
            if with_offsets:
                requests.append((messages.ADD_OFFSETS, 3, messages.add_offsets(self.who, self.group_id)))
            added = await asyncio.gather(*connection.calls(requests))  # the coordinator takes them one by one
            partitions = [(topic, number) for topic, numbers in topics.items() for number in numbers]
            failed = messages.partition_codes(added[0], partitions) if topics else {}
            blocked = [
                answers.refused_record(*where, code, "", None)
                for where, code in failed.items()
                if code in answers.ADVICE and (code not in NO_SUCH_TOPIC or pauses.elapsed > UNKNOWN_SECONDS)
            ]
            if blocked:
                raise RecordsRefused("flush", blocked, self.who.transactional_id)
            codes = {code: "{}[{}]".format(*where) for where, code in failed.items()}
            if len(codes) > 1:
                codes.pop(Code.OPERATION_NOT_ATTEMPTED, None)  # because another partition of the request failed
            if with_offsets and (code := messages.code_of(added[-1])):
                codes[code] = f"group {self.group_id}"
            if not codes:
                return
            for code, name in codes.items():
                await self._again_or_raise("flush", code, answers.ENLIST, pauses, "abortable", name)

    async def deliver(
        self,
        pieces: Mapping[PartT, Sequence[bytes]],
        offsets: SentOffsets | None,
        refused_by: Callable[[PartT, PartitionError], Awaitable[list[RefusedRecord]]],
    ) -> dict[WirePartition, int]:
        """Send batches, one of each partition, in the pieces given, and offsets beside them, until the brokers have
        them. Returns the offset of the first record of each batch whose broker has said it.

        ``refused_by`` names the records of a batch that is refused; with them ``RecordsRefused`` is raised.
        """
        pauses = Pauses()
        bases: dict[WirePartition, int] = {}
        parts = list(pieces)
        while parts or offsets is not None:
            failed, codes = await self._round(parts, pieces, offsets, bases)
            if not failed and not codes:
                break
            # All requests of the round are answered. Otherwise a late one could follow the abort, under v1.
            topics = () if offsets is None else offsets.offsets
            await self._check_offset_codes(codes, answers.OFFSETS, "send_offsets_to_transaction", topics)
            again: list[PartT] = []
            look = False
            refused: list[RefusedRecord] = []
            for part in parts:
                answer = failed.get((part.topic, part.partition))
                meaning = Meaning.DONE if answer is None else answers.PRODUCE.get(answer.code, Meaning.ABORTABLE)
                if answer is None or meaning is Meaning.DONE:
                    continue
                missing = answer.code == Code.UNKNOWN_TOPIC_OR_PARTITION and pauses.elapsed > UNKNOWN_SECONDS
                if meaning in _AGAIN and not missing:
                    again.append(part)
                    self.last_answer = answers.described(answer.code, part.name, answer.message)
                    look = look or meaning is Meaning.AGAIN_LEADER
                elif meaning in (Meaning.REFUSED, Meaning.BLOCKED) or missing:
                    refused += await refused_by(part, answer)
                else:
                    raise self._failure("flush", answer.code, meaning, part.name)
            if refused:
                raise RecordsRefused("flush", refused, self.who.transactional_id)
            if not codes:
                offsets = None
            if again or codes:
                _log.debug("%s: sent again: %s, %s", self.who.transactional_id, failed, codes)
                await pauses.next()
            if look:
                await self._cluster.refresh({part.topic for part in again})
            parts = again
        return bases

    async def end(self, *, commit: bool, requested: Callable[[], None]) -> bool:
        """End the transaction. ``requested`` is called right before each request of it; an error of it is raised here,
        and then the request is not made. Returns whether a request of it had no answer."""
        call = "commit_transaction" if commit else "abort_transaction"
        pauses = Pauses()
        is_lost = False
        while True:
            try:
                if is_lost:
                    self._coordinator = await self._cluster.coordinator(TRANSACTION, self.who.transactional_id)
                connection = await self.connections.get(self._coordinator)
                # Not before there is a connection: what was never requested needs no look-up of its outcome.
                requested()
                frame = await connection.call(
                    *self._request(connection, messages.END, messages.end(self.who, commit=commit))
                )
            except LostConnection as lost:
                # v1: a late first request could end the next transaction, which has the same epoch. v2: the epoch
                # names this one, and the coordinator answers what became of it.
                if messages.END not in self._in_doubt or not self.protocol.bumps_epoch:
                    raise
                level = logging.DEBUG if is_lost else logging.INFO
                _log.log(level, "%s: the end is requested again: %s", self.who.transactional_id, lost)
                is_lost = True
                await pauses.next()
                continue
            if self.protocol.bumps_epoch:
                code, producer_id, epoch = messages.ended(frame)
                if not code:
                    self.who = Identity(self.who.transactional_id, producer_id, epoch)
            else:
                code = messages.code_of(frame)
            if not code:
                return is_lost
            await self._again_or_raise(call, code, answers.END, pauses, "unknown")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _request(self, connection: BrokerConnection, key: int, parts: Sequence[bytes]) -> EncodedRequest:
        return key, self.protocol.version(connection, key), parts

    async def _round(
        self,
        parts: Iterable[PartT],
        pieces: Mapping[PartT, Sequence[bytes]],
        offsets: SentOffsets | None,
        bases: dict[WirePartition, int],
    ) -> tuple[dict[WirePartition, PartitionError], dict[int, str]]:
        """Send each broker its batches, and the group's coordinator the offsets, all at once.

        Returns the partitions that failed, and the codes of offsets that failed, each with a partition of it. ``bases``
        gets the offsets of the batches that are in their logs.
        """
        failed: dict[WirePartition, PartitionError] = {}
        by_broker: dict[int, list[PartT]] = {}
        for part in parts:
            leader = self._cluster.leader_of(part.topic, part.partition)
            if leader < 0:
                failed[part.topic, part.partition] = PartitionError(Code.LEADER_NOT_AVAILABLE, "", ())
            else:
                by_broker.setdefault(leader, []).append(part)
        connections = []
        for node in list(by_broker):
            try:
                connections.append(await self.connections.get(node))
            except LostConnection as lost:
                if lost.code != "_TRANSPORT":
                    raise
                # Nothing was sent: a partition whose leader has died gets another one.
                answer = PartitionError(Code.LEADER_NOT_AVAILABLE, str(lost), ())
                failed |= {(part.topic, part.partition): answer for part in by_broker.pop(node)}
        group = None if offsets is None else await self.connections.get(self._group_coordinator)
        # Nothing is awaited from here until all requests are made: the offsets go under the newest metadata.
        commit = [] if offsets is None else offsets.request(self.who, self.group_id)
        requests = []
        for connection, own in zip(connections, by_broker.values(), strict=True):
            topics: dict[str, list[tuple[int, Sequence[bytes]]]] = {}
            for part in own:
                topics.setdefault(part.topic, []).append((part.partition, pieces[part]))
            request = messages.produce(self.who.transactional_id, self._delivery_ms, topics)
            requests.append((connection, self._request(connection, messages.PRODUCE, request)))
        if group is not None:
            requests.append((group, self._request(group, messages.COMMIT_OFFSETS, commit)))
        calls: list[asyncio.Future[bytes]] = []
        for connection, in_a_row in groupby(requests, itemgetter(0)):  # with one broker all of them are one write
            calls += connection.calls([request for _, request in in_a_row])
        frames = await asyncio.gather(*calls)
        for frame, own in zip(frames, by_broker.values(), strict=False):
            failed |= messages.refused(frame, [(part.topic, part.partition) for part in own], bases)
        if offsets is None:
            return failed, {}
        partitions = [(topic, partition) for topic, positions in offsets.offsets.items() for partition in positions]
        codes = messages.partition_codes(frames[-1], partitions)
        return failed, {code: f"{topic}[{partition}]" for (topic, partition), code in codes.items()}

    # -- answers -------------------------------------------------------------------------------------------------------

    def unanswered(self, call: str, error: Exception, seconds: float) -> TransactionFailed:
        """Make the failure of a call that had no answer, or took longer than so many seconds."""
        code, why = answers.no_answer(error, seconds, self.last_answer, self._needed())
        return TransactionFailed(call, code, "unknown", f"{self.who.transactional_id}: {why}")

    def _failure(
        self, call: str, code: int, meaning: Meaning, where: str, topics: Iterable[str] = ()
    ) -> TransactionFailed:
        """``topics``: whose offsets the call sends."""
        return answers.failure(self.who.transactional_id, call, code, meaning, where, self._needed(topics))

    def _needed(self, topics: Iterable[str] = ()) -> list[Right]:
        return permissions.of_transaction(self.who.transactional_id, self.group_id, topics)

    async def _check_offset_codes(
        self, codes: Mapping[int, str], table: Mapping[int, Meaning], call: str, topics: Iterable[str]
    ) -> None:
        """Return if the request for offsets that failed may be made again, else raise what the answer means."""
        for code, named in codes.items():
            meaning = table.get(code, Meaning.ABORTABLE)
            where = f"group {self.group_id}, {named}"
            if meaning not in _AGAIN:
                raise self._failure(call, code, meaning, where, topics)
            self.last_answer = answers.described(code, where)
            if meaning is Meaning.AGAIN_COORDINATOR:
                self._group_coordinator = await self._cluster.coordinator(GROUP, self.group_id)

    async def _again_or_raise(
        self, call: str, code: int, table: Mapping[int, Meaning], pauses: Pauses, default: str, where: str = ""
    ) -> None:
        """Return when the request may be made again; else raise what the answer means."""
        meaning = table.get(code, Meaning(default))
        if meaning not in _AGAIN:
            raise self._failure(call, code, meaning, where)
        self.last_answer = answers.described(code, where)
        await pauses.next()
        if meaning is Meaning.AGAIN_COORDINATOR:
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self.who.transactional_id)
