"""Two sources of one input that exchange their roles, as a model: one speaks, the other follows it muted; after a
switch the one that has spoken may follow, and speak again after the next. Each record is spoken once. Each rule is a
switch.

Switches are numbered, and the changelog of the source that gives up has the number and its position V. Members die at
any time. How a switch comes to be one step, with no member of the speaker behind it, is in ``switch_rules.py``. Nothing
of it is in the product yet: the search comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

RECORDS = 3


class BackConfig(NamedTuple):
    """``switches``: how many there are; ``starts``: of members."""

    name: str
    switches: int = 3
    starts: int = 6


THERE_AND_BACK = BackConfig("there and back and there")
STANDARD = (THERE_AND_BACK,)
DEEP = (BackConfig("four switches", switches=4, starts=9),)


class BackRule(Enum):
    """A rule of the exchange: what happens when it is out, and the world where it is missed."""

    B11_NEVER_BEYOND = ("the follower passes the speaker's committed position", THERE_AND_BACK)
    B15_TAKE_OVER_LOOKS = ("a source that has given up speaks when it is started again", THERE_AND_BACK)
    B19_NUMBERED = ("a V of an earlier switch is taken for that of this one", THERE_AND_BACK)
    B19_HAS_SPOKEN = ("a source gives up that was to speak, and has not yet", THERE_AND_BACK)


class Source(NamedTuple):
    """``at``: its committed position; ``speaks``, since the switch of this ``number``, or follows since then. ``gave``:
    number and V of the switch by which it gave up. ``is_up``: it has a member; ``v``: from which on that speaks."""

    at: int = 0
    speaks: bool = False
    number: int = 0
    gave: tuple[int, int] | None = None
    is_up: bool = False
    v: int | None = None


class World(NamedTuple):
    """``spoken``: records in the order in which they were."""

    sources: tuple[Source, Source] = (Source(speaks=True), Source())
    switches: int = 0
    starts: int = 0
    spoken: tuple[int, ...] = ()

    def with_source(self, index: int, source: Source) -> World:
        """Return it with this source changed."""
        return self._replace(sources=put(self.sources, index, source))


class BackModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: BackConfig, out: frozenset[BackRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return len(world.spoken) == RECORDS

    def stalled(self, world: World) -> str:
        return ""  # starts are counted: a world may end with no member left

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if problem := _problem(world):
            raise Broken(problem)
        steps, luck = list[tuple[str, World]](), list[tuple[str, World]]()
        for index, source in enumerate(world.sources):
            steps += [(f"source {index} {text}", after) for text, after in self._works(world, index, source)]
            if source.is_up:
                luck.append((f"source {index} ends", world.with_source(index, source._replace(is_up=False, v=None))))
            steps += [(f"source {index} {text}", after) for text, after in self._is_switched(world, index, source)]
        return steps, luck

    def _works(self, world: World, index: int, source: Source) -> Iterator[tuple[str, World]]:
        other = world.sources[1 - index]
        has_given = source.speaks and source.gave is not None and source.gave[0] > source.number
        if not source.is_up:
            refuses = has_given and BackRule.B15_TAKE_OVER_LOOKS not in self._out
            if world.starts < self._config.starts and not refuses:
                yield "starts", world.with_source(index, source._replace(is_up=True))._replace(starts=world.starts + 1)
            return
        if source.at == RECORDS:
            return
        moved = source._replace(at=source.at + 1)
        if source.speaks:
            yield f"speaks {source.at}", _spoken(world.with_source(index, moved), source.at)
            return
        is_this = other.gave is not None and (other.gave[0] == source.number + 1 or BackRule.B19_NUMBERED in self._out)
        if source.v is None and is_this:
            assert other.gave is not None
            yield f"reads V={other.gave[1]}", world.with_source(index, source._replace(v=other.gave[1]))
        if source.v is not None and source.at >= source.v:
            moved = moved._replace(speaks=True, number=source.number + 1)  # in one transaction (B17)
            yield f"speaks {source.at}", _spoken(world.with_source(index, moved), source.at)
        elif source.at < other.at or BackRule.B11_NEVER_BEYOND in self._out:
            yield f"passes {source.at} in silence", world.with_source(index, moved)

    def _is_switched(self, world: World, index: int, source: Source) -> Iterator[tuple[str, World]]:
        other = world.sources[1 - index]
        number = world.switches + 1
        is_asked = not source.speaks and other.gave is not None and other.gave[0] == world.switches
        may_give = source.speaks or (is_asked and BackRule.B19_HAS_SPOKEN in self._out)
        # The other one follows since the last switch at the latest: it is no source that has given up, and rests.
        follows = not other.speaks and other.number == world.switches
        if not source.speaks:
            follows = other.speaks  # (only without the rule)
        if may_give and follows and not source.is_up and number <= self._config.switches:
            gives = world.with_source(index, source._replace(gave=(number, source.at)))
            if not source.speaks:  # the other one has its voice back, from there on
                back = other._replace(number=number, at=source.at)
                gives = gives.with_source(1 - index, back)
            yield f"gives up at {source.at}", gives._replace(switches=number)
        has_given = source.speaks and source.gave is not None and source.gave[0] > source.number
        if has_given and not source.is_up and other.speaks and other.number == world.switches:
            assert source.gave is not None
            yield "follows", world.with_source(index, source._replace(speaks=False, number=source.gave[0]))


def _spoken(world: World, record: int) -> World:
    return world._replace(spoken=(*world.spoken, record))


def _problem(world: World) -> str:
    if len(set(world.spoken)) < len(world.spoken):
        return "a record is spoken twice"
    if list(world.spoken) != sorted(world.spoken):
        return "records are spoken in another order"
    furthest = max(source.at for source in world.sources)
    if missing := [record for record in range(furthest) if record not in world.spoken]:
        return f"{missing[0]} is passed, and was never spoken"
    return ""
