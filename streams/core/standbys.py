"""Place spare copies so that, when any member goes, the others have its partitions ready in just the right numbers.

If a member goes, the others share its partitions. The counts decide how many of them each other member gets; so many of
them it keeps a copy of (times the number of copies). Copies that are there stay where they are as long as they fit into
these numbers; on a group at rest the numbers are met exactly, so nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush


def place_standbys(
    number: int,
    active: list[str],
    future: Mapping[int, str],
    holders: Mapping[int, Collection[str]],
) -> dict[int, list[str]]:
    """Return partition -> the active members that are to keep a spare copy of it: ``number`` of them, or all that there
    are.

    ``future``: the owner of each partition once all moves are done. ``holders``: active members that have its state
    now, the better ones first.
    """
    of: dict[str, list[int]] = {member: [] for member in active}
    for partition in sorted(future):
        of.setdefault(future[partition], []).append(partition)
    load = dict.fromkeys(active, 0)
    placed: dict[int, list[str]] = {}
    for owner, numbers in of.items():
        others = sorted(
            (member for member in active if member != owner), key=lambda member: (len(of[member]), load[member])
        )
        copies = min(number, len(others))
        if copies:
            # As even as can be, and more where more would be taken over: on the members that have fewest.
            least, larger = divmod(copies * len(numbers), len(others))
            quota = {member: least + (rank < larger) for rank, member in enumerate(others)}
            for member, count in quota.items():
                load[member] += count
            placed.update(_spread(copies, numbers, quota, holders))
    return placed


def _spread(
    wanted: int, numbers: list[int], quota: dict[str, int], holders: Mapping[int, Collection[str]]
) -> dict[int, list[str]]:
    """Place the copies of one owner's partitions. The quotas add up to what is wanted, and none is larger than
    ``numbers``: so they can be met exactly."""
    placed: dict[int, list[str]] = {}
    for partition in numbers:
        chosen = placed[partition] = []
        for member in holders.get(partition, ()):
            if quota.get(member, 0) > 0 and len(chosen) < wanted:
                chosen.append(member)
                quota[member] -= 1
    most = [(-left, rank, member) for rank, (member, left) in enumerate(quota.items()) if left > 0]
    heapify(most)
    for partition in numbers:
        chosen, passed = placed[partition], []
        while most and len(chosen) < wanted:
            left, rank, member = heappop(most)
            if member in chosen:
                passed.append((left, rank, member))
                continue
            chosen.append(member)
            quota[member] -= 1
            if quota[member] > 0:
                passed.append((-quota[member], rank, member))
        for entry in passed:
            heappush(most, entry)
    for chosen in placed.values():
        while len(chosen) < wanted:
            chosen.append(_swapped(chosen, placed, quota))
    return placed


def _swapped(lacking: list[str], placed: Mapping[int, list[str]], quota: dict[str, int]) -> str:
    """Swap a copy for the partition that is ``lacking`` one, because all members with something left of their quota
    have that partition already. One of them takes a copy of another partition, one that it has not, from a member that
    has not the lacking one. Return that member."""
    spare = next(member for member, left in quota.items() if left > 0)
    chosen, other = next(
        (chosen, other) for chosen in placed.values() if spare not in chosen for other in chosen if other not in lacking
    )
    chosen[chosen.index(other)] = spare
    quota[spare] -= 1
    return other
