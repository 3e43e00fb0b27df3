"""Tables and data of a group: the state on disk that its members have reported. Pure functions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from streams.core.assignor import NEAR
from streams.kafka.questions.group_view import MemberView
from streams.kafka.wire.group_bytes import ranges


def shelf_facts(member: MemberView) -> dict[str, Any] | None:
    """Return the folders of a member, as data: the shelf's name, which members of one machine share, and the offset of
    the changelog up to which each partition is there. ``None``: it has reported none."""
    shelf = member.report.copies.shelf if member.report else None
    return (
        {"shelf": shelf.name, "offsets": {str(p): shelf.offsets[p] for p in sorted(shelf.offsets)}} if shelf else None
    )


def on_disk(members: Collection[MemberView]) -> dict[str, str]:
    """Return the partitions that each member (id) has on disk, as of its last report, in words: also how many records
    more the farthest folder has, if they are not read in a moment. Empty: no member has state on disk."""
    shelves = {member.member_id: member.report.copies.shelf for member in members if member.report}
    farthest: dict[int, int] = {}
    for shelf in shelves.values():
        for partition, offset in shelf.offsets.items() if shelf else ():
            farthest[partition] = max(offset, farthest.get(partition, 0))
    found = {}
    for member_id, shelf in shelves.items():
        if shelf:
            lacks = {partition: farthest[partition] - offset for partition, offset in shelf.offsets.items()}
            far = [f"{partition} lacks {lack:,}" for partition, lack in sorted(lacks.items()) if lack > NEAR]
            found[member_id] = "; ".join([ranges(shelf.offsets), *far]) if shelf.offsets else "-"
    return found
