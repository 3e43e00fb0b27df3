"""Interjections that user code requests and waits for: on the loop of the event source, or elsewhere.

Every waiter gets an outcome: an interjection waits in its partition's inbox, which outlives a restart and is emptied
when the partition goes; or it runs; or its effects are in a transaction, which calls its waiters with its outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from streams.core.router import Route, Router
from streams.errors import NotOwned, RegistrationError, Stopped, StreamsError, WouldDeadlock
from streams.model.tracing import Carrier, carried
from streams.runtime.bridge import for_future
from streams.runtime.partition.failures import TakenBack
from streams.runtime.partition.interjections import Interjection, Proof
from streams.runtime.partition.worker import PartitionWorker
from streams.settings.config import EventSourceConfig

Handler = Callable[..., Any]
_Future = asyncio.Future[Any] | concurrent.futures.Future[Any]


class AdHocInterjections:
    """The interjections requested by ``EventSource.interject`` and its kin, for one run; ``EventSource`` documents the
    methods. On the loop, but for ``interject_threadsafe``."""

    def __init__(self, config: EventSourceConfig, router: Router, workers: Mapping[int, PartitionWorker]) -> None:
        """``workers``: of the partitions that are here, at any time."""
        self._config, self._router, self._workers = config, router, workers
        self._loop = asyncio.get_running_loop()
        self._topic = config.topic
        self._elsewhere: set[concurrent.futures.Future[Any]] = set()
        self._is_over = False

    async def interject(
        self, partition: int, handler: Handler, *, blocking: bool, proof: Proof = Proof.HEARTBEAT
    ) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            raise RegistrationError(
                "interject was called on another event loop than the event source's; use interject_threadsafe"
            )
        self.refuse_to_wait_for_itself([partition])
        future: asyncio.Future[Any] = self._loop.create_future()
        interjection = self._queue(partition, handler, blocking, future, self._trace(), proof)
        try:
            return await future
        finally:
            # The caller may have been cancelled. Then an interjection that has not begun need not begin.
            interjection.is_unwanted = True

    async def interject_all(self, handler: Handler, *, blocking: bool, return_exceptions: bool) -> dict[int, Any]:
        workers = sorted(self._workers.items())
        partitions = [partition for partition, worker in workers if worker.takes_interjections]
        self.refuse_to_wait_for_itself(partitions)
        # Each interjection commits by itself, so all of them end, whatever becomes of one.
        found = await asyncio.gather(
            *(self.interject(partition, handler, blocking=blocking) for partition in partitions),
            return_exceptions=True,
        )
        errors = []
        for partition, answer in zip(partitions, found, strict=True):
            if isinstance(answer, Exception):
                answer.add_note(f"in the interjection of {self._topic}[{partition}]")
                errors.append(answer)
        if errors and not return_exceptions:
            raise ExceptionGroup(f"{len(errors)} of {len(found)} interjections failed", errors)
        return dict(zip(partitions, found, strict=True))

    def interject_threadsafe(
        self, partition: int, handler: Handler, *, blocking: bool
    ) -> concurrent.futures.Future[Any]:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        trace = self._trace()  # this thread's

        def begin() -> None:
            # The future may have been cancelled, or refused by ``close``, before its turn on the loop.
            if answer in self._elsewhere and answer.set_running_or_notify_cancel():
                try:
                    self._queue(partition, handler, blocking, answer, trace)
                except StreamsError as error:
                    answer.set_exception(error)

        self._elsewhere.add(answer)
        answer.add_done_callback(self._elsewhere.discard)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(begin)
        # ``close`` may have gone through the futures before this one was among them: it would never end.
        if self._is_over:
            self._refuse_elsewhere()
        return answer

    def close(self) -> None:
        """Refuse all interjections from now on: the run is over, and every partition gone."""
        # The flag comes first: a thread that adds a future from now on finds it, and ends that future.
        self._is_over = True
        self._refuse_elsewhere()

    def _trace(self) -> Carrier:
        """Return the trace of the caller, if it is sampled."""
        tracer = self._router.tracer
        return () if tracer is None else carried([(name, text.encode()) for name, text in tracer.current()])

    def _queue(
        self,
        partition: int,
        handler: Handler,
        blocking: bool,
        future: _Future,
        trace: Carrier,
        proof: Proof = Proof.HEARTBEAT,
    ) -> Interjection:
        """Queue an interjection that ends this future. Raises ``NotOwned``, ``Stopped``."""
        if self._is_over:
            raise Stopped("the event source is not running")
        worker = self._workers.get(partition)
        if worker is None or not worker.takes_interjections:
            raise NotOwned(f"{self._topic}[{partition}] is not active on this member")

        def waiter(error: BaseException | None) -> None:
            # The caller was cancelled. That takes nothing back of what the interjection has done.
            if future.done():
                return
            if isinstance(error, TakenBack):
                self._again(partition, interjection)
            elif error is None:
                future.set_result(interjection.result)
            else:
                future.set_exception(for_future(error))

        policy = self._config.error_policy
        route = Route(_name_of(handler), None, handler, blocking=blocking, policy=policy)
        interjection = Interjection(route, waiter, trace, proof)
        worker.inbox.put(interjection)
        return interjection

    def _again(self, partition: int, interjection: Interjection) -> None:
        """Queue an interjection again that was undone for no fault of its own, if its partition takes interjections."""
        worker = self._workers.get(partition)
        if worker is not None and worker.takes_interjections:
            worker.inbox.put(interjection)
        else:
            interjection.done(NotOwned(f"{self._topic}[{partition}] is not active on this member any more"))

    def refuse_to_wait_for_itself(self, partitions: list[int]) -> None:
        """Raise ``WouldDeadlock`` in the task that has the turn of one of these partitions."""
        task = asyncio.current_task()
        for partition in partitions:
            worker = self._workers.get(partition)
            if worker is not None and worker.is_run_by(task):
                raise WouldDeadlock(
                    f"a handler of {worker.topic_partition} awaits an interjection of the same partition, which waits "
                    "for the handler to end: do its work in the handler, set a timer, or start a task that awaits it"
                )

    def _refuse_elsewhere(self) -> None:
        """End the futures of waiting threads with ``Stopped``."""
        # The loop goes over a copy, because a future that ends takes itself out.
        for answer in list(self._elsewhere):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(Stopped("the event source stopped"))


def _name_of(function: Handler) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
