"""Timers around the switch from a source OLD to its successor NEW, as a model: one partition, one name. Each due time
that OLD has not replaced is spoken once, by one of them. Each rule is a switch.

Record 0 sets the timer due at 1. Record 1, whose clock is ahead (it is here at 1, and stamped 2), sets it anew, due at
3. Record 2 is stamped 3. NEW dies at any time: what it knows of OLD is gone then, and what it has committed stays.
Nothing of it is in the product yet: the search comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps


class Told(NamedTuple):
    """A record: when it is ``here``, its time, and when the timer is due that it sets."""

    here: int
    time: int
    due: int | None


RECORDS = (Told(0, 0, 1), Told(1, 2, 3), Told(3, 3, None))
LAST = 5


class TimersConfig(NamedTuple):
    """``deaths``: of NEW."""

    name: str
    deaths: int = 2


PLAIN = TimersConfig("one timer")
STANDARD = (PLAIN,)
DEEP = (TimersConfig("many deaths", deaths=4),)


class TimersRule(Enum):
    """A rule of timers: what happens when it is out, and the world where it is missed."""

    B13_OLDS_PENDING_STAY = ("NEW fires in silence what OLD has pending", PLAIN)
    B13_NEVER_BY_THE_CLOCK = ("NEW fires in silence by the clock", PLAIN)
    B13_OLDS_AT_V = ("what OLD has fired before V is not fired in silence at V", PLAIN)
    B17_ONE_TRANSACTION = ("that NEW speaks is not in the transaction of what it speaks first", PLAIN)
    B16_LOOKS_AGAIN = ("NEW takes an older copy of what OLD has pending for that at V", PLAIN)


class Pending(NamedTuple):
    """``at``: a position; ``due``: of the timer; ``None``: it is not set."""

    at: int = 0
    due: int | None = None


class World(NamedTuple):
    """``old``, ``new``: in their changelogs. ``v``: OLD's at the switch, which was at ``switched_at``. ``looked``: what
    NEW knows of OLD; ``is_voiced``: it speaks; ``speaks``: that is in its changelog. ``fired``: spoken; ``muted``: in
    silence, both by due times."""

    now: int = 0
    old: Pending = Pending()
    new: Pending = Pending()
    v: Pending | None = None
    switched_at: int | None = None
    looked: Pending = Pending()
    is_voiced: bool = False
    speaks: bool = False
    fired: tuple[int, ...] = ()
    muted: tuple[int, ...] = ()
    deaths: int = 0


Found = Iterator[tuple[str, World]]


class TimersModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: TimersConfig, out: frozenset[TimersRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.is_voiced and world.new.at == len(RECORDS) and world.new.due is None

    def stalled(self, world: World) -> str:
        return "NEW waits for good"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if len(set(world.fired)) < len(world.fired):
            raise Broken("a timer is spoken twice")
        if world.v is not None and world.v.due is not None and world.v.due in world.muted:
            raise Broken(f"due at {world.v.due}: OLD has it pending at V, and NEW has fired it in silence")
        steps = list(self._old_works(world))
        if world.now < LAST:
            steps.append(("a tick", world._replace(now=world.now + 1)))
        steps += self._new_speaks(world) if world.is_voiced else self._new_is_muted(world)
        luck = []
        if world.deaths < self._config.deaths:
            again = world._replace(looked=Pending(), is_voiced=world.speaks, deaths=world.deaths + 1)
            luck.append(("NEW dies, and starts", again))
        return steps, luck

    def _old_works(self, world: World) -> Found:
        old = world.old
        if world.v is not None:
            return
        if old.at < len(RECORDS) and RECORDS[old.at].here <= world.now:
            yield f"OLD handles {old.at}", world._replace(old=_handled(old))
        if old.due is not None and old.due <= world.now:
            fired = world._replace(old=old._replace(due=None), fired=(*world.fired, old.due))
            yield f"OLD fires what is due at {old.due}", fired
        yield "the switch", world._replace(v=old, switched_at=world.now)

    def _new_is_muted(self, world: World) -> Found:
        new, known, out = world.new, world.looked, self._out
        if known != world.old:
            yield "NEW looks", world._replace(looked=world.old)
        if new.at < known.at:
            is_olds = new.due == known.due and TimersRule.B13_OLDS_PENDING_STAY not in out
            if new.due is not None and new.due <= RECORDS[new.at].time and not is_olds:
                yield self._in_silence(world, "before a record")
            else:
                yield f"NEW handles {new.at}, muted", world._replace(new=_handled(new))
        elif TimersRule.B13_NEVER_BY_THE_CLOCK in out and new.due is not None and new.due <= world.now:
            yield self._in_silence(world, "by the clock")
        v, switched_at = world.v, world.switched_at
        if v is None or switched_at is None or new.at != v.at:
            return
        if known == v or TimersRule.B16_LOOKS_AGAIN in out:
            is_olds = new.due is not None and new.due != known.due and new.due <= switched_at
            if is_olds and TimersRule.B13_OLDS_AT_V not in out:
                yield self._in_silence(world, "at V")
            else:
                yield "NEW speaks", world._replace(is_voiced=True)

    def _new_speaks(self, world: World) -> Found:
        new = world.new
        speaks = TimersRule.B17_ONE_TRANSACTION not in self._out
        if new.at < len(RECORDS) and RECORDS[new.at].here <= world.now:
            yield f"NEW handles {new.at}", world._replace(new=_handled(new), speaks=speaks)
        if new.due is not None and new.due <= world.now:
            fired = world._replace(new=new._replace(due=None), fired=(*world.fired, new.due), speaks=speaks)
            yield f"NEW fires what is due at {new.due}", fired

    def _in_silence(self, world: World, when: str) -> tuple[str, World]:
        new = world.new
        assert new.due is not None
        after = world._replace(new=new._replace(due=None), muted=(*world.muted, new.due))
        return f"NEW fires what is due at {new.due}, muted, {when}", after


def _handled(pending: Pending) -> Pending:
    due = RECORDS[pending.at].due
    return Pending(pending.at + 1, pending.due if due is None else due)
