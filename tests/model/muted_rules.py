"""A muted source NEW beside OLD, as a model of what is built: NEW handles no record before OLD has committed it, and
never speaks, whatever is deployed. Each rule is a switch.

OLD commits records, may leave an open transaction, and is reset once. NEW reads OLD's changelog entry by entry, from
its start after each death. Its members are of three kinds: with the setting, without it (a deployment too early or too
late), and of a release that knows no voices. The records that mute NEW are written at any time. How NEW comes to speak
is in ``switch_rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps

RECORDS = 2


class MutedConfig(NamedTuple):
    """``starts``: of NEW's members."""

    name: str
    starts: int = 3


BESIDE = MutedConfig("beside a source that goes on")
STANDARD = (BESIDE,)
DEEP = (MutedConfig("many starts", starts=5),)


class MutedRule(Enum):
    """A rule of muted sources: what happens when it is out, and the world where it is missed."""

    B10_SETTING_NEEDS_RECORD = ("a member with the setting works without the record, and says no mark", BESIDE)
    B10_RECORD_NEEDS_SETTING = ("a member without the setting works on a muted partition", BESIDE)
    MARKED_POSITION = ("the changelog's id in a muted position is the real one", BESIDE)
    MARKED_RELEASE = ("a muted partition is handed over by a marker that any release knows", BESIDE)
    B11_BEHIND = ("NEW takes a record before OLD's position is behind it", BESIDE)
    B11_COMMITTED = ("NEW reads OLD's changelog uncommitted", BESIDE)
    B11_WHOLE = ("NEW believes a position before it has read all that was there", BESIDE)


class Member(NamedTuple):
    """NEW's member: of this ``kind``, and whether it ``works``. ``read``: entries of OLD's changelog; ``goal``: those
    that were there at the first look; ``cap``: OLD's position as far as it knows."""

    kind: str
    works: bool = False
    read: int = 0
    goal: int = 0
    cap: int = 0


class World(NamedTuple):
    """``log``: OLD's committed positions; ``is_open``: a further one is sent, and not committed. ``muted``: the records
    are there; ``at``: NEW's position; ``spoken``: it has sent something; ``early``: a record was handled too early."""

    log: tuple[int, ...] = (0,)
    is_open: bool = False
    was_reset: bool = False
    muted: bool = False
    new: Member | None = None
    other: str = ""
    starts: int = 0
    at: int = 0
    spoken: bool = False
    early: bool = False


Found = Iterator[tuple[str, World]]


class MutedModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: MutedConfig, out: frozenset[MutedRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.at == RECORDS

    def stalled(self, world: World) -> str:
        return ""  # starts are counted: a world may end with no member left

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        if world.spoken:
            raise Broken("NEW has spoken")
        if world.early:
            raise Broken("NEW has handled a record that OLD has not committed")
        steps = [*self._old_works(world), *self._new_works(world)]
        luck: Steps[World] = []
        if world.is_open:
            luck.append(("OLD's transaction is aborted", world._replace(is_open=False)))
        if not world.was_reset and world.log[-1]:
            luck.append(("OLD is reset", world._replace(log=(*world.log, 0), was_reset=True, is_open=False)))
        if world.new is not None:
            luck.append(("NEW's member dies", world._replace(new=None)))
        return steps, luck

    def _is_out(self, rule: MutedRule) -> bool:
        return rule in self._out

    def _old_works(self, world: World) -> Found:
        position = world.log[-1]
        if world.is_open:
            yield f"OLD commits {position + 1}", world._replace(log=(*world.log, position + 1), is_open=False)
        elif position < RECORDS:
            yield f"OLD sends {position + 1}", world._replace(is_open=True)
        if not world.muted and not world.at:
            yield "`kes rebuild start`", world._replace(muted=True)

    def _new_works(self, world: World) -> Found:
        new = world.new
        if new is None:
            if world.starts < self._config.starts:
                for kind in ("setting", "plain", "older"):
                    if not (kind == "older" and not world.muted) and not (kind == "plain" and not world.muted):
                        member = Member(kind, goal=len(world.log))
                        yield f"NEW starts ({kind})", world._replace(new=member, starts=world.starts + 1)
        elif not new.works:
            yield from self._takes_over(world, new)
        elif new.kind != "setting":
            yield "NEW handles, and speaks", world._replace(spoken=True)
        else:
            if not world.muted:  # without a record it goes on unmuted
                yield "NEW handles, and speaks", world._replace(spoken=True)
            yield from self._follows(world, new)
            if world.starts < self._config.starts and self._is_out(MutedRule.MARKED_RELEASE):
                moved = Member("older", works=True)
                yield "NEW hands over to an older release", world._replace(new=moved, starts=world.starts + 1)

    def _takes_over(self, world: World, new: Member) -> Found:
        refused = world._replace(new=None)
        may = {
            "setting": world.muted or self._is_out(MutedRule.B10_SETTING_NEEDS_RECORD),
            "plain": not world.muted or self._is_out(MutedRule.B10_RECORD_NEEDS_SETTING),
            "older": self._is_out(MutedRule.MARKED_POSITION),
        }[new.kind]
        yield (
            ("NEW works", world._replace(new=new._replace(works=True))) if may else (f"{new.kind} is refused", refused)
        )

    def _follows(self, world: World, new: Member) -> Found:
        if new.read < len(world.log):
            read, entry = new.read + 1, world.log[new.read]
            is_whole = read >= new.goal or self._is_out(MutedRule.B11_WHOLE)
            if is_whole and entry < world.at:
                yield "NEW sees that OLD went back, and stops", world._replace(new=None)
            else:
                known = new._replace(read=read, cap=entry if is_whole else 0)
                yield f"NEW reads {entry}", world._replace(new=known)
        elif world.is_open and self._is_out(MutedRule.B11_COMMITTED):
            yield "NEW reads what is not committed", world._replace(new=new._replace(cap=world.log[-1] + 1))
        if world.at < RECORDS and (world.at < new.cap or self._is_out(MutedRule.B11_BEHIND)):
            # A stale look is only slower, but for a reset that it does not know: then it stops when it does.
            known_to = world.log[: max(new.read, new.goal)]
            early = world.at >= max(world.log) or (known_to[-1] <= world.at)
            yield f"NEW handles {world.at}", world._replace(at=world.at + 1, early=early)
