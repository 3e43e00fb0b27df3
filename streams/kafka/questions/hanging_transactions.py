"""The end of a hanging transaction: decided by proof, done by the marker that is missing.

A broker may complete a transaction without a marker in each of its partitions
(``docs/internals/hanging-transactions.md``). Such a transaction hangs in a partition, and is committed elsewhere: to
abort it there would take back a half. So it is committed or aborted as a proof says, and left alone without one.

Proofs are about one transaction, known by producer id and epoch. Under transactions v2 each transaction has an epoch of
its own, ``E``, and its markers have the next one. Under v1 many transactions share an epoch: a commit under it may be
that of another one, and proves nothing.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from streams.errors import ConfigError, OffsetError
from streams.kafka import permissions
from streams.kafka.questions.open_transactions import STATE_LOG, OpenTransactions
from streams.kafka.questions.raw_log import RawLogs, Stretch, values
from streams.kafka.wire.codec import MalformedAnswer
from streams.kafka.wire.codes import entries_of
from streams.kafka.wire.messages import Fields
from streams.kafka.wire.schemas.write_txn_markers import WriteTxnMarkersRequest
from streams.model.group import HANGING_SECONDS, HangingEnd, OpenTransaction

_MARKERS: Final = [permissions.on_cluster("ClusterAction")]
_MARKER: Final = 1  # the newest version of the request that says nothing of the transaction's own version
_ONGOING, _COMMITTED, _ABORTED = 1, (2, 4), (3, 5)  # prepared, completed: in the coordinators' log
_V2: Final = 2
_PRODUCER: Final = struct.Struct(">q")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_VALUE: Final = struct.Struct(">hqhib")  # format, producer id and epoch, time-out, state
_CLIENT_VERSION: Final = 2  # the tag of that field in the coordinators' log
_WINDOW: Final = 1_000
"""Number of offsets that are read first, backwards, in search of the marker before a transaction."""
_SKEW_MS: Final = 60_000
"""Milliseconds by which the clocks of two brokers may differ."""
_FORGET_SECONDS: Final = 20 * 3600.0
"""Seconds for which a broker is sure to remember an idle producer: it forgets it a day after its last record
(``producer.id.expiration.ms``)."""


class _Finding(NamedTuple):
    """The finding of one log about a transaction. ``commit`` is ``None`` when the log says nothing. ``is_doubtful``: it
    may be a commit, so an abort is out of the question. ``is_unread``: because not all of the log could be read."""

    commit: bool | None
    words: str
    is_doubtful: bool = False
    is_unread: bool = False


class HangingTransactions(OpenTransactions, RawLogs):
    """Judges hanging transactions and ends them. Methods block and raise as those of ``OpenTransactions``."""

    def judge(
        self,
        topic: str,
        partition: int,
        start_offset: int,
        deadline: float,
        *,
        min_age_seconds: float = HANGING_SECONDS,
    ) -> HangingEnd:
        """Find out how the hanging transaction that began at this offset is to be ended. Changes nothing.

        The proofs are, in this order: the log of the coordinators, a marker in another partition of any topic, and that
        neither has a commit, ``min_age_seconds`` after its last record.

        ``OffsetError``: there is none, a coordinator is going to end it, or there is no proof; the message names what
        was looked at, and what to look at. Needs Read on the topics and on ``__transaction_state``, Describe on all
        transactional ids: what the principal must not see looks as if no coordinator knew of it.
        """

        async def work() -> HangingEnd:
            found = await self._find(topic, [partition], deadline)
            txn = _only(topic, partition, start_offset, found)
            return await self._proved(txn, min_age_seconds, deadline)

        return self._run(deadline, work)

    def end(self, ended: HangingEnd, deadline: float) -> None:
        """Write the marker. Repeating it does no harm, nor does another process that does the same: a marker without
        an open transaction changes nothing. Needs the right to act as the cluster (``ClusterAction``)."""

        async def work() -> None:
            step = f"ending a transaction in {ended.txn.topic}[{ended.txn.partition}]"
            found = await self._find(ended.txn.topic, [ended.txn.partition], deadline)
            # Looked at again: an operator may have thought for long, and a marker ends whatever is open.
            if any(txn.identity == ended.txn.identity and txn.is_hanging for txn in found):
                await self._until(deadline, step, lambda limit: self._write_marker(ended, limit), _MARKERS)

        self._run(deadline, work)

    # ------------------------------------------------------------------ the client's loop

    async def _proved(self, txn: OpenTransaction, min_age_seconds: float, deadline: float) -> HangingEnd:
        where = f"{txn.topic}[{txn.partition}]"
        epochs, since = await self._surroundings(txn, deadline)
        if epochs != {txn.producer_epoch}:  # a marker ends all that is open of its producer
            raise OffsetError(
                f"{where}: records of several epochs ({sorted(epochs)}) of producer {txn.producer_id} are open since "
                f"offset {txn.start_offset}: more than one transaction, and one marker would end all of them. Look at "
                f"{STATE_LOG} (kafka-dump-log.sh --transaction-log-decoder) for what became of each"
            )
        # First, because it has every transaction; a marker may be missing where the broker has lost it.
        log = await self._coordinators_say(txn, since, deadline)
        if log.commit is not None:
            return HangingEnd(txn, log.commit, log.words)
        markers = await self._markers_say(txn, since, deadline)
        # A log that was read to its end, and has no commit, contradicts the marker of one: then neither is believed.
        if markers.commit and log.is_unread:
            return HangingEnd(txn, True, markers.words)
        if log.is_doubtful or markers.is_doubtful or markers.commit:
            raise OffsetError(
                f"{where}: nothing proves what became of the transaction at offset {txn.start_offset} (producer "
                f"{txn.producer_id}, epoch {txn.producer_epoch}), so it is neither committed nor aborted: {log.words}; "
                f"{markers.words}. Look whether what belongs to its records is committed elsewhere, and end it by "
                "Kafka's own kafka-transactions.sh abort only if it is not"
            )
        # Without a proof of a commit the only risk is a transaction that is alive and not shown to this principal.
        left = min_age_seconds - (time.time() - txn.last_timestamp_ms / 1000)
        if left > 0:
            raise OffsetError(
                f"{where}: the last record of the transaction at offset {txn.start_offset} is younger than "
                f"{min_age_seconds:g} s, so it may be alive, unknown to this principal; try again in {left:.0f} s"
            )
        return HangingEnd(txn, False, f"it is committed nowhere: {log.words}; {markers.words}")

    async def _surroundings(self, txn: OpenTransaction, deadline: float) -> tuple[set[int], int]:
        """Return the epochs of what is open, and a time (ms since 1970) by the brokers' clocks before it began: that of
        the marker before it, less what clocks may differ; 0: there is none."""
        topic, partition, start = txn.topic, txn.partition, txn.start_offset
        [(_, low, high, _)] = await self._stretches(topic, [partition], 0, deadline)
        epochs = {
            batch.epoch
            async for batch in self._walk(topic, partition, start, high, deadline)
            if batch.producer_id == txn.producer_id
        }
        window, since = _WINDOW, 0
        while not since and start > low:
            first = max(low, start - window)
            async for batch in self._walk(topic, partition, first, start, deadline):
                if batch.is_control:
                    since = batch.max_timestamp - _SKEW_MS
            start, window = first, window * 8
        return epochs, since

    async def _coordinators_say(self, txn: OpenTransaction, since: int, deadline: float) -> _Finding:
        """Read the log of the coordinators."""
        # All of its partitions: which one has it follows from the transactional id, and a producer id may have been
        # exchanged for another one since.
        found: list[_Entry] = []
        has_holes, is_cut, is_older = False, False, False
        try:
            partitions = sorted(await self._log_leaders(deadline))
            for stretch in await self._stretches(STATE_LOG, partitions, since, deadline) if partitions else []:
                at, reaches_back = stretch.start, not stretch.is_whole
                async for batch in self._walk(STATE_LOG, stretch.partition, stretch.start, stretch.end, deadline):
                    has_holes = has_holes or batch.base > at or batch.records <= batch.last - batch.base
                    reaches_back = reaches_back or batch.max_timestamp <= since + _SKEW_MS
                    at = batch.last + 1
                    if _PRODUCER.pack(txn.producer_id) in batch.content:
                        found += _entries(values(batch, STATE_LOG, stretch.partition), txn.producer_id)
                # Compaction leaves the newest entry of an id, so a commit may be gone where later ones are there.
                has_holes = has_holes or at < stretch.end
                is_cut = is_cut or (stretch.start > 0 and not reaches_back)
                is_older = is_older or reaches_back
        except (ConfigError, MalformedAnswer) as error:
            return _Finding(None, f"the log of the coordinators cannot be read ({error})", True, True)
        said = _decided(found, txn)
        if said.commit is not None or said.is_doubtful or (is_older and not is_cut and not has_holes):
            return said
        why = "is compacted since" if has_holes else "begins after it"
        return _Finding(None, f"{STATE_LOG}, the log of the coordinators, {why}", True, True)

    async def _markers_say(self, txn: OpenTransaction, since: int, deadline: float) -> _Finding:
        """Read the markers of its producer in other partitions."""
        looked, doubt = 0, ""
        for topic, there in (await self._all_topics(deadline)).items():
            if topic == STATE_LOG:
                continue
            try:
                numbers = await self._was_in(txn, topic, there, deadline)
                for stretch in await self._stretches(topic, numbers, since, deadline) if numbers else []:
                    looked += 1
                    said = await self._marker_says(txn, topic, stretch, deadline)
                    if said.commit:
                        return said
                    doubt = said.words if said.is_doubtful else doubt
            except ConfigError as error:
                doubt = f"{topic} cannot be read ({error})"
        words = doubt or f"no marker of its commit in the {looked} other partitions that its producer wrote to"
        return _Finding(None, words, is_doubtful=bool(doubt))

    async def _was_in(self, txn: OpenTransaction, topic: str, numbers: list[int], deadline: float) -> list[int]:
        """The partitions of a topic, but for its own, in which its producer may have been."""
        # Later than that the leaders may have forgotten it, and it may have been in any partition.
        if time.time() - txn.last_timestamp_ms / 1000 < _FORGET_SECONDS:
            needed = [permissions.on_topic("Read", topic)]
            step = f"asking for producers in topic {topic}"
            known = await self._until(deadline, step, lambda limit: self._producers(topic, numbers, limit), needed)
            numbers = sorted({each.partition for each in known if each.producer_id == txn.producer_id})
        return [number for number in numbers if (topic, number) != (txn.topic, txn.partition)]

    async def _marker_says(self, txn: OpenTransaction, topic: str, stretch: Stretch, deadline: float) -> _Finding:
        epoch, under = txn.producer_epoch, set[int]()
        said = _Finding(None, "")
        async for batch in self._walk(topic, stretch.partition, stretch.start, stretch.end, deadline):
            if batch.producer_id != txn.producer_id:
                continue
            if not batch.is_control:
                under.add(batch.epoch)
                continue
            where = f"a marker at offset {batch.base} of {topic}[{stretch.partition}]"
            # Behind records of its own epoch it is of v1, and of a later transaction.
            if batch.marker and batch.epoch == epoch + 1 and epoch in under and epoch + 1 not in under:
                return _Finding(True, f"{where} commits it")
            if batch.marker is not False and (epoch in under if under else batch.epoch in (epoch, epoch + 1)):
                said = _Finding(None, f"{where} may commit it, or another transaction of this epoch (v1)", True)
            under = set()
        return said

    async def _write_marker(self, ended: HangingEnd, deadline: float) -> None:
        txn, marker_of = ended.txn, WriteTxnMarkersRequest.WritableTxnMarker
        topic = marker_of.WritableTxnMarkerTopic(name=txn.topic, partition_indexes=[txn.partition])
        marker = marker_of(
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            transaction_result=ended.commit,
            topics=[topic],
            coordinator_epoch=txn.coordinator_epoch,
        )
        [leader] = await self._by_leader(txn.topic, [txn.partition], deadline)
        answer = await self._client.send(WriteTxnMarkersRequest(markers=[marker]), leader, deadline, most=_MARKER)
        for each in answer.markers:
            for _ in entries_of(each.topics):
                pass  # raises for one that was refused


class _Entry(NamedTuple):
    """An entry of the coordinators' log: state and epoch of a producer, the partitions that its transaction has, and
    the version that its client spoke. (Older formats than the flexible one have no partitions here.)"""

    status: int
    epoch: int
    partitions: frozenset[tuple[str, int]]
    version: int


def _entries(logged: Iterable[bytes], producer_id: int) -> Iterable[_Entry]:
    """Decode the entries of this producer (Kafka's ``TransactionLogValue``). Raises ``MalformedAnswer``."""
    for value in logged:
        fields = Fields(value)
        format_, found, epoch, _, status = fields.take(_VALUE)
        if found == producer_id:
            yield _Entry(status, epoch, *(_further(fields) if format_ >= 1 else (frozenset(), 0)))


def _further(fields: Fields) -> tuple[frozenset[tuple[str, int]], int]:
    partitions: set[tuple[str, int]] = set()
    for _ in range(fields.array()):
        topic = fields.text()
        partitions.update((topic, fields.take(_INT32)[0]) for _ in range(fields.array()))
        fields.tags()
    fields.skip(16)  # times
    version = 0
    for _ in range(fields.unsigned()):
        tag, size = fields.unsigned(), fields.unsigned()
        if tag == _CLIENT_VERSION:
            version = fields.take(_INT16)[0]
        else:
            fields.skip(size)
    return frozenset(partitions), version


def _decided(entries: Sequence[_Entry], txn: OpenTransaction) -> _Finding:
    """Decide by what the coordinators wrote about this epoch of the producer, and the next one, in this order."""
    epoch, where = txn.producer_epoch, (txn.topic, txn.partition)
    if entries and entries[-1].status == _ONGOING and entries[-1].epoch == epoch and where in entries[-1].partitions:
        words = f"{STATE_LOG} has it as ongoing, and no coordinator lists it to this principal"
        return _Finding(None, words, is_doubtful=True)
    ends = [entry for entry in entries if entry.epoch == epoch + 1 and entry.version >= _V2]
    is_committed = any(entry.status in _COMMITTED for entry in ends)
    of_v1 = [entry for entry in entries if entry.epoch == epoch and entry.version < _V2]
    # A client that went on with v2 under the epoch of its last one of v1 (Kafka's own do) has two transactions there.
    is_shared = is_committed and any(entry.status in _COMMITTED + _ABORTED for entry in of_v1)
    if is_shared or any(entry.status in _COMMITTED for entry in of_v1):
        words = f"{STATE_LOG} has commits under its epoch, which transactions v1 share"
        return _Finding(None, words, is_doubtful=True)
    if is_committed:
        return _Finding(True, f"{STATE_LOG} has it as committed")
    is_v2 = any(entry.version >= _V2 and entry.epoch in (epoch, epoch + 1) for entry in entries)
    if is_v2 and any(entry.epoch == epoch + 1 and entry.status in _ABORTED for entry in entries):
        return _Finding(False, f"{STATE_LOG} has it as aborted")
    return _Finding(None, f"{STATE_LOG} has no commit of it")


def _only(topic: str, partition: int, start_offset: int, found: Collection[OpenTransaction]) -> OpenTransaction:
    """Return the transaction that began there. ``OffsetError`` if it is not hanging."""
    where = f"{topic}[{partition}]"
    txn = next((txn for txn in found if txn.start_offset == start_offset), None)
    if txn is None:
        begun = ", ".join(str(txn.start_offset) for txn in found) or "none"
        raise OffsetError(f"{where}: no open transaction began at offset {start_offset} (open ones: {begun})")
    if not txn.is_hanging:
        raise OffsetError(
            f"{where}: the transaction at offset {start_offset} is not hanging: {txn.transactional_id} has it "
            f"({txn.state}), and its coordinator ends it, by its time-out at the latest"
        )
    return txn
