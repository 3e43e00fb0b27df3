"""Figures of an event source: values, made at each call of ``statistics``."""

from __future__ import annotations

import enum

import msgspec


class SourceState(enum.Enum):
    """State of an event source in its life cycle."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class InputStatistics(msgspec.Struct, frozen=True):
    """One input of a partition, of a source that reads several topics. ``awaited``: other inputs wait for it now;
    ``end`` as in ``PartitionStatistics``."""

    topic: str
    next_offset: int
    queued_records: int
    awaited: bool = False
    end: int = -1

    @property
    def lag(self) -> int | None:
        """Return the records between the next offset and the end; ``None`` while the end is not known."""
        return max(self.end - self.next_offset, 0) if self.end >= 0 and self.next_offset >= 0 else None


class VisitStatistics(msgspec.Struct, frozen=True):
    """A visit in one partition. ``run``: under way (empty: none), with ``keys`` done; ``waiting``: runs that begin when
    it is over. ``ended`` and ``cancelled``: the last runs that are over, each with its keys."""

    visit: str
    run: str
    keys: int
    waiting: tuple[str, ...]
    ended: dict[str, int]
    cancelled: dict[str, int]


class VisitRunStatistics(msgspec.Struct, frozen=True):
    """A run of a visit over several partitions: how many it is under way in (``running``), waits in, has ended in, was
    cancelled in; and the keys that it has visited."""

    visit: str
    run: str
    running: int = 0
    waiting: int = 0
    ended: int = 0
    cancelled: int = 0
    keys: int = 0


class ParkedStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Parked keys of one partition, the ``events`` in their queues, and since when the one that has waited longest does
    (``since_ms``, milliseconds since the epoch)."""

    partition: int
    keys: int
    events: int
    since_ms: int


class JobStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Durable jobs of one partition that have waited for long: ``parked`` of them wait for an operator, and the oldest
    of all was started at ``since_ms`` (milliseconds since the epoch)."""

    partition: int
    parked: int
    since_ms: int


class PartitionStatistics(msgspec.Struct, frozen=True):
    """One partition: its state, the next offset to handle, records that wait, and whether it is paused."""

    partition: int
    state: str
    next_offset: int
    queued_records: int
    queued_bytes: int
    paused: bool
    events_ahead: int = 0
    """Events whose work runs ahead of their turn, and those that wait behind them (they count as queued, too)."""
    timers: int = 0
    """Durable timers that are set."""
    next_timer_ms: int | None = None
    """Time at which the first of them is due, in milliseconds since the epoch; ``None``: none is set."""
    end: int = -1
    """End of the partition in the source topic, as far as the consumer has seen it, without a few markers of
    transactions once these are known; -1: not known. Only in the answer of ``statistics_threadsafe``."""
    inputs: tuple[InputStatistics, ...] = ()
    """All inputs, the source's own topic first, if it reads several; ``next_offset`` and ``end`` are of that one."""
    visits: tuple[VisitStatistics, ...] = ()
    """Visits that were ever started."""
    out_of_time: dict[str, int] = {}
    """Since the partition is here: ``late``, ``expired_early`` and ``time_jump`` of ``metrics.OutOfTime``, as far as
    there were any."""
    parked_keys: int = 0
    """Parked keys; ``parked_events`` wait in their queues, with ``parked_bytes``."""
    parked_events: int = 0
    parked_bytes: int = 0
    parked_since_ms: int | None = None
    """Time at which the key was parked that has waited longest, in milliseconds since the epoch; ``None``: no key is
    parked."""
    parking_full: str = ""
    """The setting of ``ParkingConfig`` whose bound holds up the partition; empty: none does."""
    lag_seconds: dict[str, float] = {}
    """By topic: the age of the oldest record that is not committed, by the records' own times; 0.0: it is at the end. A
    topic is missing while nothing is known of its next record."""
    event_age_seconds: dict[str, float] = {}
    """By topic: the age of the last record that was handled here in its turn, when it was."""
    jobs: int = 0
    """Durable jobs that are not over; ``jobs_parked`` wait for an operator, ``jobs_running`` run."""
    jobs_parked: int = 0
    jobs_since_ms: int | None = None
    """Time at which the oldest durable job was started, in milliseconds since the epoch; ``None``: there is none."""
    jobs_running: int = 0
    jobs_full: str = ""
    """The jobs whose bound (``SchedulerConfig.max_jobs``) holds up the partition's input; empty: none do."""

    once_ids: int = 0
    """Ids of events that are remembered (``once=``). Since the partition is here: ``once_duplicates`` events were
    passed, ``once_missing`` had no id, ``once_forgotten`` ids went before their time."""
    once_duplicates: int = 0
    once_missing: int = 0
    once_forgotten: int = 0

    @property
    def lag(self) -> int | None:
        """Return the records between the next offset and the end; ``None`` while the end is not known."""
        return max(self.end - self.next_offset, 0) if self.end >= 0 and self.next_offset >= 0 else None


class CopyStatistics(msgspec.Struct, frozen=True):
    """State that is read from the changelog: ``restoring`` (to be worked on here), ``preparing`` or ``ready`` (a warm
    copy), ``failed``. ``position`` and ``end`` are offsets of the changelog (-1: not known yet); ``records`` and
    ``size_bytes`` were read in ``seconds``. ``seconds_left`` at that rate, ``None`` when there is no rate yet.
    ``lag_seconds``: the age of the last record read, while there are more. Before the changelog, ``folder_loaded`` of
    ``folder_bytes`` come from the disk; 0: there is no folder, or not yet."""

    partition: int
    state: str
    position: int
    end: int
    records_left: int
    records: int
    size_bytes: int
    seconds: float
    seconds_left: float | None
    lag_seconds: float
    folder_bytes: int = 0
    folder_loaded: int = 0


class FolderStatistics(msgspec.Struct, frozen=True):
    """State on disk of a partition that is worked on, or copied, here. ``state``: ``kept``; ``failing``: it cannot be
    written to, what is committed waits in memory; ``left``: it stays at its mark for the rest of the run. ``offset``:
    of the changelog, up to which the mark says that all is there (-1: no mark yet); ``size_bytes``: of its data.
    ``gathered_changes`` and ``unwritten_bytes`` (an estimate) are committed, and not written yet.
    ``mark_age_seconds``: since what it holds was committed. ``checkpoint_seconds``: time of the last one.
    ``recover_seconds``: estimate of the time that a restart would need for loading it and reading the rest.
    ``snapshot_age_seconds``: of the newest snapshot that is known here; ``None``: none is."""

    partition: int
    state: str
    offset: int
    size_bytes: int
    gathered_changes: int
    unwritten_bytes: int
    mark_age_seconds: float
    checkpoint_seconds: float
    recover_seconds: float
    snapshot_age_seconds: float | None = None


class StageStatistics(msgspec.Struct, frozen=True):
    """Work that runs ahead of its turn, of one scheduler, batcher or concurrent handler: what runs, what waits for a
    slot or its key, and how many keys have work. For a batcher that is counted in items, for a producer in records."""

    name: str
    running: int
    waiting: int
    keys: int
    batches: int = 0
    """Calls that a batcher has made so far."""
    mean_batch_size: float = 0.0
    """Items per call of a batcher, so far."""


class MoveStatistics(msgspec.Struct, frozen=True):
    """A move that is under way: ``direction`` is ``in`` or ``out``, ``peer`` the receiver's member id (``out``),
    ``generation`` the one it was ordered in, ``seconds`` since it is waited for (``in``)."""

    partition: int
    direction: str
    peer: str
    generation: int
    seconds: float | None


class RebalanceStatistics(msgspec.Struct, frozen=True):
    """A rebalance that reached this member: its time (milliseconds since the epoch) and its cause."""

    generation: int
    at_ms: int
    cause: str


class LookupStatistics(msgspec.Struct, frozen=True):
    """A lookup of this process. ``is_complete``: it has met the end of its topic once; ``is_cut_off``: the cluster has
    not answered the last request about it; ``is_awaited``: partitions that come here wait until it is as far as what
    their handlers have looked into before. ``records`` and ``size_bytes`` were read, ``records_left`` offsets are left
    as far as is known, ``skipped`` records were passed over by ``on_error``."""

    topic: str
    state: SourceState
    is_complete: bool
    is_cut_off: bool
    is_awaited: bool
    records: int
    records_left: int
    size_bytes: int
    skipped: int


class SourceStatistics(msgspec.Struct, frozen=True):
    """State of an event source at one moment."""

    state: SourceState
    instance_id: str
    generation: int
    partitions: tuple[PartitionStatistics, ...]
    committed_transactions: int
    committed_events: int
    unsettled_transactions: int
    copies: tuple[CopyStatistics, ...] = ()
    moves: tuple[MoveStatistics, ...] = ()
    member_id: str = ""
    rebalances: tuple[RebalanceStatistics, ...] = ()
    stages: tuple[StageStatistics, ...] = ()
    hung_calls: int = 0
    """Calls to the broker that were given up and have not come back: each keeps a thread and connections."""
    folders: tuple[FolderStatistics, ...] = ()
    """State on disk, with ``StateConfig.folder``."""
    folders_set_aside: int = 0
    """Folders that were not believed, or damaged, in this run."""
    lookups: tuple[LookupStatistics, ...] = ()
    """The lookups of the process; empty while they are read for the first time."""
    input_bytes: dict[str, int] = {}
    """Bytes of keys, values and headers that were read in this run, by the topic of the input."""
    hot_path: str = ""
    """How the hot path runs: ``compiled``, or ``plain Python`` and why, as ``kes --version`` says it."""
    registry_waiting: tuple[int, ...] = ()
    """Partitions that wait for a schema of the registry (``streams.formats.SchemaRegistry``)."""
    handled_events: dict[str, int] = {}
    """Events that handlers have completed since the source was made, committed or not, by their types."""
    failed_events: dict[str, dict[str, int]] = {}
    """Events that have failed for good since then, by their types, and by what was done about them."""
