"""A group as data and in words: owners of partitions, moves under way, lags. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from streams.kafka.questions.group_view import BROKER, NONE, GroupView, MemberView
from streams.kafka.questions.lags import PartitionLag
from streams.kafka.wire.group_bytes import ranges
from streams.looks.figures import duration
from streams.looks.group_folders import shelf_facts
from streams.looks.group_live import Live, LiveMember, jobs_in, parked_in, rebalances
from streams.model.group import Copies
from streams.statistics import CopyStatistics

Lags = Mapping[str, list[PartitionLag]]
"""Topic -> partitions."""

_COPY_STATES: Final = {"preparing": "behind"}
_SILENCE_SECONDS: Final = 10.0
_STATES: Final = {
    "PreparingRebalance": "rebalancing: members join",
    "CompletingRebalance": "rebalancing: partitions are assigned",
}


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a partition, being restored or kept warm by a member. ``state``: ``ready`` (it had caught up),
    ``behind``, ``late`` (not ready in time, so moves do not wait for it), ``restoring`` (the owner is not at work yet),
    ``failed``. A field that is ``None`` is not reported; then the rest is of the last time that it joined."""

    member: str
    state: str
    records_left: int | None = None
    per_second: float | None = None
    seconds_left: float | None = None
    lag_seconds: float | None = None


class PartitionRow(msgspec.Struct, kw_only=True):
    """One partition. ``owners``: members that work on it (more than one only while a member has not learned yet).
    ``standbys`` keep a copy, ``preparing`` restore one for a move, ``restoring``: an owner does it. ``move``: from whom
    to whom it is being handed over. That takes a transaction and no other plan, so the receiver counts as the owner,
    unless the giver reports that it has it still. ``lag``: ``None`` when it is not known."""

    topic: str
    partition: int
    owners: list[str] = []
    restoring: list[Copy] = []
    standbys: list[Copy] = []
    preparing: list[Copy] = []
    move: tuple[str, str] | None = None
    lag: PartitionLag | None = None


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown at one moment. ``stale``: the members' status is that from before the rebalance that is
    under way. ``notes``: what could not be found out, or is odd."""

    view: GroupView
    lags: Lags = {}
    live: Live = {}
    stale: bool = False
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------- what is known


def remembered(view: GroupView, before: GroupView | None) -> tuple[GroupView, bool]:
    """During a rebalance the broker shows no member's metadata: return the members with what was known of them before,
    and whether something had to be remembered."""
    if view.settled or before is None:
        return view, False
    known = {member.member_id: member for member in before.members}
    members = tuple(known.get(member.member_id, member) for member in view.members)
    stale = any(member.member_id in known for member in view.members)
    return msgspec.structs.replace(view, members=members, protocol=view.protocol or before.protocol), stale


def names(view: GroupView) -> dict[str, str]:
    """Member id -> what it is called: its instance name; two of the same name are distinguished by their ids."""
    called = [member.instance for member in view.members]
    return {
        member.member_id: member.instance
        if called.count(member.instance) == 1
        else f"{member.instance} ({short_id(member)})"
        for member in view.members
    }


def short_id(member: MemberView) -> str:
    """Return the part of a member id behind the name: brokers make ids of the client id and a UUID."""
    for name in (member.instance, member.client_id):
        if name and member.member_id.startswith(f"{name}-"):
            return member.member_id[len(name) + 1 :][:8]
    return member.member_id[:12]


def partition_rows(picture: Picture) -> list[PartitionRow]:
    """Every partition that a member has, gets, or has committed in."""
    view, called, moving = picture.view, names(picture.view), under_way(picture.live)
    rows: dict[tuple[str, int], PartitionRow] = {}
    targets: list[tuple[PartitionRow, str]] = []

    def row(topic: str, partition: int) -> PartitionRow:
        return rows.setdefault((topic, partition), PartitionRow(topic=topic, partition=partition))

    for topic, lags in picture.lags.items():
        for entry in lags:
            row(topic, entry.partition).lag = entry
    for member in view.members:
        name = called[member.member_id]
        if member.assignment is None or not member.topics:  # a foreign one: as Kafka has it
            for topic, partitions in member.owned.items():
                for partition in partitions:
                    row(topic, partition).owners.append(name)
            for topic, partitions in (member.target or {}).items():
                missing = partitions - member.owned.get(topic, frozenset())
                targets += [(row(topic, partition), name) for partition in missing]
            continue
        topic, assignment, live = member.topics[0], member.assignment, picture.live.get(member.member_id)
        for partition in owned_here(member, picture.live):
            row(topic, partition).owners.append(name)
            if live is not None and partition in live.copies and live.copies[partition].state == "restoring":
                row(topic, partition).restoring.append(copy_of(member, name, partition, live))
        for partition, to in assignment.release.items():
            if partition in moving:
                row(topic, partition).move = (name, called.get(to, f"{to} (gone)"))
        for partition in assignment.standby:
            row(topic, partition).standbys.append(copy_of(member, name, partition, live))
        for partition in assignment.preparing:
            row(topic, partition).preparing.append(copy_of(member, name, partition, live))
    for target, name in targets:  # when all owners are known
        target.move = (", ".join(target.owners) or "no member", name)
    return [found for _, found in sorted(rows.items())]


def under_way(live: Live) -> frozenset[int]:
    """The partitions that are being handed over, as their members report it: the last plan stands long after."""
    return frozenset(move.partition for alive in live.values() for move in alive.status.moves)


def owned_here(member: MemberView, live: Live) -> frozenset[int]:
    """The partitions that a member of ours works on: by the last plan, unless it reports that a move is not through."""
    assert member.assignment is not None
    planned = member.assignment.own | member.assignment.incoming.keys()
    alive = live.get(member.member_id)
    moves = alive.status.moves if alive is not None else ()
    owned = planned | {move.partition for move in moves if move.direction == "out"} & member.assignment.release.keys()
    return owned - {move.partition for move in moves if move.direction == "in"}


def copy_of(member: MemberView, name: str, partition: int, live: LiveMember | None) -> Copy:
    """The state of a copy: by its member's last note, else by what the member reported when it joined."""
    joined = member.report.copies if member.report else Copies()
    late = partition in joined.late
    note = live.copies.get(partition) if live is not None else None
    if note is None:
        state = "ready" if partition in joined.ready else "late" if late else "behind"
        return Copy(member=name, state=state, records_left=joined.preparing.get(partition))
    return Copy(
        member=name,
        state="late" if late and note.state == "preparing" else _COPY_STATES.get(note.state, note.state),
        records_left=note.records_left,
        per_second=note.records / note.seconds if note.seconds > 0 else None,
        seconds_left=note.seconds_left,
        lag_seconds=note.lag_seconds,
    )


def facts(picture: Picture) -> dict[str, Any]:
    """Everything as data, for ``--json``."""
    view, called, moving = picture.view, names(picture.view), under_way(picture.live)
    lag = [entry.lag for lags in picture.lags.values() for entry in lags]
    return {
        "group": view.group,
        "kind": view.kind,
        "state": view.state,
        "protocol": view.protocol,
        "epoch": None if view.epoch < 0 else view.epoch,
        "stale": picture.stale,
        "lag": sum(lag) if lag else None,
        "members": [_member_facts(member, called, picture.live, moving) for member in view.members],
        "partitions": [_partition_facts(row) for row in partition_rows(picture)],
        "parked": [msgspec.structs.asdict(each) for each in parked_in(picture.live)],
        "jobs": [msgspec.structs.asdict(each) for each in jobs_in(picture.live)],
        "rebalances": [msgspec.structs.asdict(entry) for entry in rebalances(picture.live, called)],
        "notes": list(picture.notes),
    }


def _member_facts(member: MemberView, called: Mapping[str, str], live: Live, moving: Collection[int]) -> dict[str, Any]:
    report, assignment = member.report, member.assignment
    release = assignment.release if assignment else {}
    alive = live.get(member.member_id)
    return {
        "member_id": member.member_id,
        "instance": member.instance,
        "static": member.static,
        "client_id": member.client_id,
        "host": member.host,
        "since": member.since,
        "leaving": bool(report and report.leaving),
        "topics": list(member.topics),
        "owned": _owned_partitions(member, live),
        "standby": sorted(assignment.standby) if assignment else [],
        "preparing": sorted(assignment.preparing) if assignment else [],
        "incoming": sorted(assignment.incoming.keys() & set(moving)) if assignment else [],
        "releasing": {str(p): called.get(to, to) for p, to in release.items() if p in moving},
        "folders": shelf_facts(member),
        "problem": member.problem,
        "live": msgspec.to_builtins(alive) if alive is not None else None,
    }


def _owned_partitions(member: MemberView, live: Live) -> dict[str, list[int]]:
    if member.assignment is not None and member.topics:
        return {member.topics[0]: sorted(owned_here(member, live))}
    return {topic: sorted(partitions) for topic, partitions in member.owned.items()}


def _partition_facts(row: PartitionRow) -> dict[str, Any]:
    lag = row.lag
    figures = {name: getattr(lag, name) if lag else None for name in ("committed", "end", "lag")}
    return {**msgspec.to_builtins(row), **figures}


# -------------------------------------------------------------------------------------------------------- for people


def headline(picture: Picture) -> str:
    """``shop: stable, kes-incremental-2, 3 members, 1,234 behind``."""
    view = picture.view
    if view.kind == NONE:
        return f"{view.group}: no such group"
    words = [_STATES.get(view.state, view.state.lower() or "no state")]
    if view.protocol:
        words.append(view.protocol + (" (assigned by the broker)" if view.kind == BROKER else ""))
    if view.epoch >= 0:
        words.append(f"epoch {view.epoch}")
    words.append(f"{len(view.members)} member{'' if len(view.members) == 1 else 's'}")
    lag = [entry.lag for lags in picture.lags.values() for entry in lags]
    if lag:
        words.append(f"{sum(lag):,} behind")
    if keys := sum(each.keys for each in parked_in(picture.live)):
        words.append(f"{keys:,} parked key{'' if keys == 1 else 's'}")
    if jobs := sum(each.parked for each in jobs_in(picture.live)):
        words.append(f"{jobs:,} parked job{'' if jobs == 1 else 's'}")
    return f"{view.group}: " + ", ".join(words)


def doing(live: LiveMember | None) -> str:
    """Describe a member: what it restores, with rate and time left; how far its copies are; what it waits for."""
    if live is None:
        return "reports nothing"
    copies = list(live.copies.values())
    words = [
        _summary(verb, [copy for copy in copies if copy.state == state])
        for state, verb in (("restoring", "restores"), ("preparing", "prepares"), ("failed", "failed to read"))
    ]
    ready = [copy for copy in copies if copy.state == "ready"]
    if ready:
        behind, age = sum(copy.records_left for copy in ready), max(copy.lag_seconds for copy in ready)
        words.append(f"{len(ready)} ready" + (f", {behind:,} records or {age:.1f} s behind" if behind else ""))
    words += [f"muted, follows {live.status.shadow_of}"] if live.status.shadow_of else []
    awaited = [move for move in live.status.moves if move.direction == "in" and move.seconds is not None]
    words += [f"awaits {move.partition} for {duration(move.seconds or 0.0)}" for move in awaited]
    if live.age_seconds > _SILENCE_SECONDS and (awaited or len(ready) < len(copies)):
        words.append(f"silent for {duration(live.age_seconds)}")
    return "; ".join(filter(None, words)) or "-"


def _summary(verb: str, copies: list[CopyStatistics]) -> str:
    if not copies:
        return ""
    words = [f"{verb} {ranges({copy.partition for copy in copies})}"]
    words.append(f"{sum(copy.records_left for copy in copies):,} left")
    size, loaded = sum(copy.folder_bytes for copy in copies), sum(copy.folder_loaded for copy in copies)
    words += [f"{100 * loaded // size} % of the folders loaded"] if loaded < size else []
    rate = sum(copy.records / copy.seconds for copy in copies if copy.seconds > 0)
    left = [copy.seconds_left for copy in copies if copy.seconds_left is not None]
    return ", ".join(
        [
            *words,
            *([f"{rate:,.0f}/s"] if rate else []),
            *([duration(max(left))] if max(left, default=0.0) >= 0.5 else []),
        ]
    )


def standing(copy: Copy) -> str:
    """``""`` for one that has caught up, else how far it is behind."""
    if copy.state == "ready":
        lag = f", {copy.lag_seconds:.1f} s" if copy.lag_seconds else ""
        return f"{copy.records_left:,} behind{lag}" if copy.records_left else ""
    words = [f"{copy.records_left:,} left"] if copy.records_left is not None else []
    words += [f"{copy.per_second:,.0f}/s"] if copy.per_second else []
    words += [duration(copy.seconds_left)] if copy.seconds_left and copy.seconds_left >= 0.5 else []
    return ", ".join(words) or copy.state
