"""How long the threads that poll may wait for the first record.

A command to them waits until the poll under way is over: confluent-kafka lets no other thread near a consumer
meanwhile, and has no way to end a poll. So polls are short, except when nothing happens.
"""

from __future__ import annotations

import time

POLL_SECONDS = 0.02
"""How long a poll waits for a first record: the longest that a command has to wait for its turn."""

CALM_POLL_SECONDS = 0.1
"""The same when it is calm. A record ends either poll at once."""

CALM_AFTER_SECONDS = 1.0
"""It is calm when nothing came, and nothing was asked for, for so long."""


class Calm:
    """Whether it is calm around one polling thread, which is the only one that may use it."""

    def __init__(self) -> None:
        self.disturbed()

    def disturbed(self) -> None:
        """Something came, or was asked for: more of it is likely."""
        self._begins_at = time.monotonic() + CALM_AFTER_SECONDS

    @property
    def poll_seconds(self) -> float:
        """How long the next poll may wait."""
        return POLL_SECONDS if time.monotonic() < self._begins_at else CALM_POLL_SECONDS
