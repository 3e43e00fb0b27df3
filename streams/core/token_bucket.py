"""A rate: so many a second, and those of one second at once after a pause."""

from __future__ import annotations


class TokenBucket:
    """Tokens that come back at a rate, up to those of one second, one at least."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._tokens = self._most
        self._as_of = now

    def seconds_to_token(self, now: float) -> float:
        """Return the seconds until there is a token; 0: there is one."""
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._as_of) * self._rate)
        self._as_of = now
        # Within what a float rounds away: the token that was waited for is there.
        return 0.0 if self._tokens > 1 - 1e-9 else (1 - self._tokens) / self._rate

    def take(self) -> None:
        """Take a token, which is there."""
        self._tokens -= 1
