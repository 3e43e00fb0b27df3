"""What one member holds, as the group has to hear it: the claims that go into its next JoinGroup.

The group decides from claims, and claims travel slowly: between a JoinGroup and its plan a partition may be handed
over, taken, or nobody's any more. Two rules keep that harmless, whatever comes first:

* **A move under way stays under way.** The owner claims ``releasing`` from the moment it was told until the marker is
  committed; the receiver claims ``incoming`` until it has taken the partition. Plans keep such a move as it is while
  both are members, so it does not matter whether the marker was committed before or after the claim was made.
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
        self._told = MemberReport(instance=instance, sequence=sequence)

    @property
    def told(self) -> MemberReport:
        """The last report that was made."""
        return self._told

    @property
    def here(self) -> frozenset[int]:
        """What is worked on here, or may be at any moment."""
        return self.owned | self.incoming.keys()

    def report(self) -> MemberReport:
        """The report for the next JoinGroup. Its counter makes it differ from the one before."""
        self._told = MemberReport(
            instance=self._told.instance,
            owned=self.owned,
            generation=self.generation,
            releasing=dict(self.releasing),
            incoming=frozenset(self.incoming),
            copies=self.copies,
            leaving=self.leaving,
            sequence=self._told.sequence + 1,
        )
        return self._told

    def revoked_by(self, assignment: Assignment) -> frozenset[int]:
        """What has to be given up before this assignment can be applied.

        One that was claimed as incoming may have been taken since, and the plan repeats what was claimed. Any other
        incoming one is a new move hither: what we still think that we own of it is not ours. What we await and the plan
        gives to somebody else is to be given up, too: the marker may be there before we hear of it.
        """
        repeated = assignment.incoming.keys() & self._told.incoming
        return self.here - assignment.own - assignment.release.keys() - repeated

    def has_to_join_again(self, assignment: Assignment) -> bool:
        """Whether the plan takes something away that was claimed: it counts on the next round to give it to somebody,
        also if it is not here any more (handed over since the claim was made)."""
        return bool(self._told.owned - assignment.own - assignment.release.keys())

    def apply(self, generation: int, assignment: Assignment) -> frozenset[int]:
        """Apply an assignment once everything that it revokes was released; returns the partitions that are new.

        An order to another receiver than the one that was claimed withdraws the order before it: the partition is ours,
        also if it was handed over to the former receiver meanwhile.
        """
        told = self._told.releasing
        anew = {number for number, to in assignment.release.items() if number not in told or told[number].to != to}
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
        """Revoked ones were given up."""
        gone = frozenset(partitions)
        self.owned -= gone
        self.incoming = {number: since for number, since in self.incoming.items() if number not in gone}

    def handed_over(self, partition: int, order: Order) -> None:
        """The marker of this order is committed. Without effect if the order does not stand any more."""
        if self.releasing.get(partition) == order:
            self.owned -= {partition}
            self.releasing = {number: other for number, other in self.releasing.items() if number != partition}

    def took(self, partition: int) -> None:
        """An incoming partition is worked on now."""
        if partition in self.incoming:
            self.owned |= {partition}
            self.incoming = {number: since for number, since in self.incoming.items() if number != partition}

    def void(self) -> None:
        """The membership is lost: nothing is owned, and nothing is under way. Copies hold what is committed: they
        stay."""
        self.owned, self.generation = frozenset(), -1
        self.releasing, self.incoming = {}, {}
