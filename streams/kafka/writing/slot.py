"""One transactional id that speaks Kafka's protocol itself: a slot of the transaction pool, on the event loop.

A transaction's records are encoded when they come here. ``flush`` sends them, one request per broker, and the offsets
beside them; ``commit`` ends the transaction. Which protocol is spoken is decided when the slot opens: transactions v2
(KIP-890) where the cluster has finalized it, else v1. With v2 each transaction has an epoch of its own, so a request
that comes late is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from streams.errors import RecordsRefused, TransactionFailed
from streams.kafka.wire import messages
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.messages import MalformedAnswer
from streams.kafka.wire.protocol import Markers
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.last_transaction import LastTransaction, by_topic, until_led
from streams.kafka.writing.offsets import Offsets, OffsetsOfNoMember
from streams.kafka.writing.session import TransactionSession
from streams.model.group import GroupMetadata
from streams.settings.groups import DELIVERY_SHARE

_log = logging.getLogger(__name__)


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
        self._cluster = cluster
        self._timeout = call_timeout_seconds
        self._delivery_seconds = min(call_timeout_seconds, transaction_timeout_seconds * DELIVERY_SHARE)
        self._session = TransactionSession(
            transactional_id,
            cluster,
            group_id=group_id,
            transaction_ms=int(transaction_timeout_seconds * 1000),
            delivery_ms=int(self._delivery_seconds * 1000),
            in_doubt=(messages.END,),
        )
        self._has_begun = False  # a transaction that is not ended yet
        self._last = LastTransaction()
        self._markers = Markers(alone)
        self._under_way: object | None = None  # the call that is running
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
            await self._session.locate()
        if may_open is not None:
            await may_open()
        before = self._session.who
        async with self._bounded("init_transactions", self._timeout):
            await self._session.initialize()
        self._sequences.clear()  # a new epoch, in which brokers take no first sequence but 0
        self._has_begun = False
        # To abort an open transaction takes an epoch, and so does each new owner of the id.
        has_begun = self._session.who != before._replace(epoch=before.epoch + 1)
        if self._last.reopened(has_begun=has_begun) or is_shaken:
            async with self._bounded("init_transactions", self._timeout):
                await self._end_again()
        self.is_open = True

    @property
    def is_shaken(self) -> bool:
        """Check whether a broker was lost since the last transaction ended, so that markers of it may be missing."""
        return self._last.is_shaken or self._session.connections.are_lost

    def settled(self, committed: bool) -> None:
        """Note what became of the transaction that was under way when the slot was opened again."""
        self._last.settled(committed)

    async def _end_again(self) -> None:
        """End the last transaction a second time (``LastTransaction``), without records, so no fence is needed."""
        topics, committed = self._last.again()
        self._session.connections.forget_lost()  # what they may have cost is made good now
        try:
            if topics:
                await until_led(topics, self._cluster)
                await self._session.enlist(topics, with_offsets=bool(self._session.group_id))
                await self._end(commit=committed)
        except RecordsRefused as refused:
            _log.warning("%s: markers that may be missing are not written: %s", self.transactional_id, refused)
            self._last.forget()

    def abandon(self) -> None:
        """Close at once. A transaction that is open is left to the next owner of the id."""
        self.is_open = False
        self._under_way = None
        self._session.connections.close()

    # -- sending -------------------------------------------------------------------------------------------------------

    async def flush(
        self,
        records: EncodedTransaction,
        offsets: Mapping[str, Mapping[int, int]],
        fence: Callable[[], GroupMetadata] | None,
    ) -> None:
        """Send all records and, beside them, the offsets under the newest group metadata; wait until all in-sync
        replicas have them. The first call begins a transaction, further ones add to it.

        ``offsets``: the next offset to read, by topic and partition, all in one request. ``fence`` is called right
        before they are sent; an error of it is raised here. ``None``: a command sends them, which is no member; the
        broker takes them unfenced. After a failure the transaction is to be aborted.
        """
        session = self._session
        if not offsets and session.group_id and not self._has_begun:
            raise ValueError("a transaction without offsets is not fenced by the group")
        self._check_open("flush")
        self._cluster.refresh_if_old()
        async with self._bounded("flush", self._delivery_seconds):
            if not self._has_begun and self.is_shaken:
                await self._end_again()
            if session.protocol.bumps_epoch and not self._has_begun:
                # v1 stays in its epoch, so they go on: a broker would take 0 for a repetition, and drop the records.
                self._sequences.clear()
            rounds = records.encoded.rounds(self._sequences) or [[]]
            if not rounds[0] and not offsets:
                return
            # Before anything is sent: of a request without an answer the broker may have a transaction open.
            self._has_begun = True
            self._last.begins()
            places = [(part.topic, part.partition) for part in rounds[0]]  # all of its partitions
            nodes = session.brokers_of(places, with_offsets=bool(offsets))
            # v1 has no other way. Under v2 the leaders would enlist their partitions, one at a time, each after the
            # markers of the id's last transaction: with three brokers 73 ms (p50), and 29 when the slot does it first.
            # On one broker it only costs a round trip, unless markers are late.
            if self._markers.may_be_late() or not session.protocol.bumps_epoch or len(nodes) > 1:
                await session.enlist(by_topic(places), with_offsets=bool(offsets))
            # Not before it is enlisted: until then it has no records, and the one before is still the last.
            self._last.writes(places)
            sent = Offsets(offsets, fence) if fence is not None else OffsetsOfNoMember(offsets, "")
            pending = sent if offsets else None
            for parts in rounds:
                _, producer_id, epoch = session.who
                compression = self._cluster.settings.compression
                # Once, and not for each try: a broker knows what is in its log by its sequences, and does not write it
                # twice.
                pieces = {part: part.batch.encode(producer_id, epoch, part.sequence, compression) for part in parts}
                records.written.append((parts, await session.deliver(pieces, pending, records.refused_by)))
                pending = None
        self._markers.sent()

    async def use_group(self, group_id: str) -> None:
        """Send offsets to this group from now on: one transaction may have those of several."""
        self._session.group_id = group_id
        async with self._bounded("flush", self._timeout):
            await self._session.locate_group()

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
        self.is_open = self._session.protocol.bumps_epoch

    async def _end(self, *, commit: bool, requested: Callable[[], None] = lambda: None) -> None:
        def request() -> None:
            # First: what it raises means that no end is requested, and the last transaction stays as it is known.
            requested()
            self._last.requested(commit=commit)

        async with self._bounded("commit_transaction" if commit else "abort_transaction", self._timeout):
            is_lost = await self._session.end(commit=commit, requested=request)
        self._has_begun = False
        self._last.ended(commit, is_lost)
        self._markers.ended()

    # -- time ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _bounded(self, call: str, seconds: float) -> AsyncIterator[None]:
        """Bound a call in time. However it fails without an answer, the slot is closed."""
        mark = object()
        outer, self._under_way = self._under_way, mark
        self._session.last_answer = ""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TransactionFailed:
            raise
        except (LostConnection, MalformedAnswer, TimeoutError) as error:
            self._abandon_after(mark)
            raise self._session.unanswered(call, error, seconds) from None
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
