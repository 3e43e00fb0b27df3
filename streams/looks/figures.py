"""Amounts, rates and times as text, and lines of progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

LOG_EVERY_SECONDS: Final = 5.0
"""Seconds between two lines of one work."""
_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


class ShowProgress(Protocol):
    """Called with what is being done, how much of it is done, and how much there is (0: not known)."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


class LogLines:
    """Progress without a terminal: a line at the first call, every five seconds, and at the end of each work."""

    def __init__(self, unit: str, now: Callable[[], float], write: Callable[[str], None]) -> None:
        self._unit = unit
        self._now = now
        self._write = write
        self._began: dict[str, tuple[float, int]] = {}
        self._written: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int, /) -> None:
        now = self._now()
        began, first = self._began.setdefault(what, (now, done))
        written = self._written.get(what, -LOG_EVERY_SECONDS)
        ended = 0 < total <= done
        if now - written < LOG_EVERY_SECONDS and what in self._written and not ended:
            return
        if ended:  # a work of the same name may follow
            del self._began[what]
        self._written[what] = now
        rate = (done - first) / (now - began) if now > began else 0.0
        self._write(f"{what}: {figures(done, total, rate, self._unit)}")


def figures(done: int, total: int, rate: float, unit: str) -> str:
    """``12,000 of 48,000 events (25 %), 3,000/s, 12 s left``; what is not known is left out."""
    amount = f"{_amount(done, unit)} of {_amount(total, unit)}" if total else _amount(done, unit)
    counted = f" {unit}" if unit and unit != "bytes" else ""
    words = [amount + counted + (f" ({done * 100 // total} %)" if total else "")]
    if rate >= 1:
        words.append(f"{_amount(int(rate), unit)}/s")
    if rate > 0 and total > done:
        words.append(f"{duration((total - done) / rate)} left")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """``8 s``, ``2 min 05 s``, ``1 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _amount(number: int, unit: str) -> str:
    if unit != "bytes":
        return f"{number:,}"
    size, name = float(number), _BYTE_UNITS[0]
    for larger in _BYTE_UNITS[1:]:
        if size < 1000:
            break
        size, name = size / 1000, larger
    return f"{size:.0f} {name}" if name == "B" else f"{size:.1f} {name}"
