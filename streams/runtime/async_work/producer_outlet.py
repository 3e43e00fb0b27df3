"""Send records from the loop: one plain producer, its thread, and the records that it has not reported yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from streams.errors import BrokerUnavailable, RecordRefused
from streams.records import Acknowledgement, Delivery
from streams.runtime.ports import Blocking, PlainProducer
from streams.runtime.signal import Signal

POLL_SECONDS = 0.1
"""The thread's wait for reports between two checks that it is still needed."""


class Outlet:
    """The outlet of deliveries, in their order. Deliveries wait here while the producer has no room. On the loop.

    ``connect`` builds a producer (blocking). ``is_wanted`` is called before a delivery is sent. ``report`` is called
    once for each one that was sent; ``refused`` if there cannot be a producer, with all deliveries that wait for it.
    """

    def __init__(
        self,
        worker: Blocking,
        connect: Callable[[], PlainProducer],
        is_wanted: Callable[[Delivery], bool],
        report: Callable[[Acknowledgement], None],
        refused: Callable[[list[Delivery], Exception], None],
    ) -> None:
        self._worker = worker
        self._connect = connect
        self._is_wanted = is_wanted
        self._report = report
        self._refused = refused
        self._queue: deque[Delivery] = deque()
        self._producer: PlainProducer | None = None
        self._unreported: dict[int, Delivery] = {}  # by their ids
        self._more = Signal()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kes-outlet")
        self._task.add_done_callback(self._ended)

    @property
    def waiting(self) -> int:
        """Deliveries that the producer has not taken yet."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Deliveries that are not reported yet."""
        return len(self._unreported)

    def send(self, delivery: Delivery) -> None:
        """Queue a delivery behind all others."""
        self._queue.append(delivery)
        self._flush()

    def close(self) -> asyncio.Task[None]:
        """Close the producer, and drop the unreported deliveries."""
        self._queue.clear()
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        while True:
            while not self._queue:
                await self._more.wait()
            try:
                self._producer = await self._worker.call(self._connect)
            except Exception as error:
                waiting, self._queue = list(self._queue), deque()
                self._refused(waiting, error)
                continue
            self._flush()
            while not self._producer.is_broken:
                await self._serve(self._producer)
            self._drop()

    async def _serve(self, producer: PlainProducer) -> None:
        """Wait for reports while there may be any."""
        if not self._unreported:
            await self._more.wait()
            return
        for report in await self._worker.call(producer.poll, POLL_SECONDS):
            if self._unreported.pop(id(report.token), None) is not None:
                self._report(report)
        self._flush()

    def _flush(self) -> None:
        """Hand over the deliveries that the producer takes."""
        self._more.notify()
        producer = self._producer
        while producer is not None and self._queue and not producer.is_broken:
            delivery = self._queue.popleft()
            if not self._is_wanted(delivery):
                continue
            try:
                taken = producer.produce(delivery.record, delivery)
            except Exception as error:  # refused, or a part of it is of a wrong type
                self._report(Acknowledgement(delivery, -1, -1, error))
                continue
            if taken:
                self._unreported[id(delivery)] = delivery
            elif self._unreported:
                self._queue.appendleft(delivery)
                return
            else:
                text = f"{delivery.record.topic}: a record larger than queue.buffering.max.kbytes of its producer"
                self._report(Acknowledgement(delivery, -1, -1, RecordRefused(text)))

    def _drop(self) -> None:
        """Drop a producer that is of no use any more, with the deliveries that it will never report."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._worker.post(producer.close)
        lost, self._unreported = self._unreported, {}
        for delivery in lost.values():
            error = BrokerUnavailable(f"{delivery.record.topic}: the producer broke before it acknowledged the record")
            self._report(Acknowledgement(delivery, -1, -1, error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the task. Not in the task itself: one that is cancelled at once never runs."""
        self._drop()
        self._worker.abandon()
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]
