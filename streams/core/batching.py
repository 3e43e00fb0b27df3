"""Decide when a transaction is sealed: the self-tuning ("Nagle") rule.

While a transaction is under way the next one grows, so batches are as large as a commit is slow, and small when the
broker is quick. The rule knows three numbers of the open transaction and one of the pipeline; it has no state.

How long a transaction waits for further events, if the settings leave that open, is the time that commits take: then
waiting costs no event more than the commit itself does, and a quick broker is not left idle.

The bytes that a network, or a quota, carries in the time of one transaction are found by trying: the bound in bytes is
halved when a transaction was too large, and grows slowly while transactions near the bound are committed.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from streams.settings.groups import PoolConfig

LEAST_BYTES: Final = 16 * 1024
"""Bytes below which the bound is not halved any further. One event may be larger, and goes alone."""
GROWTH: Final = 32
"""The bound in bytes grows by one part in so many with each full transaction that is committed: 22 double it."""
LONGEST_DELAY_SECONDS: Final = 0.01
"""Seconds that a transaction waits for further events, at most, if the settings leave that open: the ``BatchDelay`` of
the Go library that this toolkit learned from."""
SMOOTHING: Final = 4
"""The delay moves by one part in so many towards the time of each commit."""


class Seal(enum.Enum):
    """The next step for the open transaction."""

    NOW = "now"
    """Seal it."""
    LATER = "later"
    """Seal it when the delay is over, if nothing else happens before."""
    WHEN_FREE = "when free"
    """Go on filling it; decide again when a transaction has settled."""


class Rule(PoolConfig, frozen=True, kw_only=True):
    """Settings whose delay moves with each commit. They are not checked again."""

    def __post_init__(self) -> None:
        """Nothing: the settings that it was made of were checked."""


def decide(config: PoolConfig, *, size: int, size_bytes: int, age_seconds: float, in_flight: int) -> Seal:
    """Decide the next step for an open transaction of ``size`` = max(events, records), opened ``age_seconds`` ago by
    its first event, while ``in_flight`` sealed transactions are not settled yet."""
    wanted = size >= config.target_batch_size or size_bytes >= config.max_batch_bytes
    if in_flight == 0:
        if wanted or age_seconds >= (config.batch_delay_seconds or 0):
            return Seal.NOW
        return Seal.LATER
    if wanted and in_flight < config.pending_transactions:
        return Seal.NOW
    # Not for the delay alone while one is in flight: that is how batches grow with the time of a commit.
    return Seal.WHEN_FREE


def first(config: PoolConfig) -> PoolConfig:
    """Return the rule before the first commit."""
    if config.batch_delay_seconds is not None:
        return config
    return _delayed(Rule(**msgspec.structs.asdict(config)), LONGEST_DELAY_SECONDS)


def paced(rule: PoolConfig, config: PoolConfig, commit_seconds: float) -> PoolConfig:
    """Return the rule after a commit that took so long, from the seal on. ``config``: the settings."""
    delay = rule.batch_delay_seconds
    if config.batch_delay_seconds is not None or delay is None:
        return rule
    return _delayed(rule, min(delay + (commit_seconds - delay) / SMOOTHING, LONGEST_DELAY_SECONDS))


def _delayed(rule: PoolConfig, seconds: float) -> PoolConfig:
    return msgspec.structs.replace(rule, batch_delay_seconds=seconds)


def is_full(config: PoolConfig, *, size: int, size_bytes: int) -> bool:
    """Check whether intake has to stop until this transaction is sealed."""
    return size >= config.max_batch_size or size_bytes >= config.max_batch_bytes


def smaller(config: PoolConfig, size_bytes: int) -> PoolConfig:
    """Return the rule after a transaction of so many bytes did not fit its time."""
    # Half of what was sent, which may be less than the bound. A setting below the least stays as it is.
    most = min(config.max_batch_bytes, max(LEAST_BYTES, min(config.max_batch_bytes, size_bytes) // 2))
    return msgspec.structs.replace(config, max_batch_bytes=most)


def larger(config: PoolConfig, size_bytes: int, most_bytes: int) -> PoolConfig:
    """Return the rule after a commit of so many bytes; the bound is never more than ``most_bytes``."""
    bound = config.max_batch_bytes
    if bound >= most_bytes or size_bytes < bound // 2:
        return config  # no evidence about larger transactions
    return msgspec.structs.replace(config, max_batch_bytes=min(most_bytes, bound + bound // GROWTH + 1))
