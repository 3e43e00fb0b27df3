"""Read partitions of one topic by Fetch requests of our own: the face of ``consumer.LogConsumer``, for logs that are
read up to an end.

While records are decoded and received here, the next answers are on their way: a broker gets its next request as soon
as an answer is taken in, and the kernel's buffers take what comes. So an answer of each broker is held, and one is
under way. Fetches go to leaders only (not to followers that are near, KIP-392).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from streams.errors import LogDamaged, StreamsError, TopicReplaced
from streams.kafka.connection import ConnectionLog
from streams.kafka.reading import failures
from streams.kafka.reading.fetch_line import FetchAnswer, FetchLine
from streams.kafka.reading.fetch_session import LOG_START, NO_END, NO_ID, FetchKind, FetchOptions, LogPartition
from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.reading.record_batches import FetchedBatches
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.codes import Code, is_retriable, is_stale_metadata, name_of
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.topic_questions import PartitionData
from streams.records import IncomingRecord, PolledPartition

_log = logging.getLogger(__name__)

UNKNOWN_SECONDS: Final = 3.0
"""Seconds for which a topic or partition may be unknown before that is an error: one just made is not known
everywhere."""
_LOOK_SECONDS: Final = 10.0
"""Seconds for one look at the metadata, over all brokers."""
_PAUSE_SECONDS: Final = 0.05
"""Seconds between two looks, and until a partition whose leader refused is fetched again."""
_MOST_BYTES: Final = 1 << 30
"""Bytes up to which the fetch of a partition grows, where a broker cuts off the first batch."""
_REFUSALS: Final = ("_AUTHENTICATION", "_SSL")
_MAYBE_GONE: Final = frozenset((Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID, Code.INCONSISTENT_TOPIC_ID))


class LogFetcher:
    """Reads partitions of one topic from given offsets, committed records only or all of them.

    Owned by one thread: every method is called by it. ``loop``: one of this thread, which others may use, too; without
    it there is one of its own. It never joins a group, never commits, and never resets a position.
    """

    def __init__(
        self,
        settings: ClientSettings,
        topic: str,
        kind: FetchKind,
        *,
        loop: ReadingLoop | None = None,
        committed_only: bool = True,
    ) -> None:
        self.topic, self._addresses = topic, settings.bootstrap_servers
        self._is_alone = loop is None
        self._loop = ReadingLoop(settings) if loop is None else loop
        self._options = FetchOptions(topic, kind, committed_only=committed_only)
        self._connection = ConnectionLog(self._addresses, f"{kind.role} {topic}")
        self._partitions: dict[int, LogPartition] = {}
        """In the order of the next request: those that have just brought something come last, because an answer has
        room for the first ones."""
        self._lines: dict[int, FetchLine] = {}
        self._ready: deque[tuple[LogPartition, FetchedBatches]] = deque()
        self._quiet: set[LogPartition] = set()  # at their end, without a record
        self._failures: dict[int, StreamsError] = {}
        self.refused: LostConnection | None = None
        """A broker's refusal to talk (credentials, certificates), until the next answer: waiting does not cure it."""
        self._looking: asyncio.Task[None] | None = None
        self._look_at = 0.0
        self._is_stale = True  # the metadata
        self._is_placed = True  # else the loop's metadata of before give the leaders
        self._missing: dict[int, float] = {}  # partitions that the metadata do not have, and since when

    @property
    def reason(self) -> str:
        """The last complaint about brokers, for error messages."""
        return self._connection.reason

    @property
    def by_name(self) -> bool:
        """Check whether a fetch had to name the topic, since its broker takes no ids (before Kafka 3.1): then its
        records may be those of another topic that has the name by now."""
        return self._options.by_name

    def add(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on, or from the start of its log (``LOG_START``). ``ValueError`` if it is
        read already."""
        self.add_all({partition: offset})

    def add_all(
        self, positions: Mapping[int, int], ends: Mapping[int, int] | None = None, topic_id: UUID = NO_ID
    ) -> None:
        """Read these partitions. See ``add``. ``ends``: no fetch begins there or behind, but one may bring more than
        wanted. ``topic_id``: that of the topic whose positions these are, where it is known; else it is that of the
        first metadata."""
        if not self._partitions:
            cluster = self._loop.cluster
            # Positions of before were another reading's. Brokers compare the id with each fetch, so metadata that the
            # loop has of this id are as good as new ones.
            self._is_placed = not (topic_id.int and topic_id == cluster.ids.get(self.topic))
            if self._is_placed:
                cluster.forget(self.topic)
            self._options.topic_id = topic_id
            self._is_stale, self._look_at = self._is_placed, 0.0
            self._missing.clear()
        for number, offset in positions.items():
            if number in self._partitions:
                raise ValueError(f"{self.topic}[{number}] is read already")
            end = NO_END if ends is None else ends[number]
            self._partitions[number] = LogPartition(number, offset, end)

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading: nothing of these partitions is returned any more. Unknown ones are passed over."""
        for number in partitions:
            self._partitions.pop(number, None)
            self._failures.pop(number, None)
        # An answer under way is passed over by ``_take_in``; this is what has come and was not taken yet.
        self._ready = deque(one for one in self._ready if self._is_read(one[0]))

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, PolledPartition]:
        """Wait for something new and take what else is there, up to ``limit`` records.

        Per partition in order, each record once. Records from before a failure are returned before ``take_failures``
        has it. An outage looks as if nothing came (it is logged when it begins and when it ends).
        """
        if not self._ready and not self._failures and self._partitions:
            self._loop.run(self._wait(timeout_seconds))
        found: dict[LogPartition, list[IncomingRecord]] = {}
        while self._ready and limit > 0:
            partition, batches = self._ready[0]
            try:
                records = batches.take(limit)
            except StreamsError as error:
                self._ready.popleft()
                self._fail(partition, error)
                continue
            if batches.is_done:
                self._ready.popleft()
            else:  # so many records of another one do not wait behind this one
                self._ready.rotate(-1)
            partition.position = batches.position
            limit -= len(records)
            found.setdefault(partition, []).extend(records)
        for partition in self._quiet:
            if self._is_read(partition):
                found.setdefault(partition, [])
        self._quiet.clear()
        return {partition.number: self._news(partition, records) for partition, records in found.items()}

    def poll_fetched(self, timeout_seconds: float) -> list[tuple[int, FetchedBatches]]:
        """Wait for something new, and return all that has come as it is, by partition in order, in place of
        ``poll_batch``. Nothing: also where a partition has come to its end (``end_of``)."""
        if not self._ready and not self._failures and self._partitions:
            self._loop.run(self._wait(timeout_seconds))
        found = [(partition.number, batches) for partition, batches in self._ready]
        for partition, batches in self._ready:
            partition.position, partition.is_at_end = batches.following, False
        for partition in self._quiet:
            partition.is_at_end = True
        self._ready.clear()
        self._quiet.clear()
        return found

    def end_of(self, partition: int) -> int:
        """Return the last stable offset of a partition that is read, as the last answer had it; -1: there was none."""
        found = self._partitions.get(partition)
        return -1 if found is None else found.stable

    def take_failures(self) -> dict[int, StreamsError]:
        """Return the partitions that failed since the last call; they are removed already. ``OffsetError``: the
        position is not in the log (any more). ``TopicReplaced``: the topic was made again. ``TopicError``: the topic is
        gone, may not be read, or its log is damaged (``LogDamaged``)."""
        found, self._failures = self._failures, {}
        return found

    def close(self) -> None:
        """Free everything; a loop that others may use is theirs to close. Does not raise; repeating is harmless."""
        if self._looking is not None:
            self._looking.cancel()
        for line in self._lines.values():
            line.close()
        self._partitions.clear()
        self._ready.clear()
        self._lines.clear()
        if self._is_alone:
            self._loop.close()

    def _is_read(self, partition: LogPartition) -> bool:
        return self._partitions.get(partition.number) is partition

    def _news(self, partition: LogPartition, records: list[IncomingRecord]) -> PolledPartition:
        at_end = partition.is_at_end = partition.position >= partition.stable
        return PolledPartition(records, partition.position, partition.high, at_end)

    # ------------------------------------------------------------------ on the loop

    async def _wait(self, seconds: float) -> None:
        """Send what can be sent, until something has come or the time is over."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        if not self._is_placed:
            self._is_placed = True
            self._place()
        while True:
            # What has come is taken in before anything is sent: a leader that is known now gets its fetch in this turn.
            self._take_metadata()
            self._look()
            for line in self._lines_in_use():
                line.send(self._partitions.values())
                self._take_answer(line)
            left = end - clock()
            if self._ready or self._quiet or self._failures or left <= 0:
                return
            waiting: list[asyncio.Future[Any]] = [
                one for line in self._lines.values() if (one := line.under_way) is not None
            ]
            is_idle = len(waiting) == len(self._lines) and not any(one.leader < 0 for one in self._partitions.values())
            if self._looking is not None:
                waiting.append(self._looking)
            began = clock()
            # What is held back for a while is looked at again soon.
            pause = left if is_idle else min(left, _PAUSE_SECONDS)
            if waiting:
                await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(pause)
            for line in self._lines.values():
                line.waited(clock() - began)

    def _lines_in_use(self) -> Iterator[FetchLine]:
        leaders = {one.leader for one in self._partitions.values()}
        for node in leaders - self._lines.keys() - {-1}:
            self._lines[node] = FetchLine(node, self._loop, self._options)
        # While a leader is looked up it may be the one of before, whose line knows how long it was silent.
        for node in self._lines.keys() - leaders if -1 not in leaders else ():
            if self._lines[node].under_way is None:
                del self._lines[node]
        yield from [*self._lines.values()]

    def _take_answer(self, line: FetchLine) -> None:
        try:
            answer = line.take()
        except LostConnection as failure:
            _log.debug("%s: broker %d: %s", self.topic, line.node, failure)
            self._on_lost(failure, is_down=False)
            for partition in self._partitions.values():
                if partition.leader == line.node:
                    self._look_up(partition)
            return
        if answer is None:
            if line.under_way is None:  # the connection is there now
                line.send(self._partitions.values())
            return
        self._connection.on_answer()
        self.refused = None
        self._take_in(answer)
        line.send(self._partitions.values())  # before this is decoded: the broker is at work meanwhile

    def _on_lost(self, failure: LostConnection, *, is_down: bool) -> None:
        self._connection.on_failure(f"{failure.code}: {failure}", is_down=is_down)
        if failure.code in _REFUSALS:
            self.refused = failure

    def _take_in(self, answer: FetchAnswer) -> None:
        for partition, offset, data in answer.partitions:
            if self._is_read(partition) and offset == partition.next_offset:  # else it was removed meanwhile
                if code := answer.code or data.error_code:
                    self._refused(partition, code)
                else:
                    self._take_data(partition, data)

    def _take_data(self, partition: LogPartition, data: PartitionData) -> None:
        cut = data.diverging_epoch
        # Before anything of the answer counts: the log was cut below the position (an unclean election), and what
        # follows there is another history.
        if cut is not None and cut.end_offset >= 0:
            known = f"leader epoch {partition.fetched_epoch}, which the log has up to {cut.end_offset} only"
            self._fail(partition, self._not_in_log(partition, f"what is before it was read under {known}"))
            return
        partition.is_guessed = False
        if partition.position == LOG_START:
            partition.position = partition.next_offset
        partition.high = data.high_watermark
        partition.stable = data.high_watermark if data.last_stable_offset < 0 else data.last_stable_offset
        aborted = [(one.producer_id, one.first_offset) for one in data.aborted_transactions or ()]
        batches = FetchedBatches(
            self.topic,
            partition.number,
            partition.next_offset,
            data.records or b"",
            aborted if self._options.committed_only else None,
        )
        if batches.is_cut:
            partition.least_bytes = 2 * max(partition.least_bytes, self._options.kind.far_bytes)
            if partition.least_bytes > _MOST_BYTES:
                self._fail(partition, self._damaged(partition, "the broker cuts off the first batch of every answer"))
        elif not batches.is_done:
            partition.bytes_an_offset = batches.bytes_an_offset
            partition.next_offset, partition.fetched_epoch = batches.following, batches.leader_epoch
            self._ready.append((partition, batches))
            self._partitions[partition.number] = self._partitions.pop(partition.number)
        elif partition.position >= partition.stable and not partition.is_at_end:
            self._quiet.add(partition)

    def _refused(self, partition: LogPartition, code: int) -> None:
        where, name = self._where(partition), name_of(code)
        if code == Code.OFFSET_OUT_OF_RANGE and partition.is_guessed:
            partition.is_guessed, partition.next_offset = False, LOG_START
        elif code == Code.OFFSET_OUT_OF_RANGE:
            self._fail(partition, self._not_in_log(partition, name))
        elif code == Code.TOPIC_AUTHORIZATION_FAILED:
            self._fail(partition, failures.not_allowed(where, self.topic, name))
        elif code == Code.CORRUPT_MESSAGE:
            self._fail(partition, self._damaged(partition, f"the broker cannot read it either ({name})"))
        elif is_retriable(code) or code == Code.UNKNOWN_SERVER_ERROR:
            self._connection.on_failure(f"{name}: {where}", is_down=False)
            partition.retry_at = asyncio.get_running_loop().time() + _PAUSE_SECONDS
            if code in _MAYBE_GONE:
                self._loop.cluster.forget(self.topic)  # else metadata without the topic count as those of a late broker
            if is_stale_metadata(code):
                self._look_up(partition)
        else:
            self._fail(partition, failures.refused(where, self._addresses, name))

    def _damaged(self, partition: LogPartition, reason: str) -> LogDamaged:
        return LogDamaged(f"{self._where(partition)}@{partition.next_offset}: {reason}")

    def _not_in_log(self, partition: LogPartition, reason: str) -> StreamsError:
        return failures.not_in_log(self._where(partition), partition.next_offset, self._addresses, reason)

    def _where(self, partition: LogPartition) -> str:
        return f"{self.topic}[{partition.number}]"

    def _fail(self, partition: LogPartition, error: StreamsError) -> None:
        if self._is_read(partition):
            del self._partitions[partition.number]
            self._failures[partition.number] = error

    # ------------------------------------------------------------------ leaders

    def _look_up(self, partition: LogPartition) -> None:
        """Look the leader of a partition up again."""
        partition.leader, self._is_stale = -1, True

    def _look(self) -> None:
        """Give partitions their leaders; fetch the metadata anew if they are stale."""
        if self._is_stale or any(one.leader < 0 for one in self._partitions.values()):
            now = asyncio.get_running_loop().time()
            if self._looking is None and now >= self._look_at:
                self._looking = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._loop.cluster.refresh([self.topic])
        except TimeoutError:
            raise LostConnection(f"no answer within {_LOOK_SECONDS:g} seconds", "_TIMED_OUT") from None

    def _take_metadata(self) -> None:
        looking = self._looking
        if looking is None or not looking.done():
            return
        self._looking, self._look_at = None, asyncio.get_running_loop().time() + _PAUSE_SECONDS
        try:
            looking.result()
        except LostConnection as failure:
            self._on_lost(failure, is_down=True)
            return
        self._connection.on_answer()
        self._is_stale = False
        if self._is_there():
            self._place()

    def _is_there(self) -> bool:
        """Check whether the topic is there, and still the same. Otherwise all partitions fail, if it is for good."""
        cluster, topic = self._loop.cluster, self.topic
        error: StreamsError | None = None
        if (unknown := cluster.unknown_since(topic)) is not None:
            code, seconds = unknown
            self._connection.on_failure(f"{name_of(code)}: {topic}", is_down=False)
            if code == Code.TOPIC_AUTHORIZATION_FAILED:
                error = failures.not_allowed(topic, topic, name_of(code))
            elif seconds >= UNKNOWN_SECONDS or not is_retriable(code):
                error = failures.no_such_topic(topic, self._addresses, name_of(code))
        else:
            found, known = cluster.ids[topic], self._options.topic_id
            if known == found or not known.int:
                self._options.topic_id = found
                return True
            error = TopicReplaced(
                f"{topic} was deleted and created again while it was read (id {known} then, {found} now); nothing of"
                " the new one was read. Read it from its beginning, or restore the topic"
            )
        if error is not None:
            for partition in [*self._partitions.values()]:
                self._fail(partition, error)
        return False

    def _place(self) -> None:
        """Give partitions without a leader the one of the metadata."""
        cluster, topic = self._loop.cluster, self.topic
        now, epochs = asyncio.get_running_loop().time(), cluster.epochs[topic]
        for partition in [*self._partitions.values()]:
            number = partition.number
            if number >= len(epochs):
                if now - self._missing.setdefault(number, now) >= UNKNOWN_SECONDS:
                    name = name_of(Code.UNKNOWN_TOPIC_OR_PARTITION)
                    self._fail(partition, failures.no_such_topic(self._where(partition), self._addresses, name))
            elif partition.leader < 0:
                self._missing.pop(number, None)
                leader, epoch = cluster.leader_of(topic, number), epochs[number]
                if leader < 0:
                    self._connection.on_failure(f"LEADER_NOT_AVAILABLE: {self._where(partition)}", is_down=False)
                elif epoch < partition.leader_epoch:  # of a broker that lags, else the log is another one
                    reason = f"the leader epoch went back from {partition.leader_epoch} to {epoch}"
                    self._connection.on_failure(f"STALE_METADATA: {self._where(partition)}: {reason}", is_down=False)
                else:
                    partition.leader, partition.leader_epoch = leader, epoch
