"""What an event source says about itself: values, made when they are asked for."""

from __future__ import annotations

import enum

import msgspec


class SourceState(enum.Enum):
    """Where an event source is in its life."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class PartitionStatistics(msgspec.Struct, frozen=True):
    """One partition: its state, the next offset to handle, records that wait, and whether it is paused."""

    partition: int
    state: str
    next_offset: int
    queued_records: int
    queued_bytes: int
    paused: bool


class SourceStatistics(msgspec.Struct, frozen=True):
    """What an event source is doing, at one moment."""

    state: SourceState
    instance_id: str
    generation: int
    partitions: tuple[PartitionStatistics, ...]
    committed_transactions: int
    committed_events: int
    unsettled_transactions: int
