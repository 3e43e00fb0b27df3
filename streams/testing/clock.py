"""A clock for the code under test, that goes with a ``TestDriver``."""

from __future__ import annotations

import datetime
from typing import Any

from streams.errors import ConfigError
from streams.testing.driver import START_TIME, TestDriver


class Clock:
    """Hand its methods to code that asks for the time: ``time`` for ``time.time``, ``monotonic``, ``now`` for an aware
    ``datetime.now``. It shows the time of the driver that it follows; without one, its own."""

    def __init__(self, start_time: float = START_TIME) -> None:
        self._start_time = start_time
        self._elapsed = 0.0
        self._driver: TestDriver[Any] | None = None

    def follow(self, driver: TestDriver[Any]) -> None:
        """Show this driver's time from now on."""
        self._driver = driver

    def time(self) -> float:
        """Seconds since 1970."""
        return self._start_time + self._elapsed if self._driver is None else self._driver.time()

    def monotonic(self) -> float:
        """Seconds since the driver was made."""
        return self._elapsed if self._driver is None else self._driver.now

    def now(self, tz: datetime.tzinfo = datetime.UTC) -> datetime.datetime:
        """The time of day."""
        return datetime.datetime.fromtimestamp(self.time(), tz)

    def advance(self, seconds: float) -> None:
        """Let time pass, as ``TestDriver.advance``."""
        if self._driver is not None:
            self._driver.advance(seconds)
        elif seconds < 0:
            raise ConfigError(f"time cannot go back by {-seconds} seconds")
        else:
            self._elapsed += seconds
