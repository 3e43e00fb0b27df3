"""A consumer group in a few hundred lines: members with real claims (``Holdings``), and what engines do.

Everything happens by a call, in any order that a test likes: JoinGroup, the plan, SyncGroup at each member (or not),
hand-overs, markers, notices from engine to membership, restoring. ``check`` says that nobody works on what somebody
else works on. One rebalance at a time; a member that is in the middle of one when the next begins has missed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET

from streams.core.group_member import Holdings
from streams.model.group import Assignment, Assignor, Copies, MemberReport, Order, Shelf

RECORDS = 100
"""What has to be restored of a new copy."""

TRAFFIC = 150_000
"""Records that come into each changelog between two generations: a folder that missed one is not near any more."""

NOTHING = Assignment()


@dataclass(eq=False)
class Member:
    """One process. ``working``: what its engine works on. ``copies``: records left to restore, by partition.
    ``folders``: offsets by partition, shared with others of the same ``shelf``."""

    id: str
    holdings: Holdings
    working: set[int] = field(default_factory=set)
    handed: dict[int, Order] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    sizes: dict[int, int] = field(default_factory=dict)
    shelf: str = ""
    folders: dict[int, int] = field(default_factory=dict)
    notices: list[Callable[[], None]] = field(default_factory=list)
    plan: Assignment = NOTHING
    announced: bool = True
    slow: bool = False
    busy: bool = False
    stuck: bool = False

    def report(self) -> MemberReport:
        ready = frozenset(partition for partition, left in self.copies.items() if not left)
        self.holdings.copies = Copies(
            ready=ready,
            preparing={partition: left for partition, left in self.copies.items() if left},
            late=frozenset(self.late & self.copies.keys()) - ready,
            sizes=dict.fromkeys(self.holdings.owned, 1) | self.sizes,
            shelf=Shelf(self.shelf, dict(self.folders)) if self.shelf else UNSET,
        )
        return self.holdings.report()

    def apply(self, generation: int, plan: Assignment) -> bool:
        """SyncGroup's answer. Returns whether it has to join again."""
        joins_again = self.holdings.has_to_join_again(plan)
        while revoked := self.holdings.revoked_by(plan):
            self.working -= revoked
            self.holdings.released(revoked)
        known_late = self.holdings.reported.copies.late
        self.holdings.apply(generation, plan)
        self.handed = {
            partition: order
            for partition, order in self.handed.items()
            if self.holdings.releasing.get(partition) == order or partition not in self.holdings.owned
        }
        kept = self.holdings.owned - self.handed.keys()
        self.working = self.working & self.holdings.incoming.keys() | kept
        keep = plan.standby | plan.preparing | self.holdings.incoming.keys()
        self.copies = {partition: self.copies.get(partition, RECORDS) for partition in keep - kept}
        self.late &= self.copies.keys()
        self.plan = plan
        self.announced = not plan.preparing - known_late
        return joins_again

    def hand_over(self, group: Group, most: int = 1 << 30) -> bool:
        """The last transaction of what it was ordered to hand over."""
        orders = [(number, order) for number, order in self.holdings.releasing.items() if number in self.working]
        for partition, order in orders[:most]:
            group.last[partition] = order
            self.working.discard(partition)
            self.handed[partition] = order
            if partition in self.plan.standby:
                self.copies[partition] = 0
            self.notices.append(partial(self.was_handed_over, partition, order))
        return bool(orders)

    def was_handed_over(self, partition: int, order: Order) -> None:
        self.holdings.handed_over(partition, order)
        if partition not in self.holdings.owned:
            self.handed.pop(partition, None)

    def took(self, partition: int, group: Group) -> None:
        self.holdings.took(partition)
        group.wanted |= self.holdings.leaving  # it has to give it up again

    def look_for_markers(self, group: Group) -> bool:
        started = False
        for partition, since in self.holdings.incoming.items():
            marker = group.last.get(partition)
            mine = marker is not None and marker.to == self.id and marker.generation >= since
            if mine and partition not in self.working:
                started = True
                self.working.add(partition)
                self.copies.pop(partition, None)
                group.last[partition] = None
                self.notices.append(partial(self.took, partition, group))
        return started

    def hear_notice(self) -> bool:
        if self.notices:
            self.notices.pop(0)()
            return True
        return False

    def restore(self, records: int = RECORDS) -> bool:
        unfinished = [partition for partition, left in self.copies.items() if left]
        for partition in unfinished:
            self.copies[partition] = max(0, self.copies[partition] - records)
        return bool(unfinished)

    def time_out(self) -> bool:
        unfinished = {partition for partition, left in self.copies.items() if left}
        late = unfinished - self.late
        self.late |= unfinished
        return bool(late)

    def wants_to_announce(self) -> bool:
        """All that it was to prepare is ready or late, and not all of it was known to be late."""
        done = all(not self.copies.get(partition, 0) or partition in self.late for partition in self.plan.preparing)
        if not self.announced and done:
            self.announced = True
            return True
        if any(not self.copies.get(partition, 0) for partition in self.late):
            self.late = {partition for partition in self.late if self.copies.get(partition, 0)}
            return True
        return False

    def is_done(self) -> bool:
        """It wanted to leave, the leader heard of it, and nothing is left to hand over or to take."""
        told = self.holdings.reported
        nothing_left = not (self.holdings.owned or self.holdings.incoming or self.working)
        return nothing_left and told.leaving and self.plan.sequence == told.sequence

    def void(self) -> None:
        """The membership is lost: all work stops, the stores hold what is committed."""
        self.copies.update(dict.fromkeys(self.working, 0))
        self.working.clear()
        self.handed.clear()
        self.notices.clear()
        self.holdings.void()
        self.plan, self.announced = Assignment(), True


class Group:
    """The coordinator. ``last``: the order of the marker that is the last record of a partition's changelog."""

    def __init__(self, partitions: int, assignor: Assignor) -> None:
        self.partitions, self.assignor = partitions, assignor
        self.members: dict[str, Member] = {}
        self.generation, self.generations = 0, 0
        self.last: dict[int, Order | None] = {}
        self.wanted = False
        self.reports: dict[str, MemberReport] = {}
        self.plan: dict[str, Assignment] = {}
        self.unsynced: set[str] = set()
        self.disks: dict[str, dict[int, int]] = {}
        self._names = 0

    def join(self, instance: str, member_id: str = "", copies: Iterable[int] = (), shelf: str = "") -> Member:
        self._names += 1
        member = Member(member_id or f"{instance}#{self._names}", Holdings(instance), shelf=shelf)
        member.folders = self.disks.setdefault(shelf, {})
        member.copies = dict.fromkeys(copies, 0)
        self.members[member.id] = member
        self.wanted = True
        return member

    def lose(self, member: Member, new_id: str = "") -> None:
        """The group does not know it any more; it joins again under another id."""
        self.remove(member)
        member.void()
        self._names += 1
        member.id = new_id or f"{member.holdings.reported.instance}#{self._names}"
        self.members[member.id] = member

    def forget(self) -> None:
        """The coordinator comes back without its memory."""
        for member in list(self.members.values()):
            self.lose(member)
        self.generation = 0

    def remove(self, member: Member) -> None:
        """It crashed, or left."""
        del self.members[member.id]
        self.reports.pop(member.id, None)
        self.unsynced.discard(member.id)
        self.wanted = True
        if self.reports:
            self._complete()

    def leave(self, member: Member) -> None:
        member.holdings.leaving = True
        self.wanted = True

    def join_group(self, member: Member) -> None:
        """Its JoinGroup arrives. The last one completes the generation."""
        self.reports[member.id] = member.report()
        self.unsynced.clear()  # who has not heard the plan before has missed it
        self._complete()

    def _complete(self) -> None:
        if self.reports.keys() == self.members.keys():
            self.generation += 1
            self.generations += 1
            self.wanted = False
            said, self.reports = self.reports, {}
            self.plan = self.assignor(self.partitions, said)
            self.unsynced = set(self.plan)
            self.planned(said)
            self.write_folders()

    def write_folders(self) -> None:
        """Everybody who has a partition up to date makes a checkpoint."""
        for member in self.members.values():
            for partition in member.working | {p for p, left in member.copies.items() if not left}:
                member.folders[partition] = max(member.folders.get(partition, 0), self.generation * TRAFFIC)

    def planned(self, said: dict[str, MemberReport]) -> None:
        """For tests that look at every plan."""

    def sync(self, member: Member) -> None:
        """Its answer of SyncGroup arrives."""
        if member.id in self.unsynced:
            self.unsynced.discard(member.id)
            self.wanted |= member.apply(self.generation, self.plan[member.id])
            if member.is_done() or self.plan[member.id].quit:
                self.remove(member)

    def engines(self) -> bool:
        """Everybody does what it can, until nobody can do more. Returns whether somebody did something."""
        busy = moved = True
        while busy:
            busy = False
            for member in list(self.members.values()):
                busy |= not member.stuck and member.hand_over(self)
                busy |= member.look_for_markers(self)
                if not member.busy:
                    busy |= member.time_out() if member.slow else member.restore()
                while member.hear_notice():
                    busy = True
                if member.is_done():
                    self.remove(member)
                    busy = True
            self.check()
            moved |= busy
        for member in self.members.values():
            self.wanted |= member.wants_to_announce()
        return moved

    def round(self) -> None:
        """One rebalance in which everybody takes part at once."""
        self.reports.clear()
        for member in list(self.members.values()):
            self.join_group(member)
        for member in list(self.members.values()):
            self.sync(member)
            self.check()

    def to_the_brink(self) -> None:
        """Rounds until something is about to be handed over."""
        for _ in range(6):
            if any(member.holdings.releasing for member in self.members.values()):
                return
            self.round()
            for member in self.members.values():
                member.restore()

    def settle(self, most: int) -> int:
        """Rounds until nobody wants another one; how many there were."""
        before = self.generations
        self.engines()
        while self.wanted and self.members:
            assert self.generations - before < most, "the group does not settle"
            self.round()
            self.engines()
        return self.generations - before

    def check(self) -> None:
        working = [partition for member in self.members.values() for partition in member.working]
        assert len(working) == len(set(working)), f"two work on one partition: {self.working()}"

    def working(self) -> dict[str, list[int]]:
        return {member.id: sorted(member.working) for member in self.members.values()}
