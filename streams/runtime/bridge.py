"""The doors between threads or processes and the event loop. Nothing else in the runtime crosses that line.

``Worker.call``: loop -> thread, run one blocking call, await its result (per batch: about 60 us). ``Inlet.put``:
thread -> loop, hand over a batch; the loop's function runs soon (per batch: about 15 us). ``in_process``: loop ->
process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import queue
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter

from streams.errors import ConfigError, ProcessJobError, Stopped
from streams.sak.forks import MadeHere

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any] | None", asyncio.AbstractEventLoop]

_log = logging.getLogger(__name__)


class Worker:
    """A thread of its own that runs one blocking call at a time for the event loop. Calls queue up in order."""

    def __init__(self, name: str) -> None:
        self._name, self._is_abandoned = name, False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._made_here = MadeHere(name, ConfigError)
        # The thread is a daemon: a call into librdkafka that never returns is abandoned with its thread, and must not
        # keep the process alive. The threads of ``anyio.to_thread`` are no daemons.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(*args)`` on the thread. Raises what it raises; ``Stopped`` after ``abandon``.

        Cancelling the caller does not stop the call; later calls of this worker wait for it.
        """
        self._made_here.check()
        if self._is_abandoned:  # nothing would ever run it
            raise Stopped(f"{self._name} is closed: the call was not made")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((function, args, future, loop))
        return await future

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run it after the calls before it, without waiting for it; what it raises is only logged."""
        self._jobs.put((function, args, None, asyncio.get_running_loop()))

    def abandon(self) -> None:
        """Let the thread end by itself, when the calls that were made have come back. Never blocks."""
        self._is_abandoned = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args, future, loop = job
            try:
                result = function(*args)
            except BaseException as error:
                if future is None:
                    _log.warning("%s failed: %r", getattr(function, "__qualname__", function), error)
                else:
                    _post(loop, _fail, future, error)
            else:
                if future is not None:
                    _post(loop, _resolve, future, result)
                del result
            del function, args, future, loop, job  # an idle thread must not keep a dropped producer alive


class Inlet(Generic[T]):
    """The way from one thread into the loop. Made on the loop; ``put`` may be called from any thread, never blocks."""

    def __init__(self, receive: Callable[[T], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()

    def put(self, item: T) -> None:
        """Run ``receive(item)`` on the loop, in the order of the calls. Dropped silently once the loop is closed."""
        _post(self._loop, self._receive, item)

    def deliver(self, item: T) -> None:
        """``put``; or run ``receive(item)`` at once, if this is the loop's thread."""
        if asyncio._get_running_loop() is self._loop:
            self._receive(item)
        else:
            self.put(item)


def wait_for(
    loop: asyncio.AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None
) -> T:
    """Run a coroutine on the loop, and wait for its result; on any thread but the loop's.

    Raises what it raises; ``TimeoutError`` (it is cancelled then); ``Stopped`` when the loop is closed, and
    ``RuntimeError`` on a thread that has a running loop: that one would never get on.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("this waits for the event loop, and must not be called on its thread: await it instead")
    coroutine = start()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise Stopped("the event source is not running any more") from None
    try:
        return future.result(timeout_seconds)
    except concurrent.futures.CancelledError:
        raise Stopped("the event source stops") from None
    except TimeoutError:
        future.cancel()
        raise


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: no receiver is left
        loop.call_soon_threadsafe(function, *args)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def for_future(error: BaseException) -> BaseException:
    """Wrap an error that a future refuses (``StopIteration``): its waiter would never end."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("the function raised StopIteration")
    raised.__cause__ = error
    return raised


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(for_future(error))


async def in_process(function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` in one of the processes that are kept for it; cancelled, that process is killed. As many
    run as are requested at a time. Raises what the function raises, and ``ProcessJobError`` when function, arguments,
    result or error cannot be pickled, or when the process dies."""
    name = getattr(function, "__qualname__", None) or repr(function)
    from anyio import to_process  # with 11 modules for subprocesses, which only such jobs need

    limiter = CapacityLimiter(math.inf)
    try:
        result, error = await to_process.run_sync(_call, name, function, args, cancellable=True, limiter=limiter)
    except BrokenWorkerProcess as broken:
        reason = f": {broken.__cause__!r}" if broken.__cause__ is not None else ""
        raise ProcessJobError(f"the process of {name} died, or did not start, before it answered{reason}") from broken
    except Exception as broken:
        raise ProcessJobError(
            f"{name}: function, argument, result or error cannot be sent between processes "
            f"({type(broken).__name__}: {broken})"
        ) from broken
    if error is not None:
        raise error
    returned: T = result
    return returned


def _call(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Call the function, in the process. Its error is a result, so that an error raised from here is one of the way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the source, which lets its jobs end
    try:
        return function(*args), None
    except Exception as error:
        return None, error
    except BaseException as error:  # an exit here is not the end of the source
        return None, ProcessJobError(f"{name} raised {type(error).__name__}: {error}")
