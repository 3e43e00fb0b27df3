"""A Python worker keeps two things between tasks: its connections, and what was fetched beyond the end of a range.

A connection costs a handshake, on a secured cluster two, so there is one loop for all partitions of a cluster. A record
batch is fetched as a whole, and the rest of it begins the next range of its partition. One range holds a loop at a
time; one process owns it.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.reading.record_batches import FetchedBatches
from streams.spark.kafka import settings_of
from streams.spark.options import KafkaSettings

MOST_BYTES: Final = 32 << 20
"""Of what was fetched too early, in all: beyond it the oldest ones go."""
IDLE_SECONDS: Final = 60.0


class _KeptLoop(NamedTuple):
    loop: ReadingLoop
    since: float


class _Rest(NamedTuple):
    batches: FetchedBatches
    since: float


_loops: dict[Hashable, _KeptLoop] = {}
_rests: dict[Hashable, _Rest] = {}  # the one that was put last is last
_of_the_parent: list[object] = []  # its sockets: closing them here would end its selector's watch, too


def take_loop(kafka: KafkaSettings) -> ReadingLoop:
    """Return a loop with connections to a cluster, the caller's until ``keep_loop``. Raises ``ConfigError``."""
    _forget_idle()
    # Taken out while it is used: a range that is given up in the middle of its generator must not share it with the
    # next.
    kept = _loops.pop(frozenset(kafka.items()), None)
    if kept is not None:
        return kept.loop
    settings = settings_of(kafka)
    settings.check()
    return ReadingLoop(settings)


def keep_loop(kafka: KafkaSettings, loop: ReadingLoop) -> None:
    """Keep a loop that nothing uses any more."""
    key = frozenset(kafka.items())
    other = _loops.pop(key, None)
    _loops[key] = _KeptLoop(loop, time.monotonic())
    if other is not None:
        other.loop.close()


def take_rest(key: Hashable, position: int) -> FetchedBatches | None:
    """Return what was fetched of a partition from ``position`` on, if that is known."""
    _forget_idle()
    rest = _rests.pop(key, None)
    return rest.batches if rest is not None and rest.batches.position == position else None


def keep_rest(key: Hashable, batches: FetchedBatches) -> None:
    """Keep what is left of batches that were read up to the end of a range."""
    _rests[key] = _Rest(batches, time.monotonic())
    size = sum(rest.batches.size for rest in _rests.values())
    while size > MOST_BYTES:
        size -= _rests.pop(next(iter(_rests))).batches.size


def _forget_idle() -> None:
    limit = time.monotonic() - IDLE_SECONDS
    for key in [key for key, rest in _rests.items() if rest.since <= limit]:
        _rests.pop(key, None)
    for key in [key for key, kept in _loops.items() if kept.since <= limit]:
        if (kept := _loops.pop(key, None)) is not None:
            kept.loop.close()


@atexit.register
def close_kept() -> None:
    """Close and forget all."""
    _rests.clear()
    while _loops:
        _loops.popitem()[1].loop.close()


def _forked() -> None:
    _of_the_parent.extend(_loops.values())
    _loops.clear()


os.register_at_fork(after_in_child=_forked)
