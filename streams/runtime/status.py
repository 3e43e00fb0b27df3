"""What a member tells about itself while it runs, for ``kes group`` to see (``clients/status_board.py``).

Told is what is new: restores and copies that move on, moves, why the group was rebalanced. A member that has no copies
and nothing new says nothing. Nobody waits for it, and a broker that does not let us is not asked again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from streams.errors import BrokerUnavailable, StreamsError
from streams.group import Assigned
from streams.runtime.ports import StatusBoard
from streams.statistics import CopyStatistics, MoveStatistics, RebalanceStatistics

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

TELL_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0
WITHDRAW_SECONDS: Final = 1.0
REBALANCES: Final = 10
"""So many of the last ones are told."""
NOTE_LETTERS: Final = 4000
"""What the board takes of a note; the rest would be cut off, and half a note says nothing."""
CAUSE_LETTERS: Final = 100
"""Of a rebalance's cause: it names members, which may be many."""


class MemberStatus(msgspec.Struct, frozen=True):
    """The note of a member: what it is doing apart from its copies, which have notes of their own. ``at_ms``: when it
    was written, milliseconds since the epoch."""

    at_ms: int
    member_id: str
    generation: int
    partitions: int
    copies: tuple[int, ...]
    moves: tuple[MoveStatistics, ...]
    rebalances: tuple[RebalanceStatistics, ...]


def note_of(status: MemberStatus) -> str:
    """The note as it is written. Copies are a bitmap in hexadecimal digits, so that thousands fit; of moves there are
    as many as fit."""
    fields: dict[str, Any] = msgspec.structs.asdict(status)
    fields["copies"] = f"{sum(1 << partition for partition in status.copies):x}"
    fields["rebalances"] = [
        msgspec.structs.replace(entry, cause=_short(entry.cause, CAUSE_LETTERS)) for entry in status.rebalances
    ]
    while len(text := _encoded(fields)) > NOTE_LETTERS and fields["moves"]:
        fields["moves"] = fields["moves"][: len(fields["moves"]) // 2]
    return text


def status_of(note: str) -> MemberStatus:
    """What ``note_of`` wrote. Anybody may write notes: raises ``ValueError`` or ``msgspec.MsgspecError``."""
    fields = msgspec.json.decode(note, type=dict[str, Any])
    copies = fields.get("copies")
    if isinstance(copies, str):
        bits = reversed(f"{int(copies, 16):b}")
        fields["copies"] = [partition for partition, bit in enumerate(bits) if bit == "1"]
    return msgspec.convert(fields, MemberStatus)


class Status:
    """Tells, and remembers why the group was rebalanced. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker = engine.connections.worker("kes-status")
        self._board: StatusBoard | None = None
        self._over = False
        self._lock = threading.Lock()  # for the board's beginning and end
        self._told: dict[tuple[str, int], str] = {}
        self.rebalances: deque[RebalanceStatistics] = deque(maxlen=REBALANCES)

    def rebalanced(self, event: Assigned, came: list[str], went: list[str]) -> str:
        """Note a rebalance; returns what it was for, as far as a member can tell."""
        plan = event.assignment
        causes = [f"joined: {', '.join(came)}"] if came else []
        causes += [f"gone: {', '.join(went)}"] if went else []
        if not causes:
            causes = ["partitions move"] if event.releasing or event.incoming or plan.preparing else ["a member asked"]
        cause = "; ".join(causes)
        self.rebalances.append(RebalanceStatistics(event.generation, self._engine.wall_ms(), cause))
        return cause

    async def run(self) -> None:
        """Tell what is new, until cancelled."""
        if not self._engine.config.publish_status:
            return
        while not self._over:
            notes = self._news()
            if notes:
                try:
                    await self._worker.call(self._publish, notes)
                except BrokerUnavailable as error:
                    self._told.clear()  # all of it again, when somebody listens
                    _log.debug("the status is not told: %s", error)
                except StreamsError as error:
                    _log.info("no status is published for `kes group`: %s", error)
                    return
            await anyio.sleep(TELL_SECONDS)

    def withdraw(self) -> None:
        """Take the notes away: who stops in good order leaves none behind. Blocks for a moment; off the loop."""
        with self._lock:  # or a board that is being made would be left behind with its thread
            self._over = True
        if self._board is not None:
            try:
                self._board.remove(self._engine.config.instance_id, WITHDRAW_SECONDS)
            except StreamsError as error:
                _log.debug("the status notes stay: %s", error)
            finally:
                self._board.close()

    def close(self) -> None:
        """Nothing more is told."""
        self._over = True
        self._worker.abandon()

    def _news(self) -> dict[tuple[str, int], tuple[int, str]]:
        engine, config = self._engine, self._engine.config
        found: dict[tuple[str, int], tuple[int, str]] = {}
        copies = engine.copies.statistics()
        for copy in copies:
            if self._is_new((config.changelog, copy.partition), _gist(copy)):
                found[config.changelog, copy.partition] = copy.position, _encoded(copy)
        status = MemberStatus(
            engine.wall_ms(),
            engine.membership.snapshot.member_id,
            engine.membership.snapshot.generation,
            len(engine.workers),
            tuple(copy.partition for copy in copies),
            engine.moves.statistics(),
            tuple(self.rebalances),
        )
        gist = _encoded(msgspec.structs.replace(status, at_ms=0, moves=tuple(map(_timeless, status.moves))))
        if found or self._is_new((config.offsets_topic, 0), gist):
            found[config.offsets_topic, 0] = max(status.generation, 0), note_of(status)
        return found

    def _is_new(self, place: tuple[str, int], gist: str) -> bool:
        before, self._told[place] = self._told.get(place), gist
        return before != gist

    def _publish(self, notes: dict[tuple[str, int], tuple[int, str]]) -> None:
        with self._lock:
            if self._over:
                return
            if self._board is None:
                self._board = self._engine.connections.status_board()
        self._board.publish(self._engine.config.instance_id, notes, ASK_SECONDS)


def _gist(copy: CopyStatistics) -> str:
    """What of a copy has to change for it to be told anew."""
    return f"{copy.state} {copy.position} {copy.end}"


def _timeless(move: MoveStatistics) -> MoveStatistics:
    return msgspec.structs.replace(move, seconds=None)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 3] + "..."


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()
