"""Settings of an event source and of its jobs, their groups, and where they are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.settings.config import EventSourceConfig
    from streams.settings.groups import (
        GroupConfig,
        ParkingConfig,
        PoolConfig,
        QueryConfig,
        QueueConfig,
        StateConfig,
        TimeoutConfig,
    )
    from streams.settings.jobs import (
        COMPUTE,
        FAST_NETWORK,
        SLOW_NETWORK,
        WIDE_NETWORK,
        BatcherConfig,
        SchedulerConfig,
    )
    from streams.settings.once import Once, header

__all__ = [
    "COMPUTE",
    "FAST_NETWORK",
    "SLOW_NETWORK",
    "WIDE_NETWORK",
    "BatcherConfig",
    "EventSourceConfig",
    "GroupConfig",
    "Once",
    "ParkingConfig",
    "PoolConfig",
    "QueryConfig",
    "QueueConfig",
    "SchedulerConfig",
    "StateConfig",
    "TimeoutConfig",
    "header",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "config": "EventSourceConfig",
            "groups": "GroupConfig ParkingConfig PoolConfig QueryConfig QueueConfig StateConfig TimeoutConfig",
            "jobs": "BatcherConfig COMPUTE FAST_NETWORK SLOW_NETWORK SchedulerConfig WIDE_NETWORK",
            "once": "Once header",
        },
    )
