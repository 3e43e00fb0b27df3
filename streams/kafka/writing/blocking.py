"""Transactions of a program that has no event source: blocking calls, over an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from anyio.from_thread import BlockingPortal, start_blocking_portal

from streams.errors import ConfigError, RecordRefused, RecordsRefused, StreamsError, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.settings import OF_LIBRDKAFKA_S_PRODUCER, ProducerSettings
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.slot import WireSlot
from streams.model.partitioners import PARTITIONERS, NullKeys
from streams.records import Output
from streams.sak.forks import MadeHere, never_freed
from streams.settings.groups import DELIVERY_SHARE

_RETRY_SECONDS: Final = 0.1
"""Seconds between two attempts of one ``commit``."""


class BlockingSlot:
    """A transactional id for a command: the calls of ``WireSlot``, blocking. One thread at a time; raises as that one.

    ``group_id``: the group of ``send_offsets``. ``seconds``: the time of a call. Raises ``ConfigError``.
    """

    def __init__(
        self,
        settings: ClientSettings,
        transactional_id: str,
        *,
        group_id: str = "",
        transaction_seconds: float,
        seconds: float,
    ) -> None:
        self._cluster = Cluster(_settings_of(settings))
        self._slot = WireSlot(
            transactional_id,
            self._cluster,
            group_id,
            call_timeout_seconds=seconds,
            transaction_timeout_seconds=transaction_seconds,
            alone=True,
        )
        self._group_id = group_id
        self._seconds = seconds
        self._resources = contextlib.ExitStack()
        self._portal = _portal(self._resources, self._slot)

    def open(self, topics: Sequence[str] = ()) -> None:
        """Take the id: what it left open is aborted, and the process that used it is fenced. ``topics`` are looked up
        before."""
        self._portal.call(self._slot.reopen, topics)

    def send(self, outputs: Sequence[Output]) -> dict[tuple[str, int], int]:
        """Send records into the transaction, which begins with the first call; wait until they are acknowledged.
        Returns the offset behind the last record of each topic and partition; -1: the broker has not said it."""
        return self._portal.call(self._send, outputs)

    def send_offsets(self, topic: str, offsets: Mapping[int, int], group_id: str = "") -> None:
        """Send offsets of the group into the transaction, or those of another one; they are pending until its end."""
        if group_id:
            self._portal.call(self._slot.use_group, group_id)
        records = EncodedTransaction(self._cluster, self._seconds)
        by_topic = {topic: offsets} if offsets else {}
        self._portal.call(self._slot.flush, records, by_topic, None)
        if group_id:
            self._portal.call(self._slot.use_group, self._group_id)

    def commit(self) -> None:
        """Commit the transaction."""
        self._portal.call(self._slot.commit, lambda: None)

    def abort(self) -> None:
        """Abort the transaction, if one has begun."""
        self._portal.call(self._slot.abort)

    def close(self) -> None:
        """End what is under way, and close connections, loop and thread. An open transaction is left to its time, or to
        the next process with the id."""
        self._resources.close()

    async def _send(self, outputs: Sequence[Output]) -> dict[tuple[str, int], int]:
        records = EncodedTransaction(self._cluster, self._seconds)
        await records.complete(outputs)
        await self._slot.flush(records, {}, None)
        return records.ends()


class Transactions:
    """The transactional producer: records without offsets, which no group fences. One thread at a time; an event loop
    may be running on it, which waits meanwhile."""

    def __init__(self, settings: ClientSettings, transactional_id: str, timeout_seconds: float, seconds: float) -> None:
        """``timeout_seconds``: the time of a transaction at the broker. ``seconds``: the time of ``commit``. Without an
        id nothing can be committed. Raises ``ConfigError``."""
        self.transactional_id = transactional_id
        self._settings = _settings_of(settings) if transactional_id else None
        self._place_of = None if settings.partitioner == "murmur2" else PARTITIONERS[settings.partitioner]
        self._null_keys: NullKeys = settings.null_keys
        self._transaction_seconds = timeout_seconds
        self._seconds = seconds
        self._call_seconds = seconds * DELIVERY_SHARE  # a call without success says why before the time is over
        self._resources = contextlib.ExitStack()
        self._start: Callable[[list[Output]], Future[None]] | None = None
        self._made_here = MadeHere("this EventProducer", ConfigError, self._leave_to_parent)

    def commit(self, outputs: list[Output]) -> None:
        """Send records in a transaction. The same records are sent again, in another transaction, until the time is
        over, as long as it is certain that the last one was not committed. Blocks.

        Raises ``RecordRefused``, and ``TransactionFailed`` (in doubt: the kind ``unknown`` of ``commit_transaction``).
        """
        self._made_here.check()
        if not outputs:
            return
        try:  # connected when it is needed first: a producer that never commits takes no id, and fences no other
            (self._start or self._connect())(outputs).result()
        except BaseException:  # also Ctrl-C in the middle: then it is still under way
            self.close()
            raise

    def close(self) -> None:
        """End what is under way, and close connections, loop and thread; the next ``commit`` makes others. A
        transaction that is open is aborted by the broker, or by the next producer with the id."""
        self._start = None
        self._resources.close()

    def _leave_to_parent(self) -> None:
        never_freed(self._resources)  # closing them would wait for the loop's thread
        self._start, self._resources = None, contextlib.ExitStack()

    def _connect(self) -> Callable[[list[Output]], Future[None]]:
        assert self._settings is not None, "a transaction needs a transactional id"
        cluster = Cluster(self._settings)
        cluster.partitioner_of, cluster.null_keys_of = (lambda _topic: self._place_of), (lambda _topic: self._null_keys)
        slot = WireSlot(
            self.transactional_id,
            cluster,
            "",
            call_timeout_seconds=self._call_seconds,
            transaction_timeout_seconds=self._transaction_seconds,
            alone=True,
        )
        portal = _portal(self._resources, slot)
        self._start = lambda outputs: portal.start_task_soon(self._commit, slot, cluster, outputs)
        return self._start

    async def _commit(self, slot: WireSlot, cluster: Cluster, outputs: list[Output]) -> None:
        requests = 0  # to commit; once there is one, nothing is sent again

        def requested() -> None:
            nonlocal requests
            requests += 1

        failure = self._timed_out("flush")
        try:
            async with asyncio.timeout(self._seconds):
                is_final = False  # once the commit was requested: the same records again could be there twice
                while not is_final:
                    try:
                        if not slot.is_open:
                            await slot.reopen({output.topic for output in outputs})
                        records = EncodedTransaction(cluster, self._call_seconds)
                        await records.complete(outputs)
                        await slot.flush(records, {}, None)
                        return await slot.commit(requested)
                    except TransactionFailed as error:
                        failure, is_final = _judged(error, requests)
                    # Readers of committed records wait for its end. A closed slot ends it when it is opened again.
                    with contextlib.suppress(TransactionFailed):
                        await slot.abort()
                    if not is_final:
                        await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            if requests:  # the last failure would say that nothing is committed, which is not known any more
                failure = self._timed_out("commit_transaction")
        raise failure

    def _timed_out(self, call: str) -> StreamsError:
        reason = f"{self.transactional_id}: no success within {self._seconds:g} seconds"
        return TransactionFailed(call, "_TIMED_OUT", "unknown", reason)


def _judged(failure: TransactionFailed, requests: int) -> tuple[StreamsError, bool]:
    """Return the error of a failed attempt, and whether it is final; else it is certain that nothing is committed, and
    the same may succeed. ``requests``: how many were made to commit."""
    if isinstance(failure, RecordsRefused):
        at_fault = [record for record in failure.refused if not record.is_batch_only]
        if at_fault:
            first = next((record for record in at_fault if record.is_own), at_fault[0])
            return RecordRefused(f"{first.reason}; nothing of the transaction is committed"), True
    if failure.kind == "fenced" and requests > 1:
        failure.kind = "unknown"  # an earlier request, which was not answered, may have committed it before that
    return failure, bool(requests) or failure.kind == "fenced"


def _settings_of(settings: ClientSettings) -> ProducerSettings:
    """Return the settings, without those that librdkafka's producer alone has: they are for other records."""
    own = {name: value for name, value in settings.overrides.items() if name not in OF_LIBRDKAFKA_S_PRODUCER}
    return ProducerSettings.of(settings.bootstrap_servers, settings.client_id, own)


def _portal(resources: contextlib.ExitStack, slot: WireSlot) -> BlockingPortal:
    """Start an event loop on a thread. Its end cancels the tasks there, and closes the slot before."""
    portal = resources.enter_context(start_blocking_portal())
    resources.callback(portal.call, portal.stop, True)  # True: tasks are cancelled
    resources.callback(portal.call, slot.abandon)
    return portal
