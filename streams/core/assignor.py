"""The strategy without preparation: sticky, cooperative (KIP-429). Shares and room serve the other strategies, too.

Rules, in the order in which they decide (``claims`` reads the owners and the moves under way):

1. Members that leave, and members whose instance name an older member holds already, get nothing new.
2. The others share the partitions so that no two counts differ by more than one. The members that own most now have the
   larger shares.
3. An owner keeps what it owns, up to its share. A partition above it is taken away: it is in no member's ``own`` this
   round, its owner gives it up by a barrier and joins again, and the follow-up round finds it without an owner.
4. A partition without an owner goes at once to a member with room, first to one that has it ready, then to one that
   has it on disk.

So no partition ever has two owners, a join or a leave settles in two rounds at most, and nothing moves that need not.
Ties are broken by instance name, so every leader decides the same.

``quit`` is set for all members when all are leaving, and for a member that has to go because of its name: it receives
``quit`` without a request to leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from streams.core.claims import Claims, Draft, read_claims
from streams.model.group import Assignment, MemberReport

NEAR: Final = 100_000
"""Records in which copies of a partition may differ and still be as good as each other: into memory they are restored
in 0.1 s, into SQLite in 0.8 s (docs/internals/performance.md)."""


def sticky_plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
    """Plan the assignments by member id, for a topic of ``partitions`` partitions. Pure: any thread, any number of
    times."""
    claims = read_claims(partitions, reports)
    counts = claims.counts()
    room = Room(claims.active, counts, shares(partitions, claims.active, counts))
    draft = Draft(claims)
    for member in claims.active:
        # Promised partitions and moves under way are decided already: they only take up room.
        fixed = counts[member] - len(claims.settled[member])
        keep = max(0, room.share[member] - fixed)
        draft.own[member].update(sorted(claims.settled[member])[:keep])
        room.set(member, fixed + min(keep, len(claims.settled[member])))
    ready, kept = ready_at(claims), kept_at(claims)
    # Those on a disk first, while the members that have them still have room.
    for partition in sorted(claims.free, key=lambda number: number not in kept) if claims.active else ():
        roomy = [member for member in ready.get(partition, ()) if room.left(member) > 0]
        folders = [folder for folder in kept.get(partition, ()) if room.left(folder[1]) > 0]
        member = room.least(roomy or [member for _, member in nearest(folders)])
        draft.own[member].add(partition)
        room.set(member, room.count[member] + 1)
    return draft.assignments()


def shares(
    partitions: int, active: list[str], counts: Mapping[str, int], after: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the number of partitions that each active member may have. Members above the smaller share get the larger
    one; of several the one with the smallest number in ``after``; then the first by name."""
    if not active:
        return {}
    after = after or {}
    least, larger = divmod(partitions, len(active))
    # Counts above the larger share rank alike: all of these members have to give some away.
    ranked = sorted(active, key=lambda member: (-min(counts[member], least + 1), after.get(member, 0)))
    return {member: least + (rank < larger) for rank, member in enumerate(ranked)}


def ready_at(claims: Claims) -> dict[int, list[str]]:
    """Return the active members that have a partition ready, by partition, in order."""
    ready: dict[int, list[str]] = {}
    for member in claims.active:
        for partition in claims.reports[member].copies.ready:
            ready.setdefault(partition, []).append(member)
    return ready


def kept_at(claims: Claims) -> dict[int, list[tuple[int, str]]]:
    """Return (records that it lacks, member) of the active members that have a partition on disk, by partition, in
    order. The folder that is farthest counts as lacking none: no report says where the log ends."""
    farthest: dict[int, int] = {}
    for report in claims.reports.values():
        for partition, offset in _folders(report).items():
            farthest[partition] = max(offset, farthest.get(partition, 0))
    kept: dict[int, list[tuple[int, str]]] = {}
    for member in claims.active:
        for partition, offset in _folders(claims.reports[member]).items():
            kept.setdefault(partition, []).append((farthest[partition] - offset, member))
    return kept


def _folders(report: MemberReport) -> Mapping[int, int]:
    return report.copies.shelf.offsets if report.copies.shelf else {}


def nearest(copies: Collection[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return those of these (records that it lacks, member) that lack hardly more than the best of them."""
    least = min((lack for lack, _ in copies), default=0)
    return [copy for copy in copies if copy[0] - least <= NEAR]


class Room:
    """Counts and shares of the active members, with quick look-ups of the member with least or most room."""

    def __init__(self, active: Iterable[str], count: Mapping[str, int], share: Mapping[str, int]) -> None:
        self._rank = {member: rank for rank, member in enumerate(active)}
        self.share = dict(share)
        self.count = {member: count[member] for member in self._rank}
        self._by_room = [(count[member] - share[member], rank, member) for member, rank in self._rank.items()]
        self._by_count = [self._entry(member) for member in self._rank]
        heapify(self._by_room)
        heapify(self._by_count)

    def _entry(self, member: str) -> tuple[bool, int, int, str]:
        """Return a sort key: members with room first, then by count."""
        return self.left(member) <= 0, self.count[member], self._rank[member], member

    def left(self, member: str) -> int:
        """Return how many more partitions the member may have; below zero when it has too many."""
        return self.share[member] - self.count[member]

    def set(self, member: str, count: int) -> None:
        self.count[member] = count
        # The entry before this stays in its heap. It is recognised as outdated when it comes to the top.
        heappush(self._by_room, (-self.left(member), self._rank[member], member))
        heappush(self._by_count, self._entry(member))

    def least(self, among: Collection[str] = ()) -> str:
        """Return the member with the fewest partitions ``among`` these. Without these: among all members, one with room
        if there is any."""
        if among:
            return min(among, key=lambda member: (self.count[member], self._rank[member]))
        while self._by_count[0] != self._entry(self._by_count[0][-1]):
            heappop(self._by_count)  # outdated
        return self._by_count[0][-1]

    def roomiest(self, without: Collection[str] = ()) -> str | None:
        """Return the member with the most room that is not in ``without``. ``None``: none of them has room."""
        put_back: list[tuple[int, int, str]] = []
        found = None
        while self._by_room and found is None:
            entry = self._by_room[0]
            member = entry[-1]
            if entry[0] != -self.left(member):
                heappop(self._by_room)
            elif entry[0] >= 0:
                break
            elif member in without:
                put_back.append(heappop(self._by_room))
            else:
                found = member
        for entry in put_back:
            heappush(self._by_room, entry)
        return found
