"""Call the user's function of a stage, with its timeout and its retries: as a task, on a thread, in a process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from streams.core.router import check_callable
from streams.errors import RegistrationError
from streams.model.tracing import with_context
from streams.outcomes import Retry
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.host import Host

_log = logging.getLogger(__name__)
_has_logged: ContextVar[bool] = ContextVar("_has_logged", default=False)
# A retry is logged here, with its place: stamina's line has its content in fields that a text format drops. Retries of
# the user's own by stamina, in a job or elsewhere, are logged by stamina as before.
logging.getLogger("stamina").addFilter(lambda _: not _has_logged.get())

KINDS = ("async", "thread", "process")

Outcome = tuple[Any, BaseException | None, int]
"""Result, error, attempts made."""


def kind_of(what: str, function: Callable[..., Any], kind: str | None) -> str:
    """Return the kind of call of ``what``; by default that of its function. Raises ``RegistrationError``."""
    check_callable(f"the function of {what}", function)
    found_async = is_async(function)
    kind = kind or ("async" if found_async else "thread")
    if kind not in KINDS:
        raise RegistrationError(f"the kind of {what} is {kind!r}; use one of {', '.join(KINDS)}")
    if found_async != (kind == "async"):
        found = "async" if found_async else "a plain function"
        raise RegistrationError(f"the function of {what} is {found}; it cannot be of the kind {kind!r}")
    return kind


def check_ends(what: str, *arguments: str, finalizer: object, on_failure: object) -> None:
    """Check the functions that are called with these arguments at an event's turn, if they are given. Raises
    ``RegistrationError``."""
    for part, function in (("finalizer", finalizer), ("on_failure", on_failure)):
        if function is not None:
            check_callable(f"{part} of {what}", function, *arguments)


def check_planner(what: str, function: Callable[..., Any]) -> None:
    """Check a planner, which runs on the loop, ahead of the event's turn. Raises ``RegistrationError``."""
    if is_async(function):
        raise RegistrationError(f"{what} is async; it runs on the loop and must not wait")
    check_callable(what, function, "record", "event")


class Calls:
    """The calls of one function of one run. ``timeout_seconds`` is for an attempt; ``prepare`` makes each attempt's own
    argument."""

    def __init__(
        self,
        host: Host,
        kind: str,
        function: Callable[[Any], Any],
        timeout_seconds: float | None,
        retry: Retry | None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        run = _runner(host, kind, function)
        prepared = run if prepare is None else lambda argument: run(prepare(argument))
        self._once = _once(prepared, timeout_seconds)
        self._retry = retry
        self._host = host
        import stamina  # 21 modules: a program that only declares jobs does without

        # Waits and bounds are those of Retry: stamina only knows the machine's clock and randomness.
        self._retries = None if retry is None else stamina.AsyncRetryingCaller(attempts=retry.attempts, timeout=None)

    async def outcome(self, argument: Any, where: Callable[[], str]) -> Outcome:
        """Call the function until it answers or its retries end, which are logged with ``place()``. Raises
        ``CancelledError`` only if its task is cancelled. An error that is no ``Exception`` (``SystemExit``) is raised
        again at the event's turn, and not for the event's policy."""
        made = 1
        try:
            retry = self._retry
            if self._retries is None or retry is None:
                return await self._once(argument), None, made
            made = 0
            now = asyncio.get_running_loop().time
            began = now()

            def pause(error: Exception) -> bool | float:
                if not retry.allows(made, error, now() - began):
                    return False
                seconds, said = retry.pause_seconds(made, self._host.rng), f"{type(error).__name__}: {error}"[:300]
                text = "%s: attempt %d of %d failed (%s); the next one in %.2f s"
                _log.warning(text, where(), made, retry.attempts, said, seconds)
                _has_logged.set(True)
                return seconds

            async def attempt() -> Any:
                nonlocal made
                made += 1
                _has_logged.set(False)
                return await self._once(argument)

            return await self._retries(pause, attempt), None, made
        except asyncio.CancelledError as cancelled:
            # This task is cancelled, or else something that the function awaited: that is an error like any other.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, cancelled_inside(cancelled), made
        except GeneratorExit:
            raise  # the loop is gone
        except BaseException as error:
            # Also SystemExit: raised here it would end a task of the loop, and no log line could name the event.
            return None, error, made


def is_async(function: Callable[..., Any]) -> bool:
    """Check whether a call of it returns an awaitable."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _once(run: Callable[[Any], Awaitable[Any]], seconds: float | None) -> Callable[[Any], Awaitable[Any]]:
    async def limited(argument: Any) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await run(argument)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise TimeoutError(f"it took longer than timeout_seconds={seconds}") from error

    return run if seconds is None else limited


async def _on_thread(host: Host, function: Callable[[Any], Any], argument: Any) -> Any:
    if host.router.tracer is not None:  # the current span is the function's, too
        function = with_context(function)
    result = await host.handler_threads.run(function, argument)
    if inspect.iscoroutine(result):  # a plain function around an async one: nothing of it is done yet
        return await result
    return result


def _runner(host: Host, kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    if kind == "async":
        return function
    if kind == "thread":
        return lambda argument: _on_thread(host, function, argument)
    return lambda argument: host.in_process(function, argument)
