"""The exported metrics: names, kinds, labels, and where each value comes from. One source of truth for every exporter.

Two sources fill them: measurements (``streams.metrics``; counters and histograms), and the statistics of a source at
the moment of a look (``streams.statistics``; gauges). A label has as many values as there are partitions, registered
jobs, or members of an enumeration: never keys, texts of errors, or names of other members.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streams.metrics import (
    BatchFailed,
    CallAbandoned,
    CallbackFailed,
    CommandHandled,
    DurableJobEnded,
    EventDuplicate,
    EventFailed,
    HandlerTimed,
    HeadTried,
    IdMissing,
    IdsForgotten,
    JobEnded,
    Measurement,
    MembershipChanged,
    OffsetMismatch,
    OutOfTime,
    OwnMeasured,
    PartitionMoved,
    PartitionsAdded,
    TakeOverDone,
    TransactionSettled,
)
from streams.outcomes import ErrorResponse
from streams.statistics import SourceState, SourceStatistics

Labels = tuple[str, ...]
"""Values of labels, in the order of the instrument's names."""


class Kind(enum.Enum):
    """The kinds of instruments."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False, slots=True)
class Instrument:
    """One exported metric; each is equal to itself only. ``name`` is without ``_total``; ``at_start``: label values
    that are exported as 0 before anything happened, so that the first time is an increase. ``buckets``: upper bounds,
    in seconds."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    at_start: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()


Sample = tuple[Instrument, float, Labels]
"""A value for an instrument: to be added (counter), set (gauge), or observed (histogram); and its labels."""

FAST: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLOW: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

HANDLER: Final = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *FAST)

_ALL: list[Instrument] = []


def _counter(name: str, text: str, labels: Labels = (), at_start: tuple[Labels, ...] | None = None) -> Instrument:
    _ALL.append(Instrument(name, Kind.COUNTER, text, labels, at_start or (() if labels else ((),))))
    return _ALL[-1]


def _histogram(name: str, text: str, buckets: tuple[float, ...], labels: Labels = ()) -> Instrument:
    _ALL.append(Instrument(name, Kind.HISTOGRAM, text, labels, () if labels else ((),), buckets))
    return _ALL[-1]


def _gauge(name: str, text: str, labels: Labels = (), at_start: tuple[Labels, ...] = ()) -> Instrument:
    _ALL.append(Instrument(name, Kind.GAUGE, text, labels, at_start))
    return _ALL[-1]


# -- from measurements -------------------------------------------------------------------------------------------------

_RESPONSES: Final = tuple((response.value,) for response in ErrorResponse)
_DIRECTIONS: Final = (("in",), ("out",))

TRANSACTIONS = _counter(
    "kes_transactions", "Transactions that ended.", ("outcome",), (("committed",), ("not_committed",))
)
TRANSACTIONS_RESENT = _counter("kes_transactions_resent", "Further attempts of transactions that failed.")
EVENTS = _counter("kes_events", "Events that were committed.")
OUTPUTS = _counter("kes_outputs", "Output records that were committed.")
CHANGES = _counter("kes_changes", "State changes that were committed to the changelog.")
TRANSACTION_OPEN = _histogram("kes_transaction_open_seconds", "Time in which a transaction was filled.", FAST)
TRANSACTION_FLUSH = _histogram(
    "kes_transaction_flush_seconds", "Time from the end of filling until the broker had all records.", FAST
)
TRANSACTION_COMMIT = _histogram(
    "kes_transaction_commit_seconds", "Time from the end of filling until the transaction ended.", FAST
)
EVENTS_FAILED = _counter(
    "kes_failed_events", "Events that failed for good, by what was done about them.", ("response",), _RESPONSES
)
RECORDS_UNREAD = _counter(
    "kes_decode_failures", "Records that were no event, by why: null, untyped, unknown_type, refused, value.",
    ("topic", "reason"),
)  # fmt: skip
VALUES_UNREAD = _counter(
    "kes_unreadable_values", "Events that failed for good because a value of the state could not be read."
)
OUTPUT_BYTES = _counter("kes_output_bytes", "Bytes of output records that were committed.", ("topic",))
CHANGELOG_BYTES = _counter("kes_changelog_bytes", "Bytes of changelog records that were committed.")
HANDLER_SECONDS = _histogram(
    "kes_handler_seconds", "Time of a handler for one event, of a sample of events.", HANDLER, ("type",)
)
HEADS_TRIED = _counter(
    "kes_parked_retries", "Attempts at first events of parked keys.", ("outcome",), (("completed",), *_RESPONSES)
)
ONCE_DUPLICATES = _counter(
    "kes_once_duplicates", "Events that were passed: one with their id was handled before (once=).", ("type",)
)
ONCE_MISSING = _counter("kes_once_missing", "Events with once= that had no id, and were handled.", ("type",))
ONCE_FORGOTTEN = _counter("kes_once_forgotten", "Ids that went before their time, for others to have room (once=).")
BATCHES_FAILED = _counter("kes_failed_batches", "Batches that failed as a whole; their events run one by one.")
COMMANDS = _counter("kes_commands", "Commands that were handled: done, rejected, conflict.", ("type", "outcome"))
COMMAND_SECONDS = _histogram("kes_command_seconds", "Time from the sending of a command to its turn.", FAST)
LATE_ITEMS = _counter("kes_late_items", "Items that came for windows that were closed.", ("store", "window"))
EXPIRED_EARLY = _counter(
    "kes_expired_early", "Entries that expired before their time by the clock: an event came from the future.",
    ("store", "table"),
)  # fmt: skip
TIME_JUMPS = _counter(
    "kes_time_jumps", "Events that were refused: they would have moved their partition's time too far.", ("partition",)
)
JOBS = _counter("kes_jobs", "Jobs that ended.", ("name", "outcome"))
JOBS_RETRIED = _counter("kes_job_retries", "Further attempts of jobs.", ("name",))
JOB_SECONDS = _histogram(
    "kes_job_seconds", "Time of a job with its retries, without its wait for a slot.", FAST, ("name",)
)
JOBS_ENDED = _counter(
    "kes_jobs_ended", "Durable jobs that are over, or wait for more than an attempt.", ("name", "outcome")
)
REBALANCES = _counter("kes_rebalances", "Rebalances that reached the member.")
MEMBERSHIPS_LOST = _counter("kes_memberships_lost", "Times that the member lost everything it owned.")
TAKEOVERS = _counter("kes_takeovers", "Partitions taken over; warm: with a copy of the state.", ("warm",),
                     (("false",), ("true",)))  # fmt: skip
TAKEOVER_SECONDS = _histogram("kes_takeover_seconds", "Time of a take-over: fence, barrier, restore.", SLOW)
RESTORE_SECONDS = _histogram("kes_restore_seconds", "Time of the restore in a take-over.", SLOW)
MOVES = _counter("kes_moves", "Partitions that were handed over by a marker.", ("direction",), _DIRECTIONS)
MOVE_SECONDS = _histogram("kes_move_seconds", "Time of a hand-over: out, without intake; in, since the plan.", SLOW,
                          ("direction",))  # fmt: skip
OFFSETS_MISMATCHED = _counter("kes_offset_mismatches", "Group offsets that were behind the changelog, or missing.")
CALLS_ABANDONED = _counter("kes_abandoned_calls", "Calls to the broker that were given up.")
CALLBACKS_FAILED = _counter(
    "kes_failed_callbacks", "Functions about partitions that raised, or took too long.", ("callback",),
    at_start=tuple((moment,) for moment in ("on_assigned", "on_activated", "on_will_revoke", "on_revoked")),
)  # fmt: skip
PARTITIONS_UNREAD = _gauge(
    "kes_unread_partitions", "Partitions of the source topic beyond the settings' number: no member reads them.",
    at_start=((),),
)  # fmt: skip

# -- from statistics ---------------------------------------------------------------------------------------------------

INFO = _gauge("kes_source_info", "Always 1: topic and instance of the source.", ("topic", "instance_id"))
LOOP_ANSWERED = _gauge("kes_loop_answered", "1: the event loop answered this scrape; 0: it stands still.")
STATE = _gauge("kes_source_state", "1 for the present state of the source, 0 for the others.", ("state",))
GENERATION = _gauge("kes_group_generation", "Generation of the group; -1: not a member.")
UNSETTLED = _gauge("kes_unsettled_transactions", "Transactions that are open or on their way.")
REGISTRY_WAITING = _gauge("kes_registry_waiting", "Partitions that wait for a schema of the registry.")
HUNG_CALLS = _gauge("kes_hung_calls", "Calls to the broker that were given up and have not come back.")
PARTITIONS = _gauge("kes_partitions", "Partitions that are here, by state.", ("state",))
MOVES_UNDER_WAY = _gauge("kes_moves_under_way", "Hand-overs that are under way.", ("direction",))
NEXT_OFFSET = _gauge("kes_partition_next_offset", "Next offset to be handled.", ("partition",))
LAG_SECONDS = _gauge(
    "kes_lag_seconds", "Age of the oldest record that is not committed, as far as it is known; 0: at the end.",
    ("partition", "topic"),
)  # fmt: skip
EVENT_AGE = _gauge(
    "kes_event_age_seconds", "Age of the last record that was handled, when it was.", ("partition", "topic")
)
LAG = _gauge("kes_partition_lag", "Records between the next offset and the end of the partition.", ("partition",))
INPUT_OFFSET = _gauge(
    "kes_input_next_offset", "Next offset of an input, of a source that reads several.", ("partition", "topic")
)
INPUT_LAG = _gauge("kes_input_lag", "Records between that and the end of the input.", ("partition", "topic"))
INPUT_AWAITED = _gauge("kes_input_awaited", "1: the other inputs wait for this one.", ("partition", "topic"))
HANDLED_EVENTS = _gauge(
    "kes_handled_events", "Events of this process that are over: completed, or what was done about them.",
    ("type", "outcome"),
)  # fmt: skip
INPUT_BYTES = _gauge("kes_input_bytes", "Bytes of the records that were read in this run.", ("topic",))
LOOKUP_RECORDS = _gauge("kes_lookup_records", "Records of a lookup that were read.", ("topic",))
LOOKUP_LEFT = _gauge("kes_lookup_records_left", "Offsets of a lookup that are still to be read.", ("topic",))
LOOKUP_BYTES = _gauge("kes_lookup_bytes", "Bytes of keys and values of a lookup that were read.", ("topic",))
LOOKUP_AWAITED = _gauge(
    "kes_lookup_awaited", "1: partitions that come here wait until this lookup is as far as before.", ("topic",)
)
LOOKUP_CUT_OFF = _gauge("kes_lookup_cut_off", "1: the cluster does not answer about this lookup.", ("topic",))
QUEUED_RECORDS = _gauge("kes_partition_queued_records", "Records that wait to be handled.", ("partition",))
QUEUED_BYTES = _gauge("kes_partition_queued_bytes", "Their bytes.", ("partition",))
PAUSED = _gauge("kes_partition_paused", "1: not read on, because its queue is full.", ("partition",))
EVENTS_AHEAD = _gauge("kes_partition_events_ahead", "Events whose work runs ahead of their turn.", ("partition",))
TIMERS = _gauge("kes_partition_timers", "Durable timers that are set.", ("partition",))
VISIT_RUNNING = _gauge(
    "kes_visit_running", "1: a run of the visit is under way in the partition.", ("partition", "visit")
)
VISIT_KEYS = _gauge("kes_visit_keys", "Keys that the run under way has visited.", ("partition", "visit"))
PARKED_KEYS = _gauge("kes_parked_keys", "Parked keys.", ("partition",))
PARKED_EVENTS = _gauge("kes_parked_events", "Events that wait in the queues of parked keys.", ("partition",))
PARKED_BYTES = _gauge("kes_parked_bytes", "Bytes of the events that wait in the queues of parked keys.", ("partition",))
PARKED_SINCE = _gauge(
    "kes_parked_since_timestamp_seconds", "Time at which the key was parked that has waited longest.", ("partition",)
)
PARKED_FULL = _gauge(
    "kes_parked_full", "1: an event waits for room in the queues of parked keys, and its partition with it.",
    ("partition",),
)  # fmt: skip
JOBS_PENDING = _gauge("kes_jobs_pending", "Durable jobs that are not over.", ("partition",))
JOBS_RUNNING = _gauge("kes_jobs_running", "Durable jobs that run.", ("partition",))
ONCE_IDS = _gauge("kes_once_ids", "Ids of events that are remembered (once=).", ("partition",))
JOBS_PARKED = _gauge("kes_jobs_parked", "Durable jobs that wait for an operator.", ("partition",))
JOBS_SINCE = _gauge(
    "kes_jobs_since_timestamp_seconds", "Time at which the oldest durable job was started.", ("partition",)
)
JOBS_FULL = _gauge(
    "kes_jobs_full", "1: the partition takes no input, because it has as many durable jobs as it may.", ("partition",)
)
NEXT_TIMER = _gauge(
    "kes_partition_next_timer_timestamp_seconds", "Time at which the first timer is due.", ("partition",)
)
COPIES = _gauge("kes_copies", "Copies of state that are read from the changelog, by state.", ("state",))
COPY_LEFT = _gauge("kes_copy_records_left", "Records of the changelog that a copy has still to read.", ("partition",))
COPY_LAG = _gauge(
    "kes_copy_lag_seconds", "Age of the last record that a copy read, while there are more.", ("partition",)
)
FOLDERS = _gauge(
    "kes_folders", "Folders of state on disk; failing: cannot be written to; left: stay at their marks.", ("state",)
)
FOLDERS_SET_ASIDE = _gauge("kes_folders_set_aside", "Folders that were damaged, or not believed, in this run.")
FOLDER_BYTES = _gauge("kes_folder_bytes", "Bytes of data in a folder.", ("partition",))
FOLDER_GATHERED = _gauge(
    "kes_folder_gathered_changes", "Changes that are committed, and not on disk yet.", ("partition",)
)
FOLDER_UNWRITTEN = _gauge("kes_folder_unwritten_bytes", "Their bytes.", ("partition",))
FOLDER_MARK_AGE = _gauge("kes_folder_mark_age_seconds", "Age of what a folder holds.", ("partition",))
FOLDER_CHECKPOINT = _gauge("kes_folder_checkpoint_seconds", "Time of a folder's last checkpoint.", ("partition",))
FOLDER_RECOVER = _gauge(
    "kes_folder_recover_seconds", "Estimate: time of a restore from the folder and the rest of the changelog.",
    ("partition",),
)  # fmt: skip
FOLDER_SNAPSHOT_AGE = _gauge(
    "kes_folder_snapshot_age_seconds", "Age of the newest snapshot of a partition that is known here.", ("partition",)
)
STAGE_RUNNING = _gauge("kes_stage_running", "Work of a stage that runs.", ("name",))
STAGE_WAITING = _gauge("kes_stage_waiting", "Work of a stage that waits for a slot or its key.", ("name",))
STAGE_KEYS = _gauge("kes_stage_keys", "Keys that have work in a stage.", ("name",))
STAGE_BATCHES = _gauge("kes_stage_batches", "Calls that a batcher has made in this run.", ("name",))

_PARTITION_STATES: Final = ("restoring", "active", "restarting", "releasing", "draining")
_COPY_STATES: Final = ("restoring", "preparing", "ready", "failed")
_FOLDER_STATES: Final = ("kept", "failing", "left")

# -- from the supervisor of kes run ------------------------------------------------------------------------------------

WORKER_UP = _gauge("kes_worker_up", "1: the worker process runs and answered this scrape.")
WORKER_STARTS = _counter("kes_worker_starts", "Starts of the worker process by this supervisor.")

INSTRUMENTS: Final = tuple(_ALL)
OF_SOURCES: Final = tuple(each for each in _ALL if each not in (WORKER_UP, WORKER_STARTS))


def readings(measurement: Measurement) -> list[Sample]:
    """Return the values of one measurement. On the loop, so it makes plain tuples, and the most frequent come first."""
    match measurement:
        case JobEnded(name, _, seconds, attempts, outcome):
            ended: list[Sample] = [(JOBS, 1, (name, outcome)), (JOB_SECONDS, seconds, (name,))]
            return ended if attempts == 1 else [*ended, (JOBS_RETRIED, attempts - 1, (name,))]
        case TransactionSettled(committed, attempts, events, outputs, changes, _, opened, commit, flush, sizes, size):
            resent: Sample = (TRANSACTIONS_RESENT, attempts - 1, ())
            if not committed:
                return [(TRANSACTIONS, 1, ("not_committed",)), resent]
            return [
                (TRANSACTIONS, 1, ("committed",)),
                resent,
                (EVENTS, events, ()),
                (OUTPUTS, outputs, ()),
                (CHANGES, changes, ()),
                (TRANSACTION_OPEN, opened, ()),
                (TRANSACTION_FLUSH, flush, ()),
                (TRANSACTION_COMMIT, commit, ()),
                (CHANGELOG_BYTES, size, ()),
                *((OUTPUT_BYTES, sent, (topic,)) for topic, sent in sizes.items()),
            ]
        case EventFailed(_, _, _, response, topic, unread, is_state_unread):
            failed: list[Sample] = [(EVENTS_FAILED, 1, (response,))]
            failed += [(RECORDS_UNREAD, 1, (topic, unread))] if unread else []
            return [*failed, (VALUES_UNREAD, 1, ())] if is_state_unread else failed
        case OwnMeasured():
            return []  # ``ObservedSource`` has the instruments of its source's own metrics
        case HandlerTimed(kind, seconds):
            return [(HANDLER_SECONDS, seconds, (kind,))]
        case HeadTried(_, outcome):
            return [(HEADS_TRIED, 1, (outcome,))]
        case DurableJobEnded(name, _, outcome):
            return [(JOBS_ENDED, 1, (name, outcome))]
        case CommandHandled(_, name, outcome, seconds):
            return [(COMMANDS, 1, (name, outcome)), (COMMAND_SECONDS, seconds, ())]
        case EventDuplicate(_, _, kind, events):
            return [(ONCE_DUPLICATES, events, (kind,))]
        case IdMissing(_, kind, events):
            return [(ONCE_MISSING, events, (kind,))]
        case IdsForgotten(_, ids):
            return [(ONCE_FORGOTTEN, ids, ())]
        case BatchFailed():
            return [(BATCHES_FAILED, 1, ())]
        case OutOfTime(partition, kind, store, part, items):
            if kind == "time_jump":
                return [(TIME_JUMPS, items, (str(partition),))]
            return [(LATE_ITEMS if kind == "late" else EXPIRED_EARLY, items, (store, part))]
        case MembershipChanged():
            return [(MEMBERSHIPS_LOST if measurement.lost else REBALANCES, 1, ())]
        case TakeOverDone(_, _, _, fence, barrier, restore, warm):
            return [
                (TAKEOVERS, 1, ("true" if warm else "false",)),
                (TAKEOVER_SECONDS, fence + barrier + restore, ()),
                (RESTORE_SECONDS, restore, ()),
            ]
        case PartitionMoved(_, direction, _, seconds):
            return [(MOVES, 1, (direction,)), (MOVE_SECONDS, seconds, (direction,))]
        case OffsetMismatch():
            return [(OFFSETS_MISMATCHED, 1, ())]
        case CallAbandoned():
            return [(CALLS_ABANDONED, 1, ())]
        case CallbackFailed(callback):
            return [(CALLBACKS_FAILED, 1, (callback,))]
        case PartitionsAdded(_, known, partitions):
            return [(PARTITIONS_UNREAD, partitions - known, ())]


def figures(statistics: SourceStatistics) -> Iterator[Sample]:
    """Yield the values of the statistics of one moment."""
    for state in SourceState:
        yield STATE, state is statistics.state, (state.value,)
    yield GENERATION, statistics.generation, ()
    yield UNSETTLED, statistics.unsettled_transactions, ()
    yield REGISTRY_WAITING, len(statistics.registry_waiting), ()
    yield HUNG_CALLS, statistics.hung_calls, ()
    for name in _PARTITION_STATES:
        yield PARTITIONS, sum(each.state == name for each in statistics.partitions), (name,)
    for name in _COPY_STATES:
        yield COPIES, sum(copy.state == name for copy in statistics.copies), (name,)
    for (direction,) in _DIRECTIONS:
        moves = sum(move.direction == direction for move in statistics.moves)
        yield MOVES_UNDER_WAY, moves, (direction,)
    for each in statistics.partitions:
        label = (str(each.partition),)
        yield NEXT_OFFSET, each.next_offset, label
        yield QUEUED_RECORDS, each.queued_records, label
        yield QUEUED_BYTES, each.queued_bytes, label
        yield PAUSED, each.paused, label
        yield EVENTS_AHEAD, each.events_ahead, label
        yield TIMERS, each.timers, label
        yield PARKED_KEYS, each.parked_keys, label
        yield PARKED_EVENTS, each.parked_events, label
        yield PARKED_BYTES, each.parked_bytes, label
        yield PARKED_FULL, bool(each.parking_full), label
        if each.parked_since_ms is not None:
            yield PARKED_SINCE, each.parked_since_ms / 1000, label
        yield ONCE_IDS, each.once_ids, label
        yield JOBS_PENDING, each.jobs, label
        yield JOBS_RUNNING, each.jobs_running, label
        yield JOBS_PARKED, each.jobs_parked, label
        yield JOBS_FULL, bool(each.jobs_full), label
        if each.jobs_since_ms is not None:
            yield JOBS_SINCE, each.jobs_since_ms / 1000, label
        if each.lag is not None:
            yield LAG, each.lag, label
        for one in each.inputs:
            labels = (str(each.partition), one.topic)
            yield INPUT_OFFSET, one.next_offset, labels
            yield INPUT_AWAITED, one.awaited, labels
            if one.lag is not None:
                yield INPUT_LAG, one.lag, labels
        for topic, seconds in each.lag_seconds.items():
            yield LAG_SECONDS, seconds, (str(each.partition), topic)
        for topic, seconds in each.event_age_seconds.items():
            yield EVENT_AGE, seconds, (str(each.partition), topic)
        for visit in each.visits:
            yield VISIT_RUNNING, bool(visit.run), (str(each.partition), visit.visit)
            yield VISIT_KEYS, visit.keys, (str(each.partition), visit.visit)
        if each.next_timer_ms is not None:
            yield NEXT_TIMER, each.next_timer_ms / 1000, label
    for copy in statistics.copies:
        yield COPY_LEFT, copy.records_left, (str(copy.partition),)
        yield COPY_LAG, copy.lag_seconds, (str(copy.partition),)
    for lookup in statistics.lookups:
        label = (lookup.topic,)
        yield LOOKUP_RECORDS, lookup.records, label
        yield LOOKUP_LEFT, lookup.records_left, label
        yield LOOKUP_BYTES, lookup.size_bytes, label
        yield LOOKUP_AWAITED, lookup.is_awaited, label
        yield LOOKUP_CUT_OFF, lookup.is_cut_off, label
    for kind, events in statistics.handled_events.items():
        yield HANDLED_EVENTS, events, (kind, "completed")
    for kind, failed in statistics.failed_events.items():
        for response, events in failed.items():
            yield HANDLED_EVENTS, events, (kind, response)
    for topic, size in statistics.input_bytes.items():
        yield INPUT_BYTES, size, (topic,)
    yield FOLDERS_SET_ASIDE, statistics.folders_set_aside, ()
    for name in _FOLDER_STATES:
        yield FOLDERS, sum(folder.state == name for folder in statistics.folders), (name,)
    for folder in statistics.folders:
        label = (str(folder.partition),)
        yield FOLDER_BYTES, folder.size_bytes, label
        yield FOLDER_GATHERED, folder.gathered_changes, label
        yield FOLDER_UNWRITTEN, folder.unwritten_bytes, label
        yield FOLDER_MARK_AGE, folder.mark_age_seconds, label
        yield FOLDER_CHECKPOINT, folder.checkpoint_seconds, label
        yield FOLDER_RECOVER, folder.recover_seconds, label
        if folder.snapshot_age_seconds is not None:
            yield FOLDER_SNAPSHOT_AGE, folder.snapshot_age_seconds, label
    for stage in statistics.stages:
        yield STAGE_RUNNING, stage.running, (stage.name,)
        yield STAGE_WAITING, stage.waiting, (stage.name,)
        yield STAGE_KEYS, stage.keys, (stage.name,)
        yield STAGE_BATCHES, stage.batches, (stage.name,)
