"""A source OLD and its rebuilt successor NEW as a model: each cause (a record of an input) is spoken once, by OLD below
the switch vector V, and by NEW from V on, and keys keep their order. Each rule is a switch.

OLD reads input partitions p. NEW reads the same, or, with growth, partitions q, which a re-partitioner fills: it copies
each p in order, exactly once, and a copy names its cause. OLD has one member and one zombie (frozen, expelled, with an
open transaction). Two operators switch and undo at any time, and may die. NEW has a member that may die; its own
zombies are fenced as any member's, and so left out. Nothing of it is in the product yet: the search comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

KEYS = (("A", "B"), ("C",))
"""The keys of the records, by partition of OLD."""
PLACE_OF = {"A": 0, "B": 1, "C": 1}
"""With growth: two keys of one partition go to two, and two partitions have a key in one."""
FAR = (9, 9)

Cause = tuple[int, int]
Vector = tuple[int, int]


class SwitchConfig(NamedTuple):
    """``grows``: NEW has other partitions. ``olds``, ``news``: starts of a member; ``commands``: those of operators."""

    name: str
    grows: bool = False
    olds: int = 1
    commands: int = 2
    news: int = 1


SAME = SwitchConfig("the same partitions")
GROWN = SwitchConfig("other partitions", grows=True, commands=1)
STANDARD = (GROWN, SAME)
DEEP = (SwitchConfig("two starts of each", olds=2, news=2), SwitchConfig("other partitions, undone", grows=True))


class SwitchRule(Enum):
    """A rule of the switch: what happens when it is out, and the world where it is missed."""

    B11_NEVER_BEYOND_OLD = ("NEW passes OLD's committed positions", SAME)
    B14_FENCE = ("what departed members have left open is not ended", SAME)
    B14_SECOND_FENCE = ("it is not ended once more, behind the second look", SAME)
    B14_HOLD = ("no offsets of the group are pending", SAME)
    B14_LOOKS = ("nobody looks whether the group has members", SAME)
    B14_READ_BEHIND_THE_HOLD = ("V is read before the offsets are pending", SAME)
    B15_TAKE_OVER_LOOKS = ("a take-over does not look at the voice", SAME)
    B16_COMMITTED = ("NEW reads V uncommitted", SAME)
    B17_ONE_TRANSACTION = ("that NEW speaks is written behind the first event that it has spoken", SAME)
    B18_HAS_NOT_SPOKEN = ("an undo does not look whether NEW has spoken", SAME)
    B18_NEW_STANDS_STILL = ("an undo while NEW has members", SAME)
    B18_BOTH_ARE_HELD = ("an undo holds OLD's group only", SAME)
    B21_BY_CAUSE = ("a partition of NEW speaks as a whole", GROWN)


class Old(NamedTuple):
    """OLD's member. ``at``: its positions, once it has read its changelog; ``under_way``: the partition of the record
    that its open transaction is about; ``sent``: its offsets are in it."""

    at: Vector | None = None
    under_way: int | None = None
    sent: bool = False


class Operator(NamedTuple):
    """A command: ``step`` is the next one, ``v`` what it has read."""

    is_undo: bool
    step: str = "look"
    v: Vector | None = None


class New(NamedTuple):
    """NEW's member. ``cap``: OLD's positions, as far as it knows; ``v``: it knows that it is to speak from there on.
    ``under_way``: its partition, and whether the event in its open transaction speaks."""

    cap: Vector = (0, 0)
    v: Vector | None = None
    under_way: tuple[int, bool] | None = None


class World(NamedTuple):
    """``old_at``: OLD's committed positions; ``v``: in OLD's changelog, if it does not speak any more. ``holder``: the
    operator whose offsets are pending. ``copied``: by the re-partitioner, in order. ``new_at``: NEW's committed
    positions; ``speaks``: that V, by partitions of NEW whose changelog says that they speak. ``spoken``: causes."""

    old_at: Vector = (0, 0)
    v: Vector | None = None
    old: Old | None = None
    zombie: Old | None = None
    olds: int = 0
    operators: tuple[Operator | None, ...] = (None, None)
    commands: int = 0
    holder: int | None = None
    copied: tuple[Cause, ...] = ()
    new_at: Vector = (0, 0)
    speaks: tuple[Vector | None, ...] = (None, None)
    new: New | None = None
    news: int = 0
    spoken: tuple[tuple[str, Cause], ...] = ()

    def with_operator(self, index: int, operator: Operator | None) -> World:
        """Return it with an operator; one that is gone holds nothing."""
        holder = None if operator is None and self.holder == index else self.holder
        return self._replace(operators=put(self.operators, index, operator), holder=holder)


Found = Iterator[tuple[str, World]]


class SwitchModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: SwitchConfig, out: frozenset[SwitchRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return len(world.spoken) == sum(map(len, KEYS))

    def stalled(self, world: World) -> str:
        return ""  # members and commands are counted: a world may end with none of them left

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := self._problem(world):
            raise Broken(problem)
        steps = [*self._copies(world), *self._old_works(world), *self._new_works(world)]
        luck = list(self._zombie_works(world))
        for index, operator in enumerate(world.operators):
            if operator is None:
                steps += self._begins(world, index)
            else:
                steps += [(f"operator {index} {text}", after) for text, after in self._acts(world, index, operator)]
                luck.append((f"operator {index} dies", world.with_operator(index, None)))
        if world.new is not None:
            luck.append(("NEW dies", world._replace(new=None)))
        return steps, luck

    def _is_out(self, rule: SwitchRule) -> bool:
        return rule in self._out

    def _copies(self, world: World) -> Found:
        for p in range(2) if self._config.grows else ():
            done = sum(cause[0] == p for cause in world.copied)
            if done < len(KEYS[p]):
                yield f"{p}@{done} is copied", world._replace(copied=(*world.copied, (p, done)))

    def _inputs(self, world: World, q: int) -> tuple[Cause, ...]:
        """Return the causes in a partition of NEW's input, in order."""
        if not self._config.grows:
            return tuple((q, offset) for offset in range(len(KEYS[q])))
        return tuple((p, offset) for p, offset in world.copied if PLACE_OF[KEYS[p][offset]] == q)

    # -- OLD -----------------------------------------------------------------------------------------------------------

    def _old_works(self, world: World) -> Found:
        old = world.old
        if old is None:
            if world.olds < self._config.olds:  # the fence of its take-over ends what is open of others
                zombie = None if world.zombie is None else Old()
                yield "OLD joins", world._replace(olds=world.olds + 1, old=Old(), zombie=zombie)
            return
        if old.at is None:
            if world.holder is None:  # its barrier waits for pending offsets
                if world.v is not None and not self._is_out(SwitchRule.B15_TAKE_OVER_LOOKS):
                    yield "OLD reads that it is muted, and leaves", world._replace(old=None)
                else:
                    yield "OLD reads its changelog", world._replace(old=Old(world.old_at))
        elif old.under_way is None:
            for p in range(2):
                if old.at[p] < len(KEYS[p]):
                    yield f"OLD handles {p}@{old.at[p]}", world._replace(old=old._replace(under_way=p))
        elif not old.sent:
            yield "OLD sends offsets", world._replace(old=old._replace(sent=True))
        else:
            at: Vector = put(old.at, old.under_way, old.at[old.under_way] + 1)
            yield "OLD commits", _committed(world, old.under_way)._replace(old=Old(at))
        if old.under_way is None:
            yield "OLD stops", world._replace(old=None)
        elif world.zombie is None:
            yield "OLD freezes, and is expelled", world._replace(old=None, zombie=old)

    def _zombie_works(self, world: World) -> Found:
        zombie = world.zombie
        # One that is open without offsets cannot send them any more: the group refuses its generation.
        if zombie is not None and zombie.under_way is not None and zombie.sent:
            yield "the zombie's commit arrives", _committed(world, zombie.under_way)._replace(zombie=Old())

    # -- operators -----------------------------------------------------------------------------------------------------

    def _begins(self, world: World, index: int) -> Found:
        if world.commands < self._config.commands and not (index == 1 and world.operators[0] is None):  # they are alike
            for is_undo in (False, True):
                begun = world.with_operator(index, Operator(is_undo))._replace(commands=world.commands + 1)
                yield f"operator {index} begins to {'undo' if is_undo else 'switch'}", begun

    def _acts(self, world: World, index: int, operator: Operator) -> Found:
        out, zombie = self._is_out, world.zombie
        blocks_undo = operator.is_undo and world.new is not None and not out(SwitchRule.B18_NEW_STANDS_STILL)
        is_alive = (world.old is not None or blocks_undo) and not out(SwitchRule.B14_LOOKS)
        fenced = world if zombie is None or out(SwitchRule.B14_FENCE) else world._replace(zombie=Old())
        if operator.step == "look":
            if not is_alive:
                reads_early = out(SwitchRule.B14_READ_BEHIND_THE_HOLD)
                after = fenced.with_operator(
                    index, operator._replace(step="hold", v=world.old_at if reads_early else None)
                )
                if world.holder not in (None, index):  # both have one transactional id: the other's is ended
                    after = after.with_operator(1 - index, None)
                yield "looks, and fences", after
        elif operator.step == "hold":
            waits = zombie is not None and zombie.under_way is not None and zombie.sent
            if world.holder is None and (not waits or out(SwitchRule.B14_FENCE)):
                held = None if out(SwitchRule.B14_HOLD) else index
                yield (
                    "holds the offsets",
                    world.with_operator(index, operator._replace(step="again"))._replace(holder=held),
                )
        elif operator.step == "again":
            if is_alive:
                yield "sees a member, and aborts", world.with_operator(index, None)
            else:
                v = operator.v if out(SwitchRule.B14_READ_BEHIND_THE_HOLD) else world.old_at
                ends = not out(SwitchRule.B14_SECOND_FENCE)
                after = (fenced if ends else world).with_operator(index, operator._replace(step="write", v=v))
                yield "fences again, and reads the changelogs", after
        else:
            yield from self._writes(world, index, operator)

    def _writes(self, world: World, index: int, operator: Operator) -> Found:
        v, after = operator.v, world.with_operator(index, None)
        has_spoken = any(world.speaks) and not self._is_out(SwitchRule.B18_HAS_NOT_SPOKEN)
        if (world.v is None) is operator.is_undo or (operator.is_undo and has_spoken):
            yield "is refused", after
        elif operator.is_undo:
            assert world.v is not None
            yield "takes V back", after._replace(v=None, old_at=world.v)
        else:
            assert v is not None
            yield f"commits V={v}", after._replace(v=v, old_at=v)
            if self._is_out(SwitchRule.B16_COMMITTED) and world.new is not None:
                yield "writes V, which NEW reads, and aborts", after._replace(new=world.new._replace(v=v))

    # -- NEW -----------------------------------------------------------------------------------------------------------

    def _new_works(self, world: World) -> Found:
        new = world.new
        if new is None:
            holder = None if world.holder is None else world.operators[world.holder]
            is_held = holder is not None and holder.is_undo and not self._is_out(SwitchRule.B18_BOTH_ARE_HELD)
            if world.news < self._config.news and not is_held:
                known = next(filter(None, world.speaks), None)
                yield "NEW starts", world._replace(news=world.news + 1, new=New(v=known))
            return
        if new.under_way is not None:
            yield self._new_commits(world, new, *new.under_way)
        else:
            cap = FAR if self._is_out(SwitchRule.B11_NEVER_BEYOND_OLD) else world.old_at
            if (informed := new._replace(cap=cap, v=new.v or world.v)) != new:
                yield "NEW reads OLD's changelog", world._replace(new=informed)
            for q in range(2):
                causes = self._inputs(world, q)
                if world.new_at[q] < len(causes):
                    yield from self._new_handles(world, new, q, causes[world.new_at[q]])
        if self._is_out(SwitchRule.B17_ONE_TRANSACTION):
            for q in range(2):
                if world.speaks[q] is None and self._has_spoken(world, q):
                    yield f"NEW writes that {q} speaks", world._replace(speaks=put(world.speaks, q, new.v))

    def _new_handles(self, world: World, new: New, q: int, cause: Cause) -> Found:
        p, offset = cause
        if new.v is not None:
            as_a_whole = self._is_out(SwitchRule.B21_BY_CAUSE) and self._config.grows
            speaks = as_a_whole or offset >= new.v[p]
            yield f"NEW handles {p}@{offset}", world._replace(new=new._replace(under_way=(q, speaks)))
        elif offset < new.cap[p]:
            yield f"NEW handles {p}@{offset}, muted", world._replace(new=new._replace(under_way=(q, False)))

    def _new_commits(self, world: World, new: New, q: int, speaks: bool) -> tuple[str, World]:
        cause = self._inputs(world, q)[world.new_at[q]]
        after = world._replace(new_at=put(world.new_at, q, world.new_at[q] + 1), new=new._replace(under_way=None))
        if speaks:
            after = after._replace(spoken=(*after.spoken, ("NEW", cause)))
            if not self._is_out(SwitchRule.B17_ONE_TRANSACTION):
                after = after._replace(speaks=put(after.speaks, q, new.v))
        return f"NEW commits {cause[0]}@{cause[1]}{', spoken' if speaks else ''}", after

    def _has_spoken(self, world: World, q: int) -> bool:
        return any(("NEW", cause) in world.spoken for cause in self._inputs(world, q)[: world.new_at[q]])

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _problem(self, world: World) -> str:
        causes = [cause for _, cause in world.spoken]
        if len(set(causes)) < len(causes):
            return "a cause is spoken twice"
        for key in PLACE_OF:
            seen = [cause for cause in causes if KEYS[cause[0]][cause[1]] == key]
            if seen != sorted(seen):
                return f"the order of the key {key}"
        for q in range(2):
            for p, offset in self._inputs(world, q)[: world.new_at[q]]:
                if (p, offset) not in causes and world.v is not None and offset >= world.v[p]:
                    return f"{p}@{offset} is behind V, and NEW has passed it in silence"
        for p in range(2):
            for offset in range(world.old_at[p]):
                if (p, offset) not in causes:
                    return f"{p}@{offset} is below OLD's position, and was never spoken"
        return ""


def _committed(world: World, p: int) -> World:
    offset = world.old_at[p]
    spoken = (*world.spoken, ("OLD", (p, offset)))
    return world._replace(old_at=put(world.old_at, p, offset + 1), spoken=spoken)
