"""One partition of this member, below everything that works on it: its state, its store and how far it is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from streams.core.jobs import BrokenJob
from streams.core.known_failures import KnownFailures
from streams.core.parking import BrokenQueue, Queue
from streams.core.partition import PartitionState
from streams.core.position import Position, offsets_of
from streams.core.timers import Timer
from streams.errors import OffsetError
from streams.model.topics import InputSpec
from streams.protocols import JournalledStore
from streams.records import IncomingRecord, TopicPartition, shown_key
from streams.runtime.changelog import OffsetRecord, ReleaseMarker, TopicIds, VoiceRecord
from streams.runtime.partition.failures import LastTraces
from streams.runtime.partition.formed_outputs import NO_FORMS, forming
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.partition.seen_ids import SeenIds
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.partition.voices import refuse_voice
from streams.sak.murmur2 import partition_of

_log = logging.getLogger(__name__)


class Restored(Protocol):
    """A state that was read from a changelog (``ownership.replicas.Replica``)."""

    @property
    def store(self) -> Any: ...
    @property
    def offset_record(self) -> OffsetRecord | None: ...
    @property
    def timers(self) -> Mapping[str, Timer]: ...
    @property
    def voice(self) -> VoiceRecord | None: ...
    @property
    def joined(self) -> JoinedRows: ...
    @property
    def seen(self) -> SeenIds: ...
    @property
    def kept(self) -> KeptState | None: ...


class KeptState(Protocol):
    """The way of a partition's committed changes to the disk (``keeping.kept_partition.KeptPartition``)."""

    def close(self) -> None: ...


class Partition:
    """One partition at work. On the loop; handlers on a thread read ``timers``.

    ``topic_partition`` names it, ``reading`` the input whose event has its turn (the same, with one input), and
    ``watermark`` is the first offset of that which is not handled yet. ``committed``: the position up to which
    everything is known to be committed. ``epoch`` counts the partitions that this
    process brought up: records that were read for an earlier one are dropped. ``ids`` and ``input_ids`` (of further
    inputs) are the topics that the state belongs to, as they were checked. ``is_closing``: no further event is handled.
    """

    def __init__(self, topic_partition: TopicPartition, epoch: int, timers: PartitionTimers) -> None:
        self.topic_partition = self.reading = topic_partition
        self.partition = topic_partition.partition
        self.epoch = epoch
        self.state = PartitionState.RESTORING
        self.store: Any = None  # until it is adopted, and after it was taken
        self.is_journalled = False
        self.before_event: Callable[[Any], None] | None = None  # of a ``protocols.ObservingStore``
        self.kept: Any = None  # a ``KeptState``, if the store is kept on disk
        self.offset_record: OffsetRecord | None = None
        self.voice: VoiceRecord | None = None  # of a muted one
        self.ids = TopicIds()
        self.input_ids: tuple[str, ...] = ()
        self.watermark = -1
        self.committed: Position = -1
        self.specs: Mapping[str, InputSpec] = {}  # of further inputs, and of a topic with a rule, by their topics
        self.forms = NO_FORMS  # of topics that are written to otherwise than with our headers
        self.timers = timers
        self.timekeeper: Any = None  # of a store that goes by the time of its events (``timekeeping.Timekeeper``)
        self.last_handled: tuple[IncomingRecord, float] | None = None  # and when, by the loop's clock
        self.failures = KnownFailures()
        self.traces = LastTraces()
        self.is_closing = False

    def adopt(self, restored: Restored) -> None:
        """Work on this state from now on. Raises ``ConfigError`` unless the settings know that it is muted, or not."""
        self.store = restored.store
        self.offset_record, self.voice = restored.offset_record, restored.voice
        refuse_voice(self.timers.config.shadow_of, self.topic_partition, self.offset_record, self.voice)
        try:
            self.timers.restore(restored.timers.values())
        except (BrokenQueue, BrokenJob) as error:
            what = "jobs" if isinstance(error, BrokenJob) else "queues of parked keys"
            raise OffsetError(
                f"{self.topic_partition}: the {what} in the changelog are broken: {error}. Something else writes to "
                "it, or a newer version of this package does"
            ) from error
        self._warn_of_strays()
        self.timers.joined, self.timers.seen = restored.joined, restored.seen
        self.kept = restored.kept
        self.is_journalled = isinstance(self.store, JournalledStore)
        self.before_event = getattr(self.store, "before_event", None) if self.is_journalled else None
        if self.before_event is not None and hasattr(self.store, "timekeeper"):
            self.store.timekeeper = self.timekeeper
        if self.forms:
            self.before_event = forming(self.forms, self.before_event)

    def _warn_of_strays(self) -> None:
        """Warn of parked keys that belong into another partition: nothing there knows that they are parked."""
        count = self.timers.config.num_partitions
        strays = [key for key in self.parked if partition_of(key, count) != self.partition]
        if strays:
            _log.warning(
                "%s: %d parked key(s) belong to another one of %d partitions (murmur2), %s to %d: partitions were "
                "added to the topic, or its producers use another partitioner. If later events of such a key are "
                "there, they are handled before those that wait here: kes parked show MODULE:SOURCE KEY",
                self.topic_partition,
                len(strays),
                count,
                shown_key(strays[0]),
                partition_of(strays[0], count),
            )

    @property
    def parked(self) -> Mapping[bytes, Queue]:
        """Return the queues of its parked keys; empty: no key is parked."""
        return self.timers.parked.keys

    def queue_of(self, record: IncomingRecord) -> Queue | None:
        """Return the queue in which a record has to wait behind those of its key, whatever their inputs; ``None``: its
        key is open, or its input knows no queues."""
        queue = None if record.key is None else self.parked.get(record.key)
        spec = None if queue is None else self.specs.get(record.topic)
        return queue if spec is None or spec.queues else None

    @property
    def joined(self) -> JoinedRows:
        """Return the rows of its joined tables."""
        return self.timers.joined

    @property
    def seen(self) -> SeenIds:
        """Return the ids that it has handled."""
        return self.timers.seen

    def start_at(self, position: Position) -> None:
        """Begin work at this position, up to which the store is complete."""
        self.watermark, self.committed = offsets_of(position)[0], position
        # Jobs of a topic that was made anew begin at number 0 again: the topic's id keeps their ids apart.
        changelog = (self.ids.changelog or self.timers.config.changelog).encode()
        self.timers.job_prefix = f"kes-{hashlib.blake2b(changelog, digest_size=4).hexdigest()}-{self.partition}"
        self.failures.expect(position, (timer.origin for timer in self.timers))

    def further_fields(self, position: Position) -> tuple[str, str, msgspec.Raw | msgspec.UnsetType]:
        """Return the fields of its offset record at this position, from ``source_id`` on."""
        inputs = msgspec.UNSET if self.offset_record is None else self.offset_record.inputs
        return self.ids.source, self.ids.changelog, inputs

    def release_marker(self, to: str, generation: int) -> ReleaseMarker:
        """Return the marker that hands the partition over to the member ``to``, by the order of this generation."""
        return ReleaseMarker(to, generation)

    def take_store(self) -> Any:
        """Return the store, which has no other holder from now on."""
        store, self.store = self.store, None
        return store

    def take_kept(self) -> Any:
        """Return the way to the disk, which has no other holder from now on; ``None``: there is none."""
        kept, self.kept = self.kept, None
        return kept
