"""The rows of the pages, from a status. Pure functions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from streams.kafka.questions.group_view import MemberView
from streams.looks.figures import duration
from streams.looks.group_live import rebalances
from streams.looks.group_picture import PartitionRow, doing, headline, names, owned_here, partition_rows, standing
from streams.statistics import PartitionStatistics, RebalanceStatistics, SourceStatistics
from streams.web.board import GroupStatus
from streams.web.facts import CommitTimes, MemberFacts

MOST_ROWS: Final = 500
"""Partitions on one page; further ones are behind a link."""


class InputProgress(msgspec.Struct, frozen=True):
    """The progress of a partition in one topic: the committed offset, the end, and the records between them; ``None``:
    not known."""

    topic: str
    committed: int | None
    end: int | None
    lag: int | None


class PartitionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One partition. ``topic``: empty for an event source, whose inputs share their partitions. ``state``, ``queued``
    and its timers come from its owner, if that answers."""

    topic: str
    partition: int
    owner: str = ""
    state: str = ""
    waits_for: str = ""
    queued: int | None = None
    timers: int | None = None
    next_timer_ms: int | None = None
    inputs: tuple[InputProgress, ...] = ()
    copies: str = ""
    move: str = ""

    @property
    def id(self) -> str:
        """Return the id of its row in a page."""
        return f"p-{self.topic}-{self.partition}"


class MemberLine(msgspec.Struct, frozen=True, kw_only=True):
    """One member. ``says``: where its facts come from, or that it does not answer. ``answers``: ``None`` for one whose
    own facts are not within reach of this monitor."""

    name: str
    host: str = ""
    state: str = ""
    partitions: int = 0
    events: int | None = None
    transactions: int | None = None
    unsettled: int | None = None
    commits: CommitTimes = CommitTimes()
    answers: bool | None = None
    says: str = ""


class WorkLine(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one member that runs ahead of its turn (``StageStatistics``)."""

    member: str
    name: str
    running: int
    waiting: int
    keys: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the whole group; ``None``: not known."""

    members: int
    partitions: int
    lag: int | None
    rate: float | None
    silent: tuple[str, ...]
    headline: str


def member_lines(status: GroupStatus) -> list[MemberLine]:
    """Every member that the group or this monitor knows, by name."""
    picture = status.picture
    views: dict[str, MemberView] = {} if picture is None else {each.member_id: each for each in picture.view.members}
    called = {} if picture is None else names(picture.view)
    lines = []
    for facts in status.members:
        statistics = facts.statistics
        member_id = statistics.member_id if statistics else ""
        view = views.pop(member_id, None) or _by_instance(views, facts.name)
        lines.append(_own_line(facts, view))
    for member_id, view in views.items():
        assert picture is not None
        live = picture.live.get(member_id)
        owned = owned_here(view, picture.live) if view.assignment else frozenset().union(*view.owned.values())
        says = f"by the group: {doing(live)}" if live is not None else "by the group; it reports nothing itself"
        state = "leaving" if view.report and view.report.leaving else "member"
        lines.append(MemberLine(name=called[member_id], host=view.host, state=state, partitions=len(owned), says=says))
    return sorted(lines, key=lambda line: line.name)


def _by_instance(views: dict[str, MemberView], name: str) -> MemberView | None:
    """Take the member of this instance, which may not answer itself."""
    found = next((member_id for member_id, view in views.items() if view.instance == name), None)
    return None if found is None else views.pop(found)


def _own_line(facts: MemberFacts, view: MemberView | None) -> MemberLine:
    statistics, host = facts.statistics, view.host if view else ""
    if statistics is None:
        state = "in the group" if view else ""
        return MemberLine(
            name=facts.name, host=host, state=state, answers=False, says=facts.problem, commits=facts.commits
        )
    started = f"start {facts.starts}" if facts.starts > 1 else ""
    return MemberLine(
        name=facts.name,
        host=host,
        state=statistics.state.value,
        partitions=len(statistics.partitions),
        events=statistics.committed_events,
        transactions=statistics.committed_transactions,
        unsettled=statistics.unsettled_transactions,
        commits=facts.commits,
        answers=True,
        says=started,
    )


def partition_lines(status: GroupStatus, is_source: bool) -> list[PartitionLine]:
    """Every partition: as the group has it, with what its owner says. ``is_source``: partitions of all topics with one
    number are one partition."""
    own = {
        each.partition: (facts.name, facts.statistics, each)
        for facts in status.members
        if facts.statistics
        for each in facts.statistics.partitions
    }
    if status.picture is None:
        return [_line("", number, [], own.get(number)) for number in sorted(own)]
    found: dict[tuple[str, int], list[PartitionRow]] = {}
    for row in partition_rows(status.picture):
        found.setdefault(("" if is_source else row.topic, row.partition), []).append(row)
    for number in own:
        found.setdefault(("", number), [])
    return [_line(topic, number, rows, own.get(number)) for (topic, number), rows in sorted(found.items())]


def _line(
    topic: str,
    number: int,
    rows: list[PartitionRow],
    own: tuple[str, SourceStatistics, PartitionStatistics] | None,
) -> PartitionLine:
    inputs = [
        InputProgress(row.topic, row.lag.committed, row.lag.end, row.lag.lag) if row.lag
        else InputProgress(row.topic, None, None, None)
        for row in rows
    ]  # fmt: skip
    owners = ", ".join(dict.fromkeys(owner for row in rows for owner in row.owners))
    move = ", ".join(f"{row.move[0]} to {row.move[1]}" for row in rows if row.move)
    copies = [(copy, "") for row in rows for copy in row.standbys]
    copies += [(copy, "prepares: ") for row in rows for copy in row.preparing]
    shown = ", ".join(f"{copy.member} ({verb}{standing(copy) or copy.state})" for copy, verb in copies)
    if own is None:
        restoring = ", ".join(standing(copy) for row in rows for copy in row.restoring)
        return PartitionLine(
            topic=topic,
            partition=number,
            owner=owners,
            state="restoring" if restoring else "" if owners else "no member",
            waits_for=f"its state: {restoring}" if restoring else "",
            inputs=tuple(inputs),
            copies=shown,
            move=move,
        )
    name, statistics, partition = own
    if not inputs:
        end = partition.end if partition.end >= 0 else None
        inputs = [InputProgress("", partition.next_offset, end, partition.lag)]
    return PartitionLine(
        topic=topic,
        partition=number,
        owner=owners or name,
        state=partition.state,
        waits_for=waits_for(partition, statistics),
        queued=partition.queued_records,
        timers=partition.timers,
        next_timer_ms=partition.next_timer_ms,
        inputs=tuple(inputs),
        copies=shown,
        move=move,
    )


def waits_for(partition: PartitionStatistics, statistics: SourceStatistics) -> str:
    """Describe what a partition waits for, as its owner sees it."""
    for move in statistics.moves:
        if move.partition == partition.partition:
            since = f" for {duration(move.seconds)}" if move.seconds else ""
            return f"its move {move.direction}{since}"
    for copy in statistics.copies:
        if copy.partition == partition.partition and copy.state == "restoring":
            left = f", {duration(copy.seconds_left)}" if copy.seconds_left else ""
            return f"its state: {copy.records_left:,} records left{left}"
    if partition.state != "active":
        return partition.state
    if partition.events_ahead:
        return f"work that runs ahead, of {partition.events_ahead:,} events"
    if partition.paused:
        return "its handlers: the queue is full"
    if partition.queued_records:
        return "its handlers"
    if partition.lag:
        return "records of the broker"
    return "new records"


def work_lines(status: GroupStatus) -> list[WorkLine]:
    """Work that runs ahead of its turn, of every member that answers."""
    return [
        WorkLine(member=facts.name, name=each.name, running=each.running, waiting=each.waiting, keys=each.keys)
        for facts in status.members
        if facts.statistics
        for each in facts.statistics.stages
    ]


def totals(status: GroupStatus, lines: list[PartitionLine], members: list[MemberLine]) -> Totals:
    """Sum up."""
    lags = [progress.lag for line in lines for progress in line.inputs if progress.lag is not None]
    picture = status.picture
    return Totals(
        members=len(members),
        partitions=len(lines),
        lag=sum(lags) if lags else None,
        rate=status.rates[-1] if status.rates else None,
        silent=tuple(line.name for line in members if line.answers is False),
        headline=headline(picture) if picture is not None else f"{status.group}: the group is not known",
    )


def last_rebalances(status: GroupStatus) -> list[RebalanceStatistics]:
    """Return the last rebalances with their causes, the newest first."""
    if status.picture is not None and status.picture.live:
        return rebalances(status.picture.live, names(status.picture.view))
    reported = {
        each.generation: each for facts in status.members if facts.statistics for each in facts.statistics.rebalances
    }
    return [reported[generation] for generation in sorted(reported, reverse=True)][:5]


def plain_status(status: GroupStatus, is_source: bool) -> dict[str, Any]:
    """Return a status as data for programs."""
    lines, members = partition_lines(status, is_source), member_lines(status)
    return {
        "group": status.group,
        "at_ms": status.at_ms,
        "totals": msgspec.to_builtins(totals(status, lines, members)),
        "members": msgspec.to_builtins(members),
        "partitions": msgspec.to_builtins(lines),
        "work": msgspec.to_builtins(work_lines(status)),
        "rebalances": msgspec.to_builtins(last_rebalances(status)),
        "notes": [status.problem] if status.problem else list(status.picture.notes if status.picture else ()),
    }
