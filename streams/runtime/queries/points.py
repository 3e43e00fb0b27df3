"""Single keys, read for the loop of an HTTP server: all that wait are handed over by one wake-up of the source's loop,
those of one partition share a turn, and the answers share one wake-up back.

A key that nothing unsettled changes has its committed value in the store, so with the lease (``read_proofs``) it
is answered in the turn itself. Otherwise the answer waits for its proof, as those of all other queries do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from streams.core.parking import queue_name
from streams.core.position import Position, offsets_of
from streams.errors import Stopped, StreamsError
from streams.model.answers import Answer
from streams.runtime.changelog import timer_key
from streams.runtime.engine import Engine
from streams.runtime.partition.failures import TakenBack
from streams.runtime.partition.interjections import Proof, StoreRead
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.queries.questions import LONGEST_SECONDS, NamedOffset, Question, Reply, read_of


class PointRead:
    """One key to be read. ``outcome``: its answer, or the error."""

    __slots__ = ("is_parked", "outcome", "question", "seen", "waiter")

    def __init__(self, question: Question, waiter: asyncio.Future[None]) -> None:
        self.question = question
        self.waiter = waiter  # of the other loop
        self.seen: Any = None  # the fields of the reply
        self.is_parked = False
        self.outcome: Reply | Exception | None = None


Done = Callable[[PointRead], None]


class PointReads:
    """The reads of single keys of one run. On the loop.

    ``topics``: the inputs, the source's own topic first. ``query``: ``LocalQueries.query``, for keys that have to wait.
    """

    def __init__(self, engine: Engine, topics: tuple[str, ...], query: Callable[..., Awaitable[Answer[Any]]]) -> None:
        self._engine, self._topics, self._patient_query = engine, topics, query
        self._turns: dict[int, list[PointRead]] = {}  # those that have not begun
        self._patient: set[asyncio.Task[None]] = set()

    def read(self, reads: Sequence[PointRead], done: Done) -> None:
        """Read these keys; ``done`` is called with each, once, when it has its outcome."""
        for read in reads:
            partition = read.question.partition
            turn = self._turns.get(partition)
            if turn is not None:
                turn.append(read)
                continue
            worker = self._engine.workers.get(partition)
            if worker is None or not worker.takes_interjections:
                self._read_patiently([read], done)
                continue
            self._turns[partition] = turn = [read]
            turn_of_reads = StoreRead(
                partial(self._read, partition, turn, done), partial(self._refused, partition, turn, done)
            )
            worker.inbox.put(turn_of_reads)

    def _read(self, partition: int, turn: list[PointRead], done: Done) -> None:
        # The turn is closed first: a key that comes from now on needs a read of its own.
        del self._turns[partition]
        worker, proofs = self._engine.workers[partition], self._engine.read_proofs
        # The partition was given up, or restarts, since this was queued: what its store shows may never be committed.
        if not worker.state.admits:
            self._read_patiently(turn, done)
            return
        pending = proofs.pending(partition)
        committed: list[PointRead] = []
        others: list[PointRead] = []
        for read in turn:
            if read.waiter.done():  # it was cancelled
                continue
            question = read.question
            try:
                read.seen = read_of(question, worker.store)
                read.is_parked = question.keyed_by in worker.parked
            except Exception as error:
                read.outcome = error
                done(read)
                continue
            # Its queue is in the answer as its value is: neither may be of what is not committed yet.
            queue = timer_key(queue_name(question.keyed_by or b"")) if pending else b""
            is_pending = any(question.key in changes or queue in changes for changes in pending)
            (others if is_pending else committed).append(read)
        if committed and not proofs.has_lease():  # by a clock that is read after the read
            proofs.renew()
            others += committed
            committed = []
        # With nothing unsettled all that is admitted is committed.
        self._answer(committed, worker, worker.committed if pending else worker.position, done)
        if others:
            self._engine.prove_read(worker, partial(self._proven, worker, worker.position, others, done), Proof.LEASE)

    def _proven(
        self,
        worker: PartitionWorker,
        position: Position,
        reads: list[PointRead],
        done: Done,
        error: BaseException | None,
    ) -> None:
        if error is None:
            self._answer(reads, worker, position, done)
        elif isinstance(error, TakenBack):
            self._read_patiently(reads, done)
        else:
            _fail(reads, error, done)

    def _refused(self, partition: int, turn: list[PointRead], done: Done, error: BaseException | None) -> None:
        # The read has taken the turn out, if it came first.
        self._turns.pop(partition, None)
        _fail(turn, error, done)

    def _answer(self, reads: Sequence[PointRead], worker: PartitionWorker, position: Position, done: Done) -> None:
        if not reads:
            return
        offsets = zip(self._topics, offsets_of(position), strict=True)
        named: tuple[NamedOffset, ...] = tuple((topic, worker.partition, offset) for topic, offset in offsets)
        instance = self._engine.config.instance_id
        for read in reads:
            read.outcome = Reply(
                partition=worker.partition,
                positions=named,
                age_seconds=0.0,
                served_by=instance,
                parked=read.is_parked,
                **read.seen,
            )
            done(read)

    def _read_patiently(self, reads: Sequence[PointRead], done: Done) -> None:
        """Read as any other query does: it waits for a partition that is about to be here."""
        for read in reads:
            task = asyncio.create_task(self._query(read, done))
            self._patient.add(task)
            task.add_done_callback(self._patient.discard)

    async def _query(self, read: PointRead, done: Done) -> None:
        question = read.question
        seconds = min(question.timeout_seconds, LONGEST_SECONDS)
        try:
            answer = await self._patient_query(
                question.partition, partial(read_of, question), key=question.keyed_by, timeout_seconds=seconds
            )
            read.outcome = reply_of(answer)
        except asyncio.CancelledError:
            read.outcome = Stopped("the event source has stopped")
            raise
        except Exception as error:
            read.outcome = error
        finally:
            done(read)


class Crossing:
    """The way of questions from a server's loop to the source's, and of their answers back. Made on the server's
    loop, for one run of the source, whose loop this is. ``points`` returns the reads of its present run, and raises
    ``Stopped`` without one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, points: Callable[[], PointReads]) -> None:
        self.loop, self.home = loop, asyncio.get_running_loop()
        self._points = points
        self._going: deque[PointRead] = deque()
        self._coming: deque[PointRead] = deque()
        # Set before the wake-up, and taken back before the queue is emptied: what is put in meanwhile is taken, too.
        self._is_called = self._is_answered = False

    async def read(self, question: Question) -> Reply:
        """Have a key read. Raises as ``LocalQueries.query``."""
        read = PointRead(question, self.home.create_future())
        self._going.append(read)
        if not self._is_called:
            self._is_called = True
            try:
                self.loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # it is closed
                raise Stopped("the event source is not running") from None
        await read.waiter
        if isinstance(read.outcome, Reply):
            return read.outcome
        assert read.outcome is not None
        raise read.outcome

    def _take(self) -> None:
        """Take all that wait. On the source's loop."""
        self._is_called = False
        reads: list[PointRead] = []
        while self._going:
            reads.append(self._going.popleft())
        try:
            points = self._points()
        except StreamsError as error:
            _fail(reads, error, self._done)
        else:
            points.read(reads, self._done)

    def _done(self, read: PointRead) -> None:
        self._coming.append(read)
        if not self._is_answered:
            self._is_answered = True
            with contextlib.suppress(RuntimeError):  # the server is closed
                self.home.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        """Wake those whose answers have come. On the server's loop."""
        self._is_answered = False
        while self._coming:
            waiter = self._coming.popleft().waiter
            if not waiter.done():
                waiter.set_result(None)


def is_point(question: Question) -> bool:
    """Check for a question that needs nothing but the owner's lease: it names a key, and no further condition."""
    return question.kind == "get" and not (question.at_least or question.confirm or question.max_staleness is not None)


def reply_of(answer: Answer[Any]) -> Reply:
    """Return the answer to the read of a key as it travels."""
    named = tuple((where.topic, where.partition, offset) for where, offset in answer.positions.items())
    return Reply(
        partition=answer.partition,
        positions=named,
        age_seconds=0.0,
        served_by=answer.served_by,
        parked=answer.parked,
        **answer.value,
    )


def _fail(reads: Sequence[PointRead], error: BaseException | None, done: Done) -> None:
    for read in reads:
        read.outcome = error if isinstance(error, Exception) else Stopped("the event source has stopped")
        done(read)
