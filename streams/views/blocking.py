"""``with View(...) as prices``: a view without an event loop of the caller's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

from streams.errors import ConfigError, RegistrationError, Stopped
from streams.records import Delivery
from streams.sak.forks import MadeHere
from streams.views.reads import ViewReads
from streams.views.state import ViewState, ViewStatistics
from streams.views.table import ViewChange, ViewTable

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class LoopThread:
    """A thread with an event loop, for one view. A view is entered and left in one task, which lives here."""

    def __init__(self) -> None:
        self._made_here = MadeHere("this view", ConfigError)
        self._loop = asyncio.new_event_loop()
        self._leave: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._entered: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="kes-view", daemon=True)
        self._thread.start()

    def enter(self, view: AbstractAsyncContextManager[object]) -> None:
        """Enter the view. Raises what that raises."""

        async def start() -> None:
            self._task = asyncio.create_task(self._hold(view))
            await asyncio.wait([self._entered, self._task], return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                await self._task

        self.call(start)

    def leave(self, error: BaseException | None) -> None:
        """Leave the view. Raises the error that it failed with, unless there is one of the caller's block."""

        async def stop() -> None:
            if not self._leave.done():
                self._leave.set_result(error)
            assert self._task is not None
            try:
                await self._task
            except Exception:
                if error is None:
                    raise

        self.call(stop)

    def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop, and wait for it; an interrupted wait cancels it. Raises what it raises, and
        ``Stopped`` after the end."""
        if asyncio._get_running_loop() is not None:
            raise RegistrationError(
                "`with View(...)` blocks its thread, and this one runs an event loop: use async with"
            )
        self._made_here.check()  # a forked child has the loop, and no thread that runs it: it would wait forever
        coroutine = start()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise Stopped("the view is not running any more") from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Stopped("the view was stopped") from None
        except BaseException:  # Ctrl-C, while it waits: the coroutine must not go on without its caller
            future.cancel()
            raise

    def end(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _hold(self, view: AbstractAsyncContextManager[object]) -> None:
        # Entered and left in this one task: a view cancels the task that entered it when it fails.
        async with view:
            self._entered.set_result(None)
            await self._leave

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class LoopView(Protocol[K, V]):
    """A view that is used on an event loop; ``View`` documents the methods."""

    @property
    def state(self) -> ViewState: ...
    @property
    def positions(self) -> dict[int, int]: ...
    def statistics(self) -> ViewStatistics: ...
    async def ready(self, timeout_seconds: float | None = None) -> None: ...
    async def wait_for(self, place: Delivery | Mapping[int, int], timeout_seconds: float | None = None) -> None: ...
    async def wait_for_key(self, key: K, timeout_seconds: float | None = None) -> V: ...
    async def fresh_within(self, seconds: float, timeout_seconds: float = 10.0) -> bool: ...
    def changes(self, *, initial: bool = False) -> AsyncGenerator[ViewChange[K, V], None]: ...
    def _current(self) -> ViewTable[K, V]: ...
    def _passed(self) -> Mapping[int, int]: ...


class BlockingView(ViewReads[K, V], Generic[K, V]):
    """A running view, made by ``with View(...)``: the methods of ``View``, on any thread; those that wait, block. After
    a failure reads raise ``StoreError``, and the end of the block raises the failure."""

    def __init__(self, view: LoopView[K, V], thread: LoopThread) -> None:
        self._view = view
        self._thread = thread

    @property
    def state(self) -> ViewState:
        """Return the state of the view."""
        return self._view.state

    @property
    def positions(self) -> dict[int, int]:
        """Return the offsets below which everything is here, by partition."""
        return self._view.positions

    def statistics(self) -> ViewStatistics:
        """Return the present state in figures."""
        return self._view.statistics()

    def ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the view is complete; as ``View.ready``."""
        self._thread.call(lambda: self._view.ready(timeout_seconds))

    def wait_for(self, place: Delivery | Mapping[int, int], timeout_seconds: float | None = None) -> None:
        """Wait until the view has come to a place; as ``View.wait_for``."""
        self._thread.call(lambda: self._view.wait_for(place, timeout_seconds))

    def wait_for_key(self, key: K, timeout_seconds: float | None = None) -> V:
        """Wait until there is a value for this key; as ``View.wait_for_key``."""
        return self._thread.call(lambda: self._view.wait_for_key(key, timeout_seconds))

    def fresh_within(self, seconds: float, timeout_seconds: float = 10.0) -> bool:
        """Wait until the view is proven to be fresh; as ``View.fresh_within``."""
        return self._thread.call(lambda: self._view.fresh_within(seconds, timeout_seconds))

    def changes(self, *, initial: bool = False) -> Generator[ViewChange[K, V], None, None]:
        """Iterate over the changes from now on; as ``View.changes``."""

        async def begin() -> Any:
            return self._view.changes(initial=initial)

        arriving = self._thread.call(begin)
        pending: asyncio.Task[Any] | None = None

        async def following() -> Any:
            nonlocal pending
            pending = asyncio.current_task()
            return await anext(arriving, None)

        async def close() -> None:
            if pending is not None:  # the caller's thread was interrupted: maybe before it could cancel, and it runs on
                pending.cancel()
                await asyncio.wait([pending])
            await arriving.aclose()

        def arrive() -> Generator[ViewChange[K, V], None, None]:
            try:
                while True:
                    change: ViewChange[K, V] | None = self._thread.call(following)
                    if change is None:
                        return
                    yield change
            finally:
                self._thread.call(close)

        return arrive()

    def _current(self) -> ViewTable[K, V]:
        return self._view._current()

    def _passed(self) -> Mapping[int, int]:
        return self._view._passed()
