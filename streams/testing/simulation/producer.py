"""``ports.Producer`` over the simulated broker, with the errors that ``clients.translate`` makes of librdkafka's."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from streams.clients.group_wire import parse_metadata
from streams.errors import RecordRefused, TransactionFailed
from streams.records import Change, Output, changelog_record
from streams.runtime.changelog import RELEASE_KEY
from streams.testing.simulation.broker import LogEntry, Refuses
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.process import FOREVER, Process
from streams.testing.simulation.refusals import check_record, is_name

EFFECTS = {"send": "send_offsets.after", "commit": "commit.after", "abort": "abort.after"}
"""Kinds of calls, and the point at which the broker has done what they ask."""


@dataclass
class SimRefusal:
    """``ports.Refusal``."""

    topic: str
    reason: str
    is_own: bool
    output: Output | None


class SimProducer:
    """``ports.Producer``, with the errors that ``clients.translate`` makes of librdkafka's."""

    def __init__(self, process: Process, name: str, transaction_timeout: float, one_by_one: bool, limit: int) -> None:
        self._one_by_one, self._limit = one_by_one, limit
        self._process, self._name, self._transaction_timeout = process, name, transaction_timeout
        self._broker, self._faults = process.broker, process.faults
        self._epoch = -1
        self._queue: deque[tuple[str, int, LogEntry, Output]] = deque()
        self._sending = self._closed = self._begun = self._releases = False
        self._failed: TransactionFailed | None = None
        self._sent_any = False
        self._born = process.loop.time()
        self.refused: list[SimRefusal] = []

    def init(self, timeout_seconds: float) -> None:
        self._process.at("init.before")
        deadline = self._process.loop.time() + timeout_seconds
        strike = self._process.strike("init")
        if strike is Strike.HANGS:
            self._process.pause(FOREVER)
        if strike is Strike.REQUEST_LOST:
            self._no_answer("init_transactions", timeout_seconds)
        while True:
            self._process.send()
            epoch = self._broker.init(self._name, self._transaction_timeout)
            if epoch is not None:
                self._process.at("init.after")
            if strike is Strike.REPLY_LOST:
                self._no_answer("init_transactions", timeout_seconds)
            self._process.travel()
            if epoch is not None:
                self._epoch = epoch
                return
            if self._process.loop.time() > deadline:
                raise TransactionFailed("init_transactions", "_TIMED_OUT", "unknown")
            self._process.pause(0.02)

    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None:
        self._process.travel()

    def begin(self) -> None:
        if self._begun:
            raise TransactionFailed("begin_transaction", "_STATE", "unknown", "a transaction is under way")
        self._begun, self._sent_any, self._failed, self.refused = True, False, None, []
        self._releases = False
        self._process.passes("begin.after")

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        position = start
        with contextlib.suppress(RecordRefused, TransactionFailed, TypeError, ValueError, OverflowError):
            while position < len(outputs) and self.produce(outputs[position]):
                position += 1
        return position

    def produce_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int) -> int:
        return self.produce_many([changelog_record(topic, partition, change) for change in changes], start)

    def produce(self, output: Output) -> bool:
        topic, partition = output.topic, output.partition
        entry = LogEntry(output.key, output.value, output.headers, None, False, output.timestamp_ms)
        if self._failed is not None and self._failed.kind == "fenced":
            raise self._failed
        if self._closed or not self._begun:
            raise TransactionFailed("produce", "_STATE", "unknown", "no transaction")
        if len(self._queue) >= self._faults.queue_limit:
            return False
        count = self._broker.topics.get(topic, self._broker.partitions)
        check_record(topic, partition, count, entry.key, entry.value, entry.headers, self._limit, entry.timestamp_ms)
        if partition == -1 and is_name(topic):
            partition = self._broker.partition_of(topic, entry.key)
        self._process.passes("produce.before")
        self._queue.append((topic, partition, entry, output))
        self._releases = self._releases or entry.key == RELEASE_KEY
        self._schedule()
        return True

    def poll(self) -> None:
        pass

    def _schedule(self) -> None:
        if not self._sending:
            self._sending = True
            self._process.loop.call_later(self._faults.one_way(), self._send)

    def _send(self) -> None:
        """Send queued records in order, as librdkafka's own thread does."""
        self._sending = False
        process = self._process
        if self._closed or process.dead or self._failed is not None:
            self._queue.clear()
            return
        wait = process.away()
        if wait > 0:
            self._sending = True
            process.loop.call_later(wait + self._faults.one_way(), self._send)
            return
        for _ in range(min(len(self._queue), self._faults.rng.randint(1, 30))):
            topic, partition, entry, _ = self._queue[0]
            reason = self._broker.blocked.get(topic) or self._broker.refusal(topic, partition, entry)
            if reason is not None:
                is_own = topic not in self._broker.blocked
                self._refuse(topic, partition, reason, is_own)
                kind = "abortable" if is_own else "blocked"
                self._failed = TransactionFailed("flush", reason, kind, self.refused[0].reason)
                self._queue.clear()
                return
            try:
                if not self._broker.produce(self._name, self._epoch, topic, partition, entry):
                    break
            except Refuses as refuses:
                self._failed = TransactionFailed("flush", refuses.code, refuses.kind)
                self._queue.clear()
                return
            self._sent_any = True
            self._queue.popleft()
            self._process.passes("produce.after")
        if self._queue:
            self._schedule()

    def _refuse(self, topic: str, partition: int, reason: str, is_own: bool) -> None:
        """Refuse the batch of a record: the broker's answer is to a batch, so records that travel with one too large
        are refused too, and only a record that travels alone can be named."""
        batch = [queued[3] for queued in self._queue if queued[:2] == (topic, partition)]
        where = topic if partition < 0 else f"{topic}[{partition}]"
        text, size = f"{where}: {reason}", self._faults.rng.randint(1, 3)
        if self._one_by_one:
            self.refused.append(SimRefusal(topic, text, is_own, batch[0]))
        else:
            self.refused += [SimRefusal(topic, text, is_own, None)] * len(batch[:size])

    def flush(self, timeout_seconds: float) -> None:
        self._process.at("flush.before")
        process, deadline = self._process, self._process.loop.time() + timeout_seconds
        strike = process.strike("flush", self._share("flush"))
        if strike is not None:
            if strike is Strike.HANGS:
                process.pause(FOREVER)
            if strike is Strike.ABORTABLE:
                raise TransactionFailed("flush", "INJECTED", "abortable")
            if strike is Strike.REPLY_LOST:
                self._no_answer("flush", timeout_seconds)
        process.travel()
        while self._queue and self._failed is None:
            if process.loop.time() > deadline:
                raise TransactionFailed("flush", "_TIMED_OUT", "unknown")
            process.pause(0.003)
        self._raise_if_failed()
        process.at("flush.after")
        process.travel()

    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None:
        member = parse_metadata(metadata)

        def effect() -> bool:
            shown = member.generation, member.member_id
            return self._broker.send_offsets(self._name, self._epoch, *shown, dict(offsets))

        if self._born < self._broker.last_outage and self._faults.rng.random() < 0.7:
            self._process.pause(FOREVER)  # librdkafka issues 5456 and 5511
        self._process.at("send_offsets.before")
        self._request("send_offsets_to_transaction", timeout_seconds, effect)
        self._sent_any = True

    def commit(self, timeout_seconds: float) -> None:
        self._end("commit_transaction", timeout_seconds, True)

    def abort(self, timeout_seconds: float) -> None:
        self._queue.clear()
        self._failed = None if self._failed is not None and self._failed.kind != "fenced" else self._failed
        self._end("abort_transaction", timeout_seconds, False)

    def close(self) -> None:
        self._closed = True
        self._queue.clear()

    def _end(self, call: str, timeout_seconds: float, commit: bool) -> None:
        self._raise_if_failed()
        self._process.at(call.split("_")[0] + ".before")
        if self._sent_any:
            self._request(call, timeout_seconds, lambda: self._broker.end(self._name, self._epoch, commit))
        self._begun = False

    def _request(self, call: str, timeout_seconds: float, effect: Callable[[], bool]) -> None:
        process, deadline = self._process, self._process.loop.time() + timeout_seconds
        kind = call.split("_")[0]
        strike = process.strike(kind, self._share(kind))
        if strike is Strike.REQUEST_LOST:
            self._no_answer(call, timeout_seconds)
        if strike is Strike.HANGS:
            process.pause(FOREVER)
        late = self._faults.rng.uniform(1.0, 6.0) * timeout_seconds if strike is Strike.LATE else 0.0
        if strike is Strike.ABORTABLE:
            process.travel()
            raise TransactionFailed(call, "INJECTED", "abortable")
        if strike is Strike.FORGOTTEN:
            process.travel()
            raise TransactionFailed(call, "UNKNOWN_MEMBER_ID", "lost")
        while True:
            if self._closed:
                raise TransactionFailed(call, "_DESTROY", "unknown")
            process.send(late)
            try:
                done = effect()
            except Refuses as refuses:
                process.travel()
                raise TransactionFailed(call, refuses.code, refuses.kind) from None
            if done:
                process.at(EFFECTS[kind])
            if strike is Strike.REPLY_LOST:
                self._no_answer(call, timeout_seconds)
            process.travel()
            if done:
                return
            if process.loop.time() > deadline:
                raise TransactionFailed(call, "_TIMED_OUT", "unknown")
            process.pause(0.02)

    def _share(self, call: str) -> float:
        return self._faults.plan.marker_strikes.get(call, 0.0) if self._releases else 0.0

    def _no_answer(self, call: str, timeout_seconds: float) -> None:
        self._process.pause(timeout_seconds if self._faults.rng.random() < 0.5 else FOREVER)
        raise TransactionFailed(call, "_TIMED_OUT", "unknown")

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed
