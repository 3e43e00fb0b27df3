"""Commands and their answers as a model: a command that has an id takes effect once, and an answer to a caller is true
and stays so. Each rule is a switch.

Two callers ask for one command under one id: each sends a record, asks the owner for the reply, and asks again until it
knows or gives up. Owners die, stand still while another takes over and go on, and get no answer to a commit.

``core/commands.py`` and ``runtime/queries/commands.py`` are the code. What a take-over does is in ``rules.py``: here it
is one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put
from tests.model.two_owners import bad_luck, may_take_over, newest_first, placed, vacated


class CommandsConfig(NamedTuple):
    """``takes``: take-overs, after the last of which no member dies or stands still. ``sends``: records of the command,
    all callers together. ``fails``: the first turn of a record may fail, and its error policy lets it go."""

    name: str
    takes: int = 2
    sends: int = 2
    fails: bool = False


PLAIN = CommandsConfig("two owners")
FAILING = CommandsConfig("a turn that fails", fails=True)
STANDARD = (PLAIN, FAILING)
DEEP = (CommandsConfig("three owners", takes=3, sends=3, fails=True),)


class CommandsRule(Enum):
    """A rule of commands: what happens when it is out, and the world where it is missed."""

    C2_ONE_TRANSACTION = ("the reply is kept by a transaction behind that of the effect", PLAIN)
    C3_ONCE = ("a copy is decided without a look for its id", PLAIN)
    C7_BEHIND_THE_COMMIT = ("a reply is given when the command has had its turn", PLAIN)
    C7_NOT_KNOWN = ("a caller who gets no answer takes the command for failed", PLAIN)
    C6_FAILED_BEHIND = ("a command without a reply has failed, wherever the position is", PLAIN)
    D1_FAILED_IS_NOT_SEEN = ("a turn that fails leaves a reply", FAILING)


class Partition(NamedTuple):
    """``position``: records that are handled; ``effects``: how many the id has had; ``kept``: the reply beside the id,
    which is the number of its effect; ``failed``: the places of the records that were let go."""

    position: int = 0
    effects: int = 0
    kept: int = 0
    failed: frozenset[int] = frozenset()


class Member(NamedTuple):
    """``take``: its take-over; ``memory``: the partition; ``base``: as it was last known to be committed. ``rest``: a
    reply that a second transaction is to keep."""

    take: int
    memory: Partition
    base: Partition
    is_unsure: bool = False
    rest: int = 0


class World(NamedTuple):
    """``log``: the partition in the changelog; ``sent``: records in the topic. ``answers``: that of each caller: the
    reply, -1 for a failure, 0 for none; ``at``: the record that each caller has sent, or -1."""

    members: tuple[Member | None, ...] = (None, None)
    log: Partition = Partition()
    sent: int = 0
    take: int = 0
    frozen: int = -1
    answers: tuple[int, ...] = (0, 0)
    at: tuple[int, ...] = (-1, -1)
    problem: str = ""


class CommandsModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: CommandsConfig, out: frozenset[CommandsRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.log.position == world.sent > 0 and not self.stalled(world)

    def stalled(self, world: World) -> str:
        waits = any(at >= 0 and not answer for at, answer in zip(world.at, world.answers, strict=True))
        return "a caller waits for good" if waits else ""

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := world.problem or self._problem(world):
            raise Broken(problem)
        steps, luck = list[tuple[str, World]](), list[tuple[str, World]]()
        for caller, at in enumerate(world.at):
            if not world.answers[caller] and world.sent < self._config.sends:  # for the first time, or once more
                sent = world._replace(at=put(world.at, caller, world.sent), sent=world.sent + 1)
                (luck if at >= 0 else steps).append((f"caller {caller} sends record {world.sent}", sent))
            if not world.answers[caller] and at >= 0 and CommandsRule.C7_NOT_KNOWN in self._out:
                luck.append((f"caller {caller} takes no answer for a failure", self._answered(world, caller, -1)))
        for index, member in enumerate(world.members):
            if member is None:
                steps += self._takes_over(world, index)
                continue
            name = f"owner {member.take}"
            luck += bad_luck(world, index, self._config.takes)
            steps += [(f"{name} {text}", after) for text, after in self._answers(world, member)]
            if member.is_unsure:
                steps += [(f"{name} {text}", after) for text, after in self._settled(world, index, member)]
                continue
            turns, mishaps = self._turn(world, index, member)
            steps += [(f"{name}: {text}", after) for text, after in turns]
            luck += [(f"{name}: {text}", after) for text, after in mishaps]
            if member.memory != member.base or member.rest:
                steps += [(f"{name} {text}", after) for text, after in self._commits(world, index, member)]
                if member.take == world.take:
                    luck.append((f"{name} gets no answer", placed(world, index, member._replace(is_unsure=True))))
        return newest_first(steps), newest_first(luck)

    def _takes_over(self, world: World, index: int) -> Iterator[tuple[str, World]]:
        if world.take < self._config.takes and may_take_over(world):
            member = Member(world.take + 1, world.log, world.log)
            yield f"owner {member.take} takes over", placed(world, index, member)._replace(take=member.take)

    def _turn(self, world: World, index: int, member: Member) -> tuple[Steps[World], Steps[World]]:
        there = member.memory
        if there.position == world.sent or member.rest:
            return [], []
        place, passed = there.position, there._replace(position=there.position + 1)
        if there.kept and CommandsRule.C3_ONCE not in self._out:
            return [(f"record {place} is a copy", placed(world, index, member._replace(memory=passed)))], []
        reply = there.effects + 1
        after, rest = passed._replace(effects=reply, kept=reply), 0
        if CommandsRule.C2_ONE_TRANSACTION in self._out:
            after, rest = after._replace(kept=there.kept), reply
        decided = placed(world, index, member._replace(memory=after, rest=rest))
        failed = passed._replace(failed=there.failed | {place})
        if CommandsRule.D1_FAILED_IS_NOT_SEEN in self._out:
            failed = failed._replace(kept=1)
        mishap = (f"record {place} fails", placed(world, index, member._replace(memory=failed)))
        return [(f"record {place} is decided", decided)], [mishap] if self._config.fails and place == 0 else []

    def _commits(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        if member.take < world.take:
            yield "is fenced", vacated(world, index)
        elif member.memory == member.base:  # the second transaction
            there = member.memory._replace(kept=member.rest)
            yield "keeps the reply", placed(world, index, Member(member.take, there, there))._replace(log=there)
        else:
            settled = member._replace(base=member.memory)
            yield "commits", placed(world, index, settled)._replace(log=member.memory)

    def _settled(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        """Yield the ends of a transaction without an answer: the changelog says which."""
        if member.take < world.take:
            yield "learns that it is lost", vacated(world, index)
            return
        again = member._replace(is_unsure=False)
        yield "learns that it was aborted", placed(world, index, again)
        if member.memory != member.base:
            settled = placed(world, index, again._replace(base=member.memory))
            yield "learns that it was committed", settled._replace(log=member.memory)

    def _answers(self, world: World, member: Member) -> Iterator[tuple[str, World]]:
        # What was committed stays true, so even one that is no owner any more may say it. (That it is one is what the
        # proof of a query adds: for the positions beside the reply, which are not in this model.)
        shown = member.memory if CommandsRule.C7_BEHIND_THE_COMMIT in self._out else member.base
        for caller, at in enumerate(world.at):
            if at < 0 or world.answers[caller]:
                continue
            if shown.kept:
                yield f"answers caller {caller} by the reply {shown.kept}", self._answered(world, caller, shown.kept)
            elif shown.position > at or CommandsRule.C6_FAILED_BEHIND in self._out:
                yield f"answers caller {caller} that record {at} has failed", self._answered(world, caller, -1)

    def _answered(self, world: World, caller: int, answer: int) -> World:
        after = world._replace(answers=put(world.answers, caller, answer))
        if answer < 0 and world.at[caller] not in world.log.failed:
            return after._replace(
                problem=f"caller {caller} gets a failure as its answer, and its record has not failed"
            )
        if answer > 0 and world.log.effects < answer:
            return after._replace(
                problem=f"caller {caller} gets the effect {answer} as its answer, which is not committed"
            )
        return after

    def _problem(self, world: World) -> str:
        if world.log.effects > 1:
            return "one id has had two effects"
        if len({reply for reply in world.answers if reply > 0}) > 1:
            return "two callers have two replies"
        return ""
