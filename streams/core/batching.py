"""When a transaction is sealed: the self-tuning ("Nagle") rule.

While a transaction is under way the next one grows, so batches are as large as a commit is slow, and small when the
broker is quick. The rule knows three numbers of the open transaction and one of the pipeline; it has no state.
"""

from __future__ import annotations

import enum

from streams.config import PoolConfig


class Seal(enum.Enum):
    """What to do with the open transaction."""

    NOW = "now"
    """Seal it."""
    LATER = "later"
    """Seal it when the delay is over, if nothing else happens before."""
    WHEN_FREE = "when free"
    """Go on filling it; ask again when a transaction has settled."""


def decide(config: PoolConfig, *, size: int, size_bytes: int, age_seconds: float, in_flight: int) -> Seal:
    """What to do with an open transaction of ``size`` = max(events, records), opened ``age_seconds`` ago by its first
    event, while ``in_flight`` sealed transactions are not settled yet."""
    wanted = size >= config.target_batch_size or size_bytes >= config.max_batch_bytes
    if in_flight == 0:
        if wanted or age_seconds >= config.batch_delay_seconds:
            return Seal.NOW
        return Seal.LATER
    if wanted and in_flight < config.pending_transactions:
        return Seal.NOW
    return Seal.WHEN_FREE


def is_full(config: PoolConfig, *, size: int, size_bytes: int) -> bool:
    """Whether intake has to stop until this transaction is sealed."""
    return size >= config.max_batch_size or size_bytes >= config.max_batch_bytes
