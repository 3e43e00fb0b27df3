"""One partition of a source with a lookup as a model: no owner looks into an older table than an owner before it, over
planned moves, crashes, and members of releases that do not know the lookup. Each rule is a switch.

The lookup is one partition of a topic; a table is the number of its rows. A row comes into it in three steps, for
the thread that reads is beside the handlers: it counts as seen, it is in the table, it counts as received. Any table
may be behind for any time, also that of a process that has just started. What is the same without lookups (fences,
transactions without answers, who may answer) is in ``rules.py``: here a commit is one step, which only the owner takes.
Members die, or stand still at any moment while another one takes over.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

KNOWS, CARRIES, DROPS = "knows", "carries", "drops"
"""Releases of a member: one looks into the lookup, one does not declare it, one is older than positions."""


class LookupConfig(NamedTuple):
    """``releases``: of the members. ``answers``: there are looks without a record, those of interjections that only
    look. ``losses``: rows that the topic may lose; none comes after that. ``takes``: how often the group gives the
    partition to a member, or has it moved."""

    name: str
    releases: tuple[str, ...] = (KNOWS, KNOWS)
    rows: int = 1
    answers: bool = True
    losses: int = 0
    takes: int = 3
    crashes: int = 1


PLAIN = LookupConfig("moves and crashes")
ROLLING = LookupConfig("rolling restart", releases=(KNOWS, CARRIES, KNOWS))
OLD = LookupConfig("an older release in the group", releases=(KNOWS, DROPS, KNOWS))
LOSING = LookupConfig("a topic that loses rows", releases=(KNOWS, CARRIES, KNOWS), answers=False, losses=1)
STANDARD = (PLAIN, ROLLING, OLD, LOSING)
DEEP = (
    LookupConfig("two rows", rows=2, takes=4, crashes=2),
    LookupConfig("rolling restart, two rows", releases=(KNOWS, CARRIES, KNOWS), rows=2),
    LookupConfig("a topic that loses both its rows", rows=2, answers=False, losses=2),
)


class LookupRule(Enum):
    """A rule of the protocol: what happens when it is out, and the world where it is missed."""

    IN_THE_RECORD = ("offset records have no position of the lookup", LOSING)
    SAME_TRANSACTION = ("the position is committed after the marker, by itself", PLAIN)
    SEALED_LAST = ("the donor's last record has the position of the moment at which the move was ordered", PLAIN)
    SEEN_BEFORE_IT_IS_IN = ("a row counts as looked into when it is in the table, and not before", PLAIN)
    RECEIVED_WHEN_IT_IS_IN = ("a table is as far as a row that is just coming into it", PLAIN)
    RECEIVER_WAITS = ("the receiver of a move starts with the table that it has", PLAIN)
    TAKER_WAITS = ("a take-over waits for the position in the record, and not for the end of the topic", PLAIN)
    END_AFTER_FENCE = ("a take-over uses the end of the topic as it was before the partition was given to it", PLAIN)
    DONOR_KNOWS = ("the receiver of a move starts by a position that its donor has only carried", ROLLING)
    MISSING_IS_UNKNOWN = ("the receiver of a move starts if there is no position", OLD)
    UNKNOWN_IS_CARRIED = ("the position in a lookup that is not declared is left out of an offset record", LOSING)
    LOSS_IS_REFUSED = ("a take-over does not compare its table with the position in the record", LOSING)


class Record(NamedTuple):
    """The last offset record. ``position``: in the lookup; ``None``: it has none. ``looked``, ``writer``: who has
    written the position, and the record."""

    position: int | None = None
    looked: int = -1
    writer: int = -1


class Member(NamedTuple):
    """``phase``: of its take-over; ``take``: which one. ``rows``: in its table; ``received`` is what is surely in it,
    ``seen`` what may be. ``goal``: the end that a take-over waits for, once it knows it."""

    phase: str = "out"
    take: int = 0
    received: int = 0
    rows: int = 0
    seen: int = 0
    goal: int | None = None


class World(NamedTuple):
    """``end``: of the lookup's topic. ``best``: the newest table that an owner has looked into. ``take``: that of the
    owner. ``order``: donor, receiver, and how far the donor's table was at the order. ``stopped``: a start was refused,
    as it has to be."""

    members: tuple[Member, ...]
    end: int = 0
    best: int = 0
    record: Record | None = None
    order: tuple[int, int, int] | None = None
    take: int = 0
    crashes: int = 0
    losses: int = 0
    stopped: bool = False


class LookupModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: LookupConfig, out: frozenset[LookupRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World(tuple(Member() for _ in self._config.releases))

    def done(self, world: World) -> bool:
        position = None if world.record is None else world.record.position
        return world.best == position == world.end == self._config.rows

    def stalled(self, world: World) -> str:
        waits = any(member.phase == "given" and member.take == world.take for member in world.members)
        return "a take-over waits for good" if waits and not world.stopped and not world.losses else ""

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        steps: Steps[World] = []
        luck: Steps[World] = []
        if world.stopped:
            return steps, luck
        if world.end < self._config.rows and not world.losses:
            steps.append(("a row comes into the topic", world._replace(end=world.end + 1)))
        if world.end and world.losses < self._config.losses:
            luck.append(("the topic loses a row", world._replace(end=world.end - 1, losses=world.losses + 1)))
        for index, member in enumerate(world.members):
            name, owns = "ABC"[index], _owns(world, member)
            if not owns and world.take < self._config.takes:
                steps.append((f"the group gives the partition to {name}", self._given(world, index, member)))
            if world.crashes < self._config.crashes:
                dead = _with(world, index, Member())._replace(crashes=world.crashes + 1)
                luck.append((f"{name} dies, and starts again", dead))
            if LookupRule.END_AFTER_FENCE in self._out and member.phase == "out" and member.goal is None:
                steps.append((f"{name} looks up the end of the topic", self._with_goal(world, index, member)))
            if self._knows(index):
                steps += [(f"{text} {name}", after) for text, after in self._reading(world, index, member)]
            if owns:
                steps += [(f"{name} {text}", after) for text, after in self._owner_steps(world, index, member)]
        return steps, luck

    def _knows(self, index: int) -> bool:
        return self._config.releases[index] == KNOWS

    def _reading(self, world: World, index: int, member: Member) -> Steps[World]:
        """Return the steps of the thread that reads the lookup."""
        if member.rows < member.seen:
            return [("the row is in the table of", _with(world, index, member._replace(rows=member.seen)))]
        if member.received < member.rows:
            return [("the row counts as received by", _with(world, index, member._replace(received=member.rows)))]
        if member.seen < world.end:
            return [("a row begins to come to", _with(world, index, member._replace(seen=member.seen + 1)))]
        return []

    # -- a take-over ---------------------------------------------------------------------------------------------------

    def _given(self, world: World, index: int, member: Member) -> World:
        early = LookupRule.END_AFTER_FENCE in self._out
        given = member._replace(phase="given", take=world.take + 1, goal=member.goal if early else None)
        return _with(world, index, given)._replace(take=given.take, order=None)

    def _with_goal(self, world: World, index: int, member: Member) -> World:
        goal = 0 if LookupRule.TAKER_WAITS in self._out else world.end
        return _with(world, index, member._replace(goal=goal))

    def _owner_steps(self, world: World, index: int, member: Member) -> Steps[World]:
        if member.phase == "awaits":
            return [self._by_marker(world, index, member)]
        if not self._knows(index) and member.phase == "given":
            return [("starts", _with(world, index, member._replace(phase="works")))]
        if member.phase == "given":
            if member.goal is None:
                return [("looks up the end of the topic", self._with_goal(world, index, member))]
            return self._started(world, index, member)
        return self._work(world, index, member)

    def _is_as_far(self, member: Member, position: int) -> bool:
        return position <= (member.seen if LookupRule.RECEIVED_WHEN_IT_IS_IN in self._out else member.received)

    def _started(self, world: World, index: int, member: Member) -> Steps[World]:
        record, works = world.record or Record(), member._replace(phase="works", goal=None)
        compares = LookupRule.LOSS_IS_REFUSED not in self._out
        if not self._is_as_far(member, member.goal or 0):
            return []
        if record.position is None or not compares or self._is_as_far(member, record.position):
            return [("starts", _with(world, index, works))]
        if record.position <= world.end:
            return []  # its table will get there
        if not world.losses:
            raise Broken(f"{'ABC'[index]} refuses to start: the topic ends at {world.end}, before {record.position}")
        return [("refuses: the topic has lost rows", world._replace(stopped=True))]

    def _by_marker(self, world: World, index: int, member: Member) -> tuple[str, World]:
        record = world.record or Record()
        if not self._knows(index):
            starts = True
        elif record.position is None:
            starts = LookupRule.MISSING_IS_UNKNOWN in self._out
        else:
            is_vouched = record.looked == record.writer or LookupRule.DONOR_KNOWS in self._out
            as_far = self._is_as_far(member, record.position) or LookupRule.RECEIVER_WAITS in self._out
            starts = is_vouched and as_far
        if starts:
            return "starts by the marker", _with(world, index, member._replace(phase="works"))
        return "needs a take-over", _with(world, index, member._replace(phase="given"))

    # -- work ----------------------------------------------------------------------------------------------------------

    def _work(self, world: World, index: int, member: Member) -> Steps[World]:
        steps: Steps[World] = []
        if self._knows(index):
            looked = self._looked(world, index, member.rows)
            if self._config.answers:
                steps.append((f"answers a look into {member.rows} rows", looked))
            committed = looked._replace(record=self._record(world, index, member.seen))
            steps.append((f"commits an event that has looked into {member.rows} rows", committed))
        else:
            steps.append(("commits an event", world._replace(record=self._record(world, index, 0))))
        if world.order is None and world.take < self._config.takes:
            for other, receiver in enumerate(world.members):
                if other != index and not _owns(world, receiver):
                    ordered = world._replace(order=(index, other, member.seen))
                    steps.append((f"is to hand over to {'ABC'[other]}", ordered))
        elif world.order is not None and world.order[0] == index:
            steps.append(("hands over", self._handed_over(world, index, member)))
        return steps

    def _looked(self, world: World, index: int, value: int) -> World:
        if value < world.best:
            raise Broken(f"{'ABC'[index]} looks into {value} rows where {world.best} were there before")
        return world._replace(best=value)

    def _record(self, world: World, index: int, seen: int) -> Record:
        """Return the offset record of a transaction of this member."""
        before, release = world.record or Record(), self._config.releases[index]
        if release == KNOWS:
            if LookupRule.IN_THE_RECORD in self._out:
                return Record(writer=index)
            late = LookupRule.SEEN_BEFORE_IT_IS_IN in self._out
            return Record(min(seen, world.members[index].received) if late else seen, index, index)
        if release == DROPS or LookupRule.UNKNOWN_IS_CARRIED in self._out:
            return Record(writer=index)
        return before._replace(writer=index)

    def _handed_over(self, world: World, index: int, member: Member) -> World:
        assert world.order is not None
        _, to, ordered_at = world.order
        record = self._record(world, index, ordered_at if LookupRule.SEALED_LAST in self._out else member.seen)
        if LookupRule.SAME_TRANSACTION in self._out and self._knows(index):
            record = (world.record or Record(0, index))._replace(writer=index)
        take = world.take + 1
        after = world._replace(record=record, order=None, take=take)
        after = _with(after, index, member._replace(phase="out"))
        return _with(after, to, world.members[to]._replace(phase="awaits", take=take, goal=None))


def _owns(world: World, member: Member) -> bool:
    return member.phase != "out" and member.take == world.take


def _with(world: World, index: int, member: Member) -> World:
    return world._replace(members=put(world.members, index, member))
