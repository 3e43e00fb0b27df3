"""A member of a consumer group by librdkafka: ``model.group.Membership`` without code of ours among the members.

Either by the classic protocol (librdkafka's own assignors decide), or by the broker's (KIP-848: the broker decides).
A thread drives a Consumer that is subscribed, and takes nothing of what it is assigned: no partition is ever fetched.
The rules are those of ``membership.py``; this is how they hold here:

* **Incarnation first.** ``on_lost`` replaces the metadata before anything else. It does not always come, so the group
  metadata are looked at after every poll and callback, and while one is blocked.
* **A loss in the middle of a rebalance ends the Consumer.** What librdkafka believes to hold is not to be trusted
  then; another Consumer joins in its place.
* **Revoke is a barrier**: ``on_revoke`` does not return before all was released. Heartbeats go on meanwhile.
  The barrier has the rebalance timeout; afterwards the group goes on without us, and the membership is void.

Facts about librdkafka and brokers that this rests on are pinned by ``tests/broker/test_librdkafka_membership.py``.

Threads: the Consumer and all state belong to the membership's own thread, except ``group_metadata`` (replaced by one
assignment, read anywhere) and what is guarded by ``_changed``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from streams.core.group_member import GroupMember
from streams.errors import BrokerUnavailable, MembershipFatal, StreamsError
from streams.kafka.connection import ConnectionLog
from streams.kafka.group.librdkafka_group import GroupLog, Roster, RosterTakeOver, Term, explained, name_of
from streams.kafka.group.refusals import name_taken
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.model.group import Assigned, Assignment, Copies, Fatal, GroupEvent, GroupMetadata, Lost, Order

log = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 0.02  # seconds between checks of the group metadata; a command waits for as long at most
_ASK_SECONDS: Final = 1.5  # seconds for one question to the coordinator
_PAUSE: Final = 0.2  # seconds between two tries of such a question
_RIVAL_SECONDS: Final = 1.0  # seconds from an assignment to a check for another member of our name, and between them
_LEAVE_PATIENCE: Final = 3.0  # seconds for a LeaveGroup at the end


class LibrdkafkaMembership:
    """One member of ``group_id`` that shares the partitions of ``topic`` with the others. ``model.group.Membership``
    documents the methods; ``start`` is for once, ``close`` ends the shared client too, and may be repeated.

    ``consumer``: builds the Consumer. ``eager``: its assignors take everything at each rebalance. ``broker_side``:
    KIP-848. ``static``: ``instance`` is its group instance id; ``close`` leaves only after ``leave``. ``alive`` is
    called every half second: when it returns ``False`` for the rebalance timeout, the member gives up. ``check`` is
    called with the members before it joins; it raises what speaks against joining, and returns the session timeout in
    seconds. ``client`` is the one of ``take_over``; it is started and closed with the membership.
    """

    def __init__(
        self,
        take_over: RosterTakeOver,
        consumer: Callable[[ConnectionLog], Consumer],
        group_id: str,
        topic: str,
        instance: str,
        *,
        eager: bool,
        broker_side: bool,
        static: bool,
        rebalance_seconds: float,
        client: WireClient,
        alive: Callable[[], bool],
        check: Callable[[Roster], float],
    ) -> None:
        self._take_over, self._make_consumer = take_over, consumer
        self._group_id, self._topic, self._instance = group_id, topic, instance
        self._eager, self._broker_side, self._static = eager, broker_side, static
        self._rebalance_seconds = rebalance_seconds
        self._patience = rebalance_seconds  # for a predecessor to expire; with the session, once that is known
        self._client = client
        self._alive, self._check = alive, check
        take_over.member_id = lambda: self.group_metadata.member_id
        # The session timeout is known later; no report and no assignment of ours travels, so its graces are not used.
        self._state = GroupMember(instance, session_seconds=0.0, rebalance_seconds=rebalance_seconds)
        self._deliver: Callable[[GroupEvent], None] | None = None
        self._thread = threading.Thread(target=self._run, name="kes-group", daemon=True)
        self._changed = threading.Condition()
        self._leave_asked = self._closing = False  # guarded by _changed
        self._voided_generation = -1  # the last one of the incarnation before
        self._left = self._stopped = False
        self._alive_at = self._asked_at = 0.0
        self._rivals_at = float("inf")
        self._rival_since = -1.0  # since when another member has our name; -1: none has
        self._logged: set[int] = set()  # passing errors, each logged once
        self._others: frozenset[str] = frozenset()  # the members at the last look, for the log

    # ------------------------------------------------------------------ any thread

    @property
    def group_metadata(self) -> GroupMetadata:
        return self._state.group_metadata

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        if self._deliver is not None:
            raise RuntimeError("a membership is started once")
        self._deliver = deliver
        self._client.start()
        self._thread.start()

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        with self._changed:
            self._state.released(partitions, incarnation, generation)
            self._changed.notify_all()

    def handed_over(self, partition: int, order: Order) -> None:
        """Do nothing: librdkafka's members order no moves."""

    def took(self, partition: int, incarnation: int) -> None:
        """Do nothing: librdkafka's members order no moves."""

    def report(self, copies: Copies, *, announce: bool) -> None:
        """Do nothing: no leader would read it."""

    def leave(self) -> None:
        with self._changed:
            self._leave_asked = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._deliver is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                log.warning("group %s: leaving took too long; the session has to expire", self._group_id)
        self._void_quietly()
        self._client.close(max(0.5, deadline - time.monotonic()))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if self._admitted():
                while not self._ended:
                    self._serve()
        except StreamsError as error:
            self._end(error)
        except Exception as error:
            log.exception("group %s: the thread of the membership failed", self._group_id)
            self._end(MembershipFatal(f"group {self._group_id}: the thread of the membership failed: {error!r}"))

    @property
    def _ended(self) -> bool:
        return self._closing or self._stopped or self._left

    def _admitted(self) -> bool:
        """Wait until no member of the group has our name (a killed predecessor expires), and nothing else speaks
        against joining. ``False``: it was closed meanwhile."""
        logged, until = False, None
        while not self._ended:
            try:
                roster = self._take_over.roster(time.monotonic() + _ASK_SECONDS)
                self._patience = self._check(roster) + self._rebalance_seconds
            except BrokerUnavailable as error:
                if not logged:
                    log.warning("group %s: %s; trying on", self._group_id, error)
                logged, until = True, None
                self._pause(_PAUSE)
                continue
            if self._static or not roster.rivals(self._instance, ""):
                return True  # of a static name the broker itself allows one member only
            until = until or time.monotonic() + self._patience
            if time.monotonic() > until:
                raise self._taken()
            if not logged:
                log.warning("%s; waiting for it to go, as a killed predecessor does with its session", self._taken())
            logged = True
            self._pause(_PAUSE)
        return False

    def _taken(self) -> MembershipFatal:
        return name_taken(self._group_id, self._instance)

    def _serve(self) -> None:
        """Serve one Consumer, from its subscription to its end."""
        group_log = GroupLog(self._client.addresses, f"group {self._group_id}")
        term = Term(self._make_consumer(group_log), group_log)
        term.consumer.subscribe(
            [self._topic],
            on_assign=partial(self._on_assign, term),
            on_revoke=partial(self._on_revoke, term),
            on_lost=partial(self._on_lost, term),
        )
        self._alive_at = time.monotonic()
        try:
            while not (term.over or self._ended):
                message = term.consumer.poll(_CHECK_SECONDS)
                if message is not None and message.error() is not None:
                    self._on_error(term, message.error())
                if group_log.fatal is not None:
                    self._on_fatal(term, group_log.fatal)
                self._compare(term)
                self._do(term)
        except StreamsError as error:
            self._void(str(error))
            raise
        finally:
            self._retire(term)
        while not self._alive() and not self._ended:
            self._pause(_PAUSE)

    def _retire(self, term: Term) -> None:
        """Void the metadata, then close the Consumer: by that a dynamic member leaves, a static one does not."""
        term.over = True
        self._void_quietly()

        def close() -> None:
            with contextlib.suppress(Exception):  # KafkaException; SystemError of a member that was removed
                term.consumer.close()

        if self._ended:
            close()
        else:  # it may take its time, and a successor need not wait for it
            threading.Thread(target=close, name="kes-group-close", daemon=True).start()

    def _do(self, term: Term) -> None:
        """Do what was requested, and what is due."""
        now = time.monotonic()
        if self._leave_asked and not term.unsubscribed:
            term.unsubscribed = True
            term.consumer.unsubscribe()
        if term.unsubscribed and not term.held:
            self._was_left()
            return
        if term.stale_since is not None and now - term.stale_since > self._rebalance_seconds:
            term.over = True
        if now - self._asked_at > 0.5:
            self._asked_at = now
            if self._alive():
                self._alive_at = now
            elif now - self._alive_at > self._rebalance_seconds:
                self._void("no progress for the rebalance timeout")
                term.over = True
        if now > self._rivals_at:
            self._find_rivals(now)

    def _was_left(self) -> None:
        generation, member_id = self.group_metadata.generation, self.group_metadata.member_id
        self._void_quietly()
        if self._static and member_id:
            try:
                self._take_over.remove_member(member_id, self._instance, time.monotonic() + _LEAVE_PATIENCE)
            except StreamsError as error:
                log.warning("group %s: leaving failed (%s); the session has to expire", self._group_id, error)
        self._left = True
        none, plan = frozenset[int](), Assignment(members=(self._instance,), quit=True)
        self._tell(Assigned(self.group_metadata.incarnation, generation, none, none, plan))

    def _find_rivals(self, now: float) -> None:
        """Two processes of one name that joined at the same moment did not see each other before."""
        self._rivals_at = now + _RIVAL_SECONDS
        try:
            roster = self._take_over.roster(now + _RIVAL_SECONDS)
        except StreamsError:
            return
        own = self.group_metadata.member_id
        self._others = roster.instances - {self._instance}
        rivals = [] if self._static or not own else roster.rivals(self._instance, own)
        if not rivals:
            self._rival_since, self._rivals_at = -1.0, float("inf")
        # The one with the least id stays: both would go, otherwise.
        elif self._rival_for(now) > self._patience and own > min(rival.member_id for rival in rivals):
            raise self._taken()

    def _rival_for(self, now: float) -> float:
        self._rival_since = now if self._rival_since < 0 else self._rival_since
        return now - self._rival_since

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    # ------------------------------------------------------------------ the thread: what librdkafka reports

    def _compare(self, term: Term) -> None:
        """Compare librdkafka's metadata with the metadata: publish what is newer, void what is no more."""
        if term.over or self._closing or (term.unsubscribed and not self._state.holdings.owned):
            return
        seen, known = term.metadata(), self.group_metadata
        if known.generation < 0:
            # Nothing is published after a loss before librdkafka reported our partitions. With the broker-side protocol
            # it reports nothing to a member that gets none.
            fresh = seen.is_member and seen.generation != self._voided_generation
            if self._broker_side and fresh and not term.held:
                self._publish(term, seen)
                self._tell_assigned(frozenset())
        # Evicted while a rebalance callback of it runs, a member joins again without ``on_lost``. By the classic
        # protocol it has another id then; with KIP-848 the id stays, and ``on_lost`` does come.
        elif not seen.is_member or seen.member_id != known.member_id or seen.generation < known.generation:
            self._void(term.reason)
            term.stale_since = time.monotonic() if term.held else None
        elif seen.generation != known.generation:
            self._publish(term, seen)

    def _publish(self, term: Term, seen: group_bytes.Metadata) -> None:
        term.log.on_answer()
        self._state.joined(seen.generation, seen.member_id, seen.data)

    def _on_assign(self, term: Term, consumer: Any, partitions: list[TopicPartition]) -> None:
        # Nothing is taken: librdkafka's idea of what the group gave us does not depend on it, and nothing is fetched.
        consumer.assign([]) if self._eager else consumer.incremental_assign([])
        if term.over or self._closing:
            return
        if term.stale_since is not None:
            term.over = True  # it joined again with partitions of a membership that was lost
            return
        before = term.held
        term.held = _numbers(partitions) | (frozenset() if self._eager else before)
        self._compare(term)
        if self.group_metadata.generation < 0:
            seen = term.metadata()
            if before or term.is_stale or not seen.is_member:
                term.over = True  # evicted while this was on its way
                return
            self._publish(term, seen)
        self._tell_assigned(term.held)

    def _tell_assigned(self, owned: frozenset[int]) -> None:
        generation = self.group_metadata.generation
        log.info("group %s: generation %d, partitions %s", self._group_id, generation, group_bytes.ranges(owned))
        # The others as of the last look: a take-over asks for them when it needs them (``RosterTakeOver``).
        assignment = Assignment(own=owned, members=(self._instance, *sorted(self._others)))
        self._rivals_at = time.monotonic() + _RIVAL_SECONDS
        self._tell(self._state.assign(generation, assignment))

    def _on_revoke(self, term: Term, consumer: Any, partitions: list[TopicPartition]) -> None:
        numbers = _numbers(partitions)
        self._compare(term)
        if not (term.over or self._closing) and numbers & self._state.holdings.owned:
            self._barrier(term, numbers & self._state.holdings.owned)
            self._compare(term)
        with self._changed:
            self._state.holdings.released(numbers)
        term.held -= numbers
        if term.stale_since is not None:
            term.stale_since, term.over = None, term.over or bool(term.held)
        consumer.unassign() if self._eager else consumer.incremental_unassign([])

    def _on_lost(self, term: Term, consumer: Any, partitions: list[TopicPartition]) -> None:
        if not term.over:
            self._void(term.reason)
            term.held -= _numbers(partitions)
            term.stale_since, term.over = None, bool(term.held)
        consumer.unassign() if self._eager else consumer.incremental_unassign([])

    def _barrier(self, term: Term, revoked: frozenset[int]) -> None:
        """Wait until all is released. Ends early when the membership is void, or by the rebalance timeout."""
        incarnation, deadline = self.group_metadata.incarnation, time.monotonic() + self._rebalance_seconds
        with self._changed:
            event = self._state.begin_barrier(revoked)
        self._tell(event)
        while True:
            with self._changed:
                done = self._changed.wait_for(lambda: self._closing or self._state.is_barrier_open, _CHECK_SECONDS)
                if done:
                    self._state.end_barrier()
                    return
            self._compare(term)
            if self.group_metadata.incarnation != incarnation:
                return
            if time.monotonic() > deadline:
                self._void("revoked partitions were not released within the rebalance timeout")
                term.over = True
                return

    def _on_error(self, term: Term, error: KafkaError) -> None:
        if error.code() == KafkaError._FATAL or error.fatal():
            self._on_fatal(term, error if term.log.fatal is None else term.log.fatal)
            return
        failure = explained(name_of(error), error.str(), self._group_id, self._instance, self._topic)
        if failure is not None:
            raise failure
        if error.code() not in self._logged:
            self._logged.add(error.code())
            log.warning("group %s: %s: %s", self._group_id, error.name(), error.str())

    def _on_fatal(self, term: Term, error: KafkaError) -> None:
        """librdkafka will not go on with this Consumer."""
        name = name_of(error)
        if name == "GROUP_ID_NOT_FOUND":  # the coordinator lost its memory: a loss like any other, to be joined anew
            self._void("the coordinator does not know the group any more")
        unreleased = name == "UNRELEASED_INSTANCE_ID" and self._rival_for(time.monotonic()) < self._patience
        if unreleased or name == "GROUP_ID_NOT_FOUND":  # a killed predecessor of our static name expires
            term.over = True
            self._pause(_PAUSE)
            return
        failure = explained(name, error.str(), self._group_id, self._instance, self._topic)
        raise failure or MembershipFatal(f"group {self._group_id}: {name}: {error.str()}")

    # ------------------------------------------------------------------ the thread: small parts

    def _void(self, reason: str) -> None:
        """Everything owned is void. Repeating is harmless."""
        lost = self._void_quietly(reason)
        if lost is not None:
            log.warning("group %s: membership lost: %s", self._group_id, reason)
            self._tell(lost)

    def _void_quietly(self, reason: str = "") -> Lost | None:
        with self._changed:
            generation, lost = self.group_metadata.generation, self._state.lost(reason)
            if lost is not None:
                self._voided_generation = generation
            self._changed.notify_all()
        return lost

    def _end(self, error: StreamsError) -> None:
        if self._stopped or self._closing:
            return
        self._void(str(error))
        self._stopped = True
        log.error("group %s: %s", self._group_id, error)
        assert self._deliver is not None
        self._deliver(Fatal(error))

    def _tell(self, event: GroupEvent) -> None:
        if not (self._stopped or self._closing) and self._deliver is not None:
            self._deliver(event)


def _numbers(partitions: list[TopicPartition]) -> frozenset[int]:
    return frozenset(partition.partition for partition in partitions)
