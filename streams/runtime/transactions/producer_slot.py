"""One slot of the transaction pool as the loop sees it: a transactional id, its producer of the moment, and its thread.

Every blocking call has a deadline *outside* the call, because librdkafka's own does not hold around a broker restart
(rule R7; librdkafka issues 5456 and 5511). When it passes, the producer and its thread are abandoned. ``reopen`` then
builds a new producer with the same id, which settles and fences the transaction of the old one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from streams.errors import RecordRefused, TransactionFailed
from streams.group import Snapshot
from streams.records import Change, Output
from streams.runtime.bridge import DeadlinePassed
from streams.runtime.ports import Blocking, Connections, Producer, Refusal
from streams.runtime.transactions.hung_calls import HungCalls

_log = logging.getLogger(__name__)
T = TypeVar("T")

DELIVER_SECONDS = 1.0
GRACE_SECONDS = 2.0
"""The time of a call on top of its own timeout, before it counts as hung."""


class Slot:
    """One producer slot, used by one transaction at a time. All methods are called on the loop."""

    def __init__(
        self, transactional_id: str, connections: Connections, call_timeout_seconds: float, hung_calls: HungCalls
    ) -> None:
        self.transactional_id = transactional_id
        self._connections = connections
        self._hung_calls = hung_calls
        self._under_way: str | None = None  # the last call, until it is known to have come back
        self._timeout = call_timeout_seconds
        self.one_by_one = False
        self._producer: Producer | None = None
        self._worker: Blocking | None = None

    async def reopen(
        self,
        topics: Collection[str],
        *,
        one_by_one: bool = False,
        may_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Build a new producer with this id, ready to begin. An open transaction of the one before is settled when this
        returns.

        ``one_by_one``: each record travels in a batch of its own, so that a refusal names its record and no other.
        ``may_open``: awaited when it is built and connected, right before it fences another holder of the id.

        Raises ``TransactionFailed`` if that did not work in time; call it again.
        """
        self.abandon()
        worker = self._worker = self._connections.worker(f"kes-{self.transactional_id}")
        try:
            producer = self._producer = await self._call(
                self._connect, worker, tuple(topics), one_by_one, name="list_topics"
            )
            if may_open is not None:
                await may_open()
            await self._call(self._init, worker, producer, name="init_transactions")
            self.one_by_one = one_by_one
        except BaseException:
            if self._worker is worker:
                self.abandon()
            raise

    def abandon(self) -> None:
        """Drop producer and thread as they are. Never blocks; a call that hangs keeps both until it comes back."""
        producer, self._producer = self._producer, None
        worker, self._worker = self._worker, None
        call, self._under_way = self._under_way, None
        if worker is not None:
            if producer is not None:
                worker.post(producer.close)  # on its own thread: closing takes its time, and must not race with a call
            if call is None:
                worker.abandon()
            else:
                self._hung_calls.abandon(worker, call)

    @property
    def refused(self) -> Sequence[Refusal]:
        """The deliveries of this transaction that the broker refused."""
        return self._producer.refused if self._producer is not None else ()

    def begin(self) -> None:
        """Start a transaction. Raises ``TransactionFailed``."""
        self._alive("begin_transaction").begin()

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        """Hand records to the producer, from position ``start`` up to the first that it does not take: return its
        position. ``produce`` finds the reason. Raises ``TransactionFailed`` if there is no producer."""
        return self._alive("produce").produce_many(outputs, start)

    def produce_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int) -> int:
        """Hand the changelog records of a partition's changes to the producer, as ``produce_many`` does outputs."""
        return self._alive("produce").produce_changes(topic, partition, changes, start)

    def produce(self, output: Output) -> bool:
        """Hand one record to the producer; ``False``: its queue is full. Raises ``RecordRefused``, also where a part of
        it is of a wrong type."""
        producer = self._alive("produce")
        try:
            return producer.produce(output)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordRefused(f"the client cannot send a record for topic {output.topic!r}: {error}") from error

    def poll(self) -> None:
        """Let the producer report refused deliveries."""
        if self._producer is not None:
            self._producer.poll()

    async def flush(self) -> None:
        """Wait until all records are acknowledged. Raises ``TransactionFailed``."""
        producer = self._alive("flush")
        await self._call(producer.flush, self._timeout, name="flush")

    async def commit(
        self,
        topic: str,
        offsets: Mapping[int, int],
        fence: Callable[[], Snapshot],
        requested: Callable[[], None],
    ) -> None:
        """Send the offsets under the newest group metadata, then commit.

        ``fence`` is called right before the offsets are sent, on the slot's thread; an error of it is raised here.
        ``requested`` is called right before the commit itself, after which the outcome may be unknown.
        """
        producer = self._alive("commit_transaction")
        timeout = self._timeout

        def send_and_commit() -> None:
            metadata = fence().metadata
            if metadata is None:
                raise TransactionFailed(
                    "send_offsets_to_transaction", "NO_MEMBER", "stale", "not in the group right now"
                )
            producer.send_offsets(topic, offsets, metadata, timeout)
            # First reported, then looked: an abandonment meanwhile is seen here, or sees the report.
            requested()
            if self._producer is not producer:
                raise TransactionFailed("commit_transaction", "ABANDONED", "unknown", "the deadline passed before it")
            producer.commit(timeout)

        await self._call(send_and_commit, name="send_offsets_to_transaction or commit_transaction", patience=2.0)

    async def deliver(self) -> None:
        """Give records on their way some time to arrive; failures are left to later calls."""
        producer = self._producer
        if producer is not None:
            with contextlib.suppress(TransactionFailed):
                await self._call(producer.flush, DELIVER_SECONDS, name="flush")

    async def abort(self) -> None:
        """Abort the transaction. Raises ``TransactionFailed``; the slot has to be reopened either way (rule R8)."""
        producer = self._alive("abort_transaction")
        await self._call(producer.abort, self._timeout, name="abort_transaction")

    def _connect(self, worker: Blocking, topics: tuple[str, ...], one_by_one: bool) -> Producer:
        producer = self._connections.producer(self.transactional_id, one_by_one=one_by_one)
        with self._closed_if_late(worker, producer):
            producer.warm_up(topics, self._timeout)
        return producer

    def _init(self, worker: Blocking, producer: Producer) -> None:
        with self._closed_if_late(worker, producer):
            producer.init(self._timeout)

    @contextlib.contextmanager
    def _closed_if_late(self, worker: Blocking, producer: Producer) -> Iterator[None]:
        try:
            yield
            if self._worker is not worker:  # too late: it is abandoned, and its end must not hold up the loop's thread
                raise TransactionFailed("init_transactions", "ABANDONED", "unknown", "the deadline passed before it")
        except BaseException:
            producer.close()
            raise

    def _alive(self, call: str) -> Producer:
        if self._producer is None:
            raise TransactionFailed(call, "NO_PRODUCER", "unknown", f"{self.transactional_id} is being replaced")
        return self._producer

    async def _call(self, function: Callable[..., T], *args: object, name: str, patience: float = 1.0) -> T:
        worker = self._worker
        if worker is None:
            raise TransactionFailed(name, "NO_PRODUCER", "unknown", f"{self.transactional_id} is being replaced")
        self._under_way = name
        try:
            result = await worker.call(function, *args, timeout=self._timeout * patience + GRACE_SECONDS)
        except DeadlinePassed:
            _log.warning("%s: %s hangs; producer and thread are abandoned", self.transactional_id, name)
            self._producer = None
            self.abandon()
            raise TransactionFailed(
                name, "HANGS", "unknown", f"no return from the call on {self.transactional_id}"
            ) from None
        except Exception:
            self._came_back(worker)
            raise
        self._came_back(worker)
        return result

    def _came_back(self, worker: Blocking) -> None:
        if self._worker is worker:
            self._under_way = None
