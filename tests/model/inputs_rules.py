"""One partition of a source with two inputs as a model: the vector of positions, one fenced commit, the questions of a
take-over; and what a loop and a joined table add. Each rule is a switch.

What is the same with one input (fences, transactions without answers, moves by marker) is in ``rules.py``: here a
commit is one step, which the group refuses to a member that has not the partition any more. Members die, or stand still
at any moment while the other one takes over, which makes them go on as zombies.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

EVENTS, LOOP, TABLE = "events", "loop", "table"
KNOWS, CARRIES, DROPS = "knows", "carries", "drops"
"""What a member's release does with the further input: reads it; does not declare it; is older than vectors."""


class InputsConfig(NamedTuple):
    """``own`` and ``further``: records of the two inputs in the end. ``there``: of the further one at the start.
    ``first``: of the first member's release; the second one reads both. ``takes``: how often the group gives the
    partition to a member."""

    name: str
    kind: str = EVENTS
    own: int = 2
    further: int = 2
    there: int = 1
    first: str = KNOWS
    takes: int = 3
    crashes: int = 1


PLAIN = InputsConfig("two inputs", own=1)
ROLLING = InputsConfig("rolling restart", first=CARRIES)
OLD = InputsConfig("an older release in the group", first=DROPS)
LOOPING = InputsConfig("loop", kind=LOOP, own=1, there=1)
JOINING = InputsConfig("joined table", kind=TABLE, own=1, there=2, further=3)
STANDARD = (PLAIN, ROLLING, OLD, LOOPING, JOINING)
DEEP = (InputsConfig("two inputs, two records each"),)


class InputsRule(Enum):
    """A rule of the protocol: what happens when it is out, and the world where it is missed."""

    FULL_VECTOR = ("an offset record has the positions of the inputs that its transaction has touched", PLAIN)
    ONE_COMMIT = ("the position in the further input is committed after that in the first, by itself", PLAIN)
    ALL_OFFSETS = ("the group's offset is sent for the first input alone", OLD)
    REFUSED_WITHOUT_POSITION = ("an offset of the group without a position in the changelog is passed over", OLD)
    UNKNOWN_IS_CARRIED = ("positions in inputs that are not declared are left out of an offset record", ROLLING)
    LOGS_AFTER_CHANGELOG = ("a take-over looks up the ends of the inputs before that of the changelog", PLAIN)
    LOOK_AGAIN = ("records that look deleted are taken for lost, although the changelog may have moved on", LOOPING)
    PURGED_WHEN_COMMITTED = ("the loop is deleted up to what is handled, and not yet committed", LOOPING)
    LOOP_FROM_ITS_START = ("a partition that has no position in the loop begins at its end", LOOPING)
    GOAL_IS_KEPT = ("the end up to which a table is read first is known to the member alone", JOINING)
    ROWS_ARE_STATE = ("rows are read from the table's topic, beside the changelog", JOINING)


Pair = tuple[int, int]


class Record(NamedTuple):
    """The last offset record, and the state up to it. ``further``: ``None``: it has no position there."""

    own: int = 0
    further: int | None = None
    goal: int = 0
    rows: int = 0
    serial: int = 0


class Member(NamedTuple):
    """``phase``: of its take-over; ``take``: which one. ``base``: up to where its work is committed, ``at``: handled.
    ``half``: its own positions are committed, the others not yet."""

    phase: str = "out"
    take: int = 0
    group: int | None = None
    record: Record | None = None
    low: int = 0
    high: int = 0
    base: Pair = (0, 0)
    at: Pair = (0, 0)
    goal: int = 0
    rows: int = 0
    touched: tuple[bool, bool] = (False, False)
    half: bool = False


class World(NamedTuple):
    """``visible``: effects, by input. ``end`` and ``low``: of the further input's log. ``promised``: the end up to
    which the table is read first, as the first commit has it. ``dropped``: an older release has dropped a position.
    ``stopped``: a start was refused, as it has to be."""

    end: int
    visible: Pair = (0, 0)
    record: Record | None = None
    group: int | None = None
    low: int = 0
    members: tuple[Member, Member] = (Member(), Member())
    take: int = 0
    takes: int = 0
    crashes: int = 0
    promised: int = 0
    dropped: bool = False
    stopped: bool = False


class InputsModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: InputsConfig, out: frozenset[InputsRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World(end=self._config.there)

    def done(self, world: World) -> bool:
        everything = self._config.own, self._config.further
        record = world.record
        return world.visible == everything and record is not None and (record.own, record.further) == everything

    def stalled(self, world: World) -> str:
        is_over = world.stopped or world.takes == self._config.takes
        return "" if is_over else "nothing can happen any more"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        steps: Steps[World] = []
        luck: Steps[World] = []
        if world.stopped:
            return steps, luck
        if world.end < self._config.further:
            steps.append(("a record comes into the further input", world._replace(end=world.end + 1)))
        for index, member in enumerate(world.members):
            name = "AB"[index]
            if world.takes < self._config.takes and member.phase == "out":
                taken = world._replace(take=world.takes + 1, takes=world.takes + 1)
                steps.append((f"the group gives the partition to {name}",
                              _with(taken, index, Member("given", taken.take))))  # fmt: skip
            if member.phase != "out" and world.crashes < self._config.crashes:
                dead = world._replace(crashes=world.crashes + 1)
                luck.append((f"{name} dies", _with(dead, index, Member())))
            steps += [(f"{name} {text}", after) for text, after in self._member_steps(world, index, member)]
        return steps, luck

    def _knows(self, index: int) -> str:
        return KNOWS if index else self._config.first

    # -- a take-over ---------------------------------------------------------------------------------------------------

    def _member_steps(self, world: World, index: int, member: Member) -> Steps[World]:
        early = InputsRule.LOGS_AFTER_CHANGELOG in self._out
        order = ("given", "group", *(("range", "record") if early else ("record", "range")))
        if member.phase not in order:
            return self._work(world, index, member) if member.phase == "works" else []
        asked = (*order, "asked")[order.index(member.phase) + 1]
        if asked == "group":
            return [("reads the group's offset", _with(world, index, member._replace(phase=asked, group=world.group)))]
        if asked == "record":
            return [("reads the changelog", _with(world, index, member._replace(phase=asked, record=world.record)))]
        if asked == "range":
            seen = member._replace(phase=asked, low=world.low, high=world.end)
            return [("looks up the further input", _with(world, index, seen))]
        return [self._started(world, index, member)]

    def _started(self, world: World, index: int, member: Member) -> tuple[str, World]:
        record, name = member.record or Record(), "AB"[index]
        if self._knows(index) != KNOWS:
            at = record.own, 0
            return "starts with one input", _with(world, index, member._replace(phase="works", base=at, at=at))
        known, goal = record.further, record.goal
        if known is None:
            if member.group is not None and InputsRule.REFUSED_WITHOUT_POSITION not in self._out:
                if not world.dropped:
                    raise Broken(f"{name} refuses to start: the changelog has no position, although none was dropped")
                return "refuses: a position was dropped", world._replace(stopped=True)
            known = member.low
            if self._config.kind == LOOP and InputsRule.LOOP_FROM_ITS_START in self._out:
                known = member.high
            goal = member.high if self._config.kind == TABLE else 0
        elif known > member.high:
            raise Broken(f"{name} refuses to start: the further input ends at {member.high}, before {known}")
        elif known < member.low:
            if world.record != member.record and InputsRule.LOOK_AGAIN not in self._out:
                return "sees that another member works", _with(world, index, Member("given", member.take))
            raise Broken(f"{name} refuses to start: the records from {known} to {member.low} are deleted")
        at = record.own, known
        rows = world.end if InputsRule.ROWS_ARE_STATE in self._out else record.rows
        works = member._replace(phase="works", base=at, at=at, goal=goal, rows=rows)
        return f"starts at {at}", _with(world, index, works)

    # -- work ----------------------------------------------------------------------------------------------------------

    def _work(self, world: World, index: int, member: Member) -> Steps[World]:
        own, further = member.at
        steps: Steps[World] = []
        if member.half:
            return [("commits the other position", self._committed(world, index, member))]
        reads = self._knows(index) == KNOWS
        if own < self._config.own and not (reads and further < member.goal):
            if self._config.kind == TABLE and member.take == world.take and further < world.promised:
                raise Broken(f"an event of {'AB'[index]} meets {further} of the {world.promised} rows that were there")
            after = member._replace(at=(own + 1, further), touched=(True, member.touched[1]))
            steps.append((f"handles record {own} of the first input", _with(world, index, after)))
        if reads and further < world.end:
            if self._config.kind == TABLE and member.rows != further:
                raise Broken(f"an update of {'AB'[index]} meets row {member.rows} where row {further} was before it")
            after = member._replace(at=(own, further + 1), rows=further + 1, touched=(member.touched[0], True))
            steps.append((f"handles record {further} of the further input", _with(world, index, after)))
        if member.at != member.base:
            steps.append(("commits", self._committed(world, index, member)))
        deletes = self._config.kind == LOOP and reads
        below = further if InputsRule.PURGED_WHEN_COMMITTED in self._out else world.group or 0
        if deletes and below > world.low:
            steps.append(("deletes what is handled in the loop", world._replace(low=below)))
        return steps

    def _committed(self, world: World, index: int, member: Member) -> World:
        if member.take != world.take:  # the fence: a later generation has the partition
            return _with(world, index, Member())
        release, reads = self._knows(index), self._knows(index) == KNOWS
        there = world.visible if reads else (world.visible[0], member.base[1])
        if not member.half and there != member.base:
            raise Broken(f"{'AB'[index]} commits {member.base} to {member.at}, and {world.visible} is visible already")
        before = world.record or Record()
        apart = InputsRule.ONE_COMMIT in self._out and not member.half and member.touched == (True, True)
        own, further = member.at
        written: int | None = further
        if not reads:
            written = before.further
            if release == DROPS or InputsRule.UNKNOWN_IS_CARRIED in self._out:
                written = None
        elif apart:
            written = before.further
        elif InputsRule.FULL_VECTOR in self._out and not member.touched[1]:
            written = None
        goal = member.goal if further < member.goal and InputsRule.GOAL_IS_KEPT not in self._out else 0
        record = Record(own, written, goal, member.rows, before.serial + 1)
        sends = reads and not apart and member.touched[1] and InputsRule.ALL_OFFSETS not in self._out
        promised = member.goal if world.record is None else world.promised
        dropped = world.dropped or (release == DROPS and before.further is not None)
        after = world._replace(
            visible=member.at if reads else (own, world.visible[1]),
            record=record,
            promised=promised,
            group=further if sends else world.group,
            dropped=dropped,
        )
        done = member._replace(base=member.at, touched=member.touched if apart else (False, False), half=apart)
        return _with(after, index, done)


def _with(world: World, index: int, member: Member) -> World:
    return world._replace(members=put(world.members, index, member))
