"""Read the state of every partition from the members' reports, for all strategies; and the draft of their plans.

Claims are made at different moments and may contradict each other. Each partition gets one state:

* **settled**: a member owns it, and it is not on its way. When two claim it, and one of them was ordered to hand it
  over to the other, it has done so; otherwise the newer generation is right, because the other member missed a
  rebalance.
* **moving**: its owner was ordered to hand it over, to a member that is there. Claims do not show whether the marker is
  committed by now. So every plan repeats the order, whatever else it wants.
* **promised**: only one member may have it, and that member's answer to this plan is not enough to let it go again.
  Either the member expects the partition and it has no owner any more (the member may start at any moment, by the
  marker); or the member's order points to a member that is gone, or that has had the partition and passed it on (the
  marker may be committed: then the member takes the partition over anew). It gets ``own``, even if it leaves, and no
  order before the next plan.
* **free**: without an owner; any member may have it.

Numbers outside of the topic have no owner. Ties are broken by instance name, then by member id: every leader reads the
same.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streams.model.group import THIS_GENERATION, Assignment, MemberReport


class Move(msgspec.Struct, frozen=True):
    """A partition on its way between two members (ids); ``since``: the generation in which it was ordered."""

    donor: str
    target: str
    since: int = THIS_GENERATION


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all partitions: each is in exactly one of ``settled``, ``promised`` (by member), ``moves`` and
    ``free``.

    ``order``: all members by instance and id. ``rivals``: those whose instance name belongs to another member.
    ``active``: those that may be given something, in order: neither leaving nor rivals. ``all_leave``: no member stays.
    """

    partitions: int
    reports: Mapping[str, MemberReport]
    order: list[str]
    rivals: frozenset[str]
    active: list[str]
    all_leave: bool
    settled: dict[str, set[int]]
    promised: dict[str, set[int]]
    moves: dict[int, Move]
    free: list[int]

    def counts(self) -> dict[str, int]:
        """Return the number of partitions that each member has, once all moves under way have arrived."""
        counts = {member: len(self.settled[member]) + len(self.promised[member]) for member in self.order}
        for move in self.moves.values():
            counts[move.target] += 1
        return counts


def read_claims(partitions: int, reports: Mapping[str, MemberReport]) -> Claims:
    """Read the state of ``partitions`` partitions from member id -> report. Pure: any thread, any number of times."""
    order = sorted(reports, key=lambda member: (reports[member].instance, member))
    rivals = _rivals(order, reports)
    claims = Claims(
        partitions=partitions,
        reports=reports,
        order=order,
        rivals=rivals,
        active=[member for member in order if member not in rivals and not reports[member].leaving],
        all_leave=all(reports[member].leaving for member in order),
        settled={member: set() for member in order},
        promised={member: set() for member in order},
        moves={},
        free=[],
    )
    owners = _owners(partitions, order, reports)
    expecting = _expecting(order, reports)
    for partition in range(partitions):
        _assign(claims, partition, owners.get(partition), expecting.get(partition))
    return claims


def _assign(claims: Claims, partition: int, owner: str | None, expecting: str | None) -> None:
    if owner is None:
        if expecting is None:
            claims.free.append(partition)
        else:  # it starts by the marker at any moment: with another owner the partition would have two
            claims.promised[expecting].add(partition)
        return
    ordered = claims.reports[owner].releasing.get(partition)
    if ordered is None:
        claims.settled[owner].add(partition)
        return
    target = claims.reports.get(ordered.to)
    # The marker may be committed: it is taken over anew then, and no order goes out before the next plan.
    if target is None or ordered.to == owner:
        claims.promised[owner].add(partition)
    elif target.generation < ordered.generation or partition in target.incoming:
        # Under way, or the target has missed the plan. Withdrawn, the order would leave the partition with a donor that
        # may have handed it over, beside a receiver that works on it.
        claims.moves[partition] = Move(owner, ordered.to, ordered.generation)
    else:
        # The target knows the order, and neither expects nor has the partition: it took it, and passed it on. The
        # next receiver claims it.
        passed_on = expecting is not None and claims.reports[expecting].generation > ordered.generation
        claims.promised[expecting if expecting is not None and passed_on else owner].add(partition)


def _rivals(order: list[str], reports: Mapping[str, MemberReport]) -> frozenset[str]:
    """Return the members whose instance name belongs to another one: to the one that was in the newest generation."""
    holder: dict[str, str] = {}
    for member in order:
        name = reports[member].instance
        # Two members of one name would use the same transactional ids, and fence each other.
        if name not in holder or reports[member].generation > reports[holder[name]].generation:
            holder[name] = member
    return frozenset(order) - frozenset(holder.values())


def _owners(partitions: int, order: list[str], reports: Mapping[str, MemberReport]) -> dict[int, str]:
    """Return the owner of each partition, once double claims are decided."""
    by_age = sorted(order, key=lambda member: reports[member].generation)
    owner: dict[int, str] = {}
    twice: set[int] = set()
    for member in by_age:  # the newest generation comes last, and stays
        for partition in reports[member].owned:
            if 0 <= partition < partitions:
                if partition in owner:
                    twice.add(partition)
                owner[partition] = member
    for partition in twice:
        claiming = [member for member in by_age if partition in reports[member].owned]
        # A member whose receiver claims the partition as its own has handed it over.
        gave = {member for member in claiming if _ordered_to(reports[member], partition) in claiming}
        left = [member for member in claiming if member not in gave or len(gave) == len(claiming)]
        # Of one generation: the member without an order to hand it over. The other one did, and does not know it yet.
        left.sort(key=lambda member: (reports[member].generation, _ordered_to(reports[member], partition) is None))
        owner[partition] = left[-1]
    return owner


def _ordered_to(report: MemberReport, partition: int) -> str | None:
    ordered = report.releasing.get(partition)
    return None if ordered is None else ordered.to


def _expecting(order: list[str], reports: Mapping[str, MemberReport]) -> dict[int, str]:
    """Return the member that expects each partition: of several the one with the newest generation."""
    expecting: dict[int, str] = {}
    for member in sorted(order, key=lambda member: reports[member].generation):
        expecting.update((partition, member) for partition in reports[member].incoming)
    return expecting


class Draft:
    """A plan in the making, by member id, with the parts that every plan has: moves under way, names, counters.

    It starts with the moves under way and the promised partitions; a strategy adds to ``own``, ``standby`` and
    ``preparing``, and orders moves. When all members leave, every partition is taken away from its owner.
    """

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.own = {member: set(claims.promised[member]) for member in claims.order}
        self.standby: dict[str, set[int]] = {member: set() for member in claims.order}
        self.preparing: dict[str, set[int]] = {member: set() for member in claims.order}
        self._release: dict[str, dict[int, str]] = {member: {} for member in claims.order}
        self._incoming: dict[str, dict[int, int]] = {member: {} for member in claims.order}
        for partition, move in claims.moves.items():
            self.order(partition, move)

    def order(self, partition: int, move: Move) -> None:
        """Put a move into the assignments of its donor and its target."""
        self.own[move.donor].discard(partition)
        self._release[move.donor][partition] = move.target
        self._incoming[move.target][partition] = move.since

    def expects(self, member: str, partition: int) -> bool:
        """Check whether a move to this member is ordered, also of a partition that is prepared elsewhere meanwhile."""
        return partition in self._incoming[member]

    def assignments(self) -> dict[str, Assignment]:
        claims = self._claims
        names = tuple(claims.reports[member].instance for member in claims.order)
        if claims.all_leave:  # nothing is handed over: no member is left to go on
            return {
                member: Assignment(members=names, sequence=claims.reports[member].sequence, quit=True)
                for member in claims.order
            }
        return {
            member: Assignment(
                own=frozenset(self.own[member]),
                standby=frozenset(self.standby[member]),
                preparing=frozenset(self.preparing[member]),
                release=self._release[member],
                incoming=self._incoming[member],
                members=names,
                sequence=claims.reports[member].sequence,
                quit=member in claims.rivals,
            )
            for member in claims.order
        }
