"""One member of a consumer group, as a pure machine: its metadata, its claims, the barrier, and when it has to join.

Every membership drives this machine.
Three rules of the exactly-once protocol are kept here:

* **Incarnation first.** A loss replaces the group metadata before all else. A transaction that began under an
  older incarnation finds another one right before it sends offsets, and is dropped.
* **Revoke is a barrier.** An assignment is applied when all partitions that it revokes were released. An answer to an
  earlier barrier, or of an earlier incarnation, releases nothing.
* **A claim is reported before it counts.** What the engine did since the last report is news for the group: the member
  joins again, once, to report it.

No clock (times are arguments, in seconds), no threads: the machine belongs to the thread of its membership. Only
``group_metadata`` may be read by any thread, because it is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streams.model.group import (
    THIS_GENERATION,
    Assigned,
    Assignment,
    Copies,
    GroupMetadata,
    Lost,
    MemberReport,
    Order,
    Revoked,
)


class Holdings:
    """The claims of one member: the contents of the report in its next JoinGroup. ``generation`` is that of the last
    assignment that was applied, -1 before.

    The group decides from claims, and claims travel slowly: between a JoinGroup and its plan a partition may be handed
    over, be taken, or lose its owner. Two rules keep that harmless, in any order of events:

    * **A move under way stays under way.** The owner claims ``releasing`` from the moment it received the order until
      the marker is committed; the receiver claims ``incoming`` until it has taken the partition. Plans keep such a move
      as it is while both are members, so a marker may be committed before or after the claim was made.
    * **What was withdrawn has no effect.** ``handed_over`` names its order; when the group has given the partition back
      meanwhile (the receiver is gone), it is owned, and the engine takes it over anew.
    """

    def __init__(self, instance: str, sequence: int = 0) -> None:
        self.owned: frozenset[int] = frozenset()
        self.generation = -1
        self.releasing: Mapping[int, Order] = {}
        self.incoming: Mapping[int, int] = {}
        self.copies = Copies()
        self.leaving = False
        self.reported = MemberReport(instance=instance, sequence=sequence)
        """The newest report."""

    @property
    def here(self) -> frozenset[int]:
        """Return the partitions that this member works on, or may begin to work on at any moment."""
        return self.owned.union(self.incoming)  # a frozenset: ``|`` with the keys of a mapping makes a plain set

    def report(self) -> MemberReport:
        """Make the report for the next JoinGroup."""
        self.reported = MemberReport(
            instance=self.reported.instance,
            owned=self.owned,
            generation=self.generation,
            releasing=dict(self.releasing),
            incoming=frozenset(self.incoming),
            copies=self.copies,
            leaving=self.leaving,
            sequence=self.reported.sequence + 1,  # a follower's JoinGroup with the same bytes begins no rebalance
        )
        return self.reported

    def revoked_by(self, assignment: Assignment) -> frozenset[int]:
        """Return the partitions that have to be given up before this assignment can be applied.

        An incoming partition that the plan gives to another member is to be given up, too: its marker may arrive before
        the member knows the plan.
        """
        # What was claimed as incoming may have been taken since: given up, its marker would start it a second time,
        # and records would count twice. Any other incoming one is a new move: in ``owned`` it is not ours any more.
        repeated = assignment.incoming.keys() & self.reported.incoming
        return self.here.difference(assignment.own, assignment.release, repeated)  # a frozenset: see above

    def has_to_join_again(self, assignment: Assignment) -> bool:
        """Check whether the plan takes a claimed partition away. The plan counts on the next round to give it to
        another member, also if it is not here any more (handed over since the claim was made)."""
        return bool(self.reported.owned - assignment.own - assignment.release.keys())

    def apply(self, generation: int, assignment: Assignment) -> frozenset[int]:
        """Apply an assignment once everything that it revokes was released; returns the partitions that are new.

        An order to another receiver than the one that was claimed withdraws the order before it.
        """
        # A new order for what was handed over since the claim: owned again, it is taken over and handed over once more.
        # Otherwise the new receiver would wait for a marker that no member writes.
        reported = self.reported.releasing
        anew = {
            number for number, to in assignment.release.items() if number not in reported or reported[number].to != to
        }
        added = (assignment.own | anew) - self.owned
        self.owned |= added
        self.releasing = {
            partition: self._order(partition, to, generation)
            for partition, to in assignment.release.items()
            if partition in self.owned
        }
        self.incoming = {
            partition: generation if since == THIS_GENERATION else since
            for partition, since in assignment.incoming.items()
            if partition not in self.owned
        }
        self.generation = generation
        return added

    def _order(self, partition: int, to: str, generation: int) -> Order:
        # With the generation of the first order: by a newer one the receiver would wait for a marker that never comes.
        known = self.releasing.get(partition)
        return known if known is not None and known.to == to else Order(to, generation)

    def released(self, partitions: Collection[int]) -> None:
        """Remove revoked partitions that were given up."""
        gone = frozenset(partitions)
        self.owned -= gone
        self.incoming = {number: since for number, since in self.incoming.items() if number not in gone}

    def handed_over(self, partition: int, order: Order) -> None:
        """Remove a partition: this order's marker is committed. Without effect if the order does not stand any more."""
        # Under another order, or none, the partition was given back meanwhile: this member works on it.
        if self.releasing.get(partition) == order:
            self.owned -= {partition}
            self.releasing = {number: other for number, other in self.releasing.items() if number != partition}

    def took(self, partition: int) -> None:
        """Add an incoming partition to the owned ones: this member works on it now."""
        if partition in self.incoming:
            self.owned |= {partition}
            self.incoming = {number: since for number, since in self.incoming.items() if number != partition}

    def void(self) -> None:
        """Drop all claims after a loss of the membership: nothing is owned, and no move is under way. Copies hold
        committed records only: they stay."""
        self.owned, self.generation = frozenset(), -1
        self.releasing, self.incoming = {}, {}


class GracePeriod:
    """The time for which a member tolerates trouble that may pass by itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def begins(self, now: float) -> bool:
        """Note the trouble; return whether it is new."""
        if self._until is not None:
            return False
        self._until = now + self._seconds
        return True

    def is_over(self, now: float) -> bool:
        """Check that the trouble lasts too long."""
        return self._until is not None and now > self._until

    def passed(self) -> None:
        """Note that the trouble is over."""
        self._until = None


class GroupMember:
    """The state of one member. ``sequence`` begins the counter of its reports."""

    def __init__(self, instance: str, *, session_seconds: float, rebalance_seconds: float, sequence: int = 0) -> None:
        self.group_metadata = GroupMetadata(incarnation=0, generation=-1, member_id="")
        self.holdings = Holdings(instance, sequence)
        self.has_news = False
        """Whether the last report lacks a step or a request of the engine."""
        self._barrier: tuple[int, int] | None = None  # incarnation and generation that it began under
        self._unreleased: frozenset[int] = frozenset()
        # A killed predecessor is in the way until its session has expired, and may hold up a rebalance.
        self.rival = GracePeriod(session_seconds + rebalance_seconds)
        """For an older member that has our instance name."""
        self.undecodable = GracePeriod(session_seconds + rebalance_seconds)
        """For assignments of the leader that cannot be decoded."""
        self.no_common_strategy = GracePeriod(session_seconds + 1.0)
        """For a group without a strategy of ours: its only member may be the session of a killed predecessor."""

    # -- calls of the engine -------------------------------------------------------------------------------------------

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        """Note that the last transaction on these revoked partitions is settled. Others than the revoked ones are
        ignored."""
        # A late answer to an earlier barrier is about partitions that may be ours again.
        if self._is_answer(incarnation, generation):
            given_up = self._unreleased & frozenset(partitions)
            self.holdings.released(given_up)
            self._unreleased -= given_up

    def handed_over(self, partition: int, order: Order) -> bool:
        """Note that the release marker of this order is committed. Returns whether the order still stands; if it does
        not, the call has no effect."""
        stands = self.holdings.releasing.get(partition) == order
        self.holdings.handed_over(partition, order)
        return stands

    def took(self, partition: int, incarnation: int) -> bool:
        """Note that the engine has taken over an incoming partition. Returns whether the incarnation is the present
        one; if not, the call has no effect."""
        # It was taken under a membership that is lost since: the present one does not own it.
        if incarnation != self.group_metadata.incarnation:
            return False
        self.holdings.took(partition)
        if self.holdings.leaving:  # another member has to have it
            self.has_news = True
        return True

    def copies_changed(self, copies: Copies, *, announce: bool) -> None:
        """Keep what the next report contains about copies. ``announce``: that is news, unless the last report contained
        it and all other present claims."""
        self.holdings.copies = copies
        if announce and not self._is_reported():
            self.has_news = True

    def leave(self) -> None:
        """Give everything to other members. Repeating it is harmless."""
        self.holdings.leaving = True
        if not self.holdings.reported.leaving:
            self.has_news = True

    # -- events of the group -------------------------------------------------------------------------------------------

    def report(self) -> MemberReport:
        """Make the report for a JoinGroup."""
        self.has_news = False
        return self.holdings.report()

    def joined(self, generation: int, member_id: str, instance_id: str | None = None) -> None:
        """Publish a new generation: from now on the broker refuses the one before."""
        self.group_metadata = GroupMetadata(self.group_metadata.incarnation, generation, member_id, instance_id)

    def is_answer_to_report(self, assignment: Assignment) -> bool:
        """Check that the assignment was made from the last report. Another one was made for a predecessor of our
        name."""
        return assignment.sequence == self.holdings.reported.sequence

    def is_refused_for_rival(self, assignment: Assignment) -> bool:
        """Check whether the group gives this member nothing because an older one has its name. With partitions in hand
        it has to give them up first."""
        rival = assignment.quit and not assignment.own and not self.holdings.leaving
        if not rival:
            self.rival.passed()
        return rival and not self.holdings.owned

    def has_to_join_again(self, assignment: Assignment) -> bool:
        """Check whether the group counts on another round after this assignment, for partitions that it takes away.
        Call it before the barrier."""
        return bool(self.holdings.revoked_by(assignment)) or self.holdings.has_to_join_again(assignment)

    def is_dismissed(self, assignment: Assignment) -> bool:
        """Check that the group has let this member go, so that no other round has to follow."""
        return assignment.quit and self.holdings.leaving

    def begin_barrier(self, revoked: frozenset[int]) -> Revoked:
        """Wait for the release of these partitions from now on; returns the event for the engine."""
        self._unreleased = revoked
        self._barrier = incarnation, generation = self.group_metadata.incarnation, self.group_metadata.generation
        return Revoked(incarnation, generation, revoked)

    @property
    def is_barrier_open(self) -> bool:
        """Check that all partitions of the barrier were released, or handed over meanwhile."""
        return not self._unreleased & self.holdings.here

    def end_barrier(self) -> None:
        """End the barrier: a late answer is no answer to another one."""
        self._barrier, self._unreleased = None, frozenset()

    def assign(self, generation: int, assignment: Assignment) -> Assigned:
        """Apply an assignment after its barrier; returns the event for the engine."""
        holdings = self.holdings
        added = holdings.apply(generation, assignment)
        under_way = holdings.releasing, holdings.incoming, holdings.reported.copies
        return Assigned(self.group_metadata.incarnation, generation, holdings.owned, added, assignment, *under_way)

    def void(self) -> bool:
        """Lose the membership: everything owned is void. Returns whether there was one."""
        # The metadata comes first. The engine reads it on another thread, right before it sends offsets, and the broker
        # takes new metadata also for partitions that were lost.
        was_member = self.group_metadata.generation >= 0
        if was_member:
            self.group_metadata = GroupMetadata(self.group_metadata.incarnation + 1, generation=-1, member_id="")
        self.holdings.void()
        self._barrier, self._unreleased = None, frozenset()
        return was_member

    def lost(self, reason: str) -> Lost | None:
        """Make everything void; return the event for the engine, ``None`` if there was no membership."""
        return Lost(self.group_metadata.incarnation, reason) if self.void() else None

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _is_answer(self, incarnation: int, generation: int) -> bool:
        return (incarnation, generation) == self._barrier

    def _is_reported(self) -> bool:
        now, reported = self.holdings, self.holdings.reported
        claims = (now.copies, now.owned, dict(now.releasing), frozenset(now.incoming))
        return claims == (reported.copies, reported.owned, reported.releasing, reported.incoming)
