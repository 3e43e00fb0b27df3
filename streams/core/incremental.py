"""The strategy of warm moves: a partition changes hands when its new owner has it ready, and not before.

In this order (``claims`` reads the owners first, and every plan repeats moves that are under way):

1. **Partitions without an owner** are assigned at once: to a member that has them ready, even above its share, because
   being worked on comes first; else to the one that has least left to restore, from a copy in preparation or from its
   folder on disk (of those that are near enough to each other: to one with room); else to the one with fewest.
2. **Shares**: no two counts differ by more than one, and the members that own most have the larger shares. A member
   that did not get copies ready in time has a share that is smaller by as many, for as long as they are late. The
   others share the rest.
3. **A member that has too many, or leaves, gives away** the partitions that a member with room has ready: ``release``
   and ``incoming``, now. Else a member with room has to prepare them: one that has begun already if there is any, then
   one that has them in a folder which is not the donor's own. At
   most ``max_moves`` partitions and ``max_move_bytes`` of changelog are prepared at a time. Copies that are late are
   outside of these bounds: their members go on restoring and prepare no others in their place.
4. **Standbys** are placed for the time after all of these moves, new ones where their folders are. A ready copy is
   given up only when its replacement is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from streams.core.assignor import Room, kept_at, nearest, ready_at, shares
from streams.core.claims import Claims, Draft, Move, read_claims
from streams.model.group import Assignment, Assignor, MemberReport

UNKNOWN: Final = 1 << 62
"""Records left to restore of a copy whose member did not report them: more than any other copy lacks."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a plan: spare copies of each partition; partitions, and changelog bytes, that are prepared at a time
    in the whole group. One partition is always allowed, whatever its size."""

    num_standbys: int = 0
    max_moves: int = 64
    max_move_bytes: int = 1 << 30


def incremental(settings: PlanSettings) -> Assignor:
    """Make the strategy of this module."""

    def plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
        claims = read_claims(partitions, reports)
        if claims.all_leave:
            return Draft(claims).assignments()
        return _Planner(claims, settings).made()

    return plan


class _WarmCopies:
    """Copies on active members of partitions that other members work on, and their folders."""

    def __init__(self, claims: Claims) -> None:
        self.ready = ready_at(claims)
        self.kept = kept_at(claims)
        shelves = {member: claims.reports[member].copies.shelf for member in claims.order}
        self._folder = {member: shelf.name for member, shelf in shelves.items() if shelf}
        self.restoring: dict[int, list[tuple[int, str]]] = {}
        self.late: dict[str, set[int]] = {}
        for member in claims.active:
            copies = claims.reports[member].copies
            left = {**dict.fromkeys(copies.late, UNKNOWN), **copies.preparing}
            for partition in left.keys() - copies.ready:
                self.restoring.setdefault(partition, []).append((left[partition], member))
            self.late[member] = {
                partition
                for partition in copies.late - copies.ready - claims.settled[member]
                if 0 <= partition < claims.partitions
            }

    def holders(self, partition: int) -> list[str]:
        """Return the members that have a copy, the ready ones first."""
        restoring = (member for _, member in self.restoring.get(partition, ()))
        return [*self.ready.get(partition, ()), *restoring]

    def begun(self, partition: int) -> list[tuple[int, str]]:
        """Return (records left, member) of what there is of a partition, if no member has it ready."""
        return self.restoring.get(partition, []) + self.kept.get(partition, [])

    def on_disk(self, partition: int, owner: str) -> list[str]:
        """Return the members that have a folder of a partition beside the one that its owner works with."""
        in_use = self._folder.get(owner, "")
        others = (copy for copy in self.kept.get(partition, ()) if self._folder[copy[1]] != in_use)
        return [member for _, member in nearest([copy for copy in others if copy[1] != owner])]


class _Budget:
    """The number and the bytes of partitions that may be prepared at a time."""

    def __init__(self, settings: PlanSettings, sizes: dict[int, int]) -> None:
        self._moves, self._bytes = settings.max_moves, settings.max_move_bytes
        self._sizes = sizes
        self._any = False

    def spend(self, partition: int) -> bool:
        """Take this partition from the budget, if it may be prepared, too; return whether it may."""
        size = self._sizes.get(partition, 0)
        # The first one in any case: a partition larger than the bound would never move.
        if self._any and (self._moves < 1 or self._bytes < size):
            return False
        self._any = True
        self._moves -= 1
        self._bytes -= size
        return True


class _Planner:
    """One plan in the making: the steps above in turn. ``future``: the owner of each partition after all
    moves."""

    def __init__(self, claims: Claims, settings: PlanSettings) -> None:
        self._claims, self._settings = claims, settings
        self._draft = Draft(claims)
        self._copies = _WarmCopies(claims)
        self._owner: dict[int, str] = {}
        for member in claims.order:
            if member not in claims.rivals:
                self._draft.own[member] |= claims.settled[member]
            self._owner.update(dict.fromkeys(claims.settled[member] | claims.promised[member], member))
        self._owner.update((partition, move.donor) for partition, move in claims.moves.items())
        self._future = {**self._owner, **{partition: move.target for partition, move in claims.moves.items()}}
        self._counts = claims.counts()

    def made(self) -> dict[str, Assignment]:
        if self._claims.active:
            self._assign_free()
            self._balance()
            self._keep_late()
            self._keep_standbys()
        return self._draft.assignments()

    # --------------------------------------------------------------------------------------------- free partitions

    def _assign_free(self) -> None:
        claims, ready, copies = self._claims, self._copies.ready, self._copies
        room = Room(claims.active, self._counts, self._shares())

        def choices(partition: int) -> tuple[int, int]:
            folders = nearest(copies.kept.get(partition, ()))
            return len(ready.get(partition, ())) or UNKNOWN, len(folders) or UNKNOWN

        # Those with the fewest places to go first, while there is room at these.
        for partition in sorted(claims.free, key=choices):
            begun = nearest(copies.begun(partition))
            if partition in ready:
                member = room.least(ready[partition])
            elif begun:
                member = min(begun, key=lambda copy: (room.left(copy[1]) <= 0, copy[0]))[1]
            else:
                member = room.least()
            room.set(member, room.count[member] + 1)
            self._draft.own[member].add(partition)
            self._owner[partition] = self._future[partition] = member
        self._counts.update(room.count)

    def _shares(self) -> dict[str, int]:
        """Return the shares of the active members; smaller ones for those that are late."""
        claims, counts, late = self._claims, self._counts, self._copies.late
        after = self._after(claims.partitions // len(claims.active))
        fair = shares(claims.partitions, claims.active, counts, after)
        capped = {
            member: max(counts[member], fair[member] - len(late[member]))
            for member in claims.active
            if late[member] and counts[member] < fair[member]
        }
        others = [member for member in claims.active if member not in capped]
        return {**capped, **shares(claims.partitions - sum(capped.values()), others, counts, after)}

    def _after(self, least: int) -> dict[str, int]:
        """Return the members' order for the larger shares, among members that have as many partitions. Members that can
        give at once, because members with too few have their partitions ready, come later."""
        claims, counts = self._claims, self._counts
        after = dict.fromkeys(claims.order, 0)
        for partition, members in self._copies.ready.items():
            owner = self._owner.get(partition)
            if owner is not None and counts[owner] > least:
                after[owner] += any(counts[member] < least for member in members)
        return after

    # ------------------------------------------------------------------------------------------------------ balance

    def _balance(self) -> None:
        claims = self._claims
        leaving = [member for member in claims.order if claims.reports[member].leaving and member not in claims.rivals]
        self._drain(leaving)  # before the shares: members that get these now may be the ones with larger shares
        room = Room(claims.active, self._counts, self._shares())
        give = {member: self._counts[member] for member in leaving}
        give.update((member, -room.left(member)) for member in claims.active if room.left(member) < 0)
        for donor in give:
            give[donor] = self._release(donor, give[donor], room)
        sizes = {
            partition: size
            for member in claims.order
            for partition, size in claims.reports[member].copies.sizes.items()
            if self._owner.get(partition) == member
        }
        budget = _Budget(self._settings, sizes)
        # Copies that have begun use up the bounds first: changed over to new ones, none would ever be ready.
        for donor in give:
            give[donor] = self._go_on_preparing(donor, give[donor], room, budget)
        # First for all donors where a folder is: it spares most of the restore, and room and bounds may be used up.
        for where in (self._copies.on_disk, None):
            for donor in give:
                give[donor] = self._prepare(donor, give[donor], room, budget, where)

    def _drain(self, leaving: list[str]) -> None:
        """Give away the partitions of leaving members that others have ready: that decides about the larger shares."""
        claims, ready, counts = self._claims, self._copies.ready, self._counts
        least, larger = divmod(claims.partitions, len(claims.active))
        larger -= sum(counts[member] > least for member in claims.active)
        going = [
            (partition, member) for member in leaving for partition in claims.settled[member] if partition in ready
        ]
        for partition, donor in sorted(going, key=lambda entry: (len(ready[entry[0]]), entry[0])):
            in_time = [member for member in ready[partition] if not self._copies.late[member]]
            member = min(in_time, key=lambda member: counts[member], default=donor)
            if member != donor and counts[member] < least + (larger > 0):
                larger -= counts[member] == least
                self._draft.order(partition, Move(donor, member))
                self._moved(partition, member)

    def _release(self, donor: str, number: int, room: Room) -> int:
        """Give away the partitions that others have ready. Returns how many are still to be given away."""
        ready = self._copies.ready
        # Only what the report names (``settled``): an order for a partition that this very plan assigns could not be
        # kept if the next rebalance came in between.
        mine = sorted(
            (partition for partition in self._claims.settled[donor] & self._draft.own[donor] if partition in ready),
            key=lambda partition: (len(ready[partition]), partition),
        )
        for partition in mine if number > 0 else ():
            roomy = [member for member in ready[partition] if room.left(member) > 0]
            if roomy and number > 0:
                member = max(roomy, key=room.left)
                self._draft.order(partition, Move(donor, member))
                self._moved(partition, member, room)
                number -= 1
        return number

    def _go_on_preparing(self, donor: str, number: int, room: Room, budget: _Budget) -> int:
        """Go on with copies in preparation that are not late. Returns how many are still to be given away."""
        for partition in self._surplus(donor) if number > 0 else ():
            at_it = [
                (left, member)
                for left, member in self._at_it(partition)
                if room.left(member) > 0 and partition not in self._copies.late[member]
            ]
            if at_it and number > 0 and budget.spend(partition):
                self._draft.preparing[(member := min(at_it, key=lambda copy: copy[0])[1])].add(partition)
                self._moved(partition, member, room)
                number -= 1
        return number

    def _at_it(self, partition: int) -> list[tuple[int, str]]:
        """Return (records left, member) of the copies of a partition. The ready ones could not be released yet."""
        ready = [(0, member) for member in self._copies.ready.get(partition, ())]
        return ready + self._copies.restoring.get(partition, [])

    def _surplus(self, donor: str) -> list[int]:
        """Return the partitions that a member with too many may give away: those that it has, then those on their way
        to it. The latter can be prepared elsewhere, too; they are released once they have come and the copy is
        announced."""
        own = {partition for partition in self._draft.own[donor] if self._future[partition] == donor}
        coming = (partition for partition, member in self._future.items() if member == donor and partition not in own)
        return [*sorted(own), *sorted(coming)]

    def _prepare(
        self, donor: str, number: int, room: Room, budget: _Budget, where: Callable[[int, str], list[str]] | None
    ) -> int:
        """Begin to prepare new copies, ``where`` returns members for (partition, owner); without it anywhere. Returns
        how many are still to be given away."""
        for partition in self._surplus(donor) if number > 0 else ():
            if number > 0 and self._future[partition] == donor:
                passed_over = {member for _, member in self._copies.restoring.get(partition, ())}
                if where is None:
                    member = room.roomiest(passed_over)
                else:
                    fit = [name for name in where(partition, donor) if name not in passed_over and room.left(name) > 0]
                    member = max(fit, key=room.left, default=None)
                if member is not None and budget.spend(partition):
                    self._draft.preparing[member].add(partition)
                    self._moved(partition, member, room)
                    number -= 1
        return number

    def _moved(self, partition: int, member: str, room: Room | None = None) -> None:
        donor = self._future[partition]
        self._future[partition] = member
        self._counts[donor] -= 1
        self._counts[member] += 1
        if room is not None:
            room.set(member, self._counts[member])

    # ------------------------------------------------------------------------------------------------------- copies

    def _keep_late(self) -> None:
        """Keep as many late copies as a member has too few partitions: it may still get those."""
        most = -(-self._claims.partitions // len(self._claims.active))
        for member, late in self._copies.late.items():
            number = max(0, most - self._counts[member])
            others = sorted(
                partition
                for partition in late
                if member not in (self._future.get(partition), self._owner.get(partition))
            )
            self._draft.preparing[member].update(others[:number])

    def _keep_standbys(self) -> None:
        claims, draft = self._claims, self._draft
        donors = {
            partition: owner
            for partition, owner in self._owner.items()
            if owner != self._future[partition] and owner in self._copies.late
        }
        holders = {}
        for partition, owner in self._future.items():
            have = [donors[partition]] if partition in donors else []  # its store stays as a copy when it has gone
            holders[partition] = [member for member in have + self._copies.holders(partition) if member != owner]
        kept = {partition: self._copies.on_disk(partition, owner) for partition, owner in self._future.items()}
        placed = assign_standbys(self._settings.num_standbys, claims.active, self._future, holders, kept)
        for partition, members in placed.items():
            donor = donors.get(partition)
            if donor is not None and partition in draft.own[donor]:
                rest = [member for member in members if member != donor]
            else:
                rest = members
            ready = self._copies.ready.get(partition, [])
            lacking = len(members) - sum(member == donor or member in ready for member in rest)
            taken = {*members, self._future[partition], donor}
            # A ready copy stays until its replacement is ready: a crash meanwhile would cost a restore.
            spare = [member for member in ready if member not in taken]
            for member in [*rest, *spare[:lacking]]:
                if partition not in draft.preparing[member] and not draft.expects(member, partition):
                    draft.standby[member].add(partition)


def assign_standbys(
    number: int,
    active: list[str],
    future: Mapping[int, str],
    holders: Mapping[int, Collection[str]],
    kept: Mapping[int, Collection[str]] = {},
) -> dict[int, list[str]]:
    """Return partition -> the active members that are to keep a spare copy of it: ``number`` of them, or all that there
    are. When any member goes, the others then have its partitions ready in just the right numbers.

    If a member goes, the others share its partitions. The counts decide how many of them each other member gets; so
    many of them it keeps a copy of (times the number of copies). Copies that are there stay where they are as long as
    they fit into these numbers; on a group at rest the numbers are met exactly, so nothing changes.

    ``future``: the owner of each partition once all moves are done. ``holders``: active members that have its state
    now, the better ones first. ``kept``: those that have some of it on disk.
    """
    of: dict[str, list[int]] = {member: [] for member in active}
    for partition in sorted(future):
        of.setdefault(future[partition], []).append(partition)
    load = dict.fromkeys(active, 0)
    placed: dict[int, list[str]] = {}
    for owner, numbers in of.items():
        others = sorted(
            (member for member in active if member != owner), key=lambda member: (len(of[member]), load[member])
        )
        copies = min(number, len(others))
        if copies:
            # As even as can be, and more where more would be taken over: on the members that have fewest.
            least, larger = divmod(copies * len(numbers), len(others))
            quota = {member: least + (rank < larger) for rank, member in enumerate(others)}
            for member, count in quota.items():
                load[member] += count
            placed.update(_spread(copies, numbers, quota, (holders, kept)))
    return placed


def _spread(
    wanted: int, numbers: list[int], quota: dict[str, int], preferred: Collection[Mapping[int, Collection[str]]]
) -> dict[int, list[str]]:
    """Place the copies of one owner's partitions: all that is ``preferred`` most, then what is less. The quotas add up
    to what is wanted, and none is larger than ``numbers``: so they can be met exactly."""
    placed: dict[int, list[str]] = {partition: [] for partition in numbers}
    for holders in preferred:  # no folder takes a copy's place
        for partition in numbers:
            chosen = placed[partition]
            for member in holders.get(partition, ()):
                if quota.get(member, 0) > 0 and len(chosen) < wanted and member not in chosen:
                    chosen.append(member)
                    quota[member] -= 1
    most = [(-left, rank, member) for rank, (member, left) in enumerate(quota.items()) if left > 0]
    heapify(most)
    for partition in numbers:
        chosen, passed = placed[partition], []
        while most and len(chosen) < wanted:
            left, rank, member = heappop(most)
            if member in chosen:
                passed.append((left, rank, member))
                continue
            chosen.append(member)
            quota[member] -= 1
            if quota[member] > 0:
                passed.append((-quota[member], rank, member))
        for entry in passed:
            heappush(most, entry)
    for chosen in placed.values():
        while len(chosen) < wanted:
            chosen.append(_swapped(chosen, placed, quota))
    return placed


def _swapped(lacking: list[str], placed: Mapping[int, list[str]], quota: dict[str, int]) -> str:
    """Swap a copy for the partition that is ``lacking`` one, because all members with something left of their quota
    have that partition already. One of them takes a copy of another partition, one that it has not, from a member that
    has not the lacking one. Return that member."""
    spare = next(member for member, left in quota.items() if left > 0)
    chosen, other = next(
        (chosen, other) for chosen in placed.values() if spare not in chosen for other in chosen if other not in lacking
    )
    chosen[chosen.index(other)] = spare
    quota[spare] -= 1
    return other
