"""Publish a running member's status for ``kes group`` (``kafka/group/status_board.py``).

Only news is published: progress of restores and copies, moves, causes of rebalances. A member without copies and
without news publishes nothing. No task waits for it, and a broker that refuses it gets no second request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Any, Final

import anyio
import msgspec

from streams.core.visits import runs_of
from streams.errors import BrokerUnavailable, StreamsError
from streams.model.group import Assigned
from streams.runtime.member import Member
from streams.runtime.ownership.handover import Handover
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.ports import StatusBoard
from streams.statistics import (
    CopyStatistics,
    JobStatistics,
    MoveStatistics,
    ParkedStatistics,
    RebalanceStatistics,
    VisitRunStatistics,
)

_log = logging.getLogger(__name__)

TELL_SECONDS: Final = 1.0
"""A member looks for news of itself every so many seconds."""
ASK_SECONDS: Final = 5.0
"""One request to the broker takes so many seconds, at most."""
WITHDRAW_SECONDS: Final = 1.0
"""The removal of the notes takes so many seconds, at most: the stop waits for it."""
REBALANCES: Final = 10
"""So many of the last rebalances are published."""
NOTE_LETTERS: Final = 4000
"""A note has so many characters, at most: the board cuts off the rest, and half a note cannot be read."""
OLD_JOB_SECONDS: Final = 3600
"""A durable job that was started so many seconds ago, and is not over, is reported."""
MUTED_TOPICS: Final = 20
"""Topics of records that a muted source does not send, at most: a note has no more room."""
CAUSE_LETTERS: Final = 100
"""The cause of a rebalance has so many characters, at most: it names members, which may be many."""


class MemberStatus(msgspec.Struct, frozen=True):
    """The note of a member, apart from its copies, which have notes of their own. ``at_ms``: when it was written,
    milliseconds since the epoch. ``address``: where it answers queries. ``visits``: runs, over its partitions.
    ``parked``: of its partitions, that with the oldest parked key first; ``parked_more``: of so many others, which did
    not fit. ``jobs`` and ``jobs_more``: so of its partitions with durable jobs that are parked or old. ``shadow_of``:
    the group that it follows muted; ``muted``: the records that it has not sent, by topic."""

    at_ms: int
    member_id: str
    generation: int
    partitions: int
    copies: tuple[int, ...]
    moves: tuple[MoveStatistics, ...]
    rebalances: tuple[RebalanceStatistics, ...]
    address: str = ""
    visits: tuple[VisitRunStatistics, ...] = ()
    parked: tuple[ParkedStatistics, ...] = ()
    parked_more: int = 0
    jobs: tuple[JobStatistics, ...] = ()
    jobs_more: int = 0
    shadow_of: str = ""
    muted: dict[str, int] = {}


def note_of(status: MemberStatus) -> str:
    """Encode the note. Copies are a bitmap in hexadecimal digits, so that thousands fit; of moves, of the last runs of
    visits, and of partitions with parked keys or old jobs there are as many as fit."""
    fields: dict[str, Any] = msgspec.structs.asdict(status)
    fields["copies"] = f"{sum(1 << partition for partition in status.copies):x}"
    fields["rebalances"] = [
        msgspec.structs.replace(entry, cause=_short(entry.cause, CAUSE_LETTERS)) for entry in status.rebalances
    ]
    cut = ("moves", "visits", "parked", "jobs")
    while len(text := _encoded(fields)) > NOTE_LETTERS and any(fields[name] for name in cut):
        # The newest runs of visits are the last ones: they stay.
        fields["moves"] = fields["moves"][: len(fields["moves"]) // 2]
        fields["visits"] = fields["visits"][(len(fields["visits"]) + 1) // 2 :]
        for name, entries in (("parked", status.parked), ("jobs", status.jobs)):
            fields[name] = fields[name][: len(fields[name]) // 2]
            fields[f"{name}_more"] = getattr(status, f"{name}_more") + len(entries) - len(fields[name])
    return text


def status_of(note: str) -> MemberStatus:
    """Decode a note of ``note_of``. Any program may write notes: raises ``ValueError`` or ``msgspec.MsgspecError``."""
    fields = msgspec.json.decode(note, type=dict[str, Any])
    copies = fields.get("copies")
    if isinstance(copies, str):
        bits = reversed(f"{int(copies, 16):b}")
        fields["copies"] = [partition for partition, bit in enumerate(bits) if bit == "1"]
    return msgspec.convert(fields, MemberStatus)


class Status:
    """The published status of one run, and the causes of its rebalances. On the loop."""

    def __init__(self, member: Member, replicas: Replicas, handover: Handover) -> None:
        self._member = member
        self._replicas = replicas
        self._handover = handover
        self._worker = member.thread("kes-status")
        self._board: StatusBoard | None = None
        self._over = False
        self._lock = threading.Lock()  # for the board's beginning and end
        self._published: dict[tuple[str, int], str] = {}
        self.rebalances: deque[RebalanceStatistics] = deque(maxlen=REBALANCES)

    def rebalanced(self, event: Assigned, before: Collection[str]) -> str:
        """Note a rebalance, ``before`` which there were these members; returns its cause, as far as a member can know
        it."""
        plan = event.assignment
        came, went = sorted(set(plan.members) - set(before)), sorted(set(before) - set(plan.members))
        causes = [f"joined: {', '.join(came)}"] if came else []
        causes += [f"gone: {', '.join(went)}"] if went else []
        if not causes:
            moves = event.releasing or event.incoming or plan.preparing
            causes = ["partitions move" if moves else "a member requested it"]
        cause = "; ".join(causes)
        self.rebalances.append(RebalanceStatistics(event.generation, self._member.wall_ms(), cause))
        return cause

    async def run(self) -> None:
        """Publish news until cancelled."""
        if not self._member.config.group.publish_status:
            return
        while not self._over:
            notes = self._news()
            if notes:
                try:
                    await self._worker.call(self._publish, notes)
                except BrokerUnavailable as error:
                    self._published.clear()  # all of it again, when the broker answers
                    _log.debug("the status is not published: %s", error)
                except StreamsError as error:
                    # A right that is missing stays missing: no second request.
                    _log.info("no status is published for `kes group`: %s", error)
                    return
            await anyio.sleep(TELL_SECONDS)

    def withdraw(self) -> None:
        """Remove the notes: a member that stops in good order leaves none behind. Blocks for a moment; off the loop."""
        with self._lock:  # or a board that is being made would be left behind with its thread
            self._over = True
        if self._board is not None:
            try:
                self._board.remove(self._member.config.instance_id, WITHDRAW_SECONDS)
            except StreamsError as error:
                _log.debug("the status notes stay: %s", error)
            finally:
                self._board.close()

    def close(self) -> None:
        self._over = True

    def _news(self) -> dict[tuple[str, int], tuple[int, str]]:
        member, config = self._member, self._member.config
        found: dict[tuple[str, int], tuple[int, str]] = {}
        copies = self._replicas.statistics()
        for copy in copies:
            if self._is_new((config.changelog, copy.partition), _gist(copy)):
                found[config.changelog, copy.partition] = copy.position, _encoded(copy)
        status = MemberStatus(
            member.wall_ms(),
            member.membership.group_metadata.member_id,
            member.membership.group_metadata.generation,
            len(member.workers),
            tuple(copy.partition for copy in copies),
            self._handover.statistics(),
            tuple(self.rebalances),
            config.queries.address,
            self._visits(),
            self._parked(),
            jobs=self._jobs(),
            shadow_of=config.shadow_of,
            muted=dict(list(member.pool.muted_records().items())[:MUTED_TOPICS]),
        )
        # The times are left out: they change with every look, and are no news.
        gist = _encoded(msgspec.structs.replace(status, at_ms=0, moves=tuple(map(_timeless, status.moves))))
        if found or self._is_new((config.offsets_topic, 0), gist):
            # A note is kept as the metadata of an offset, and the generation is that offset: before a plan it is -1.
            found[config.offsets_topic, 0] = max(status.generation, 0), note_of(status)
        return found

    def _visits(self) -> tuple[VisitRunStatistics, ...]:
        if not self._member.config.visits:
            return ()
        workers = self._member.workers.values()
        return runs_of(visit for worker in workers if worker.state.admits for visit in worker.visits())

    def _parked(self) -> tuple[ParkedStatistics, ...]:
        found: list[ParkedStatistics] = []
        for number, worker in self._member.workers.items():
            keys, events, _, since_ms, _ = worker.timers.parked.figures("")
            if since_ms is not None and worker.state.admits:
                found.append(ParkedStatistics(number, keys, events, since_ms))
        return tuple(sorted(found, key=lambda each: each.since_ms))

    def _jobs(self) -> tuple[JobStatistics, ...]:
        found: list[JobStatistics] = []
        old_ms = self._member.wall_ms() - 1000 * OLD_JOB_SECONDS
        for number, worker in self._member.workers.items():
            _, parked, since_ms = worker.timers.jobs.figures()
            if since_ms is not None and (parked or since_ms <= old_ms) and worker.state.admits:
                found.append(JobStatistics(number, parked, since_ms))
        return tuple(sorted(found, key=lambda each: each.since_ms))

    def _is_new(self, place: tuple[str, int], gist: str) -> bool:
        before, self._published[place] = self._published.get(place), gist
        return before != gist

    def _publish(self, notes: dict[tuple[str, int], tuple[int, str]]) -> None:
        with self._lock:
            # Without this the note of a member that has just stopped would stay behind.
            if self._over:
                return
            if self._board is None:
                self._board = self._member.connections.status_board()
        self._board.publish(self._member.config.instance_id, notes, ASK_SECONDS)


def _gist(copy: CopyStatistics) -> str:
    """Return the parts of a copy's status whose change is news."""
    return f"{copy.state} {copy.position} {copy.end} {copy.folder_loaded}"


def _timeless(move: MoveStatistics) -> MoveStatistics:
    return msgspec.structs.replace(move, seconds=None)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 3] + "..."


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()
