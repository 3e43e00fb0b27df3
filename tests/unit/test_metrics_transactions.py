"""What is measured of a transaction: where its time went, and that of its last attempt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.engine import source_of
from benchmarks.instructions.drive import by_engine
from benchmarks.instructions.scripted import COMMIT_SECONDS, FLUSH_SECONDS
from benchmarks.workload import Job
from streams import EventSource
from streams.core.transaction import Transaction, TransactionState
from streams.metrics import Measurement, TransactionSettled


class Quiet:
    """A meter that measures nothing."""

    def begin(self) -> None: ...

    end = begin


def test_the_time_of_a_commit_is_told_with_the_part_of_the_flush() -> None:
    measured: list[Measurement] = []

    def made(job: Job) -> EventSource[Any]:
        source = source_of(job)
        source.config = msgspec.structs.replace(source.config, metrics_handler=measured.append)
        return source

    by_engine(made, Quiet(), 500, 500)
    settled = [one for one in measured if isinstance(one, TransactionSettled)]
    assert sum(one.events for one in settled) == 1_000
    for one in settled:
        assert one.flush_seconds >= FLUSH_SECONDS * 0.999
        assert one.commit_seconds >= one.flush_seconds + COMMIT_SECONDS * 0.999


def test_what_is_sent_again_has_not_been_flushed_yet() -> None:
    txn = Transaction(1, 0, 0.0)
    txn.seal(1.0)
    txn.to(TransactionState.SENDING)
    txn.to(TransactionState.FLUSHED)
    txn.flushed_at = 2.0
    txn.taken_back(3.0)
    assert (txn.state, txn.flushed_at) == (TransactionState.SENDABLE, None)
    assert txn.sealed_at == pytest.approx(1.0)
