"""The status that members of a group publish, read from their notes (``kafka/group/status_board.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, Self, TypeVar

import msgspec

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.group.status_board import Note, StatusBoard, WirePartition
from streams.kafka.questions.group_view import GroupQuestions, GroupView
from streams.kafka.wire.security import Security
from streams.looks.figures import duration
from streams.runtime.status import REBALANCES as PUBLISHED
from streams.runtime.status import MemberStatus, status_of
from streams.settings.config import EventSourceConfig
from streams.statistics import CopyStatistics, JobStatistics, ParkedStatistics, RebalanceStatistics

FOREIGNERS: Final = 32
"""Members whose notes are requested, one request each, in a group without a member that is known as ours."""
REBALANCES: Final = 5
"""Number of the last rebalances that are shown."""
PARTITIONS_SHOWN: Final = 5
"""Partitions, with parked keys say, that are named in one line."""

_copy_of: Final[msgspec.json.Decoder[CopyStatistics]] = msgspec.json.Decoder(CopyStatistics)


class LiveMember(msgspec.Struct, frozen=True):
    """The status of one member. ``copies``: by partition. ``age_seconds``: since its last note; a member without news
    writes none."""

    status: MemberStatus
    copies: dict[int, CopyStatistics]
    age_seconds: float


Live = Mapping[str, LiveMember]
"""Member id -> its status."""


def live_status(
    board: StatusBoard, view: GroupView, seconds: float, now: float, topic: str = ""
) -> tuple[Live, tuple[str, ...]]:
    """The members' status, and what could not be found out. ``now`` in seconds since the epoch. ``topic``: that of the
    group's offsets, if it is known (see ``StatusBoard.read``)."""
    ours = [member for member in view.members if member.report is not None]
    queried = ours or view.members[:FOREIGNERS]
    names = {member.instance for member in queried if _may_be_an_instance(member.instance)}
    if not names:
        return {}, ()
    try:
        notes = board.read(sorted(names), seconds, topic)
    except (BrokerUnavailable, ConfigError) as error:
        return {}, (f"the members' status is not known: {error}",)
    found: dict[str, LiveMember] = {}
    for member in queried:
        status = decoded(notes.get(member.instance, {}), now)
        if status is not None and status.status.member_id == member.member_id:  # else it is its predecessor's
            found[member.member_id] = status
    return found, ()


def decoded(notes: Mapping[WirePartition, Note], now: float | None = None) -> LiveMember | None:
    """Decode the notes of one instance; ``None`` without one of the member itself. What cannot be decoded is left
    out."""
    statuses, copies = [], {}
    for (_, partition), note in notes.items():
        try:
            if '"at_ms"' in note.text:
                statuses.append(status_of(note.text))
            else:
                copies[partition] = _copy_of.decode(note.text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    if not statuses:
        return None
    status = max(statuses, key=lambda status: status.at_ms)
    current = {partition: copy for partition, copy in copies.items() if partition in status.copies}
    age = max(0.0, (time.time() if now is None else now) - status.at_ms / 1000)
    return LiveMember(status, current, age)


class LiveGroup:
    """A group whose members' notes are read again and again, between ``with`` and its end. Blocks; one thread. Raises
    ``BrokerUnavailable`` and ``ConfigError``."""

    def __init__(self, config: EventSourceConfig, client_id: str) -> None:
        security = Security.of(config.client_settings)
        self._config = config
        self._questions = GroupQuestions(config.bootstrap_servers, security)
        self._board = StatusBoard(config.bootstrap_servers, client_id, security, config.group_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._board.close()
        self._questions.close()

    def read(self, seconds: float) -> tuple[GroupView, Live, tuple[str, ...]]:
        """Return the group, its members' status, and what could not be found out."""
        view = self._questions.describe_group(self._config.group_id, seconds)
        return view, *live_status(self._board, view, seconds, time.time(), self._config.offsets_topic)


def parked_in(live: Live) -> list[ParkedStatistics]:
    """Return the parked keys of the partitions that members report, the oldest first."""
    return _reported(live, lambda status: status.parked)


def jobs_in(live: Live) -> list[JobStatistics]:
    """Return the parked and old jobs of the partitions that members report, the oldest first."""
    return _reported(live, lambda status: status.jobs)


def parked_text(live: Live, now: float) -> str:
    """``2 parked keys with 17 events: partition 1 (1 key, 9 events, for 3 min); ...``; empty: members report none.
    ``now`` in seconds since the epoch."""
    parked = parked_in(live)
    keys, events = sum(each.keys for each in parked), sum(each.events for each in parked)
    named = [
        f"partition {each.partition} ({_many(each.keys, 'key')}, {_many(each.events, 'event')}, for "
        f"{_age(each.since_ms, now)})"
        for each in parked
    ]
    more = sum(member.status.parked_more for member in live.values())
    return _listed(f"{_many(keys, 'parked key')} with {_many(events, 'event')}", named, more)


def jobs_text(live: Live, now: float) -> str:
    """``2 parked jobs: partition 1 (2 parked, the oldest job for 3 h 05 min); ...``; as ``parked_text``."""
    jobs = jobs_in(live)
    parked = sum(each.parked for each in jobs)
    named = [
        f"partition {each.partition} ({f'{each.parked:,} parked, ' * bool(each.parked)}the oldest job for "
        f"{_age(each.since_ms, now)})"
        for each in jobs
    ]
    more = sum(member.status.jobs_more for member in live.values())
    return _listed(_many(parked, "parked job") if parked else "old jobs", named, more)


def waiting_texts(live: Live, now: float) -> list[str]:
    """Return what waits and is in no lag, a line for each kind."""
    return [text for text in (parked_text(live, now), jobs_text(live, now)) if text]


class _OfPartition(Protocol):
    @property
    def partition(self) -> int: ...
    @property
    def since_ms(self) -> int: ...


P = TypeVar("P", bound=_OfPartition)


def _reported(live: Live, of: Callable[[MemberStatus], tuple[P, ...]]) -> list[P]:
    found: dict[int, P] = {}
    # Of a partition that has just moved there may be two notes: the newer one counts.
    for member in sorted(live.values(), key=lambda member: member.status.at_ms):
        found |= {each.partition: each for each in of(member.status)}
    return sorted(found.values(), key=lambda each: each.since_ms)


def _listed(what: str, named: list[str], more: int) -> str:
    if not named:
        return ""
    more += len(named) - len(named[:PARTITIONS_SHOWN])
    rest = f"; and {_many(more, 'further partition')}" if more else ""
    return f"{what}: {'; '.join(named[:PARTITIONS_SHOWN])}{rest}"


def _age(since_ms: int, now: float) -> str:
    return duration(max(0.0, now - since_ms / 1000))


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def rebalances(live: Live, instances: Mapping[str, str]) -> list[RebalanceStatistics]:
    """The last rebalances that members report, the newest first: for each generation the report that knows most.

    ``instances``: member id -> instance. A member that has just joined has nothing but that.
    """
    reported: dict[int, list[tuple[int, RebalanceStatistics]]] = {}
    for member_id, member in live.items():
        entries = sorted(member.status.rebalances, key=lambda entry: entry.generation)
        for place, entry in enumerate(entries):
            if place == 0 and len(entries) < PUBLISHED:
                entry = msgspec.structs.replace(entry, cause=f"joined: {instances.get(member_id, member_id)}")
                reported.setdefault(entry.generation, []).append((3, entry))
            else:
                reported.setdefault(entry.generation, []).append((_knowledge(entry.cause), entry))
    best = {
        generation: min(entries, key=lambda found: (found[0], found[1].at_ms))
        for generation, entries in reported.items()
    }
    return [best[generation][1] for generation in sorted(best, reverse=True)][:REBALANCES]


def _knowledge(cause: str) -> int:
    if "joined" in cause or "gone" in cause:
        return 0
    return 1 if "move" in cause else 4


def _may_be_an_instance(name: str) -> bool:
    return 1 <= len(name) <= 200 and name.isascii() and name.isprintable() and "." not in name and name == name.strip()
