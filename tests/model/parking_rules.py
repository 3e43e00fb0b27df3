"""One partition whose keys are parked as a model: of what took effect, a key's events are in order, and each record
below the position took effect once, waits in one queue, or was let go by name. Each rule is a switch.

Records 0 and 1 have the key ``a``, 2 has ``b``. The first fails until a repair is deployed, the second once: where it
has to wait, or perhaps at its turn. A timer of ``a`` is due at any time; 0 cancels it. A transaction has two events at
most. Members die, stand still while another takes over and go on, and get no answer to a commit. An operator asks once
for the first event of the queue to go; the request is delivered any time later, and again. What is the same without
parked keys (fences, barriers, restores) is in ``rules.py``: here a take-over is one step.

``core/parking.py``, ``core/parking_rules.py`` and ``runtime/partition/parked_*.py`` are the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps
from tests.model.two_owners import bad_luck, may_take_over, newest_first, placed, stalled, vacated

KEYS = "aab"
TIMER = 9
"""The event of the timer, in queues and effects."""


class ParkingConfig(NamedTuple):
    """``takes``: take-overs, after the last of which no member dies or stands still. ``operator``: there is a request.
    ``kills``: an attempt at the first record ends the process, instead of failing. ``ahead``: the work of a first event
    runs ahead of its turn, while the partition goes on."""

    name: str
    takes: int = 2
    operator: bool = True
    kills: bool = False
    ahead: bool = False


ONE = ParkingConfig("one owner", takes=1)
PLAIN = ParkingConfig("two owners")
KILLED = ParkingConfig("an event that ends its process", takes=3, operator=False, kills=True)
AHEAD = ParkingConfig("work ahead", ahead=True)
KILLED_AHEAD = ParkingConfig("work ahead that ends its process", takes=3, operator=False, kills=True, ahead=True)
THREE = ParkingConfig("three owners", takes=3)
STANDARD = (ONE, KILLED, KILLED_AHEAD, PLAIN, AHEAD)
DEEP = (THREE,)


class ParkingRule(Enum):
    """A rule of parked keys: what happens when it is out, and the world where it is missed."""

    P1_ONE_TRANSACTION = ("the queue is written by a transaction behind that of the position", PLAIN)
    P2_DECIDED_AT_THE_TURN = ("whether a key is parked is decided when the work of an event begins ahead", PLAIN)
    P3_LATER_EVENTS_QUEUE = ("later events of a parked key are handled", PLAIN)
    P4_LEAVES_WITH_ITS_EFFECTS = ("the first event leaves the queue by a transaction behind its effects", PLAIN)
    P5_OPENS_WHEN_EMPTY = ("the key opens when its first event has succeeded", PLAIN)
    P6_TIMERS_STAY_SET = ("a timer that is due is copied into the queue", PLAIN)
    P7_NAMES_THE_HEAD = ("an operator's request is for the first event, whichever that is", PLAIN)
    P7_NUMBERS_GO_ON = ("the numbers of a key's queues begin with 0 each time", PLAIN)
    P8_OLDER_RELEASES_REFUSE = ("an older release takes the partition without its queues", PLAIN)
    P9_MEMORY_FOLLOWS = ("a member that was lost goes on with its memory", THREE)
    P10_ONE_AT_A_TIME = ("a first event is tried again while its work is under way", AHEAD)
    P10_WITHDRAWN = ("the work of an event that was let go is taken for that of the next one", AHEAD)
    P12_NOTED_BEFORE_TRIED = ("a first event that was found is tried at once, without a note", KILLED)
    P12_NOTED_BEFORE_ITS_WORK = ("the note is written at the turn, behind the work ahead", KILLED_AHEAD)


class Partition(NamedTuple):
    """``queue``: events of ``a`` that wait, the first one with this ``number``. ``came``: how the events of ``a`` had
    their places. ``noted``: the take-over whose owner was going to try the first event."""

    position: int = 0
    queue: tuple[int, ...] = ()
    number: int = 0
    done: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    timer: str = "set"
    retried: bool = False
    dropped: tuple[int, ...] = ()
    noted: int = 0


class Member(NamedTuple):
    """``take``: its take-over; ``memory``: the partition; ``base``: as it was last known to be committed; ``steps``
    since then. ``ahead``: whether its key was parked when the work of record 1 began ahead; ``None``: it did not.
    ``is_due``: the first event of the queue may be tried. ``work``: the event whose work is under way as that of the
    first one, ``has_ended``: its end is there, and waits for the turn."""

    take: int
    memory: Partition
    base: Partition
    is_unsure: bool = False
    steps: int = 0
    ahead: bool | None = None
    is_due: bool = True
    work: int | None = None
    has_ended: bool = False


class World(NamedTuple):
    """``log``: the partition in the changelog; ``rest``: a queue that a second transaction is to write. ``frozen``: the
    member that another one may replace. ``asked``: the number in the operator's request; ``delivered``: how often it
    was. ``kills``: processes that an event has ended since time went by."""

    members: tuple[Member | None, ...] = (None, None)
    log: Partition = Partition()
    rest: tuple[int, ...] | None = None
    take: int = 0
    frozen: int = -1
    repaired: bool = False
    asked: int | None = None
    delivered: int = 0
    kills: int = 0
    problem: str = ""


class ParkingModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: ParkingConfig, out: frozenset[ParkingRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.log.position == len(KEYS) and not world.log.queue

    def stalled(self, world: World) -> str:
        return stalled(world, is_done=self.done(world), kills=self._config.kills)

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := world.problem or _problem(world):
            raise Broken(problem)
        steps, luck = list(self._outside(world)), list[tuple[str, World]]()
        for index, member in enumerate(world.members):
            if member is None:
                steps += self._takes_over(world, index)
                continue
            name = f"owner {member.take}"
            luck += bad_luck(world, index, self._config.takes)
            if member.is_unsure:
                steps += [(f"{name} {text}", after) for text, after in self._settled(world, index, member)]
                continue
            steps += [(f"{name}: {text}", after) for text, after in self._works(world, index, member)]
            if member.memory != member.base:
                steps += [(f"{name} {text}", after) for text, after in self._commits(world, index, member)]
                if ParkingRule.P1_ONE_TRANSACTION not in self._out and member.take == world.take:
                    luck.append((f"{name} gets no answer", placed(world, index, member._replace(is_unsure=True))))
        return newest_first(steps), newest_first(luck)

    def _outside(self, world: World) -> Iterator[tuple[str, World]]:
        if not world.repaired:
            yield "a repair is deployed", world._replace(repaired=True)
        if self._config.operator and world.asked is None and world.log.queue:
            yield "an operator asks for the first event to go", world._replace(asked=world.log.number)
        if world.rest is not None:
            yield "the second transaction", world._replace(log=world.log._replace(queue=world.rest), rest=None)
        if world.kills or any(member is not None and not member.is_due for member in world.members):
            due = tuple(member and member._replace(is_due=True) for member in world.members)
            yield "time goes by", world._replace(kills=0, members=due)

    def _takes_over(self, world: World, index: int) -> Iterator[tuple[str, World]]:
        if world.take == self._config.takes or not may_take_over(world):
            return
        found = world.log
        if ParkingRule.P8_OLDER_RELEASES_REFUSE in self._out and world.take:
            found = found._replace(queue=())
        member = Member(world.take + 1, found, world.log, is_due=not world.log.noted)
        yield f"owner {member.take} takes over", placed(world, index, member)._replace(take=member.take, rest=None)

    # -- the owner -----------------------------------------------------------------------------------------------------

    def _works(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        there = member.memory
        if ParkingRule.P2_DECIDED_AT_THE_TURN in self._out and not there.position and member.ahead is None:
            ahead = member._replace(ahead=bool(there.queue))
            yield "the work of 1 begins ahead", placed(world, index, ahead)
        if member.steps == 2:
            return

        def stepped(after: Partition) -> World:
            return placed(world, index, member._replace(memory=after, steps=member.steps + 1))

        if there.position < len(KEYS):
            yield f"the turn of {there.position}", stepped(self._turn(world, member))
            if there.position == 1 and not there.queue and not there.retried:
                failed = there._replace(position=2, queue=(1,), came=(*there.came, 1), retried=True)
                yield "1 fails at its turn", stepped(failed)
        if there.timer == "set":
            came = there._replace(came=(*there.came, TIMER))
            if there.queue:
                copies = ParkingRule.P6_TIMERS_STAY_SET in self._out
                queued = came._replace(queue=(*there.queue, TIMER), timer="copied" if copies else "queued")
                yield "the timer takes a place", stepped(queued)
            else:
                yield "the timer fires", stepped(came._replace(done=(*there.done, TIMER), timer="fired"))
        if there.queue:
            for text, after in self._head(world, index, member):
                yield text, after if isinstance(after, World) else stepped(after)
        asked = world.asked
        is_meant = asked == there.number or ParkingRule.P7_NAMES_THE_HEAD in self._out
        if there.queue and asked is not None and is_meant and world.delivered < 2:
            text = f"the operator's request lets {there.queue[0]} go"
            gone = member._replace(memory=self._let_go(there), steps=member.steps + 1)
            if ParkingRule.P10_WITHDRAWN not in self._out:
                gone = gone._replace(work=None, has_ended=False)
            yield text, placed(world, index, gone)._replace(delivered=world.delivered + 1)

    def _turn(self, world: World, member: Member) -> Partition:
        there, event = member.memory, member.memory.position
        after = there._replace(position=event + 1)
        if KEYS[event] == "a":
            after = after._replace(came=(*there.came, event))
        is_parked = bool(there.queue) if member.ahead is None or event != 1 else member.ahead
        queues = KEYS[event] == "a" and is_parked and ParkingRule.P3_LATER_EVENTS_QUEUE not in self._out
        if queues or (event == 0 and not world.repaired):
            return after._replace(queue=(*there.queue, event))
        return _handled(after, event)

    def _head(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World | Partition]]:
        """Yield the attempts at the first event of the queue."""
        there, event, out = member.memory, member.memory.queue[0], self._out
        if self._config.kills and event == 0 and not world.repaired:
            is_found = member.take > 1
            is_early = self._config.ahead and ParkingRule.P12_NOTED_BEFORE_ITS_WORK in out
            is_early |= ParkingRule.P12_NOTED_BEFORE_TRIED in out
            if not (member.is_due and is_found):
                return
            if there.noted != member.take and not is_early:
                yield "notes that it tries 0", there._replace(noted=member.take)
            elif not (member.base.noted == member.take or is_early):
                return
            elif self._config.ahead and member.work is None:
                yield "the work of 0 begins", placed(world, index, member._replace(work=0))
            else:
                kills = world.kills + (member.take == world.take)  # one that stood still may die of it at any time
                yield "0 ends the process", vacated(world, index)._replace(kills=kills)
            return
        if event == TIMER:
            left = self._left(there)
            is_set = there.timer in ("queued", "copied")
            yield "the timer has its turn", left._replace(done=(*there.done, TIMER), timer="fired") if is_set else left
        elif self._config.ahead:
            yield from self._ahead(world, index, member)
        elif event == 1 and not there.retried:
            yield "1 fails again", there._replace(retried=True)
        elif event != 0 or world.repaired:
            after = _handled(there, event)
            if ParkingRule.P4_LEAVES_WITH_ITS_EFFECTS in out:
                yield f"{event} is handled", after
                if event in there.done:
                    yield f"{event} leaves", self._left(there)
            elif ParkingRule.P5_OPENS_WHEN_EMPTY in out:
                yield f"{event} is handled, and the key opens", after._replace(queue=())
            else:
                yield f"{event} is handled", self._left(after)

    def _ahead(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        """Yield the steps of the first event's work: it begins, ends, and has its turn."""
        there, event = member.memory, member.work
        if event is None:
            yield f"the work of {there.queue[0]} begins", placed(world, index, member._replace(work=there.queue[0]))
        elif not member.has_ended:
            yield f"the work of {event} ends", placed(world, index, member._replace(has_ended=True))
            if ParkingRule.P10_ONE_AT_A_TIME in self._out:
                yield f"the work of {event} begins again", world._replace(problem=f"two calls for {event} at a time")
        else:
            turned = member._replace(steps=member.steps + 1, work=None, has_ended=False)
            if event == 0 and not world.repaired:
                yield "0 fails again", placed(world, index, turned._replace(steps=member.steps))
            else:
                after = self._left(_handled(there, event))
                yield f"{event} has its turn", placed(world, index, turned._replace(memory=after))

    def _left(self, there: Partition) -> Partition:
        number = there.number + 1
        if len(there.queue) == 1 and ParkingRule.P7_NUMBERS_GO_ON in self._out:
            number = 0
        return there._replace(queue=there.queue[1:], number=number, noted=0)

    def _let_go(self, there: Partition) -> Partition:
        event = there.queue[0]
        timer = "cancelled" if event == TIMER and there.timer in ("queued", "copied") else there.timer
        return self._left(there)._replace(dropped=(*there.dropped, event), timer=timer)

    # -- its transactions ----------------------------------------------------------------------------------------------

    def _commits(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        there = member.memory
        if member.take < world.take:
            yield "is fenced", self._lost(world, index, member)
        elif world.rest is None:
            new, rest = there, None
            if ParkingRule.P1_ONE_TRANSACTION in self._out and there.queue != member.base.queue:
                new, rest = there._replace(queue=member.base.queue), there.queue
            before = world.log.done
            goes_back = there.position < world.log.position or there.done[: len(before)] != before
            after = placed(world, index, member._replace(base=there, steps=0))._replace(log=new, rest=rest)
            yield "commits", after._replace(problem="a commit sets back another one" if goes_back else "")

    def _settled(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        """Yield the ends of a transaction without an answer: the changelog says which."""
        if member.take < world.take:
            yield "learns that it is lost", self._lost(world, index, member)
            return
        again = member._replace(is_unsure=False)
        yield "learns that it was aborted", placed(world, index, again)
        committed = again._replace(base=member.memory, steps=0)
        yield "learns that it was committed", placed(world, index, committed)._replace(log=member.memory)

    def _lost(self, world: World, index: int, member: Member) -> World:
        if ParkingRule.P9_MEMORY_FOLLOWS not in self._out or world.take == self._config.takes:
            return vacated(world, index)
        back = member._replace(take=world.take + 1, base=world.log, is_unsure=False, steps=0)
        return placed(vacated(world, index), index, back)._replace(take=back.take)


def _handled(there: Partition, event: int) -> Partition:
    after = there._replace(done=(*there.done, event))
    return after._replace(timer="cancelled") if event == 0 and there.timer in ("set", "queued") else after


def _problem(world: World) -> str:
    log = world.log
    waits = log.queue if world.rest is None else world.rest
    if len(set(log.done)) < len(log.done):
        return "an event took effect twice"
    for event in range(log.position):
        if (event in log.done) + (event in waits) + (event in log.dropped) != 1:
            return f"record {event} is below the position, and not once done, in the queue, or let go"
    of_a = [event for event in log.done if event == TIMER or KEYS[event] == "a"]
    if of_a != sorted(of_a, key=log.came.index):
        return f"the events of a took effect as {of_a}, and had their places as {[*log.came]}"
    if len(log.dropped) > 1:
        return "one request let two events go"
    if TIMER in log.done and 0 in log.done[: log.done.index(TIMER)]:
        return "the timer has fired although an earlier event of its key had cancelled it"
    return "one event has ended two processes at once" if world.kills > 1 else ""
