"""The writer of a journal over a scripted claim: answers of appends whose settlement meets other errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from streams.core.journal import Payload, TermState
from streams.errors import (
    AppendUnsettled,
    ConfigError,
    JournalError,
    NotLeading,
    OffsetError,
    RecordsRefused,
    StreamsError,
    TopicError,
    TransactionFailed,
)
from streams.journal import writer as module
from streams.journal.entries import EntryTypes
from streams.journal.term import JournalTerm
from streams.journal.writer import TermWriter
from streams.kafka.questions.admin import Watermarks
from streams.records import IncomingRecord, Output, RefusedRecord
from streams.runtime.bridge import Worker


class CommittingClaim:
    """A claim whose appends are committed, and of which all but the first raise; then each ``take`` raises an error of
    ``errors``, as long as there are some."""

    where, topic = "ledger[0]", "ledger"

    def __init__(self, *errors: StreamsError) -> None:
        self.errors = list(errors)
        self.log: list[IncomingRecord] = []
        self.on_error: Callable[[], object] = lambda: None

    def take(self) -> Watermarks:
        if self.log and self.errors:
            self.on_error()
            raise self.errors.pop(0)
        return Watermarks(0, len(self.log), len(self.log))

    look = take

    def read(self, start: int, end: int) -> list[IncomingRecord]:
        return self.log[start:end]

    def append(self, outputs: Sequence[Output]) -> int:
        is_first = not self.log
        for output in outputs:
            self.log.append(IncomingRecord(self.topic, 0, len(self.log), output.key, output.value, output.headers))
        if not is_first:
            raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown")
        return len(self.log)


class Leading:
    """A tenure that goes on."""

    is_over, reason = False, ""

    def is_confirmed(self) -> bool:
        return True


def begun(claim: Any) -> TermWriter:
    tenure: Any = Leading()
    writer = TermWriter(claim, tenure)
    writer.begin()
    return writer


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_seconds", lambda *_: 0.0)


def test_errors_that_pass_while_an_append_is_settled_are_not_its_answer() -> None:
    claim = CommittingClaim(ConfigError("no right"), TopicError("no topic"), ConfigError("no right"))
    writer, seen = begun(claim), list[TermState]()
    claim.on_error = lambda: seen.append(writer.state)
    assert writer.commit([Payload([], b"a"), Payload([], b"b")]) == (1, 2)
    assert (seen, writer.state) == ([TermState.SETTLING] * 3, TermState.OPEN)
    assert not claim.errors
    assert [record.value for record in claim.log[1:]] == [b"a", b"b"]


def test_an_append_that_is_given_up_while_such_an_error_stays_is_unsettled() -> None:
    claim = CommittingClaim(*(ConfigError("no right") for _ in range(9)))
    writer = begun(claim)
    claim.on_error = lambda: writer.give_up() if len(claim.errors) == 5 else None
    with pytest.raises(AppendUnsettled, match=r"the entries 1 to 1 of term 0: .*; no broker has said it"):
        writer.commit([Payload([], b"a")])
    writer.end("no broker has said it")
    with pytest.raises(NotLeading, match="the term 0 is over: no broker has said it; nothing is appended"):
        writer.commit([Payload([], b"b")])
    assert len(claim.log) == 2


def test_a_batch_that_is_too_large_for_the_topic_is_sent_again_in_smaller_ones() -> None:
    """Entries share batches of up to 900 kB, and a topic may take less: none of them is at fault, and no term ends."""

    class SmallerTopic(CommittingClaim):
        def __init__(self, output: Output | None) -> None:
            super().__init__()
            self.refusals = [RefusedRecord("ledger", "MESSAGE_TOO_LARGE", "too large", True, output)]

        def append(self, outputs: Sequence[Output]) -> int:
            if self.log and self.refusals:
                raise RecordsRefused("flush", [self.refusals.pop()])
            with suppress(TransactionFailed):
                super().append(outputs)
            return len(self.log)

    entries = [Payload([], b"a"), Payload([], b"b")]
    assert begun(SmallerTopic(None)).commit(entries) == (1, 2)
    writer = begun(SmallerTopic(Output("ledger", b"a", None, None, 0, 0, 0, -1)))
    with pytest.raises(RecordsRefused):
        writer.commit(entries)
    assert (writer.state, writer.position) == (TermState.OPEN, 1)


def test_a_term_that_cannot_begin_has_ended() -> None:
    claim: Any = CommittingClaim(TopicError("no topic"))
    claim.log.append(IncomingRecord("ledger", 0, 0, b"key", b"foreign", []))
    writer = TermWriter(claim, cast(Any, Leading()))
    with pytest.raises(TopicError, match="no topic"):
        writer.begin()
    assert (writer.state, writer.reason) == (TermState.ENDED, "no topic")
    with pytest.raises(JournalError, match=r"ledger\[0\]@0 is no entry of a journal"):
        TermWriter(claim, cast(Any, Leading())).begin()


async def test_a_log_that_has_lost_entries_leaves_the_append_unsettled_and_ends_the_term() -> None:
    lost = OffsetError("ledger[0] ends at 1")
    term = JournalTerm("ledger", begun(CommittingClaim(lost)), EntryTypes([bytes]))
    worker, ends = Worker("term"), list[str]()
    term.start(worker, ends.append)
    with pytest.raises(AppendUnsettled, match=r"the log does not say it: ledger\[0\] ends at 1"):
        await asyncio.wait_for(term.append(b"a"), 10)
    await term.close(0.1)
    worker.abandon()
    assert term.failure is lost
    assert ends == ["ledger[0] ends at 1"]
