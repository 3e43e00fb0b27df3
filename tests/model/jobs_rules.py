"""One partition with durable jobs as a model: calls are made for committed events only, with one id for each job, and a
job's result is handled once, or not at all if the job was cancelled. Each rule is a switch.

Record 0 starts two jobs of one order, 1 and 2; record 1 sets the name of 1 again: 1 is cancelled, and 3 starts. A run
ends well, fails, or ends its process. Members die, stand still while another takes over and go on, and get no answer to
a commit; one hands the partition over by its marker. What is the same without jobs (fences, barriers, restores) is in
``rules.py``: here a take-over is one step.

``core/jobs.py`` and ``runtime/partition/job_runs.py`` are the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps
from tests.model.two_owners import bad_luck, may_take_over, newest_first, placed, stalled, vacated

ATTEMPTS = 1
"""Failed attempts behind which a job has failed for good."""


class JobsConfig(NamedTuple):
    """``takes``: take-overs, after the last of which no member dies or stands still. ``ordered``: job 2 is there, in
    the order of job 1. ``moves``: planned moves. ``again``: record 1 is there. ``kills``: a run may end its process;
    ``fails``: or fail."""

    name: str
    takes: int = 2
    ordered: bool = False
    moves: int = 1
    again: bool = True
    kills: bool = False
    fails: bool = True


PLAIN = JobsConfig("two owners")
ORDER = JobsConfig("an order", takes=2, ordered=True, moves=0, again=False)
KILLED = JobsConfig("a job that ends its process", takes=4, moves=0, again=False, kills=True, fails=False)
THREE = JobsConfig("three owners", takes=3)
STANDARD = (PLAIN, ORDER, KILLED)
DEEP = (THREE,)


class JobsRule(Enum):
    """A rule of durable jobs: what happens when it is out, and the world where it is missed."""

    J1_ONE_TRANSACTION = ("a job's record is written by a transaction behind that of its event", PLAIN)
    J2_BEHIND_THE_COMMIT = ("a job begins when its event is handled", PLAIN)
    J3_LEAVES_WITH_ITS_END = ("a job's record goes by a transaction behind the effects of its end", PLAIN)
    J4_ONE_ID = ("each attempt has an id of its own", PLAIN)
    J5_DONOR_ENDS_RUNS = ("a donor hands over while jobs run", PLAIN)
    J6_OF_ITS_START = ("a result is taken for the job that has the name by now", PLAIN)
    J7_NOTED_BEFORE_TRIED = ("a job that was found is tried at once, without a note", KILLED)
    J9_ORDER = ("a job begins although one before it in its order is there", ORDER)
    J12_CLOSED = ("a job begins after the donor has ended its runs", PLAIN)


class Job(NamedTuple):
    """``noted``: the take-over whose owner was going to run it."""

    number: int
    attempts: int = 0
    noted: int = 0


class Partition(NamedTuple):
    """``jobs``: in the order of their starts; ``started``, ``ended`` and ``cancelled``: their numbers."""

    position: int = 0
    jobs: tuple[Job, ...] = ()
    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()


class Member(NamedTuple):
    """``take``: its take-over; ``memory``: the partition; ``base``: as it was last known to be committed. ``runs``: the
    numbers of jobs with the states of their runs. ``found``: the jobs that it has found, and not been handed or begun.
    ``closes``: it is about to hand over."""

    take: int
    memory: Partition
    base: Partition
    runs: tuple[tuple[int, str], ...] = ()
    found: frozenset[int] = frozenset()
    is_unsure: bool = False
    closes: bool = False


class World(NamedTuple):
    """``log``: the partition in the changelog; ``rest``: jobs that a second transaction is to write. ``frozen``: the
    member that another one may replace. ``ids``: job and id of each call that was made; ``calls``: how many, as far as
    they have ids of their own."""

    members: tuple[Member | None, ...] = (None, None)
    log: Partition = Partition()
    rest: tuple[Job, ...] | None = None
    take: int = 0
    moves: int = 0
    frozen: int = -1
    ids: frozenset[tuple[int, int]] = frozenset()
    calls: int = 0
    kills: int = 0
    problem: str = ""


class JobsModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: JobsConfig, out: frozenset[JobsRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.log.position == 1 + self._config.again and not world.log.jobs

    def stalled(self, world: World) -> str:
        return stalled(world, is_done=self.done(world), kills=self._config.kills)

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := world.problem or self._problem(world):
            raise Broken(problem)
        steps, luck = list[tuple[str, World]](), list[tuple[str, World]]()
        if world.rest is not None:
            steps.append(("the second transaction", world._replace(log=world.log._replace(jobs=world.rest), rest=None)))
        for index, member in enumerate(world.members):
            if member is None:
                steps += self._takes_over(world, index)
                continue
            name = f"owner {member.take}"
            luck += bad_luck(world, index, self._config.takes)
            steps += [(f"{name}: {text}", after) for text, after in self._runs_end(world, index, member)]
            if member.is_unsure:
                steps += [(f"{name} {text}", after) for text, after in self._settled(world, index, member)]
                continue
            steps += [(f"{name}: {text}", after) for text, after in self._works(world, index, member)]
            if member.memory != member.base:
                steps += [(f"{name} {text}", after) for text, after in self._commits(world, index, member)]
                if JobsRule.J1_ONE_TRANSACTION not in self._out and member.take == world.take:
                    luck.append((f"{name} gets no answer", placed(world, index, member._replace(is_unsure=True))))
            elif member.take == world.take and world.frozen != index:
                steps += [(f"{name} {text}", after) for text, after in self._hands_over(world, index, member)]
        return newest_first(steps), newest_first(luck)

    def _takes_over(self, world: World, index: int) -> Iterator[tuple[str, World]]:
        if world.take == self._config.takes or not may_take_over(world):
            return
        take, log = world.take + 1, world.log
        found = log
        if JobsRule.J7_NOTED_BEFORE_TRIED not in self._out:  # a noted attempt has ended with its process
            jobs = tuple(job._replace(attempts=job.attempts + (job.noted > 0), noted=0) for job in log.jobs)
            found = log._replace(jobs=jobs)
        member = Member(take, found, log, found=frozenset(job.number for job in log.jobs))
        yield f"owner {take} takes over", placed(world, index, member)._replace(take=take, rest=None)

    # -- the owner -----------------------------------------------------------------------------------------------------

    def _works(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        there, out = member.memory, self._out

        def changed(after: Partition, runs: tuple[tuple[int, str], ...] | None = None) -> World:
            made = member._replace(memory=after, runs=member.runs if runs is None else runs)
            return placed(world, index, made)

        if there.position == 0:
            numbers = (1, 2) if self._config.ordered else (1,)
            jobs = tuple(map(Job, numbers))
            yield "the turn of 0", changed(there._replace(position=1, jobs=jobs, started=numbers))
        elif there.position == 1 and self._config.again:
            kept = tuple(job for job in there.jobs if job.number != 1)
            cancelled = (1,) if kept != there.jobs else ()
            jobs, started = (*kept, Job(3)), (*there.started, 3)
            after = there._replace(position=2, jobs=jobs, started=started, cancelled=cancelled)
            yield "the turn of 1", changed(after)
        known = {job.number: job for job in (there if JobsRule.J2_BEHIND_THE_COMMIT in out else member.base).jobs}
        for place, job in enumerate(there.jobs):
            others = tuple(one for one in there.jobs if one != job)
            if job.number in dict(member.runs):
                continue
            if job.attempts >= ATTEMPTS:
                ended = there._replace(jobs=others, ended=(*there.ended, job.number))
                yield f"{job.number} has failed for good", changed(ended)
                continue
            # One that was before it has left only when that is committed.
            before = place or any(one.number == 1 and job.number == 2 for one in member.base.jobs)
            waits = self._config.ordered and before and JobsRule.J9_ORDER not in out
            is_closed = member.closes and JobsRule.J12_CLOSED not in out
            if job.number not in known or waits or is_closed:
                continue
            must_note = job.number in member.found and JobsRule.J7_NOTED_BEFORE_TRIED not in out
            if must_note and job.noted != member.take:
                noted = tuple(one._replace(noted=member.take) if one == job else one for one in there.jobs)
                yield f"notes that it runs {job.number}", changed(there._replace(jobs=noted))
            elif not must_note or known[job.number].noted == member.take:
                has_own_ids = JobsRule.J4_ONE_ID in out
                called = world._replace(
                    ids=world.ids | {(job.number, world.calls if has_own_ids else job.number)},
                    calls=min(world.calls + has_own_ids, 2),
                )
                if job.number not in world.log.started:
                    called = called._replace(problem=f"a call of {job.number}, whose event is not committed")
                earlier = [one.number for one in world.log.jobs if one.number < job.number]
                if self._config.ordered and earlier and member.take == world.take:
                    called = called._replace(problem=f"a call of {job.number} before {earlier[0]} is over")
                runs = tuple(sorted((*member.runs, (job.number, "running"))))
                begun = member._replace(runs=runs, found=member.found - {job.number})
                yield f"{job.number} begins", placed(called, index, begun)
        for number, state in member.runs:
            if state != "running":
                rest = tuple(run for run in member.runs if run[0] != number)
                yield from self._end(there, number, state, rest, changed)
            elif number in member.base.cancelled:
                rest = tuple(run for run in member.runs if run[0] != number)
                yield f"the run of {number} is cancelled", changed(there, rest)
        if JobsRule.J3_LEAVES_WITH_ITS_END in out:
            for job in there.jobs:
                if job.number in there.ended:
                    yield f"{job.number} leaves", changed(there._replace(jobs=_without(there.jobs, job.number)))

    def _end(
        self,
        there: Partition,
        number: int,
        state: str,
        rest: tuple[tuple[int, str], ...],
        changed: Callable[[Partition, tuple[tuple[int, str], ...]], World],
    ) -> Iterator[tuple[str, World]]:
        jobs = there.jobs
        taken = next((job for job in jobs if job.number == number), None)
        if taken is None and JobsRule.J6_OF_ITS_START in self._out:
            taken = next((job for job in jobs if job.number == 3 and number == 1), None)
        if taken is None:
            yield f"a result of {number} is dropped", changed(there, rest)
        elif state == "failed":
            failed = tuple(one._replace(attempts=one.attempts + 1, noted=0) if one == taken else one for one in jobs)
            yield f"the failure of {number} is noted", changed(there._replace(jobs=failed), rest)
        else:
            after = there._replace(ended=(*there.ended, number))
            if JobsRule.J3_LEAVES_WITH_ITS_END not in self._out:
                after = after._replace(jobs=_without(jobs, taken.number))
            yield f"the result of {number}", changed(after, rest)

    def _runs_end(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        for number, state in member.runs:
            if state == "running":
                rest = tuple(run for run in member.runs if run[0] != number)
                for end in ("good", "failed") if self._config.fails else ("good",):
                    runs = tuple(sorted((*rest, (number, end))))
                    yield f"the run of {number} is {end}", placed(world, index, member._replace(runs=runs))
                if self._config.kills and (world.take < self._config.takes or member.take < world.take):
                    yield f"the run of {number} ends the process", vacated(world, index)._replace(kills=world.kills + 1)

    # -- its transactions ----------------------------------------------------------------------------------------------

    def _commits(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        there = member.memory
        if member.take < world.take:
            yield "is fenced", vacated(world, index)
        elif world.rest is None:
            new, rest = there, None
            if JobsRule.J1_ONE_TRANSACTION in self._out and len(there.started) > len(member.base.started):
                new, rest = there._replace(jobs=member.base.jobs), there.jobs
            yield "commits", placed(world, index, member._replace(base=there))._replace(log=new, rest=rest)

    def _settled(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        """Yield the ends of a transaction without an answer: the changelog says which."""
        if member.take < world.take:
            yield "learns that it is lost", vacated(world, index)
            return
        again = member._replace(is_unsure=False)
        yield "learns that it was aborted", placed(world, index, again)
        yield (
            "learns that it was committed",
            placed(world, index, again._replace(base=member.memory))._replace(log=member.memory),
        )

    def _hands_over(self, world: World, index: int, member: Member) -> Iterator[tuple[str, World]]:
        if world.moves == self._config.moves or world.members[1 - index] is not None:
            return
        if world.take == self._config.takes:
            return
        runs_on = any(state == "running" for _, state in member.runs)
        if not member.closes:
            kept = () if JobsRule.J5_DONOR_ENDS_RUNS not in self._out else member.runs
            yield "ends its runs for a move", placed(world, index, member._replace(closes=True, runs=kept))
            return
        take = world.take + 1
        moved = world._replace(take=take, moves=world.moves + 1)
        receiver = Member(take, member.memory, member.memory)
        donor = member if runs_on else None  # what still runs, runs on although its owner has handed over
        yield "hands over", placed(placed(moved, 1 - index, receiver), index, donor)

    def _problem(self, world: World) -> str:
        log = world.log
        waits = log.jobs if world.rest is None else world.rest
        for number in log.started:
            there = sum(job.number == number for job in waits)
            ends = log.ended.count(number) + log.cancelled.count(number)
            if ends > 1:
                return f"job {number} has ended, or was cancelled, twice"
            if not there and not ends and (world.rest is None):
                return f"the event is committed, and its job {number} is lost"
        if len({job for job, _ in world.ids}) < len(world.ids):
            return "two calls of one job had two ids"
        if world.kills > ATTEMPTS + 1:
            return f"a job has ended {world.kills} processes"
        healthy = [member for index, member in enumerate(world.members) if member is not None and index != world.frozen]
        if len(healthy) == 2:
            first, second = ({number for number, state in member.runs if state == "running"} for member in healthy)
            if first & second:
                return f"job {min(first & second)} runs on two members, none of which stands still"
        return ""


def _without(jobs: tuple[Job, ...], number: int) -> tuple[Job, ...]:
    return tuple(job for job in jobs if job.number != number)
