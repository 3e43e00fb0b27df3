"""Tenures: a Kafka group says which process should write to a partition, and shares the partitions among them.

A group only says who *should*. A member that is frozen or cut off may believe in its tenure for longer, so who does
write is decided by a claim (``runtime.claim``).
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Final, Protocol

from streams.core.assignor import sticky_plan
from streams.errors import BrokerUnavailable
from streams.kafka.group.connect import connect_group
from streams.kafka.questions import takeover
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.security import Security
from streams.model.group import Assigned, Fatal, GroupEvent, Lost, Membership, Revoked, TakeOver
from streams.settings.config import host_name

SESSION_SECONDS: Final = 6.0
"""The group gives the partitions of a process to others after so many seconds without a heartbeat."""
REBALANCE_SECONDS: Final = 30.0
"""A process has so many seconds to finish its work on partitions that another one gets."""
HEARTBEAT_SECONDS: Final = 0.3
"""A heartbeat is sent every so many seconds. By its answer a process learns of a rebalance."""
_QUESTION_SECONDS: Final = 3.0
"""The answer to ``Tenure.is_confirmed`` takes so many seconds, at most."""


class Tenure:
    """One partition that the group has given to this process. Any thread.

    It is over when the group takes the partition away, or does not know this process any more; ``reason`` says why.
    ``done`` must follow, once nothing will be written: until then no other member, and no later tenure of this
    process, gets the partition, if the group is still there.
    """

    def __init__(self, partition: int, incarnation: int, group: GroupTenures) -> None:
        self.partition, self.incarnation = partition, incarnation
        self.reason = ""
        self._group = group
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Check whether this process should write no longer."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, at most so long; returns whether it is."""
        return self._over.wait(seconds)

    def is_confirmed(self, seconds: float = _QUESTION_SECONDS) -> bool:
        """Ask the group whether the partition is still this process's. Blocks. ``False`` also without an answer in
        time; a ``True`` is never about a moment before the call. Raises ``ConfigError`` (no right)."""
        return self._group.is_confirmed(self, seconds)

    def done(self) -> None:
        """Report that nothing will be written any more. Repeating is harmless."""
        self._group.done(self)

    def finish(self, reason: str) -> None:
        """Mark it as over; for the group."""
        self.reason = self.reason or reason
        self._over.set()


class TenureOwner(Protocol):
    """The part that works on partitions. It is called on the group's thread, or on that of ``done``, and must not
    block."""

    def begin(self, tenure: Tenure) -> None:
        """Begin to work. The tenure may be over already."""
        ...

    def end(self, tenure: Tenure) -> None:
        """Note that a tenure is over; ``tenure.done`` is to follow."""
        ...

    def failed(self, error: Exception) -> None:
        """Note that the group refuses this process for good."""
        ...


class GroupTenures:
    """The tenures of one process: a member of ``group_id`` that shares the partitions of a topic with the others.

    ``stop`` ends them all, ``close`` leaves the group: then others get the partitions at once. Any thread.
    """

    def __init__(self, membership: Membership, questions: TakeOver, owner: TenureOwner) -> None:
        self._membership, self._questions, self._owner = membership, questions, owner
        self._lock = threading.Lock()
        self._given: dict[int, int] = {}  # partitions that are ours: in which incarnation
        self._tenures: dict[int, Tenure] = {}  # until ``done``, also when they are over
        self._barrier: tuple[int, int] | None = None
        self._stopping = False

    @classmethod
    def connect(
        cls,
        settings: ClientSettings,
        group_id: str,
        topic: str,
        partitions: int,
        owner: TenureOwner,
        *,
        session_seconds: float = SESSION_SECONDS,
        rebalance_seconds: float = REBALANCE_SECONDS,
    ) -> GroupTenures:
        """Make one over a real group, without any I/O. ``rebalance_seconds``: within it a tenure that is over has to be
        done, or the group goes on without this process. Raises ``ConfigError``."""
        membership, questions = connect_group(
            settings.bootstrap_servers,
            group_id,
            topic,
            partitions,
            f"{host_name()}-{uuid.uuid4().hex[:12]}",
            {"cooperative-sticky": sticky_plan},
            security=Security.of(settings.overrides),
            session_timeout_ms=int(session_seconds * 1000),
            heartbeat_interval_ms=int(HEARTBEAT_SECONDS * 1000),
            rebalance_timeout_ms=int(rebalance_seconds * 1000),
        )
        return cls(membership, questions, owner)

    @property
    def member_id(self) -> str:
        """The group's name for this process; empty before it has one."""
        return self._membership.group_metadata.member_id or getattr(self._membership, "joining_as", "")

    @property
    def is_member(self) -> bool:
        """Check whether it has joined."""
        return self._membership.group_metadata.generation >= 0

    def start(self) -> None:
        """Join the group."""
        self._membership.start(self._hear)

    def remove_member(self, member_id: str, seconds: float) -> bool:
        """Take another process out of the group that is known to be dead. Raises ``BrokerUnavailable``."""
        return self._questions.remove_member(member_id, None, time.monotonic() + seconds)

    def stop(self) -> None:
        """End all tenures, and begin none any more. Returns at once."""
        with self._lock:
            # The flag comes first: a tenure that began behind ``_end_all`` would never end.
            self._stopping = True
        self._end_all("stopped")

    def close(self, seconds: float) -> None:
        """Leave the group. Blocks, at most so long. Repeating is harmless."""
        self.stop()
        self._membership.close(seconds)

    def is_confirmed(self, tenure: Tenure, seconds: float) -> bool:
        """See ``Tenure.is_confirmed``."""
        now = self._membership.group_metadata
        # In another incarnation another process may have had the partition in between.
        if tenure.is_over or now.generation < 0 or now.incarnation != tenure.incarnation:
            return False
        with contextlib.suppress(BrokerUnavailable):
            if self._questions.is_member(now.member_id, now.generation, time.monotonic() + seconds):
                # The tenure may have ended while the answer was on its way.
                return not tenure.is_over
        return False

    def done(self, tenure: Tenure) -> None:
        """See ``Tenure.done``."""
        number = tenure.partition
        with self._lock:
            if self._tenures.get(number) is not tenure:
                return
            del self._tenures[number]
            # The group may have given it back while the old work was ending: its next tenure begins only now.
            new = self._new(number)
            barrier = self._barrier
        # The lock is free here, since it is not re-entrant: the owner may call ``done`` from ``begin``.
        if new is not None:
            self._owner.begin(new)
        elif barrier is not None:  # a partition that was not revoked is ignored there
            self._membership.released([number], *barrier)

    # -- on the group's thread -----------------------------------------------------------------------------------------

    def _hear(self, event: GroupEvent) -> None:
        match event:
            case Assigned():
                self._assigned(event)
            case Revoked():
                self._revoked(event)
            case Lost():
                with self._lock:
                    self._given.clear()
                    # The group does not know this process any more, so it waits for no answer of it.
                    self._barrier = None
                self._end_all(f"the group lost this process: {event.reason}")
            case Fatal():
                with self._lock:
                    self._given.clear()
                self._end_all(str(event.error))
                self._owner.failed(event.error)

    def _assigned(self, event: Assigned) -> None:
        with self._lock:
            added = sorted(event.owned - self._given.keys())
            self._given.update(dict.fromkeys(added, event.incarnation))
            new = [tenure for number in added if (tenure := self._new(number)) is not None]
        for tenure in new:
            self._owner.begin(tenure)

    def _revoked(self, event: Revoked) -> None:
        with self._lock:
            for number in event.partitions:
                self._given.pop(number, None)
            # The barrier is set with the lock, before any end: a ``done`` that comes now must find what it answers.
            self._barrier = event.incarnation, event.generation
            ending = [self._tenures[number] for number in event.partitions if number in self._tenures]
        # Nothing works on these. The group need not wait for the ones that are ending.
        free = event.partitions - {tenure.partition for tenure in ending}
        if free:
            self._membership.released(free, event.incarnation, event.generation)
        self._end(ending, "another process gets the partition")

    def _new(self, number: int) -> Tenure | None:
        """Make the tenure of a partition that is ours, unless an earlier one is not done; with the lock."""
        if self._stopping or number not in self._given or number in self._tenures:
            return None
        tenure = self._tenures[number] = Tenure(number, self._given[number], self)
        return tenure

    def _end_all(self, reason: str) -> None:
        with self._lock:
            ending = list(self._tenures.values())
        self._end(ending, reason)

    def _end(self, tenures: list[Tenure], reason: str) -> None:
        for tenure in tenures:
            if not tenure.is_over:
                tenure.finish(reason)
                self._owner.end(tenure)


def remove_dead_member(settings: ClientSettings, group_id: str, topic: str, member_id: str, seconds: float) -> bool:
    """Take a process that is known to be dead out of a group, without being in it. Blocks. ``False``: it was not there.
    Raises ``BrokerUnavailable``, ``ConfigError``."""
    security = Security.of(settings.overrides)
    return takeover.remove_dead_member(settings.bootstrap_servers, security, group_id, topic, member_id, seconds)
