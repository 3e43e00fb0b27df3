"""Consumers that outlive a range: a Python worker keeps them, with what they have fetched beyond its end.

A connection costs a handshake, on a secured cluster two, and what a closed consumer has fetched ahead is lost. So a
consumer whose range has ended cleanly is kept under its settings, topic (with the id), partition and size, and the next
such range goes on where it stands. Its queue holds what the last fetch brought, and until it is empty there is no other
fetch. One range holds a consumer at a time; one process owns it.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from confluent_kafka import Consumer, Message

_log = logging.getLogger(__name__)

MOST_KEPT: Final = 16
IDLE_SECONDS: Final = 60.0

_SIZES: Final = ((8_000, 32, 1, 1024), (20_000, 64, 1, 1024), (200_000, 256, 1000, 4096), (None, 1024, 20_000, 32768))
"""Up to how many offsets; KiB of one fetch; records below which the next fetch begins; KiB that may wait. What is
fetched beyond the end of a range is of use only if its next one is read by the same worker, so it must be small beside
the range; what a large range fetches before it is needed makes it fast."""


def fetch_settings(offsets: int) -> dict[str, int]:
    """The settings of a consumer for a range of so many offsets."""
    for most, fetch, least, waiting in _SIZES:
        if most is None or offsets <= most:
            return {
                "fetch.message.max.bytes": fetch << 10,
                "queued.min.messages": least,
                "queued.max.messages.kbytes": waiting,
            }
    raise AssertionError("unreachable")


@dataclass
class KeptConsumer:
    """A consumer at ``position``, after which ``ahead``, and then its queue, have the next records; ``None`` when it
    has read nothing."""

    consumer: Consumer
    fetches_much: bool
    position: int | None = None
    ahead: list[Message] = field(default_factory=list)
    since: float = 0.0


_kept: dict[Hashable, KeptConsumer] = {}  # the one that was used last is last
_of_the_parent: list[KeptConsumer] = []  # a client has threads, which a fork does not copy: not even to be closed


def take(key: Hashable) -> KeptConsumer | None:
    """Return the consumer that was kept under ``key``, the caller's now. Closes those that were idle for long."""
    found = _kept.pop(key, None)
    _close(time.monotonic() - IDLE_SECONDS)
    return found


def keep(key: Hashable, kept: KeptConsumer) -> None:
    """Keep a consumer; closes the one that was idle longest when there are too many."""
    if kept.fetches_much:  # empties its queue, which is too large to be kept by many
        kept.consumer.pause(kept.consumer.assignment())
    kept.since = time.monotonic()
    if (other := _kept.pop(key, None)) is not None:
        other.consumer.close()
    _kept[key] = kept
    while len(_kept) > MOST_KEPT:
        _warn_of_many()
        _kept.pop(next(iter(_kept))).consumer.close()


@cache
def _warn_of_many() -> None:
    """Tell it once for each worker: its log says why small batches take long."""
    _log.warning(
        "this Python worker reads more than %d partitions within a minute, and keeps the connections of %d: the others "
        "connect anew in each micro-batch, which takes a part of a second each. More cores of executors, or queries of "
        "fewer partitions, make it less",
        MOST_KEPT,
        MOST_KEPT,
    )


def _close(idle_since: float) -> None:
    for key in [key for key, kept in _kept.items() if kept.since <= idle_since]:
        if (kept := _kept.pop(key, None)) is not None:
            kept.consumer.close()


@atexit.register
def close_kept() -> None:
    """Close all that are kept."""
    _close(time.monotonic())


def _forked() -> None:
    _of_the_parent.extend(_kept.values())
    _kept.clear()


os.register_at_fork(after_in_child=_forked)
