"""A member of a replicated service over a scripted journal: snapshots that fail, states that are half applied."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from streams.core.journal import MemberState
from streams.errors import JournalError, NotLeading, ReplicaFailed, TopicError
from streams.journal import Replicated, SnapshotFolder, held_state
from streams.journal.entries import EntryTypes, TermBegan
from streams.journal.held_state import HeldState
from streams.journal.journal import JournalTopic
from streams.journal.term import JournalTerm
from streams.runtime.bridge import Worker
from streams.runtime.ownership.candidate import Candidate
from tests.unit.test_journal_term import ScriptedWriter
from tests.unit.waiting import PATIENCE, give_own, turns, until

pytestmark = pytest.mark.timeout(60)


class ScriptedJournal:
    """A journal in which each member leads at once, and which nobody else writes."""

    name = "ledger"

    def __init__(self) -> None:
        self.types = EntryTypes([bytes])
        self.writer = ScriptedWriter()

    async def check(self) -> JournalTopic:
        return JournalTopic("id", 0, 1_000, 1_000)

    def candidate(self) -> Candidate:
        return Candidate(self.name, 6.0)

    @asynccontextmanager
    async def lead(self, **settings: Any) -> AsyncIterator[JournalTerm]:
        writer: Any = self.writer
        term = JournalTerm(self.name, writer, self.types, is_strict=settings["is_strict"])
        worker = Worker("lead")
        with CancelScope() as scope:
            term.start(worker, lambda reason: scope.cancel())
            try:
                yield term
            finally:
                await term.close(0.1)
                worker.abandon()
        if scope.cancelled_caught:
            raise NotLeading("it is over")

    @asynccontextmanager
    async def reader(self, **settings: Any) -> AsyncIterator[Self]:
        self.position = settings["after"]
        yield self

    async def follow(self) -> AsyncIterator[TermBegan]:
        yield TermBegan(self.writer.position - 1, self.writer.token, -1, "a process", "", 0)
        await asyncio.Event().wait()


class Pad:
    """A list of words; ``broken`` cannot be added. Its saves wait for ``gate``, and raise ``fault``."""

    gate = threading.Event()
    saving = threading.Event()
    fault: Exception | None = None
    saved: list[bytes]

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def apply(self, event: bytes) -> None:
        self.words.append(event)
        if event == b"broken":
            raise ValueError("a bug")

    def save(self, file: BinaryIO) -> None:
        self.saving.set()
        self.gate.wait(PATIENCE)
        if self.fault is not None:
            raise self.fault
        Pad.saved.append(b" ".join(self.words))
        file.write(Pad.saved[-1])

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        pad = cls()
        pad.words = file.read().split()
        return pad


@pytest.fixture(autouse=True)
def pad() -> Iterator[type[Pad]]:
    Pad.fault, Pad.saved = None, []
    Pad.gate.set()
    Pad.saving.clear()
    yield Pad
    Pad.gate.set()  # a test that fails leaves no thread


def member(folder: Path, every: int = 100_000) -> Replicated[Pad]:
    journal: Any = ScriptedJournal()
    return Replicated(journal, Pad, snapshots=SnapshotFolder(folder), checkpoint_every=every)


def words(pad: Pad) -> list[bytes]:
    return list(pad.words)


async def test_a_save_that_fails_does_not_swallow_a_cancellation(tmp_path: Path) -> None:
    journal: Any = ScriptedJournal()
    held = HeldState(journal, Pad, SnapshotFolder(tmp_path))
    await held.open()
    Pad.gate.clear()
    Pad.fault = JournalError("a full disk")
    saving = asyncio.create_task(held.save(5))
    await until(Pad.saving.is_set)
    saving.cancel()
    await turns()
    assert not saving.done()  # the state must not change meanwhile
    Pad.gate.set()
    await asyncio.wait([saving])
    assert saving.cancelled()
    held.close()


async def test_a_scope_that_is_cancelled_during_a_save_does_not_keep_the_loop_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal: Any = ScriptedJournal()
    held = HeldState(journal, Pad, SnapshotFolder(tmp_path))
    await held.open()
    Pad.gate.clear()
    waits, wait = [], asyncio.wait
    give_own(monkeypatch, "asyncio", held_state, wait=lambda tasks: (waits.append(tasks), wait(tasks))[1])
    with CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.01, scope.cancel)
        threading.Timer(0.1, Pad.gate.set).start()
        await held.save(5)
        await checkpoint()
        raise AssertionError("it was not cancelled")
    assert len(waits) <= 2
    held.close()


async def test_a_member_is_left_while_its_snapshot_fails(tmp_path: Path) -> None:
    Pad.gate.clear()
    Pad.fault = JournalError("a full disk")
    async with asyncio.timeout(PATIENCE / 3), member(tmp_path, every=1) as one:
        await until(lambda: one.is_leading, "it leads")
        await until(Pad.saving.is_set, "a checkpoint is made")
        threading.Timer(0.1, Pad.gate.set).start()


@pytest.mark.parametrize("fault", [ValueError("a bug"), JournalError("a full disk")], ids=["bug", "disk"])
async def test_a_save_that_fails_makes_no_checkpoint(tmp_path: Path, fault: Exception) -> None:
    """A bug stops the member by name; without room it goes on, with the snapshots that it has."""
    Pad.fault = fault
    one = member(tmp_path, every=1)
    journal: Any = one.journal
    async with asyncio.timeout(PATIENCE / 3):
        if isinstance(fault, ValueError):
            with pytest.raises(ReplicaFailed, match=r"ledger: Pad\.save failed at \d+: ValueError\('a bug'\)"):
                async with one:
                    await one.wait()
        else:
            async with one:
                await until(Pad.saving.is_set, "a checkpoint is made")
                assert await one.decide(lambda pad: ([b"word"], len(pad.words))) == 0
    values = [value for values in journal.writer.commits for value in values]
    assert values.count(b"word") == isinstance(fault, JournalError)
    assert not any(b"covers" in value for value in values)


async def test_a_snapshot_that_cannot_be_loaded_stops_the_member_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(file: BinaryIO) -> Pad:
        raise ValueError("a bug")

    SnapshotFolder(tmp_path).save("ledger", "id", 5, lambda file: None)
    monkeypatch.setattr(Pad, "load", load)
    found = member(tmp_path)
    with pytest.raises(ReplicaFailed, match=r"ledger: Pad\.load failed on the snapshot of 5: ValueError"):
        async with found:
            pass
    assert found.state is MemberState.STOPPED


async def test_a_decision_without_events_is_as_good_as_a_barrier(tmp_path: Path) -> None:
    one = member(tmp_path)
    journal: Any = one.journal
    async with one:
        await until(lambda: one.is_leading, "it leads")
        assert await one.decide(lambda pad: ([], "reply")) == "reply"
    assert journal.writer.commits == [[b"{}"]]


async def test_a_leader_that_only_reads_makes_checkpoints(tmp_path: Path) -> None:
    async with member(tmp_path, every=30) as one:
        await until(lambda: one.is_leading, "it leads")
        for _ in range(20):
            assert await one.read(words) == []
        await until(lambda: bool(Pad.saved), "a checkpoint is made", PATIENCE / 3)


async def test_a_state_that_is_half_applied_is_neither_saved_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pad.gate.clear()
    one, read = member(tmp_path, every=1), list[Any]()
    make_checkpoint = one._checkpoint

    async def checkpoint_behind_a_read(term: JournalTerm) -> None:
        read.append(await one.read(words))  # so the next checkpoint is due
        await make_checkpoint(term)

    monkeypatch.setattr(one, "_checkpoint", checkpoint_behind_a_read)
    async with one:
        await until(Pad.saving.is_set, "the checkpoint is made")
        assert read == [[]]
        broken = asyncio.create_task(one.decide(lambda pad: ([b"fine", b"broken"], None)))
        await turns()  # it has the turn after this checkpoint, and before the next one
        Pad.gate.set()
        with pytest.raises(ReplicaFailed, match=r"Pad\.apply failed on bytes"):
            await broken
        assert await one.read(words, barrier=False) == []  # rebuilt
        await until(lambda: one.is_leading, "it leads again")
    assert set(Pad.saved) == {b""}


async def test_a_member_that_is_cancelled_twice_leaves_no_task(tmp_path: Path) -> None:
    Pad.gate.clear()
    async with member(tmp_path, every=1) as one:
        await until(Pad.saving.is_set, "a checkpoint is made")
        assert one._task is not None
        for _ in range(2):
            one._task.cancel()
            await turns()
        assert not one._task.done()  # the checkpoint is under way
        Pad.gate.set()
        await asyncio.wait([one._task])
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_member_that_cannot_be_loaded_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        raise TopicError("it is missing")

    found = member(tmp_path)
    monkeypatch.setattr(found.journal, "check", check)
    with pytest.raises(TopicError, match="it is missing"):
        async with found:
            pass
    assert found.state is MemberState.STOPPED
    assert found._held._worker._is_abandoned, "its thread ends"


async def test_a_member_that_is_left_at_once_is_stopped(tmp_path: Path) -> None:
    async with member(tmp_path) as found:
        assert found.state is MemberState.FOLLOWING
    assert found.state is MemberState.STOPPED
