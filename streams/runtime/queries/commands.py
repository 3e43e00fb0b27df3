"""Questions for the replies to commands, as they travel, and the owner's answers to them.

A reply is given when the transaction that it was kept in is committed, with the proof of a query. The question comes
while the command is on its way, and is held here until the command has had its turn. Behind that turn there is a reply
beside the command's id, or the command waits in its key's queue, or its error policy let it go: one of the three.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final, Literal

import msgspec

from streams.core.commands import CommandReply, decode_reply
from streams.core.seen import digest_of
from streams.errors import ConfigError, NotOwned
from streams.model.answers import Answer
from streams.model.commands import LONGEST_ID, SCOPE
from streams.records import TopicPartition
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.queries.local import LocalQueries
from streams.runtime.queries.questions import NamedOffset

LONGEST_HOLD: Final = 4.0
"""A question is held so many seconds, at most; then the caller puts it again."""
_RESTORING_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 0.1
"""A question that is held looks so often whether its partition is still here; and whether the position has passed a
command that left no reply."""

Kind = Literal["reply", "waits", "parked", "failed"]


class CommandQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``key``: of the command's record. ``at``: where the record is, if that is known: only then it can be said that
    the command is parked, or has failed. ``hold_seconds``: how long the question may be held."""

    path: ClassVar[str] = "/api/v1/command"
    max_staleness: ClassVar[None] = None  # a copy does not know what is committed now

    group: str
    partition: int
    id: str
    key: bytes
    at: NamedOffset | None = None
    hold_seconds: float = 1.0
    timeout_seconds: float = 5.0


class CommandAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``kind``: ``reply`` (which is committed), ``waits`` (the command has not had its turn here), ``parked``,
    ``failed`` (its error policy let it go)."""

    kind: Kind
    partition: int
    served_by: str
    positions: tuple[NamedOffset, ...] = ()
    reply: CommandReply | None = None


def checked_question(question: CommandQuestion, group: str, partitions: int) -> CommandQuestion:
    """Check a question from outside. Raises ``ConfigError``."""
    if question.group != group:
        raise ConfigError(f"the question is for the group {question.group!r}, and this is {group!r}")
    if not 0 <= question.partition < partitions:
        raise ConfigError(f"partition {question.partition}: there are 0 to {partitions - 1}")
    if not 1 <= len(question.id) <= LONGEST_ID:
        raise ConfigError(f"the id of a command has 1 to {LONGEST_ID} characters, not {len(question.id)}")
    if not (0 <= question.hold_seconds <= 3600 and 0 < question.timeout_seconds <= 3600):
        raise ConfigError("hold_seconds and timeout_seconds are from 0 to 3600")
    return question


async def answered(queries: LocalQueries, question: CommandQuestion) -> CommandAnswer:
    """Answer a question that was checked, on the loop of the source. Raises as ``LocalQueries.query``."""
    engine, number, digest = queries.engine, question.partition, digest_of(SCOPE, question.id)
    until = engine.now() + min(question.hold_seconds, LONGEST_HOLD, question.timeout_seconds * 0.8)
    while True:
        worker = engine.workers.get(number)
        if worker is None or not worker.takes_interjections:
            if worker is None or worker.state.value != "restoring" or engine.now() >= until:
                raise NotOwned(f"{engine.config.topic}[{number}] is not active on this member")
            await asyncio.sleep(_RESTORING_SECONDS)
            continue
        # Only the look in a turn counts: during a restart the table may show what is never committed.
        if worker.state.admits and (worker.seen.find(digest) is not None or _passed(queries, worker, question.at)):
            answer = await queries.query(
                number,
                lambda _: _look(queries, engine.workers[number], digest, question),
                timeout_seconds=question.timeout_seconds,
            )
            kind, kept = answer.value
            if kind != "waits":
                return _answer(answer, kind, kept)
        left = until - engine.now()
        if left <= 0:
            return CommandAnswer(kind="waits", partition=number, served_by=engine.config.instance_id)
        await worker.timers.awaited.wait(digest, min(left, _LOOK_SECONDS))


def _passed(queries: LocalQueries, worker: PartitionWorker, at: NamedOffset | None) -> bool:
    """Check whether the position is behind a record."""
    if at is None:
        return False
    return queries.positions(worker).get(TopicPartition(at[0], worker.partition), -1) > at[2]


def _look(
    queries: LocalQueries, worker: PartitionWorker, digest: bytes, question: CommandQuestion
) -> tuple[Kind, bytes]:
    """Look for what has become of a command, in a turn."""
    at, kept = question.at, worker.seen.find(digest)
    if kept:
        return "reply", kept
    if at is None or not _passed(queries, worker, at):
        return "waits", b""
    queue = worker.parked.get(question.key)
    is_in_it = queue is not None and any((at[0], at[2]) == (one.topic, one.offset) for one in queue.events.values())
    return ("parked" if is_in_it else "failed"), b""


def _answer(answer: Answer[tuple[Kind, bytes]], kind: Kind, kept: bytes) -> CommandAnswer:
    named = tuple((where.topic, where.partition, offset) for where, offset in answer.positions.items())
    return CommandAnswer(
        kind=kind,
        partition=answer.partition,
        served_by=answer.served_by,
        positions=named,
        reply=decode_reply(kept) if kept else None,
    )
