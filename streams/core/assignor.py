"""The leader's decision: from what the members report to what each of them shall work on.

Rules, in the order in which they decide:

1. A partition has the owner that reports it. When two report it, the one that was in the newer generation keeps it; the
   other one missed a rebalance. A partition number outside of the topic is nobody's.
2. Members that leave, and members whose instance name an older member holds already, get nothing.
3. The others share the partitions so that no two counts differ by more than one. Who owns most now has the larger
   share.
4. An owner keeps what it owns, up to its share. What is above it is taken away: it is in nobody's ``own`` this round,
   its owner gives it up by a barrier and joins again, and the follow-up round finds it without an owner (KIP-429).
5. A partition without an owner goes at once to a member with room, first to one that has it ready.

So no partition ever has two owners, a join or a leave settles in two rounds at most, and nothing moves that need not.
Ties are broken by instance name, so every leader decides the same.

``quit`` is set for everybody when all members are leaving, and for a member that has to go because of its name: it
hears ``quit`` without having asked to leave.
"""

from __future__ import annotations

from collections.abc import Mapping

from streams.group import Assignment, MemberReport


def sticky_plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
    """Assignments by member id, for a topic of ``partitions`` partitions. Pure: any thread, any number of times."""
    order = sorted(reports, key=lambda member: (reports[member].instance, member))
    rivals = _rivals(order, reports)
    active = [member for member in order if member not in rivals and not reports[member].leaving]
    owned = _owned(partitions, order, reports)
    share = _shares(partitions, active, owned)
    own = {member: set(sorted(owned[member])[: share.get(member, 0)]) for member in order}
    taken = set().union(*owned.values())
    for partition in range(partitions):
        if partition not in taken and active:
            own[_with_room(partition, active, own, share, reports)].add(partition)
    nobody_left = all(reports[member].leaving for member in order)
    names = tuple(reports[member].instance for member in order)
    return {
        member: Assignment(
            own=frozenset(own[member]),
            members=names,
            sequence=reports[member].sequence,
            quit=nobody_left or member in rivals,
        )
        for member in order
    }


def _rivals(order: list[str], reports: Mapping[str, MemberReport]) -> set[str]:
    """Members whose instance name belongs to another one: to the one that was in the newest generation."""
    holder: dict[str, str] = {}
    for member in order:
        name = reports[member].instance
        if name not in holder or reports[member].generation > reports[holder[name]].generation:
            holder[name] = member
    return set(order) - set(holder.values())


def _owned(partitions: int, order: list[str], reports: Mapping[str, MemberReport]) -> dict[str, set[int]]:
    """What each member owns once double claims are decided. Later wins below, so the newest generation comes last."""
    owner: dict[int, str] = {}
    for member in sorted(order, key=lambda member: reports[member].generation):
        owner.update((partition, member) for partition in reports[member].owned if 0 <= partition < partitions)
    owned: dict[str, set[int]] = {member: set() for member in order}
    for partition, member in owner.items():
        owned[member].add(partition)
    return owned


def _shares(partitions: int, active: list[str], owned: dict[str, set[int]]) -> dict[str, int]:
    """How many partitions each active member may have. The sort is stable: equals stay in order of their names."""
    if not active:
        return {}
    least, larger = divmod(partitions, len(active))
    ranked = sorted(active, key=lambda member: -len(owned[member]))
    return {member: least + (rank < larger) for rank, member in enumerate(ranked)}


def _with_room(
    partition: int,
    active: list[str],
    own: dict[str, set[int]],
    share: dict[str, int],
    reports: Mapping[str, MemberReport],
) -> str:
    """Who takes a partition without an owner. There is always room: the shares add up to the number of partitions."""
    roomy = (member for member in active if len(own[member]) < share[member])
    return min(roomy, key=lambda member: (partition not in reports[member].ready, len(own[member])))
