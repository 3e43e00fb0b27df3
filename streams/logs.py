"""Tools for logs: one JSON object per line, floods of equal lines counted, stack traces that begin in the user's code.

The package logs below the logger ``streams``, which has no handler and propagates: where lines go is the application's
choice. ``kes run`` uses these tools; any application may.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

MOST_KINDS: Final = 500
"""Kinds of lines that are counted at one time. Beyond, the oldest count ends."""

_PACKAGE: Final = __name__.partition(".")[0]
_FOLDER: Final = str(Path(__file__).parent) + os.sep
_RUNS_US: Final = {"anyio", "asyncio", "concurrent", "contextlib", "runpy", "stamina", "tenacity", "threading"}
_KNOWN: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "worker", "repeats"}


Trace = tuple[type[BaseException], BaseException, TracebackType | None]


def exception_info(error: BaseException) -> Trace:
    """Return the ``exc_info`` of a log line: the traceback begins in the first function that is neither this package's
    nor of what runs it. An error without such a function has its whole traceback."""
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame):
        trace = trace.tb_next
    return type(error), error, trace or error.__traceback__


def is_ours(frame: FrameType) -> bool:
    """Check whether this package has the function. Compiled ones name no file that is there; ``python -m`` hides the
    module's name."""
    return _package_of(frame) == _PACKAGE or frame.f_code.co_filename.startswith(_FOLDER)


def _is_machinery(frame: FrameType) -> bool:
    return is_ours(frame) or _package_of(frame) in _RUNS_US


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``worker`` (in ``kes run``), ``message``, ``exception`` (the stack
    trace), ``repeats`` (of a ``FloodHandler``), and what the call had as ``extra``. What has no form in JSON becomes
    its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("worker", "repeats"):
            if value := getattr(record, name, None):
                fields[name] = value
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        extra = {str(key): value for key, value in vars(record).items() if key not in _KNOWN}
        try:
            return json.dumps(extra | fields, default=str, allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # keys that are no text, NaN, an object that holds itself
            return json.dumps({key: repr(value) for key, value in extra.items()} | fields)


@dataclass
class _Flood:
    until: float
    lines: int = 0
    last: dict[str, Any] | None = None  # of those held back: its fields, without what may be large


class FloodHandler(logging.Handler):
    """Passes records to ``target``, but of a kind no more than ``limit`` in ``window_seconds``: what comes on top is
    counted, and one line at the end of the window says how many there were, and repeats the last of them.

    Of a kind are records of one logger and level with the same text; for warnings and errors of this package, those
    made from one template (``in[3]@7 failed ...`` and ``in[3]@8 failed ...``). CRITICAL always passes. Any thread.
    """

    def __init__(
        self,
        target: logging.Handler,
        *,
        limit: int = 10,
        window_seconds: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.target = target
        self._limit = limit
        self._window = window_seconds
        self._now = now
        self._floods: OrderedDict[tuple[str, int, int], _Flood] = OrderedDict()  # the first to end is the first
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, or count it."""
        self._end_windows()
        try:
            kind, text = _kind_of(record), record.getMessage()
        except Exception:  # a format that does not fit its arguments: the target reports it
            self.target.handle(record)
            return
        flood = self._floods.get(kind)
        if flood is None:
            if len(self._floods) >= MOST_KINDS:
                self._end_first()
            flood = self._floods[kind] = _Flood(self._now() + self._window)
        flood.lines += 1
        if flood.lines <= self._limit or record.levelno >= logging.CRITICAL:
            self.target.handle(record)
        else:
            flood.last = {**vars(record), "msg": text, "args": None, "exc_info": None, "exc_text": None}
            self._wake_in(flood.until - self._now())

    def flush(self) -> None:
        """Write the counts that there are, and end their windows."""
        with self.lock or contextlib.nullcontext():
            while self._floods:
                self._end_first()
        self.target.flush()

    def close(self) -> None:
        """Flush, and close the target."""
        if self._timer is not None:
            self._timer.cancel()
        self.flush()
        self.target.close()
        super().close()

    def _end_windows(self) -> None:
        now = self._now()
        while self._floods and next(iter(self._floods.values())).until <= now:
            self._end_first()

    def _end_first(self) -> None:
        _, flood = self._floods.popitem(last=False)
        if flood.last is None:
            return
        more = flood.lines - self._limit
        text = f"{more:,} more lines like this within {self._window:g} s; the last: {flood.last['msg']}"
        self.target.handle(logging.makeLogRecord({**flood.last, "repeats": more, "msg": text}))

    def _wake_in(self, seconds: float) -> None:
        """Have the count written in time, although no further line may come."""
        if self._timer is None:
            self._timer = threading.Timer(max(seconds, 0.0), self._wake)
            self._timer.name, self._timer.daemon = "kes-log-floods", True
            try:
                self._timer.start()
            except RuntimeError:  # the interpreter ends, and with it comes the flush
                self._timer = None

    def _wake(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._timer = None
            self._end_windows()
            held = [flood.until for flood in self._floods.values() if flood.last is not None]
            if held:
                self._wake_in(held[0] - self._now())


def _kind_of(record: logging.LogRecord) -> tuple[str, int, int]:
    """Return what lines of one kind have in common; of the text its hash, so that it takes no memory."""
    is_ours = record.name.partition(".")[0] == "streams" and record.levelno >= logging.WARNING
    return record.name, record.levelno, hash(str(record.msg) if is_ours else record.getMessage())
