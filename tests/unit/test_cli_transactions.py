"""``kes txn`` without a broker: what is shown, what is asked first, and what is said without an answer."""

from __future__ import annotations

import io
from collections.abc import Collection
from contextlib import nullcontext

import pytest

from streams.cli import txn as transactions
from streams.errors import OffsetError
from streams.model.group import HangingEnd, ListedTransaction, OpenTransaction
from tests.unit.cli_kit import FakeCluster, Kes, admin, spec

__all__ = ["admin"]  # the fixture

HANGING = OpenTransaction(
    topic="demo.flights.changelog",
    partition=1,
    producer_id=7,
    producer_epoch=3,
    coordinator_epoch=0,
    start_offset=40,
    last_timestamp_ms=1_000,
)
KNOWN = OpenTransaction(
    topic="demo.flights.changelog",
    partition=0,
    producer_id=8,
    producer_epoch=0,
    coordinator_epoch=0,
    start_offset=5,
    last_timestamp_ms=1_000,
    transactional_id="demo.a.kes~0",
    state="Ongoing",
)
LISTED = ListedTransaction(
    transactional_id="demo.a.kes~0",
    state="Ongoing",
    producer_id=8,
    producer_epoch=0,
    coordinator=1,
    started_ms=1_000,
    timeout_ms=60_000,
    partitions=(("demo.flights.changelog", 0), ("__consumer_offsets", 3)),
)
PLACE = ("--topic", HANGING.topic, "--partition", "1", "--start-offset", "40")


class Questions:
    def __init__(self) -> None:
        self.ended: list[tuple[str, bool]] = []
        self.commit = False
        self.refusal: Exception | None = None

    def find(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        return [txn for txn in (KNOWN, HANGING) if txn.topic == topic and txn.partition in partitions]

    def find_all(self, deadline: float) -> list[OpenTransaction]:
        return [KNOWN, HANGING]

    def listed(self, deadline: float) -> list[ListedTransaction]:
        return [LISTED]

    def judge(
        self, topic: str, partition: int, start_offset: int, deadline: float, *, min_age_seconds: float
    ) -> HangingEnd:
        if self.refusal is not None:
            raise self.refusal
        return HangingEnd(HANGING, self.commit, "so says the log")

    def end(self, end: HangingEnd, deadline: float) -> None:
        self.ended.append((end.txn.topic, end.commit))


@pytest.fixture
def asked(admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Questions:
    admin.there = {name: spec(name, 2) for name in ("flights", HANGING.topic, "demo.flights.dead-letters", "other")}
    made = Questions()
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "there:1")
    monkeypatch.setattr(transactions, "_questions", lambda servers, config: nullcontext(made))
    monkeypatch.setattr(transactions, "await_listener", lambda servers, timeout: None)
    return made


def test_what_is_open_and_what_hangs(kes: Kes, asked: Questions) -> None:
    found = kes("txn", "list", "fleet:source", "--json").data["transactions"]
    assert [(entry["partition"], entry["hanging"]) for entry in found] == [(0, False), (1, True)]
    told = kes("txn", "hanging", "fleet:source")
    assert "none" in told.out
    assert "kes~0" not in told.out
    assert f"kes txn end fleet:source {' '.join(PLACE)}" in told.err
    assert "no hanging transactions" in kes("txn", "hanging", "fleet:source", "--topic", "other").out


@pytest.mark.parametrize("commit", [False, True])
def test_nothing_is_ended_unasked(kes: Kes, asked: Questions, monkeypatch: pytest.MonkeyPatch, commit: bool) -> None:
    asked.commit, how = commit, "committed" if commit else "aborted"
    for answer in ("", "n\n"):  # nobody is there to answer, or says no
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        kes("txn", "end", "fleet:source", *PLACE, code=1)
    assert asked.ended == []
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    told = kes("txn", "end", "fleet:source", *PLACE).err
    assert "producer 7 (epoch 3) began a transaction at offset 40" in told
    assert f"It is to be {how}: so says the log." in told
    assert "at most 60 offsets" in told
    kes("txn", "end", "fleet:source", *PLACE, "--json", code=2)  # which cannot ask
    assert f"{how}: demo.flights.changelog[1]" in kes("txn", "end", "fleet:source", *PLACE, "--yes").out
    assert asked.ended == [(HANGING.topic, commit)] * 2
    data = kes("txn", "end", "fleet:source", *PLACE, "--yes", "--json").data
    assert (data[how]["producer_id"], data["proof"]) == (7, "so says the log")


def test_what_is_committed_elsewhere_is_not_aborted(kes: Kes, asked: Questions) -> None:
    kes("txn", "abort", "fleet:source", *PLACE, "--yes")
    asked.commit = True
    said = kes("txn", "abort", "fleet:source", *PLACE, "--yes", code=1).err
    assert "is committed (so says the log): to abort it here would take back a part of it" in said
    assert asked.ended == [(HANGING.topic, False)]


def test_the_whole_cluster_without_a_source(kes: Kes, asked: Questions) -> None:
    found = kes("txn", "list", "--json").data
    assert [entry["partitions"] for entry in found["transactions"]] == [[list(place) for place in LISTED.partitions]]
    assert [entry["start_offset"] for entry in found["hanging"]] == [40]
    told = kes("txn", "list", "--bootstrap-servers", "there:1")
    assert "demo.flights.changelog[0], __consumer_offsets[3]" in told.out
    assert f"kes txn end {' '.join(PLACE)} --bootstrap-servers there:1" in told.err
    assert "demo.a" not in kes("txn", "hanging").out


def test_problems_are_one_line(kes: Kes, asked: Questions) -> None:
    asked.refusal = OffsetError("demo.flights.changelog[1]: the transaction at offset 40 is not hanging")
    said = kes("txn", "abort", "fleet:source", *PLACE, "--yes", code=1)
    assert "kes: offset error: demo.flights.changelog[1]" in said.err
    assert "topic nowhere does not exist" in kes("txn", "list", "fleet:source", "--topic", "nowhere", code=1).err
    kes("txn", "abort", "fleet:source", "--topic", "t", code=2)
