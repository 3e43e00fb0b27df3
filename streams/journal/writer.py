"""The writer of a term: it takes the claim, opens the term, and settles each append. All calls block.

The order of the steps is the protocol. Each rule below is one of the model in ``tests/model/journal_rules.py``, which
finds an entry that is lost, doubled, or answered wrongly when a rule is left out (J4 is about progress alone).

J1  The claim is taken before the end of the log is looked up, and before the term's record is written.
J2  A term's token is the offset of its record, never the group's generation.
J3  An answer follows a commit that is known. Without one nothing is guessed: the claim is taken again, which ends the
    transaction, and the log tells which way. Only what is not there is sent again.
J4  A claim is taken again only when the group has confirmed the tenure after the failure; else two leaders would take
    it from each other. A leader that is not confirmed waits for the record of a younger term: behind that, nothing of
    its own can come. If none comes, it takes the claim once, to settle, and writes no more.
J5  Behind a younger term nothing is sent again, whatever the group says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Final

from streams.core.journal import (
    TERM_TYPE,
    EntryMark,
    LogOrder,
    Payload,
    SettledAppend,
    TermRecord,
    TermState,
    control,
    output_of,
    outputs_of,
    settled,
)
from streams.errors import (
    AppendUnsettled,
    BrokerUnavailable,
    ConfigError,
    JournalError,
    NotLeading,
    OffsetError,
    RecordsRefused,
    TopicError,
)
from streams.errors import TransactionFailed as Failed
from streams.kafka.questions.admin import Watermarks
from streams.runtime.claim import Claim
from streams.runtime.ownership.tenure import Tenure
from streams.sak.backoff import backoff_seconds
from streams.settings.config import host_name

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_TAIL: Final = 64
"""Offsets that are read first where the last entry is looked for."""


class TermWriter:
    """One term of one process. One thread at a time; ``give_up`` may be called from any.

    ``patience_seconds``: for the record of a younger term, before an append is settled by taking the claim.
    """

    def __init__(self, claim: Claim, tenure: Tenure, patience_seconds: float = 2.0) -> None:
        self.token = -1
        self.position = 0
        """Behind the last entry that is known."""
        self.state = TermState.CLAIMING
        """On the thread that calls; others may look at it."""
        self.reason = ""
        """Why it has ended."""
        self._claim, self._tenure, self._patience = claim, tenure, patience_seconds
        self._number = 0
        self._given_up = threading.Event()

    def begin(self, address: str = "") -> int:
        """Take the claim and open the term; returns its token. ``address``: for readers.

        Raises ``TransactionFailed``, ``BrokerUnavailable`` (begin again, with another writer), ``JournalError`` (the
        end of the log is none of a journal).
        """
        try:
            return self._begin(address)
        except BaseException as error:
            self.end(str(error))
            raise

    def _begin(self, address: str) -> int:
        # J1: the claim first. Looked up before, the end could still move by a commit of the former leader.
        mark = self._claim.take()
        previous = self._last_term(mark)
        writer = f"{host_name()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
        about = TermRecord(writer, int(time.time() * 1000), address)
        opened = output_of(self._claim.topic, control(TERM_TYPE, about), EntryMark(-1, 0, previous))
        self.position = self._claim.append([opened])
        self.token = self.position - 1
        if self.token <= previous:
            raise JournalError(f"{self._claim.where}: term {self.token} would follow term {previous}")
        self._to(TermState.OPEN)
        return self.token

    def commit(self, payloads: Sequence[Payload], origins: Sequence[int] = ()) -> tuple[int, ...]:
        """Append entries in one transaction, and return their offsets. ``origins``: see ``RefusedRecord.output``.

        Raises ``NotLeading`` and ``RecordsRefused``: nothing of them is in the log, or ever will be.
        ``AppendUnsettled`` only after ``give_up``, or where the log has lost entries (``OffsetError``, its cause). What
        the log itself raises (``JournalError``) ends the term.
        """
        first = self._number + 1
        outputs = outputs_of(self._claim.topic, payloads, self.token, first, origins or [-1] * len(payloads))
        while True:
            # Also before an append is sent again: settling may have met a younger term (J5).
            self._check_term()
            self._to(TermState.COMMITTING)
            refused = None
            try:
                end = self._claim.append(outputs)
                return self._known(tuple(range(end - len(outputs), end)))
            except RecordsRefused as error:
                if not all(record.is_batch_only for record in error.refused):
                    refused = error
            except (Failed, BrokerUnavailable) as error:
                _log.warning("%s: term %d: an append is settled: %s", self._claim.where, self.token, error)
            self._to(TermState.SETTLING)
            # Also after a refusal: that nothing of it is in the log is read there, not concluded (J3).
            answer = self._settle(first, len(outputs))
            if answer.offsets:
                return self._known(answer.offsets)
            if refused is not None:
                self._to(TermState.OPEN)
                raise refused

    def give_up(self) -> None:
        """Have an append that cannot be settled, because no broker answers, end with ``AppendUnsettled``."""
        self._given_up.set()

    def end(self, reason: str) -> None:
        """Begin no append any more; only the first reason counts."""
        if self.state is not TermState.ENDED:
            self.state, self.reason = self.state.to(TermState.ENDED), reason

    def _known(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        self._number += len(offsets)
        self.position = offsets[-1] + 1
        self._to(TermState.OPEN)
        return offsets

    def _to(self, new: TermState) -> None:
        if self.state is not TermState.ENDED:  # by a younger term that was found, or by a loop that is closed
            self.state = self.state.to(new)

    def _check_term(self) -> None:
        if self._tenure.is_over:
            self.end(self._tenure.reason or "the group has ended it")
        if self.state is TermState.ENDED:
            raise NotLeading(f"{self._claim.topic}: the term {self.token} is over: {self.reason}; nothing is appended")

    def _settle(self, first: int, count: int) -> SettledAppend:
        """Find out what became of a transaction. An error of a setting or of the topic may pass (a right that is given
        back), and to raise it would say that nothing is in the log."""
        failures, until = 0, time.monotonic() + self._patience
        while True:
            try:
                if (answer := self._read_outcome(first, count, is_last=time.monotonic() > until)) is not None:
                    return answer
            except OffsetError as error:
                raise self._unsettled(first, count, f"the log does not say it: {error}") from error
            except (Failed, BrokerUnavailable, ConfigError, TopicError) as error:
                _log.warning("%s: term %d: not settled yet: %s", self._claim.where, self.token, error)
            failures += 1
            if self._given_up.wait(backoff_seconds(failures, _FIRST_PAUSE, _LONGEST_PAUSE)):
                raise self._unsettled(first, count, "no broker has said it")

    def _unsettled(self, first: int, count: int, why: str) -> AppendUnsettled:
        return AppendUnsettled(
            f"{self._claim.topic}: it is not known what became of the entries {first} to {first + count - 1} of term "
            f"{self.token}: they are in the log with these numbers, or not at all; {why}"
        )

    def _read_outcome(self, first: int, count: int, *, is_last: bool) -> SettledAppend | None:
        """Take the claim, if that is ours to do, and read the tail; ``None``: nothing can be said yet."""
        # J4: a question of now. What the group said before the failure may be old, and two leaders would take the claim
        # from each other.
        is_ours = self._tenure.is_confirmed()
        takes = is_ours or is_last
        mark = self._claim.take() if takes else self._claim.log_range()
        answer = settled(self._claim.read(self.position, mark.end), self.token, first, count)
        # Behind a younger term nothing of ours can come, so the answer is final, also without the claim.
        if answer.newer >= 0:
            self.end(f"term {answer.newer} has begun")
        elif takes and not is_ours:
            self.end(self._tenure.reason or "the group has not confirmed it")
        return answer if takes or answer.newer >= 0 else None

    def _last_term(self, log: Watermarks) -> int:
        """Return the term of the last entry, -1 without one. The end of a log may be markers and aborted entries."""
        stretch, end = _TAIL, log.end
        while end > log.start:
            start = max(log.start, end - stretch)
            order = LogOrder()
            for record in self._claim.read(start, end):
                order.see(record)
            if order.term >= 0:
                return order.term
            end, stretch = start, stretch * 8
        return -1
