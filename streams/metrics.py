"""Measurements: one small object per transaction, take-over or rebalance, given to one handler.

A handler is called on the event loop's thread, after the fact: it must not block. What it raises is logged and
ignored, so that measuring never fails a commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

_log = logging.getLogger("streams.metrics")


class TransactionSettled(msgspec.Struct, frozen=True):
    """One transaction came to its end. ``attempts`` counts how often it was sent; more than 1 means that it was sent
    again. It was filled for ``open_seconds``; ``commit_seconds`` after that it was at its end, and ``flush_seconds``
    after that the broker had all of its records (of the last attempt; 0.0 if it never came so far). ``output_bytes``:
    of its records by topic, before compression; ``changelog_bytes``: of those in the changelog."""

    committed: bool
    attempts: int
    events: int
    outputs: int
    changes: int
    partitions: int
    open_seconds: float
    commit_seconds: float
    flush_seconds: float = 0.0
    output_bytes: Mapping[str, int] = {}
    changelog_bytes: int = 0


class TakeOverDone(msgspec.Struct, frozen=True):
    """One partition was taken over. ``records`` of the changelog are in its state; what was missing was read in
    ``restore_seconds``. ``warm``: a copy was there before."""

    partition: int
    offset: int
    records: int
    fence_seconds: float
    barrier_seconds: float
    restore_seconds: float
    warm: bool = False


class OffsetMismatch(msgspec.Struct, frozen=True):
    """A committed offset of the group that is missing (-1) or behind the changelog's. The changelog's was taken."""

    partition: int
    group_offset: int
    changelog_offset: int


class PartitionMoved(msgspec.Struct, frozen=True):
    """A partition was handed over by a marker: ``out`` to the member ``peer``, ``in`` from another one. ``seconds``:
    ``out`` from the end of intake to the commit of the marker, ``in`` from the plan to the start here."""

    partition: int
    direction: str
    peer: str
    seconds: float


class MembershipChanged(msgspec.Struct, frozen=True):
    """A rebalance reached this member (``lost``: it lost everything). ``cause``: its reason, as far as the member
    knows."""

    generation: int
    owned: int
    added: int
    lost: bool
    cause: str = ""


class EventFailed(msgspec.Struct, frozen=True):
    """An event failed for good; ``response`` is what was done about it (a name of ``ErrorResponse``).

    ``unread``: why its record is no event, empty if it is one: ``null`` (it has no value), ``untyped``,
    ``unknown_type``, ``refused`` (by the rule of ``topic``), ``value`` (it cannot be decoded). ``is_state_unread``: a
    value of the state could not be read.
    """

    partition: int
    offset: int
    error: str
    response: str
    topic: str = ""
    unread: str = ""
    is_state_unread: bool = False


class OwnMeasured(msgspec.Struct, frozen=True):
    """A value of a metric of the source's own (``source.metric``), of an event that is committed: to be added to a
    counter, or observed. ``labels`` are values, in the order of the metric's names."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class HandlerTimed(msgspec.Struct, frozen=True):
    """The handler of a ``type`` took so long for one event of a sample: of a plain handler decoding and admission
    included, of an async one its waits."""

    type: str
    seconds: float


class HeadTried(msgspec.Struct, frozen=True):
    """The first event of a parked key was tried again. ``outcome``: ``completed``, or what was done about its failure
    (a name of ``ErrorResponse``; ``park``: it stays)."""

    partition: int
    outcome: str


class CommandHandled(msgspec.Struct, frozen=True):
    """A command had its turn, and its reply is noted: ``done``, ``rejected`` or ``conflict``. It may be undone, and
    handled again. ``seconds``: since it was sent, by the clocks of both."""

    partition: int
    type: str
    outcome: str
    seconds: float


class EventDuplicate(msgspec.Struct, frozen=True):
    """Events of a ``type`` with ``once=`` were passed: others with their ids were handled before. ``offset`` is the
    last one's, ``events`` how many they are."""

    partition: int
    offset: int
    type: str
    events: int = 1


class IdMissing(msgspec.Struct, frozen=True):
    """Events of a ``type`` with ``once=`` had no id (it was ``None``), and were handled all the same."""

    partition: int
    type: str
    events: int = 1


class IdsForgotten(msgspec.Struct, frozen=True):
    """Ids went before their time: the partition has as many as ``Once.max_ids`` allows (``when_full="forget"``)."""

    partition: int
    ids: int


class BatchFailed(msgspec.Struct, frozen=True):
    """A batch of events failed as a whole (its handler, or a record that the broker refused), and is undone. ``offset``
    is its last event's. Its events are handled one by one."""

    partition: int
    offset: int
    error: str


class OutOfTime(msgspec.Struct, frozen=True):
    """So many items of a structure (``part``) of a ``Stores`` class (``store``) did not fit the partition's time.

    ``kind``: ``late`` (items for windows that are closed, whatever ``late=`` says), ``expired_early`` (entries that
    expired before their time by the member's clock: an event came from the future), ``time_jump`` (events that would
    have moved the time too far; no part). Reported between two events; further attempts at an event do not count again.
    """

    partition: int
    kind: str
    store: str
    part: str
    items: int


class JobEnded(msgspec.Struct, frozen=True):
    """A job of the scheduler ``name`` ended, after so many attempts and seconds (its waiting for a slot not counted).
    ``outcome``: ``done``, ``failed`` or ``cancelled``."""

    name: str
    partition: int
    seconds: float
    attempts: int
    outcome: str


class DurableJobEnded(msgspec.Struct, frozen=True):
    """A durable job of the scheduler ``name`` is over, or waits for more than an attempt. ``outcome``: ``done``,
    ``failed`` (for good), ``cancelled``, ``queued`` (its end waits behind a parked key), ``parked`` (for an
    operator)."""

    name: str
    partition: int
    outcome: str


class CallAbandoned(msgspec.Struct, frozen=True):
    """A blocking call to the broker was given up before it came back. Until it does, it keeps its thread and
    its connections; ``hung``: how many do so now, this one included."""

    call: str
    hung: int


class CallbackFailed(msgspec.Struct, frozen=True):
    """A function about a partition (``callback``: ``on_assigned``, ``on_activated``, ``on_will_revoke`` or
    ``on_revoked``) raised an error, or took too long and was cancelled."""

    callback: str
    partition: int
    error: str


class PartitionsAdded(msgspec.Struct, frozen=True):
    """The source topic has more ``partitions`` than the ``known`` ones of the settings; no member reads the others.
    Reported by each member at each look at the topic, every ten seconds."""

    topic: str
    known: int
    partitions: int


Measurement = (
    TransactionSettled
    | TakeOverDone
    | PartitionMoved
    | OffsetMismatch
    | DurableJobEnded
    | MembershipChanged
    | EventFailed
    | OwnMeasured
    | HandlerTimed
    | BatchFailed
    | CommandHandled
    | EventDuplicate
    | HeadTried
    | IdMissing
    | IdsForgotten
    | OutOfTime
    | JobEnded
    | CallAbandoned
    | PartitionsAdded
    | CallbackFailed
)
MetricsHandler = Callable[[Measurement], None]


def logging_handler(measurement: Measurement) -> None:
    """A ready handler: writes each measurement to the logger ``streams.metrics`` at level INFO."""
    _log.info("%r", measurement)
