"""A state that is loaded from outside in several transactions, as a model: a source of two partitions begins with all
rows of one run and its position, or without any. Each rule is a switch.

Two operators, each with rows of its own, may load at any time, die, and be run again: first a mark in all partitions,
then rows, each in a transaction of its own, then the positions of both. They have one transactional id. Members start
at any time, of this release or of an older one, which knows no marks but those in the offset record. Nothing of it is
in the product yet, which loads a state in one transaction: the search comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps

ROWS = (frozenset("ab"), frozenset("bc"))
"""The rows of a partition by each run."""


class LoadingConfig(NamedTuple):
    """``commands``: how many are begun; ``starts``: of members."""

    name: str
    commands: int = 3
    starts: int = 2


PLAIN = LoadingConfig("two runs")
STANDARD = (PLAIN,)
DEEP = (LoadingConfig("many runs", commands=4, starts=3),)


class LoadingRule(Enum):
    """A rule of loading: what happens when it is out, and the world where it is missed."""

    B4_MARKED_FIRST = ("rows are written before the partitions are marked", PLAIN)
    B4_POSITION_LAST = ("the position of a partition is written with its rows", PLAIN)
    B4_OTHER_RUN_DELETES = ("another run writes its rows over those of the former", PLAIN)
    B4_OLDER_RELEASES_REFUSE = ("the mark is none that an older release knows", PLAIN)
    B4_HELD = ("a transaction of rows is not held against members that start", PLAIN)
    B2_NO_PAST = ("a source that has begun is loaded", PLAIN)


class Partition(NamedTuple):
    """``loading``: the run that has marked it; ``begun``: the one whose position it has; ``BY_ITSELF``: a member began
    with what there was."""

    rows: frozenset[str] = frozenset()
    loading: int | None = None
    begun: int | None = None


BY_ITSELF = -1


class Operator(NamedTuple):
    """A run of the command, of the rows of ``run``. ``step``: the transactions that it has committed. ``is_open``: one
    is under way, and held; ``has_looked``: behind that."""

    run: int
    step: int = 0
    is_open: bool = False
    has_looked: bool = False


class World(NamedTuple):
    """``operator``: the one that has the id; ``member``: one works, of an older release or not. ``is_lost``: a position
    was overwritten."""

    partitions: tuple[Partition, Partition] = (Partition(), Partition())
    operator: Operator | None = None
    member: str = ""
    is_lost: bool = False
    commands: int = 0
    starts: int = 0


class LoadingModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: LoadingConfig, out: frozenset[LoadingRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return all(partition.begun is not None for partition in world.partitions) and not world.operator

    def stalled(self, world: World) -> str:
        return ""  # commands are counted: the last one may have died

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := self._problem(world):
            raise Broken(problem)
        steps = list(self._begins(world))
        luck = []
        if world.operator is not None:
            steps += self._loads(world, world.operator)
            luck.append(("the operator dies", world._replace(operator=None)))
        if world.member:
            steps.append(("the member stops", world._replace(member="")))
        elif world.starts < self._config.starts:
            steps += self._starts(world)
        return steps, luck

    def _begins(self, world: World) -> Iterator[tuple[str, World]]:
        if world.commands < self._config.commands:
            for run in range(2):  # the id of the one before, with its transaction, is ended
                begun = world._replace(operator=Operator(run), commands=world.commands + 1)
                yield f"a command with the rows of {run}", begun

    def _is_out(self, rule: LoadingRule) -> bool:
        return rule in self._out

    def _loads(self, world: World, operator: Operator) -> Iterator[tuple[str, World]]:
        run, step = operator.run, operator.step
        has_begun = any(partition.begun is not None for partition in world.partitions)
        if not operator.is_open:
            if has_begun and step == 0 and not self._is_out(LoadingRule.B2_NO_PAST):
                yield "it has begun: refused", world._replace(operator=None)
            elif not world.member:
                yield "begins a transaction", world._replace(operator=operator._replace(is_open=True))
            return
        if not operator.has_looked:
            is_past = has_begun and not {LoadingRule.B2_NO_PAST, LoadingRule.B4_POSITION_LAST} & self._out
            if world.member or is_past:
                yield "sees that somebody was there, and aborts", world._replace(operator=None)
            else:
                yield "looks", world._replace(operator=operator._replace(has_looked=True))
            return
        rows = sorted(ROWS[run])
        order = ["mark", *(f"{row}/{number}" for number in range(2) for row in rows), "positions"]
        if self._is_out(LoadingRule.B4_MARKED_FIRST):
            order = [order[1], "mark", *order[2:]]
        after, what = world.partitions, order[step]
        if what == "mark":
            world = world._replace(is_lost=any(each.begun is not None for each in after))
            after = (self._marked(after[0], run), self._marked(after[1], run))
        elif what == "positions":
            after = (after[0]._replace(loading=None, begun=run), after[1]._replace(loading=None, begun=run))
        else:
            row, number = what[0], int(what[-1])
            begun = run if self._is_out(LoadingRule.B4_POSITION_LAST) else after[number].begun
            filled = after[number]._replace(rows=after[number].rows | {row}, begun=begun)
            after = (filled, after[1]) if number == 0 else (after[0], filled)
        next_one = Operator(run, step + 1) if step + 1 < len(order) else None
        yield f"commits {what} of {run}", world._replace(partitions=after, operator=next_one)

    def _marked(self, partition: Partition, run: int) -> Partition:
        deletes = partition.loading != run and not self._is_out(LoadingRule.B4_OTHER_RUN_DELETES)
        return Partition(frozenset() if deletes else partition.rows, loading=run)  # in place of a position

    def _starts(self, world: World) -> Iterator[tuple[str, World]]:
        operator = world.operator
        if operator is not None and operator.is_open and not self._is_out(LoadingRule.B4_HELD):
            return  # its barrier waits for the pending offsets
        for release in ("this release", "an older release"):
            knows_marks = release == "this release" or not self._is_out(LoadingRule.B4_OLDER_RELEASES_REFUSE)
            started = world._replace(starts=world.starts + 1)
            if knows_marks and any(each.loading is not None for each in world.partitions if each.begun is None):
                yield f"{release} refuses", started
            else:
                first, second = (
                    each._replace(begun=BY_ITSELF) if each.begun is None else each for each in world.partitions
                )
                yield f"{release} works", started._replace(partitions=(first, second), member=release)

    def _problem(self, world: World) -> str:
        begun = [partition.begun for partition in world.partitions]
        if world.is_lost:
            return "the position of a source that has begun is overwritten"
        if not world.member:
            return ""
        for number, partition in enumerate(world.partitions):
            wanted = frozenset() if partition.begun in (None, BY_ITSELF) else ROWS[partition.begun]
            if partition.rows != wanted:
                return f"a member works on the rows {''.join(sorted(partition.rows))} of partition {number}"
        if len(set(begun)) > 1:
            return f"a member works on partitions that began by different runs: {begun}"
        return ""
