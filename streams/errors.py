"""The errors of the toolkit. The class names the side that has to act; the message names the place and the way out.

``StreamsError``
    ├── ``ConfigError``              the caller: a setting is wrong (named in the message)
    ├── ``RegistrationError``        the caller: event types and handlers do not fit together
    ├── ``TopicError``               the operator: a topic is missing, or differs from what the settings say
    │     └── ``LogDamaged``         bytes of a log are not what was written
    ├── ``OffsetError``              the operator: log and state do not fit together any more; never reset silently
    │     └── ``TopicReplaced``      a topic was deleted and created again under the same name
    ├── ``EventFailure``             the caller: a handler failed, or a record cannot be read, and the policy is to stop
    ├── ``HandlerBlocked``           the caller: a handler stopped the event loop of one member after another
    ├── ``BrokerUnavailable``        the operator: nothing answers at the address; the engine keeps trying
    ├── ``RegistryUnavailable``      the operator: no schema registry answers; the engine keeps trying
    ├── ``EmbeddedBrokerError``      the operator: the embedded Kafka cannot be fetched or started
    ├── ``RecordError``              the error policy: one record cannot be handled
    │     ├── ``DecodeError``        its bytes, its type header or its version
    │     │     └── ``StateUnreadable``  the operator: a value of the state; `kes state repair` mends it
    │     ├── ``EncodeError``        an output or a change cannot be turned into bytes
    │     ├── ``PlanError``          a planner's answer is not what a job or a batch takes
    │     ├── ``TimeJump``           its time is too far in the future to move that of its partition
    │     └── ``RecordRefused``      the broker will not take an output or a change of its event
    │           └── ``LoopTooLong``  the loop's events have led to one another too often
    ├── ``StoreError``               the caller: a store was used in a way that cannot be kept exactly-once
    │     └── ``DiskDamaged``        the engine: a disk does not hold what was written to it; its partition is restored
    ├── ``OutboxError``              the caller: a record cannot be stashed so; or a relay does not fit its database
    ├── ``StagingError``             the operator: the staged rows of a Spark write cannot be kept or read
    ├── ``MembershipLost``           the engine: what the member owned is void, it joins again
    ├── ``MembershipFatal``          the operator: the group will not have this member at all
    ├── ``TransactionFailed``        the engine first, then the operator: a transactional call failed (`call` names it)
    │     └── ``RecordsRefused``     for its records, or for what they need
    ├── ``ProcessJobError``          the caller: a job cannot go to another process, or nothing came back from there
    ├── ``BatchError``               the caller: the call of a batcher did not answer with one result per item
    ├── ``NotCaughtUp``              the caller: a global change log has not received everything in time
    ├── ``NotDelivered``             the caller: records that an ``EventProducer`` sent are refused, or in doubt
    ├── ``NotLeading``               the caller: the term of this process is over, another one may lead
    ├── ``AppendConflict``           the caller: a journal has entries that an append did not expect
    ├── ``AppendUnsettled``          the caller: no broker has answered until a process gave up its append to a journal
    ├── ``JournalError``             the operator: a journal's topic holds something else, or a snapshot does not fit it
    ├── ``ReplicaFailed``            the caller: the state machine of a journal raised
    ├── ``NotOwned``                 the caller: the partition is not active on this member
    ├── ``WouldDeadlock``            the caller: a handler was about to wait for its own partition's next turn
    └── ``Stopped``                  the caller: the event source is not running (any more)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streams.records import Delivery, RefusedRecord


class StreamsError(Exception):
    """Base class of all errors of this package. Never raised itself."""


class ConfigError(StreamsError, ValueError):
    """A setting is missing, out of range or contradicts another one. The message names the setting."""


class RegistrationError(StreamsError):
    """An event type or handler was registered twice, too late, or not at all."""


class TopicError(StreamsError):
    """A topic is missing or differs from the settings (partitions, compaction, replication). Nothing was changed."""


class LogDamaged(TopicError):
    """A log does not give back what was written to it: a checksum is wrong, or bytes that are no records. The message
    names topic, partition and offset. Nothing is skipped."""


class OffsetError(StreamsError):
    """Offsets of state and log do not fit together (truncated, re-created, restored topic).

    Raised instead of a silent reset. The message names topic, partition, both offsets and the ways out.
    """


class TopicReplaced(OffsetError):
    """The source or the changelog was deleted and created again: state and offsets belong to the deleted topic."""


class EventFailure(StreamsError):
    """An event failed for good, and its error policy stops the event source. The message names topic, partition, offset
    and attempts; ``__cause__`` is the exception of the handler (or the decoder)."""


class PolicyFailed(StreamsError):
    """The function that is an event's error policy raised, or returned no answer. The source stops; ``__cause__`` is
    the failure that it was called with."""


class HandlerBlocked(StreamsError):
    """A handler has stopped the event loop for longer than ``rebalance_timeout_seconds`` on several owners of its
    partition, one after the other. The event is not tried again; its error policy decides."""


class BrokerUnavailable(StreamsError):
    """No broker answered in time. The message names the addresses (never credentials)."""


class RegistryUnavailable(StreamsError):
    """No schema registry answered in time. The message names its address (never credentials)."""


class EmbeddedBrokerError(StreamsError):
    """The embedded Kafka cannot be fetched, formatted or started. The message names the way out."""


class RecordError(StreamsError):
    """A record (input, output or change) cannot be handled; the event's error policy decides."""


class DecodeError(RecordError):
    """The bytes of a record do not fit its type header, or the type is unknown."""


class StateUnreadable(DecodeError):
    """A value of the state cannot be read: its class has changed, or an earlier release wrote it. That is no fault of
    the event that met it, so `kes skip` does not help. ``key``: as `kes state get` and `kes state repair` take it."""

    partition: int = -1
    key: str = ""


class EncodeError(RecordError):
    """A value cannot be turned into bytes by its codec, or would not come back; the message names the field."""


class PlanError(RecordError):
    """A planner returned something that is no plan of a job or a batch. The message names event and record."""


class TimeJump(RecordError):
    """An event would move its partition's time too far into the future (``max_time_jump_seconds``)."""


class RecordRefused(RecordError):
    """The client or the broker refuses an output or a change (too large, an invalid topic name). ``key``: of a record
    that was refused when it was sent."""

    key: bytes | None = None


class JobFailed(StreamsError):
    """A durable job has failed for good, in another process: its error is known by its text only."""


class JobCancelled(JobFailed):
    """An operator has cancelled a durable job."""


class JobsFull(StreamsError):
    """A partition has as many durable jobs as ``SchedulerConfig.max_jobs`` allows, and ``when_full`` is ``"fail"``."""


class Rejected(StreamsError):
    """A command is turned down by its ``decide``, which raises this: an answer, and no failure. ``data``: for the
    caller, anything that is JSON."""

    def __init__(self, message: str = "", data: object = None) -> None:
        super().__init__(message)
        self.data = data


class VersionConflict(StreamsError):
    """A command has another ``expected_version`` than the state of its key, which has ``version``. No effect."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


class IdReused(StreamsError):
    """The id of a command was used for another one before (other type, key, content or expected version). No effect of
    this one; that of the other one stands."""


class CommandFailed(StreamsError):
    """A command has failed for good, and its error policy let it go (SKIP, DEAD_LETTER), or an operator did. No effect;
    the same id may be used again."""


class Parked(StreamsError):
    """A command waits in the queue of its key (PARK). It takes effect when the key goes on, if it can; asking again
    later, under the same id, gives the answer."""


class NotKnown(StreamsError, TimeoutError):
    """No answer to a command came in time: it may have taken effect, or may still. Asking again under the same id finds
    out, and does nothing twice."""


class LoopTooLong(RecordRefused):
    """An event was to be sent to the loop as one of too many that led to one another (``max_loop_hops``)."""


class StoreError(StreamsError):
    """A store was used outside of an event, with a null key, with a reserved key, or after it was revoked."""


class DiskDamaged(StoreError):
    """The disk does not hold what was written to it, or cannot be read: never a wrong value instead. The partition's
    folder is set aside, and its state comes from the changelog again. Raised by ``DiskDatabase``."""


class OutboxError(StreamsError):
    """A record was stashed outside of a transaction, or is one that Kafka refuses; or the tables of an outbox are
    missing, or of another version. The message names the way out."""


class StagingError(StreamsError):
    """Staged rows of a write on Spark cannot be written, kept or read. The message names the path."""


class MembershipLost(StreamsError):
    """This member is not in the group any more; everything that it owned is void."""


class MembershipFatal(StreamsError):
    """The group refuses this member for good (fenced instance id, not authorised, other protocol)."""


class NotLeading(StreamsError):
    """The term of this process is over: another one may lead. The message says why."""


class AppendConflict(StreamsError):
    """Entries were appended to a journal behind the position that an append expected. Nothing of it is appended."""


class AppendUnsettled(StreamsError):
    """An append to a journal was under way when its process gave up, and no broker has said what became of it; or the
    log has lost entries, and does not say it (``__cause__`` is the ``OffsetError``). The message names the term and
    the numbers of its entries, by which they are found in the log, if they are there."""


class JournalError(StreamsError):
    """The topic of a journal holds records that are none of its entries, or entries are missing or out of order; or a
    snapshot is damaged, or of another journal. The message names the offsets. Nothing is skipped."""


class ReplicaFailed(StreamsError):
    """A state machine raised where it applied an entry, saved or loaded its state. A replica stops there, since it must
    not go on differing; the message names entry and machine, and ``__cause__`` is what it raised."""


class NotOwned(StreamsError):
    """The partition is not active on this member (any more); the request was not carried out here."""


class ProcessJobError(StreamsError):
    """A job of the kind ``process`` cannot be sent to a process, or its outcome cannot be sent back, or its process
    died. The message names the function."""


class BatchError(StreamsError):
    """The function of a batcher did not return one result per item. The message names the batcher."""


class WouldDeadlock(StreamsError, RuntimeError):
    """A handler was about to wait for an interjection of its own partition: neither would ever end."""


class NotCaughtUp(StreamsError, TimeoutError):
    """A global change log has not received everything in time. The message names partitions and positions."""


class Stopped(StreamsError):
    """The event source is stopped or stopping; the request was not carried out."""


class TransactionFailed(StreamsError):
    """A transactional call failed.

    ``call`` is the name of the call, ``code`` the broker's or the client's error name, ``reason`` the same in words.
    ``kind`` is the known state of the transaction, by which alone the recovery decides:

    ``"abortable"``
        the transaction can be aborted, the producer can be used for that; nothing of it is visible.
    ``"blocked"``
        the same, because a topic or a right is missing, or a clock is wrong (the reason names it): the same records
        will be taken once that is repaired.
    ``"stale"``
        the same, because the group moved on to another generation: wait for the new group metadata, then send again.
    ``"lost"``
        the same, because the group does not know this member: nothing may be sent again.
    ``"fenced"``
        another process initialised the same transactional id: the producer is of no use any more.
    ``"unknown"``
        no clear answer: the transaction may be committed or not. The producer is of no use any more.
    """

    def __init__(self, call: str, code: str, kind: str, reason: str = "") -> None:
        super().__init__(f"{call}: {code}" + (f" ({reason})" if reason else ""))
        self.call = call
        self.code = code
        self.kind = kind
        self.reason = reason


class RecordsRefused(TransactionFailed):
    """Records of a transaction are refused, or what they need is missing (``refused``, one at least)."""

    def __init__(self, call: str, refused: Sequence[RefusedRecord], who: str = "") -> None:
        first = next((record for record in refused if record.is_own), refused[0])
        reason = f"{who}: {first.reason}" if who else first.reason
        super().__init__(call, first.code, "abortable" if first.is_own else "blocked", reason)
        self.refused = refused


class NotDelivered(StreamsError):
    """Records of ``EventProducer.send_soon`` failed. ``deliveries``: the first of them, each with its ``error``:
    ``BrokerUnavailable`` means in doubt (the record may be there), anything else refused (it is not). ``more``: the
    number of further ones."""

    def __init__(self, deliveries: Sequence[Delivery], more: int = 0) -> None:
        doubts = sum(isinstance(delivery.error, BrokerUnavailable) for delivery in deliveries)
        text = f"{len(deliveries) + more} records were not delivered"
        counts = f"{len(deliveries) - doubts} refused, {doubts} in doubt" + (f", {more} not looked at" if more else "")
        super().__init__(f"{text} ({counts}); the first: {deliveries[0].error}")
        self.deliveries = list(deliveries)
        self.more = more
