"""One transactional id that speaks Kafka's protocol itself: a slot of the transaction pool, on the event loop.

A transaction's records are encoded as they are handed over, and sent by ``flush``, one request per broker. Which
protocol is spoken is decided when the slot opens: transactions v2 (KIP-890) where the cluster has finalized it, else
v1. With v2 each transaction has an epoch of its own, so a request that comes late is refused, and an end without an
answer is requested again.

With more than one broker involved, and with v1, the slot enlists partitions and group with the coordinator before it
sends. Under v2 the leaders would do it, but one at a time: the others are made to wait 20 to 100 ms (KIP-890's
CONCURRENT_TRANSACTIONS; measured, three brokers: a median of 29 ms instead of 73).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from confluent_kafka import KafkaError

from streams.clients import kafka_python
from streams.clients.group_wire import parse_metadata
from streams.clients.producing import answers, messages
from streams.clients.producing.answers import Meaning
from streams.clients.producing.broker_connection import BrokerConnection, LostConnection
from streams.clients.producing.cluster import GROUP, TRANSACTION, UNKNOWN_SECONDS, Cluster, SlotConnections
from streams.clients.producing.messages import Identity, MalformedAnswer
from streams.clients.producing.protocol import V1, Pauses, TransactionProtocol, protocol_of
from streams.clients.producing.record_batch import EncodedRecords, Part, in_bytes
from streams.clients.transactional import RefusedDelivery
from streams.clients.translate import BLOCKED, NO_SUCH_TOPIC
from streams.config import DELIVERY_SHARE
from streams.errors import TransactionFailed
from streams.group import Snapshot
from streams.records import Change, Output

_log = logging.getLogger(__name__)

_INIT_VERSION: Final = 5
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
    ) -> None:
        self.transactional_id = transactional_id
        self.one_by_one = False
        self.refused: list[RefusedDelivery] = []
        """The deliveries of this transaction that the broker refused."""
        self._cluster = cluster
        self._group_id = group_id
        self._timeout = call_timeout_seconds
        self._transaction_ms = int(transaction_timeout_seconds * 1000)
        self._delivery_seconds = min(call_timeout_seconds, transaction_timeout_seconds * DELIVERY_SHARE)
        self._connections = SlotConnections(cluster)
        self._is_open = False
        self._under_way: object | None = None  # the call that is running
        self._last_answer = ""  # to it, which was no success yet
        self._who = Identity(transactional_id, -1, -1)
        self._protocol: TransactionProtocol = V1
        self._coordinator = self._group_coordinator = -1
        self._sequences: dict[tuple[str, int], int] = {}
        self._records = self._no_records()

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def reopen(
        self,
        topics: Collection[str],
        *,
        one_by_one: bool = False,
        may_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Take the transactional id: what it left open is aborted, and who used it is fenced, when this returns.

        ``topics``: whose metadata are fetched before. ``one_by_one``: each record travels in a batch of its own.
        ``may_open``: awaited right before the id is taken.
        """
        if self._under_way:  # cancelled, and not over yet
            self.abandon()
        self._is_open = False
        async with self._bounded("list_topics", self._timeout):
            await self._cluster.refresh(topics)
            self._group_coordinator = await self._cluster.coordinator(GROUP, self._group_id)
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)
            for node in {self._coordinator, self._group_coordinator}:
                await self._connections.get(node)
        if may_open is not None:
            await may_open()
        async with self._bounded("init_transactions", self._timeout):
            await self._initialize()
        self._sequences.clear()
        self.one_by_one = one_by_one
        self._is_open = True

    def abandon(self) -> None:
        """Close at once. A transaction that is open is left to the next owner of the id."""
        self._is_open = False
        self._under_way = None
        self._connections.close()

    async def _initialize(self) -> None:
        request = kafka_python.InitProducerIdRequest(
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

    # -- filling -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a transaction. Nothing is sent."""
        self._check_open("begin_transaction")
        self.refused = []
        self._records = self._no_records()
        self._cluster.refresh_if_old()

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        """Encode records from position ``start`` up to the first that is not taken; return its position. ``produce``
        finds the reason."""
        self._check_open("produce")
        return self._records.add(outputs, start, self._cluster.now_ms())

    def produce_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int) -> int:
        """Encode the changelog records of a partition's changes, as ``produce_many`` does outputs."""
        self._check_open("produce")
        return self._records.add_changes(topic, partition, changes, start, self._cluster.now_ms())

    def produce(self, output: Output) -> bool:
        """Encode one record; ``False``: its topic is not known yet. Raises ``RecordRefused``."""
        output = in_bytes(output)
        if self.produce_many([output], 0):
            return True
        refusal = self._records.refusal(output)
        if refusal is not None:
            raise refusal
        known = self._cluster.placements.get(output.topic)
        if known is not None and output.partition < known.count:
            # Partitions were added since the transaction began; or no part is at fault alone.
            raise TransactionFailed("produce", "_UNKNOWN_PARTITION", "abortable", f"{output.topic}: sent again")
        unknown = self._cluster.unknown_since(output.topic)
        if unknown is not None:
            code, seconds = unknown
            if answers.PRODUCE.get(code) in (Meaning.BLOCKED, Meaning.REFUSED) or seconds > UNKNOWN_SECONDS:
                self._cluster.look_for(output.topic)
                raise self._refuse("produce", output.topic, -1, code, "", output)
        self._cluster.look_for(output.topic)
        self._cluster.check_patience(output.topic, self._timeout, self.transactional_id)
        return False

    def poll(self) -> None:
        """Do nothing: answers come to the calls that wait for them."""

    # -- sending -------------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Send all records and wait until they are acknowledged by all in-sync replicas."""
        self._check_open("flush")
        self.refused.clear()  # by ``produce``, for a topic that is there by now
        async with self._bounded("flush", self._delivery_seconds):
            if self._protocol.bumps_epoch:
                self._sequences.clear()  # they begin at 0 in each epoch
            rounds = self._records.rounds(self._sequences)
            if not rounds:
                return
            if not self._protocol.bumps_epoch or {self._leader(part) for part in rounds[0]} != {
                self._group_coordinator
            }:
                await self._enlist(rounds[0])
            for parts in rounds:
                await self._send(parts)

    async def commit(
        self,
        topic: str,
        offsets: Mapping[int, int],
        fence: Callable[[], Snapshot],
        requested: Callable[[], None],
    ) -> None:
        """Send the offsets under the newest group metadata, then commit.

        ``fence`` is called right before the offsets are sent; an error of it is raised here. ``requested`` is called
        right before the commit itself, after which the outcome may be unknown.
        """
        if not offsets:
            raise ValueError("a transaction without offsets is not fenced by the group")
        self._check_open("commit_transaction")
        async with self._bounded("send_offsets_to_transaction", self._timeout):
            await self._send_offsets(topic, offsets, fence)
        fence()  # a second look: the membership may have been lost while the offsets were under way
        requested()
        await self._end(commit=True)

    async def deliver(self) -> None:
        """Do nothing: no record is under way between two calls."""

    async def abort(self) -> None:
        """Abort the transaction."""
        if self._under_way:  # cancelled, and not over yet: what it has sent may arrive after the abort
            self.abandon()
        self._check_open("abort_transaction")
        await self._end(commit=False)

    def _call(self, connection: BrokerConnection, key: int, parts: Sequence[bytes]) -> asyncio.Future[bytes]:
        return connection.call(key, self._protocol.version(connection, key), parts)

    def _leader(self, part: Part) -> int:
        leaders = self._cluster.leaders[part.topic]
        return leaders[part.partition] if part.partition < len(leaders) else -1  # made again, or a broker that lags

    async def _enlist(self, parts: Iterable[Part]) -> None:
        """Tell the coordinator which partitions take part, and that offsets do. Both requests go in a row."""
        topics: dict[str, list[int]] = {}
        for part in parts:
            topics.setdefault(part.topic, []).append(part.partition)
        pauses = Pauses()
        while True:
            connection = await self._connections.get(self._coordinator)
            partitions = connection.call(messages.ADD_PARTITIONS, 3, messages.add_partitions(self._who, topics))
            offsets = connection.call(messages.ADD_OFFSETS, 3, messages.add_offsets(self._who, self._group_id))
            added = await asyncio.gather(partitions, offsets)
            places = [(topic, number) for topic, numbers in topics.items() for number in numbers]
            failed = messages.partition_codes(added[0], places)
            for where, code in failed.items():
                is_missing = code in NO_SUCH_TOPIC and pauses.elapsed > UNKNOWN_SECONDS
                if code in BLOCKED and (is_missing or code not in NO_SUCH_TOPIC):
                    raise self._refuse("flush", *where, code, "", None)
            codes = {code: "{}[{}]".format(*where) for where, code in failed.items()}
            codes.pop(KafkaError.OPERATION_NOT_ATTEMPTED, None)  # because another partition of the request failed
            if code := messages.code_of(added[1]):
                codes[code] = f"group {self._group_id}"
            if not codes:
                return
            for code, name in codes.items():
                await self._again_or_raise("flush", code, answers.ENLIST, pauses, "abortable", name)

    async def _send(self, parts: list[Part]) -> None:
        pauses = Pauses()
        who, compression = self._who, self._cluster.settings.compression
        pieces = {part: part.batch.encode(who.producer_id, who.epoch, part.sequence, compression) for part in parts}
        while parts:
            failed = await self._produce_round(parts, pieces)
            again = []
            look = False
            for part in parts:
                answer = failed.get((part.topic, part.partition))
                meaning = Meaning.DONE if answer is None else answers.PRODUCE.get(answer.code, Meaning.ABORTABLE)
                if answer is None or meaning is Meaning.DONE:
                    continue
                missing = answer.code == KafkaError.UNKNOWN_TOPIC_OR_PART and pauses.elapsed > UNKNOWN_SECONDS
                if meaning in _AGAIN and not missing:
                    again.append(part)
                    self._last_answer = answers.described(answer.code, part.name)
                    look = look or meaning is Meaning.AGAIN_LEADER
                elif meaning in (Meaning.REFUSED, Meaning.BLOCKED) or missing:
                    self._refuse_part(part, answer)
                else:
                    raise answers.failure(self.transactional_id, "flush", answer.code, meaning, part.name)
            if self.refused:
                first = next((refused for refused in self.refused if refused.is_own), self.refused[0])
                kind = "abortable" if first.is_own else "blocked"
                raise TransactionFailed("flush", first.code, kind, f"{self.transactional_id}: {first.reason}")
            if again:
                _log.debug("%s: produced again: %s", self.transactional_id, failed)
                await pauses.next()
                if look:
                    await self._cluster.refresh({part.topic for part in again})
            parts = again

    async def _produce_round(
        self, parts: Iterable[Part], pieces: Mapping[Part, list[bytes]]
    ) -> dict[tuple[str, int], messages.PartitionError]:
        """Send each broker its batches, all at once; return the partitions that failed."""
        failed: dict[tuple[str, int], messages.PartitionError] = {}
        by_broker: dict[int, list[Part]] = {}
        for part in parts:
            leader = self._leader(part)
            if leader < 0:
                failed[part.topic, part.partition] = messages.PartitionError(KafkaError.LEADER_NOT_AVAILABLE, "", ())
            else:
                by_broker.setdefault(leader, []).append(part)
        connections = [await self._connections.get(node) for node in by_broker]
        calls = []
        for connection, own in zip(connections, by_broker.values(), strict=True):
            topics: dict[str, list[tuple[int, list[bytes]]]] = {}
            for part in own:
                topics.setdefault(part.topic, []).append((part.partition, pieces[part]))
            request = messages.produce(self.transactional_id, int(self._delivery_seconds * 1000), topics)
            calls.append(self._call(connection, messages.PRODUCE, request))
        for frame, own in zip(await asyncio.gather(*calls), by_broker.values(), strict=True):
            failed |= messages.refused(frame, [(part.topic, part.partition) for part in own])
        return failed

    async def _send_offsets(self, topic: str, offsets: Mapping[int, int], fence: Callable[[], Snapshot]) -> None:
        pauses = Pauses()
        while True:
            connection = await self._connections.get(self._group_coordinator)
            metadata = fence().metadata  # right before the request: nothing is awaited in between
            if metadata is None:
                raise TransactionFailed(
                    "send_offsets_to_transaction", "NO_MEMBER", "stale", "not in the group right now"
                )
            member = parse_metadata(metadata)
            frame = await self._call(
                connection,
                messages.COMMIT_OFFSETS,
                messages.commit_offsets(
                    self._who, self._group_id, member.generation, member.member_id, member.instance_id, topic, offsets
                ),
            )
            failed = messages.partition_codes(frame, [(topic, partition) for partition in offsets])
            codes = {code: partition for (_, partition), code in failed.items()}
            if not codes:
                return
            for code, partition in codes.items():
                name = f"group {self._group_id}, {topic}[{partition}]"
                call = "send_offsets_to_transaction"
                await self._again_or_raise(call, code, answers.OFFSETS, pauses, "abortable", name)

    async def _end(self, *, commit: bool) -> None:
        """End the transaction. Without an answer: under v2 the end is requested again, because the coordinator knows
        the epoch and says what became of it; under v1 a late first request could end the next transaction."""
        call = "commit_transaction" if commit else "abort_transaction"
        pauses = Pauses()
        async with self._bounded(call, self._timeout):
            is_lost = False
            while True:
                try:
                    if is_lost:
                        self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)
                    connection = await self._connections.get(self._coordinator)
                    frame = await self._call(connection, messages.END, messages.end(self._who, commit=commit))
                except LostConnection as lost:
                    if not self._protocol.bumps_epoch:
                        raise
                    _log.log(
                        logging.DEBUG if is_lost else logging.INFO,
                        "%s: the end is requested again: %s",
                        self.transactional_id,
                        lost,
                    )
                    is_lost = True
                    await pauses.next()
                    continue
                if self._protocol.bumps_epoch:
                    code, producer_id, epoch = messages.ended(frame)
                    if not code:
                        self._who = Identity(self.transactional_id, producer_id, epoch)
                        return
                elif not (code := messages.code_of(frame)):
                    return
                await self._again_or_raise(call, code, answers.END, pauses, "unknown")

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _again_or_raise(
        self, call: str, code: int, table: Mapping[int, Meaning], pauses: Pauses, default: str, where: str = ""
    ) -> None:
        """Return when the request may be made again; else raise what the answer means."""
        meaning = table.get(code, Meaning(default))
        if meaning not in _AGAIN:
            raise answers.failure(self.transactional_id, call, code, meaning, where)
        self._last_answer = answers.described(code, where)
        await pauses.next()
        if meaning is Meaning.AGAIN_COORDINATOR and table is answers.OFFSETS:
            self._group_coordinator = await self._cluster.coordinator(GROUP, self._group_id)
        elif meaning is Meaning.AGAIN_COORDINATOR:
            self._coordinator = await self._cluster.coordinator(TRANSACTION, self.transactional_id)

    def _refuse_part(self, part: Part, answer: messages.PartitionError) -> None:
        """Note the records of a batch that are refused: those that the broker names, or the only one."""
        if answer.code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE) and part.batch.records > 1:
            self._cluster.too_large(part.topic, part.batch.size)
        named = [(index, reason or answer.message) for index, reason in answer.records]
        if not named:
            named = [(0 if part.batch.records == 1 else -1, answer.message)]
        for index, reason in named:
            output = None
            if index >= 0:
                output = self._records.output_at(part.topic, part.partition, part.first + index)
            self._refuse("flush", part.topic, part.partition, answer.code, reason, output)

    def _refuse(
        self, call: str, topic: str, partition: int, code: int, said: str, output: Output | None
    ) -> TransactionFailed:
        self.refused.append(answers.refused_delivery(topic, partition, code, said, output))
        reason = f"{self.transactional_id}: {self.refused[-1].reason}"
        return TransactionFailed(call, self.refused[-1].code, "blocked", reason)

    @asynccontextmanager
    async def _bounded(self, call: str, seconds: float) -> AsyncIterator[None]:
        """Bound a call in time. However it fails without an answer, the slot is closed."""
        self._under_way = mark = object()
        self._last_answer = ""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TransactionFailed:
            raise
        except (LostConnection, MalformedAnswer, TimeoutError) as error:
            self._abandon_after(mark)
            code = "_TIMED_OUT" if isinstance(error, TimeoutError) else getattr(error, "code", "_BAD_MSG")
            last = f"no success within {seconds:g} seconds: {self._last_answer}" if self._last_answer else ""
            reason = str(error) or last or f"no answer within {seconds:g} seconds"
            raise TransactionFailed(call, code, "unknown", f"{self.transactional_id}: {reason}") from None
        except BaseException:  # cancelled
            self._abandon_after(mark)
            raise
        finally:
            if self._under_way is mark:
                self._under_way = None

    def _abandon_after(self, mark: object) -> None:
        if self._under_way is mark:  # else a later call closed everything, and has connections of its own
            self.abandon()

    def _check_open(self, call: str) -> None:
        if not self._is_open:
            raise TransactionFailed(call, "NO_PRODUCER", "unknown", f"{self.transactional_id} is being replaced")

    def _no_records(self) -> EncodedRecords:
        return EncodedRecords(self._cluster.placements, self._cluster.settings.message_limit, alone=self.one_by_one)
