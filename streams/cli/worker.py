"""One worker process of ``kes run``: import the event source, run it, leave with a code that the supervisor can read.

Exit codes: 0 drained or finished; 78 a problem that a restart does not solve (a wrong setting, a topic that differs, a
module that cannot be imported); 70 failed, worth another start. (Not 1 for the problem: an interpreter that dies of an
exception also says 1, and that is worth another start.)
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from streams.cli.console import complain, configure_logging
from streams.cli.failures import innermost
from streams.errors import (
    ConfigError,
    EmbeddedBrokerError,
    MembershipFatal,
    OffsetError,
    RegistrationError,
    StreamsError,
    TopicError,
)

log = logging.getLogger(__name__)

EXIT_PROBLEM = 78
EXIT_FAILED = 70
ORPHAN_DRAIN_SECONDS = 10.0
# For these somebody has to change something first: another start would end in the same way.
NOT_FOR_RESTART = (ConfigError, RegistrationError, TopicError, OffsetError, EmbeddedBrokerError, MembershipFatal)


def main(argv: Sequence[str]) -> int:
    """``argv`` is source, verbosity, and the number of the descriptor that ends with the supervisor."""
    source, verbosity, pipe = argv
    name = os.environ.get("KES_INSTANCE_ID", "")
    configure_logging(int(verbosity), who=name)
    threading.Thread(target=_leave_with, args=(int(pipe),), name="kes-supervisor-watch", daemon=True).start()
    try:
        load(source).run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return _failed(name, innermost(error))
    return 0


def _failed(name: str, error: Exception) -> int:
    if isinstance(error, StreamsError):
        _tell(name, error)
    else:  # the user's code: its stack trace is what they need
        traceback.print_exception(error)
    return EXIT_PROBLEM if isinstance(error, NOT_FOR_RESTART) else EXIT_FAILED


def load(source: str) -> Any:
    """``module:name`` (``name`` may be dotted; ``source`` if left out) -> an object with a method ``run``.

    A callable without a ``run`` is a factory and is called. Raises ``ConfigError``, with the place in the user's file.
    """
    module_name, _, path = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
    except StreamsError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot import {module_name!r} of {source!r}: {_described(error)}") from error
    for name in (path or "source").split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{module_name!r} has no {path or 'source'!r}: name the event source as module:name")
        found = getattr(found, name)
    if not hasattr(found, "run") and callable(found):
        found = _made_by(found, source)
    if not callable(getattr(found, "run", None)):
        raise ConfigError(f"{source!r} is {type(found).__name__}, which is neither an event source nor makes one")
    return found


def _made_by(factory: Callable[..., Any], source: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigError(f"the factory {source!r} cannot be called without arguments: {error}") from None
    except ValueError:
        pass  # no signature to be had: it will be seen when it is called
    return factory()


def _leave_with(pipe: int) -> NoReturn:
    """Wait for the end of the supervisor, then drain as after SIGTERM; a drain that hangs is cut off."""
    while os.read(pipe, 1):
        pass
    log.warning("the supervisor is gone: draining")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_DRAIN_SECONDS)
    os._exit(EXIT_FAILED)


def _tell(name: str, error: StreamsError) -> None:
    if os.environ.get("KES_DEBUG") == "1":
        traceback.print_exception(error)
    cause = error.__cause__
    hint = f"caused by {_described(cause)}" if cause is not None and not isinstance(error, ConfigError) else ""
    complain(f"{name}: {type(error).__name__}: {error}", hint=hint)


def _described(error: BaseException) -> str:
    """The error in one line, with the last line of the user's code that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _is_machinery(filename: str) -> bool:
    return filename.startswith("<frozen") or filename == __file__ or Path(filename).parent.name == "importlib"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
