"""Run jobs in processes of their own. Arguments and results are pickled by anyio; the error names a failure of that."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from streams.errors import ProcessJobError

T = TypeVar("T")


async def in_process(function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` in one of the processes that are kept for it; cancelled, that process is killed. As many
    run as are requested at a time. Raises what the function raises, and ``ProcessJobError`` when function, arguments,
    result or error cannot be pickled, or when the process dies."""
    name = getattr(function, "__qualname__", None) or repr(function)
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
