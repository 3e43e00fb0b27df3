"""When a transaction is sealed: the self-tuning ("Nagle") rule.

While a transaction is under way the next one grows, so batches are as large as a commit is slow, and small when the
broker is quick. With a backlog they grow further: nobody waits for the outputs of the moment then, and each transaction
costs the broker and us the same again, whatever is in it. The rule knows numbers of the open transaction, of the
pipeline and of what waits to be handled; it has no state.
"""

from __future__ import annotations

from typing import Final

from streams.config import PoolConfig

COMMITS: Final = 3.0
"""With a backlog a transaction is filled for as long as so many commits take."""

LONGEST_SECONDS: Final = 0.25
"""But never for longer than this, however slow commits are."""


def half_full(config: PoolConfig) -> int:
    """The size that a transaction grows to with a backlog, and what makes a backlog: so many events wait."""
    return config.max_batch_size // 2


def seconds_to_seal(
    config: PoolConfig,
    *,
    size: int,
    size_bytes: int,
    age_seconds: float,
    in_flight: int,
    waiting: int,
    commit_seconds: float,
) -> float | None:
    """When to seal an open transaction of ``size`` = max(events, records), opened ``age_seconds`` ago by its first
    event, while ``in_flight`` sealed ones are not settled yet and ``waiting`` events were read and wait to be handled.
    ``commit_seconds`` is what passes between sealing and settling of late.

    0: at once. A number of seconds: then, if nothing else happens before. ``None``: ask again when one has settled.
    """
    wanted = size >= config.target_batch_size or size_bytes >= config.max_batch_bytes
    if in_flight:
        return 0.0 if wanted and in_flight < config.pending_transactions else None
    if not wanted:
        return max(0.0, config.batch_delay_seconds - age_seconds)
    enough = half_full(config)
    if waiting < enough or size >= enough or size_bytes >= config.max_batch_bytes:
        return 0.0
    return max(0.0, min(COMMITS * commit_seconds, LONGEST_SECONDS) - age_seconds)


def is_full(config: PoolConfig, *, size: int, size_bytes: int) -> bool:
    """Whether intake has to stop until this transaction is sealed."""
    return size >= config.max_batch_size or size_bytes >= config.max_batch_bytes
