"""The reading of a whole topic on an event loop: start, watch, catch up, fail, stop. ``GlobalChangeLog``, ``View`` and
lookups stand on it.

The tail's thread reads (``view_follower.py``), another one carries requests about the topic (``followed_topic.py``).
Their news and errors come back to the loop, and are decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any

import anyio

from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    OffsetError,
    RegistrationError,
    Stopped,
    StreamsError,
    TopicError,
)
from streams.kafka.questions.admin import Watermarks
from streams.runtime.bridge import Inlet
from streams.runtime.ports import LogClients, LogTail
from streams.runtime.reading.followed_topic import REQUEST_SECONDS, FollowedTopic, loop_time
from streams.runtime.reading.view_follower import Following, LogPartitionStatistics, OnError, Receiver, Starts
from streams.runtime.signal import Broadcast
from streams.runtime.system import elapsed_seconds
from streams.statistics import SourceState

_log = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
"""The progress is logged, and the topic's id and number of partitions are looked up, every so many seconds."""
PROVE_SECONDS = 60.0
"""The ends of the logs are looked up every so many seconds, to prove as of when everything was received."""
PROOFS_IN_A_LIFE = 4
"""Where tombstones live for a short time, so many looks fall into it: one late look is no reason to fail."""
STOP_SECONDS = 10.0
"""``stop`` waits so many seconds for a receiver that does not come back."""
RETRY_SECONDS = 0.5
"""A partition that cannot be read although its topic exists is tried again after so many seconds."""
_POLL_SECONDS = 0.005
"""``stop`` looks every so many seconds whether the reading thread has ended."""

Missing = list[tuple[int, int, int, bool]]


class LogReader:
    """One reading of all partitions of a topic, from ``start`` to ``stop`` or to a failure. All methods are for one
    loop. ``GlobalChangeLog`` documents them."""

    def __init__(
        self,
        topic: str,
        connections: LogClients,
        on_error: OnError,
        topic_timeout_seconds: float,
        only_compacted: bool = False,
    ) -> None:
        self.topic = topic
        self.receivers: list[Receiver] = []
        self.state = SourceState.CREATED
        self.failure: Exception | None = None
        self.is_cut_off = False
        self.cut_off_until = -math.inf
        """The time of the loop at which the cluster was last known not to answer."""
        self.begin_at: Callable[[FollowedTopic], Awaitable[Starts]] | None = None
        """Returns where to go on in each partition; the others are read from the start of their logs."""
        self._only_compacted = only_compacted
        self._connections = connections
        self._on_error = on_error
        self._topic_timeout = topic_timeout_seconds
        self._changed: Broadcast  # made on the loop
        self._body: anyio.CancelScope | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._followed_topic: FollowedTopic | None = None
        self._tail: LogTail | None = None
        self._following: Following | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters = 0
        self._began = 0.0
        self._is_logged = False  # that it has caught up
        self._failing: dict[int, tuple[float, float]] = {}
        """Partitions that could not be read: when that began, and when it was seen last."""

    @property
    def addresses(self) -> str:
        """Return the bootstrap servers of the cluster."""
        return self._connections.addresses

    # -- its life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> None:
        """Start, and cancel the body if the reading fails. Enter and leave it in the same task."""
        await self.start()
        self._body = anyio.CancelScope().__enter__()
        self.on_failure(self._body.cancel)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises the error of the reading, unless the body ended with an error of its own."""
        body, self._body = self._body, None
        assert body is not None
        cancelled = body.__exit__(kind, error, trace)
        await self.stop()
        if self.failure is not None and (error is None or cancelled):
            raise self.failure

    async def start(self) -> None:
        if self.state is not SourceState.CREATED:
            raise RegistrationError(f"the global change log of {self.topic} was started before; make another one")
        if not self.receivers:
            raise RegistrationError(f"{self.topic} has no receiver: call table() or add_receiver() first")
        self.state = SourceState.STARTING
        self._changed = Broadcast()
        followed = self._followed_topic = FollowedTopic(self.topic, self._connections)
        try:
            await followed.find(self._topic_timeout)
            life = self._checked_life(followed, await followed.settings())
            starts = {} if self.begin_at is None else await self.begin_at(followed)
        except BaseException:
            followed.close()
            stopping = self.state is SourceState.STOPPING
            self._followed_topic, self.state = None, SourceState.STOPPED if stopping else SourceState.CREATED
            self._changed.notify()
            raise
        news: Inlet[None] = Inlet(lambda _: self._progressed())
        failed: Inlet[tuple[int, Exception]] = Inlet(lambda failure: self._partition_failed(*failure))
        self._tail = self._connections.tail()
        self._following = Following(
            self.topic,
            self._tail,
            self.receivers,
            self._on_error,
            lambda: news.put(None),
            lambda partition, error: failed.put((partition, error)),
            starts,
            life,
        )
        self._began = loop_time()
        self.state = SourceState.RUNNING
        self._following.grow(followed.partitions)
        self._task(self._watch, self._following, followed)
        self._task(self._prove, self._following, followed)

    def _checked_life(self, followed: FollowedTopic, settings: Mapping[str, str]) -> float:
        """Return for how many seconds the topic keeps tombstones. Raises ``TopicError`` for a topic that cannot be
        followed."""
        if trouble := followed.why_not_compacted(settings):
            if self._only_compacted:
                raise TopicError(f"{trouble}. Choose a compacted topic, or set its cleanup.policy to compact")
            _log.warning("%s", trouble)
        return followed.tombstones_seconds(settings)

    def on_failure(self, cancel: Callable[[], None]) -> None:
        """Have ``cancel`` called when the reading fails, or now if it has."""
        self._cancel = cancel
        if self.failure is not None:
            cancel()

    async def stop(self) -> None:
        if self.state is SourceState.CREATED:
            self.state = SourceState.STOPPED
            self._end_receivers()
            return
        if self.state in (SourceState.STARTING, SourceState.RUNNING):
            self.state = SourceState.STOPPING
            self._end_reading()
        # A cancelled caller waits, too: as long as the thread runs, a receiver may be called.
        with anyio.CancelScope(shield=True):
            deadline = loop_time() + STOP_SECONDS
            while not self._is_over() and loop_time() < deadline:
                await anyio.sleep(_POLL_SECONDS)
        if self._is_over():
            self._end_receivers()
        else:
            _log.error("%s: a receiver still runs %g s after the stop; it is left to itself", self.topic, STOP_SECONDS)
        if self.state is SourceState.STOPPING:
            self.state = SourceState.STOPPED
            self._changed.notify()

    async def wait_stopped(self) -> None:
        while self.state in (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING):
            await self._changed.wait(1.0)
        if self.failure is not None:
            raise self.failure

    def running(self) -> Following:
        """Return the running reading. Raises the error that it failed with, or ``Stopped``."""
        if self.failure is not None:
            raise self.failure
        if self.state is not SourceState.RUNNING or self._following is None:
            raise Stopped(f"the global change log of {self.topic} is not running ({self.state.value})")
        return self._following

    # -- how far it is -------------------------------------------------------------------------------------------------

    async def wait_caught_up(self, timeout_seconds: float | None, settle_seconds: float) -> bool:
        deadline = math.inf if timeout_seconds is None else loop_time() + timeout_seconds
        marks = await self.wait_stable(timeout_seconds)
        settled = min(deadline, loop_time() + settle_seconds)
        missing = await self._reach({number: mark.end for number, mark in marks.items()}, settled)
        if missing and settle_seconds == math.inf:
            what = f"open transactions hold it back for more than {timeout_seconds:g} s"
            raise NotCaughtUp(f"{self.topic}: not caught up, {what}: {_shown(missing)}")
        if missing:
            _log.warning("%s: caught up, but for what open transactions hold back: %s", self.topic, _shown(missing))
        return not missing

    async def wait_stable(self, timeout_seconds: float | None) -> Mapping[int, Watermarks]:
        """Wait for everything below the last stable offsets of now. Returns those. Raises as ``wait_caught_up``."""
        following, followed = self.running(), self._followed_topic
        assert followed is not None  # it is running
        deadline = math.inf if timeout_seconds is None else loop_time() + timeout_seconds
        try:
            # The topic has to be the same one first: the ends of another one would prove nothing.
            await self._check_topic(following, followed, deadline)
            marks = await followed.ends(deadline)
        except Stopped:
            self.running()  # raises what it failed with meanwhile, if that is why
            raise
        following.grow(len(marks))
        missing = await self._reach({number: mark.stable for number, mark in marks.items()}, deadline)
        if missing:
            raise NotCaughtUp(f"{self.topic}: not caught up within {timeout_seconds:g} s: {_shown(missing)}")
        return marks

    async def wait_for_positions(self, positions: Mapping[int, int], timeout_seconds: float | None) -> None:
        following, followed = self.running(), self._followed_topic
        assert followed is not None  # it is running
        deadline = math.inf if timeout_seconds is None else loop_time() + timeout_seconds
        if max(positions, default=0) >= following.partitions:  # it may have grown
            try:
                await self._check_topic(following, followed, deadline)
            except Stopped:
                self.running()  # as below
                raise
        for number, offset in positions.items():
            if not 0 <= number < following.partitions or offset < 0:
                last = following.partitions - 1
                raise ConfigError(
                    f"{self.topic}[{number}]@{offset} is no place in it: there are partitions 0 to {last}"
                )
        missing = await self._reach(positions, deadline)
        if missing:
            raise NotCaughtUp(f"{self.topic}: not there within {timeout_seconds:g} s: {_shown(missing)}")

    @property
    def topic_id(self) -> str:
        """Return the id of the topic that is read; empty before the start."""
        return "" if self._followed_topic is None else self._followed_topic.topic_id

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Return how far each partition is, see ``Following.positions``; nothing before the start."""
        return () if self._following is None else self._following.positions

    async def wait_changed(self, timeout_seconds: float) -> None:
        if self.state in (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING):
            await self._changed.wait(timeout_seconds)

    def statistics(self) -> tuple[bool, tuple[LogPartitionStatistics, ...]]:
        """Return whether it has caught up once, and the progress of each partition."""
        following = self._following
        return (False, ()) if following is None else (following.caught_up, following.statistics())

    async def _reach(self, goals: Mapping[int, int], until: float) -> Missing:
        """Wait until the goals are reached, or until it is too late; return the partitions that lack records then."""
        self._waiters += 1
        told_at = loop_time()
        try:
            while True:
                following = self.running()
                # This is set before the look: what the thread receives between the two would not be reported.
                following.awaited = True
                missing, left = following.missing(goals), until - loop_time()
                if not missing or left <= 0:
                    return missing
                if self._is_logged and loop_time() - told_at > WATCH_SECONDS:  # before, its progress is logged
                    told_at = loop_time()
                    _log.warning("%s: it is waited for: %s", self.topic, _shown(missing))
                await self._changed.wait(min(left, 1.0))
        finally:
            self._waiters -= 1
            if self._following is not None:
                self._following.awaited = self._waiters > 0

    # -- news of the thread --------------------------------------------------------------------------------------------

    def _progressed(self) -> None:
        following = self._following
        if not self._is_logged and following is not None and following.caught_up:
            self._is_logged = True
            _, _, records = following.progress()
            seconds, partitions = loop_time() - self._began, following.partitions
            _log.info("%s: caught up: %d records, %d partitions, %.1f s", self.topic, records, partitions, seconds)
        self._changed.notify()

    def _partition_failed(self, partition: int, error: Exception) -> None:
        if isinstance(error, TopicError | OffsetError) and self.state is SourceState.RUNNING:
            self._task(self._examine, partition, error)
        else:
            self.fail(error)

    async def _examine(self, partition: int, error: TopicError | OffsetError) -> None:
        """Find out why a partition cannot be read: its place in the log is gone, or the topic, or a broker does not
        know it yet."""
        following, followed = self.running(), self._followed_topic
        assert followed is not None  # it is running
        now = loop_time()
        began, last = self._failing.get(partition, (now, now))
        if now - last > 10 * RETRY_SECONDS:
            # The last failure is long ago, so the time to wait begins anew.
            began = now
        self._failing[partition] = began, now
        while True:
            try:
                await self._check_topic(following, followed, loop_time() + REQUEST_SECONDS)
                break
            except BrokerUnavailable as unavailable:
                _log.debug("%s: %s", self.topic, unavailable)
        if isinstance(error, OffsetError) or now - began >= self._topic_timeout:
            raise error
        if began == now:
            _log.warning("%s[%d] is tried again for %g s: %s", self.topic, partition, self._topic_timeout, error)
        await anyio.sleep(RETRY_SECONDS)
        following.go_on(partition)

    async def _watch(self, following: Following, followed: FollowedTopic) -> None:
        """Log the progress until it has caught up, and check the topic again and again."""
        passed, at = 0, self._began
        while True:
            await anyio.sleep(WATCH_SECONDS)
            if not self._is_logged:
                before, since, at = passed, at, loop_time()
                passed, left, records = following.progress()
                rate = (passed - before) / (at - since)
                time_left = f"{left / rate:.0f} s left" if rate > 0 else "standing still"
                _log.info("%s: %d records, %d offsets to go, %.0f/s, %s", self.topic, records, left, rate, time_left)
            try:
                await self._check_topic(following, followed, loop_time() + REQUEST_SECONDS)
            except BrokerUnavailable as error:
                _log.debug("%s: %s", self.topic, error)
                self.is_cut_off, self.cut_off_until = True, loop_time()
                self._changed.notify()

    async def _prove(self, following: Following, followed: FollowedTopic) -> None:
        """Note as of when everything was received, again and again: after a pause tombstones may be gone."""
        shortest: float | None = None  # as long as the settings have not been seen
        while True:
            settings = await followed.settings()
            life = followed.tombstones_seconds(settings)
            if settings:
                # Never longer than it was: a tombstone keeps the time that was set when the cleaner met it first.
                shortest = life if shortest is None else min(shortest, life)
            following.life_seconds = life if shortest is None else shortest
            # The time is taken before the request: what is written behind its answer is younger.
            as_of = elapsed_seconds()
            try:
                following.prove(await followed.stable_ends(), as_of)
            except Stopped:
                raise
            except StreamsError as error:  # what is wrong with the topic is found out by ``_watch``
                _log.debug("%s: %s", self.topic, error)
            await anyio.sleep(min(PROVE_SECONDS, following.life_seconds / PROOFS_IN_A_LIFE))

    async def _check_topic(self, following: Following, followed: FollowedTopic, deadline: float) -> None:
        """Check that the topic is still the same; it may have grown. Fails, and raises, if it is not."""
        loss = await followed.loss(deadline)
        if self.is_cut_off:
            self.is_cut_off, self.cut_off_until = False, loop_time()
            self._changed.notify()
        if loss is not None:
            self.fail(loss)
            raise loss
        following.grow(followed.partitions)

    def _task(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        async def run() -> None:
            try:
                await work(*args)
            except Stopped:
                pass
            except Exception as error:
                self.fail(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Stop reading because of an error: the first one is raised."""
        if self.state is not SourceState.RUNNING:
            return
        if not isinstance(error, StreamsError):
            failure = StreamsError(f"the global change log of {self.topic} can not go on: {error!r}")
            failure.__cause__ = error
            error = failure
        self.failure, self.state = error, SourceState.FAILED
        _log.error("the global change log of %s failed: %s", self.topic, error)
        for receiver in self.receivers:
            if receiver.fail is not None:
                receiver.fail(f"{receiver.name} is not kept up to date any more: {error}")
        self._end_reading()
        self._cancel()

    def _end_reading(self) -> None:
        if self._following is not None:
            self._following.end()
        if self._followed_topic is not None:
            self._followed_topic.close()
        # The present task goes on: if it has found the failure, it still has to raise it.
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._changed.notify()

    def _is_over(self) -> bool:
        """Check that no start is under way, and no thread is left that could call a receiver."""
        starting = self._followed_topic is not None and self._following is None
        return not starting and (self._tail is None or self._tail.ended)

    def _end_receivers(self) -> None:
        receivers, self.receivers = self.receivers, []
        for receiver in receivers:
            if receiver.end is not None:
                try:
                    receiver.end()
                except Exception:
                    _log.exception("%s: the end of %s failed", self.topic, receiver.name)


def _shown(missing: list[tuple[int, int, int, bool]]) -> str:
    where = [
        f"[{number}] at {max(position, 0)} of {goal}" + (" (paused)" if paused else "")
        for number, position, goal, paused in missing
    ]
    return ", ".join(where[:5]) + (f" and {len(where) - 5} more" if len(where) > 5 else "")
