"""What models have in common in which two members own one partition in turn: members die, stand still while another one
takes over, and go on. A world has ``members``, the number ``take`` of the last take-over, and ``frozen``: the place of
the member that another one may replace, or -1."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast

from tests.model.search import put


class Owner(Protocol):
    """A member. ``take``: its take-over."""

    @property
    def take(self) -> int: ...


class TwoOwners(Protocol):
    """A world."""

    @property
    def members(self) -> tuple[Owner | None, ...]: ...
    @property
    def take(self) -> int: ...
    @property
    def frozen(self) -> int: ...


W = TypeVar("W", bound=TwoOwners)


def placed(world: W, index: int, member: Owner | None) -> W:
    """Return the world with a member at this place."""
    return _changed(world, members=put(world.members, index, member))


def vacated(world: W, index: int) -> W:
    """Return the world without the member at this place."""
    return _changed(placed(world, index, None), frozen=-1 if world.frozen == index else world.frozen)


def newest_first(steps: list[tuple[str, W]]) -> list[tuple[str, W]]:
    """Return the steps to the same worlds with the newest member first: their places are alike."""
    return [(text, _ordered(after)) for text, after in steps]


def may_take_over(world: TwoOwners) -> bool:
    """Check that no member is in the way: each is gone, replaced already, or stands still."""
    return all(
        member is None or member.take < world.take or at == world.frozen for at, member in enumerate(world.members)
    )


def stalled(world: TwoOwners, *, is_done: bool, kills: bool) -> str:
    """Return what is wrong with a world in which nothing can happen. With ``kills`` an event, or a job, ends processes:
    the last owner's, too."""
    return "" if is_done or (kills and not any(world.members)) else "it waits for good"


def bad_luck(world: W, index: int, takes: int) -> list[tuple[str, W]]:
    """Return what may befall a member while there are ``takes`` take-overs at most: it dies, or stands still."""
    member, found = world.members[index], list[tuple[str, W]]()
    assert member is not None
    if world.take < takes or member.take < world.take:
        found.append((f"owner {member.take} dies", vacated(world, index)))
    if world.frozen < 0 and world.take < takes:
        found.append((f"owner {member.take} stands still", _changed(world, frozen=index)))
    return found


def _ordered(world: W) -> W:
    first, second = (0 if member is None else member.take for member in world.members)
    if second <= first:
        return world
    return _changed(world, members=world.members[::-1], frozen=1 - world.frozen if world.frozen >= 0 else -1)


def _changed(world: W, **changes: Any) -> W:
    return cast(W, cast(Any, world)._replace(**changes))
