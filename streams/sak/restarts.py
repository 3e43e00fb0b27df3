"""Restarts of what died: after a pause that grows, and not without end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Pauses between restarts, and how many crashes in a window of time are too many."""

    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 30.0
    max_crashes: int = 5
    window_seconds: float = 60.0


class Restarts:
    """The crashes of one thing that is kept alive, and what follows from them. Pure: time is an argument."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._crashes: deque[float] = deque()

    def crashed(self, now: float) -> float | None:
        """Note a crash; return the seconds until the next start, or None when it crashed too often in the window."""
        self._crashes.append(now)
        while self._crashes[0] < now - self._policy.window_seconds:
            self._crashes.popleft()
        if len(self._crashes) > self._policy.max_crashes:
            return None
        delay = self._policy.first_delay_seconds * 2.0 ** (len(self._crashes) - 1)
        return min(delay, self._policy.max_delay_seconds)
