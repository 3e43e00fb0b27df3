"""A journal's term over a scripted writer: which appends share a commit, who gets which answer, and when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any

import pytest

from streams.core.journal import Payload, TermState
from streams.errors import AppendConflict, AppendUnsettled, ConfigError, JournalError, NotLeading, RecordRefused
from streams.errors import RecordsRefused as Refused
from streams.journal.entries import EntryTypes
from streams.journal.term import JournalTerm
from streams.records import Output, RefusedRecord
from streams.runtime.bridge import Worker
from tests.unit.waiting import PATIENCE, turns, until


class ScriptedWriter:
    """Commits when ``gate`` is open. ``script``: called with the values of each transaction before it is committed."""

    def __init__(self) -> None:
        self.token, self.position, self.reason = 7, 8, ""
        self.state = TermState.OPEN
        self.commits: list[list[bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.script: Callable[[list[bytes], Sequence[int]], None] = lambda values, origins: None
        self.given_up = threading.Event()

    def commit(self, payloads: Sequence[Payload], origins: Sequence[int] = ()) -> tuple[int, ...]:
        while not self.gate.wait(0.01):
            if self.given_up.is_set():
                raise AppendUnsettled("no broker has said")
        values = [payload.value for payload in payloads]
        self.script(values, origins)
        self.commits.append(values)
        first = self.position + 1  # behind a marker
        self.position = first + len(values)
        return tuple(range(first, self.position))

    def give_up(self) -> None:
        self.given_up.set()

    def end(self, reason: str) -> None:
        self.state = TermState.ENDED


class Desk:
    """A term at work. ``ends``: why it ended by itself."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.writer = ScriptedWriter()
        writer: Any = self.writer
        self.term = JournalTerm("ledger", writer, EntryTypes([bytes]), is_strict=is_strict)
        self.ends: list[str] = []
        self._worker = Worker("term")
        self.term.start(self._worker, self.ends.append)

    async def close(self) -> None:
        await self.term.close(0.1)
        self._worker.abandon()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.close()


def refuse(values: list[bytes], origins: Sequence[int], at_fault: bytes, *, named: bool) -> None:
    """Refuse a transaction with this value in it."""
    if at_fault in values:
        origin = origins[values.index(at_fault)]
        output = Output("ledger", at_fault, None, None, 0, 0, 0, origin) if named else None
        raise Refused("flush", [RefusedRecord("ledger", "MESSAGE_TOO_LARGE", "too large", named, output)])


async def test_appends_that_come_during_a_commit_share_the_next_one(desk: Desk) -> None:
    desk.writer.gate.clear()
    first = desk.term.submit(b"first")
    while not first.is_sent:
        await asyncio.sleep(0.001)
    others = [desk.term.submit(b"%d" % number, b"x") for number in range(3)]
    barriers = [asyncio.create_task(desk.term.barrier()) for _ in range(2)]
    desk.writer.gate.set()
    assert await first == 10
    assert [await other for other in others] == [13, 15, 17]
    await asyncio.gather(*barriers)
    assert desk.writer.commits[:2] == [[b"first"], [b"0", b"x", b"1", b"x", b"2", b"x"]]
    await desk.term.barrier()  # alone it is an entry of its own
    assert desk.writer.commits[-1] == [b"{}"]
    assert desk.term.position == desk.writer.position


@pytest.mark.parametrize("append", [JournalTerm.append, JournalTerm.submit])
async def test_callers_that_were_answered_share_the_next_commit_with_those_that_wait(
    desk: Desk, append: Callable[[JournalTerm, bytes], Awaitable[int]]
) -> None:
    """Else two groups would take turns for ever, and each would wait for the other."""
    desk.writer.gate.clear()

    async def caller(name: bytes) -> None:
        for _ in range(3):
            await append(desk.term, name)

    early = asyncio.create_task(caller(b"early"))
    await until(lambda: desk.term._under_way)
    late = asyncio.create_task(caller(b"late"))
    await until(lambda: bool(desk.term._queue))
    desk.writer.gate.set()
    await asyncio.gather(early, late)
    assert [sorted(values) for values in desk.writer.commits] == [
        [b"early"],
        [b"early", b"late"],
        [b"early", b"late"],
        [b"late"],
    ]


async def test_an_append_that_expects_less_than_there_is_conflicts(desk: Desk) -> None:
    position = await desk.term.append(b"a", expect=8)
    late, fine = desk.term.submit(b"b", expect=8), desk.term.submit(b"c", expect=position)
    with pytest.raises(AppendConflict, match="up to 10, behind the expected 8; nothing is appended"):
        await late
    assert await fine == 12
    assert desk.writer.commits == [[b"a"], [b"c"]]


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
async def test_a_refused_append_fails_alone(desk: Desk, named: bool) -> None:
    desk.writer.script = lambda values, origins: refuse(values, origins, b"bad", named=named)
    appends = [desk.term.submit(value) for value in (b"a", b"bad", b"b")]
    answers = await asyncio.gather(*appends, return_exceptions=True)
    assert isinstance(answers[1], RecordRefused)
    assert [type(answer) for answer in (answers[0], answers[2])] == [int, int]
    assert [value for values in desk.writer.commits for value in values] == [b"a", b"b"]
    assert not desk.ends


async def test_a_refused_append_that_others_rest_on_ends_a_strict_term() -> None:
    desk = Desk(is_strict=True)
    desk.writer.script = lambda values, origins: refuse(values, origins, b"bad", named=True)
    appends = [desk.term.submit(value) for value in (b"a", b"bad", b"b")]
    answers = await asyncio.gather(*appends, return_exceptions=True)
    assert [type(answer) for answer in answers] == [NotLeading, RecordRefused, NotLeading]
    assert desk.writer.commits == []
    assert len(desk.ends) == 1
    await desk.close()


@pytest.mark.parametrize("error", [NotLeading("term 9 has begun"), JournalError("foreign")], ids=["deposed", "damaged"])
async def test_the_end_of_the_writer_ends_the_term_and_refuses_the_rest(desk: Desk, error: Exception) -> None:
    desk.writer.gate.clear()

    def fails(values: list[bytes], origins: Sequence[int]) -> None:
        raise error

    desk.writer.script = fails
    sent = desk.term.submit(b"sent")
    while not sent.is_sent:
        await asyncio.sleep(0.001)
    queued = desk.term.submit(b"queued")
    ended = asyncio.create_task(desk.term.ended())
    desk.writer.gate.set()
    with pytest.raises(type(error), match=str(error)):
        await sent
    with pytest.raises(NotLeading, match="nothing is appended"):
        await queued
    with pytest.raises(NotLeading):
        await desk.term.append(b"late")
    assert await ended == str(error)
    assert desk.ends == [str(error)]
    assert desk.term.failure is (None if isinstance(error, NotLeading) else error)


async def test_a_cancelled_append_is_withdrawn_if_it_was_not_sent_and_else_has_its_answer(desk: Desk) -> None:
    desk.writer.gate.clear()
    sent = desk.term.submit(b"sent")
    task = asyncio.create_task(desk.term.append(b"queued"))
    while not (sent.is_sent and desk.term._queue):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sent.withdraw()
    desk.writer.gate.set()
    assert await sent == 10
    await desk.term.barrier()
    assert [b"queued"] not in desk.writer.commits


async def test_a_checkpoint_waits_for_what_is_under_way_and_holds_back_the_rest(desk: Desk) -> None:
    desk.writer.gate.clear()
    first = desk.term.submit(b"first")
    while not first.is_sent:
        await asyncio.sleep(0.001)
    queued = desk.term.submit(b"queued")
    threading.Timer(0.05, desk.writer.gate.set).start()
    async with desk.term.checkpoint("x") as pending:
        assert (await first, pending.position) == (10, 10)
        later = asyncio.get_running_loop().create_task(desk.term.append(b"later"), context=Context())
        with pytest.raises(ConfigError, match="within the block of a checkpoint"):
            desk.term.submit(b"no")
        assert desk.writer.commits == [[b"first"]]
    await asyncio.gather(queued, later)
    assert desk.writer.commits[1:] == [[b'{"covers":10,"name":"x"}'], [b"queued", b"later"]]
    assert pending.entry_position == 12


async def test_a_task_that_is_made_within_a_checkpoint_may_append_when_it_is_over(desk: Desk) -> None:
    go = asyncio.Event()

    async def appends_later() -> int:
        with pytest.raises(ConfigError, match="within the block of a checkpoint"):
            await desk.term.append(b"no")
        await go.wait()
        async with desk.term.checkpoint():
            pass
        return await desk.term.append(b"later")

    async with desk.term.checkpoint():
        task = asyncio.create_task(appends_later())
        await turns()
    go.set()
    assert await asyncio.wait_for(task, PATIENCE) == desk.term.position
    assert desk.writer.commits[-1] == [b"later"]


async def test_a_term_that_ends_within_a_checkpoint_appends_no_entry(desk: Desk) -> None:
    with pytest.raises(NotLeading, match="the group has ended it; nothing is appended"):
        async with desk.term.checkpoint():
            desk.term.end("the group has ended it")
    for late in (desk.term.checkpoint(), desk.term.checkpoint(at=8)):
        with pytest.raises(NotLeading):
            async with late:
                pass
    assert desk.writer.commits == []
    await desk.close()
    assert desk.term.state is TermState.ENDED


async def test_a_term_that_is_left_while_no_broker_answers_says_so(desk: Desk) -> None:
    desk.writer.gate.clear()
    under_way = desk.term.submit(b"x")
    while not under_way.is_sent:
        await asyncio.sleep(0.001)
    await desk.term.close(0.05)
    with pytest.raises(AppendUnsettled):
        await under_way
    assert not under_way.is_committed
    assert under_way.is_settled
