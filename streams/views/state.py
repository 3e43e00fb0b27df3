"""The state of a view, and its figures."""

from __future__ import annotations

import enum

import msgspec

from streams.runtime.reading.view_follower import LogPartitionStatistics


class ViewState(enum.Enum):
    """State of a view. It may be read while it is ``LIVE`` or ``STALE``: then the cluster does not answer, and there
    may be newer values."""

    CREATED = "created"
    STARTING = "starting"
    CATCHING_UP = "catching up"
    LIVE = "live"
    STALE = "stale"
    STOPPED = "stopped"
    FAILED = "failed"


class ViewStatistics(msgspec.Struct, frozen=True):
    """State of a view at one moment, its number of keys (of a view on disk about so many), and the progress of each
    partition."""

    state: ViewState
    topic: str
    keys: int
    partitions: tuple[LogPartitionStatistics, ...]
