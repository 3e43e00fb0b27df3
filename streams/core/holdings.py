"""The claims of one member: the contents of the report in its next JoinGroup.

The group decides from claims, and claims travel slowly: between a JoinGroup and its plan a partition may be handed
over, be taken, or lose its owner. Two rules keep that harmless, whatever comes first:

* **A move under way stays under way.** The owner claims ``releasing`` from the moment it received the order until the
  marker is committed; the receiver claims ``incoming`` until it has taken the partition. Plans keep such a move as it
  is while both are members, so it does not matter whether the marker was committed before or after the claim was made.
* **What was withdrawn has no effect.** ``handed_over`` names its order; when the group has given the partition back
  meanwhile (the receiver is gone), it is owned, and the engine takes it over anew.

Pure: no clock, no threads. It belongs to the membership's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streams.group import THIS_GENERATION, Assignment, Copies, MemberReport, Order


class Holdings:
    """Claims of one member. ``generation`` is that of the last assignment that was applied, -1 before."""

    def __init__(self, instance: str, sequence: int = 0) -> None:
        self.owned: frozenset[int] = frozenset()
        self.generation = -1
        self.releasing: Mapping[int, Order] = {}
        self.incoming: Mapping[int, int] = {}
        self.copies = Copies()
        self.leaving = False
        self._reported = MemberReport(instance=instance, sequence=sequence)

    @property
    def reported(self) -> MemberReport:
        """The newest report."""
        return self._reported

    @property
    def here(self) -> frozenset[int]:
        """The partitions that this member works on, or may begin to work on at any moment."""
        return self.owned.union(self.incoming)  # likewise not "|"

    def report(self) -> MemberReport:
        """Make the report for the next JoinGroup. Its counter makes it differ from the one before."""
        self._reported = MemberReport(
            instance=self._reported.instance,
            owned=self.owned,
            generation=self.generation,
            releasing=dict(self.releasing),
            incoming=frozenset(self.incoming),
            copies=self.copies,
            leaving=self.leaving,
            sequence=self._reported.sequence + 1,
        )
        return self._reported

    def revoked_by(self, assignment: Assignment) -> frozenset[int]:
        """Return the partitions that have to be given up before this assignment can be applied.

        A partition that was claimed as incoming may have been taken since, and the plan repeats the claim. Any other
        incoming one is a new move to this member: a partition of it that is still in ``owned`` here is not ours. An
        incoming partition that the plan gives to another member is to be given up, too: its marker may arrive before
        the member knows the plan.
        """
        repeated = assignment.incoming.keys() & self._reported.incoming
        return self.here.difference(assignment.own, assignment.release, repeated)  # not "-": with keys that is a set

    def has_to_join_again(self, assignment: Assignment) -> bool:
        """Check whether the plan takes a claimed partition away. The plan counts on the next round to give it to
        another member, also if it is not here any more (handed over since the claim was made)."""
        return bool(self._reported.owned - assignment.own - assignment.release.keys())

    def apply(self, generation: int, assignment: Assignment) -> frozenset[int]:
        """Apply an assignment once everything that it revokes was released; returns the partitions that are new.

        An order to another receiver than the one that was claimed withdraws the order before it: the partition is ours,
        also if it was handed over to the former receiver meanwhile.
        """
        reported = self._reported.releasing
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
        known = self.releasing.get(partition)
        return known if known is not None and known.to == to else Order(to, generation)

    def released(self, partitions: Collection[int]) -> None:
        """Remove revoked partitions that were given up."""
        gone = frozenset(partitions)
        self.owned -= gone
        self.incoming = {number: since for number, since in self.incoming.items() if number not in gone}

    def handed_over(self, partition: int, order: Order) -> None:
        """Remove a partition: this order's marker is committed. Without effect if the order does not stand any more."""
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
