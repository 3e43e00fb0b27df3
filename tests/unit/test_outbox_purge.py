"""What `kes outbox purge` deletes, by rings with holes, shards that are refused, and relays that go on beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self

import pytest

from streams import RelayConfig
from streams.core.outbox import RowId, SentBatch, encode_batch, record_key
from streams.errors import OffsetError
from streams.kafka.questions.admin import Watermarks
from streams.outbox import purge as module
from streams.outbox.database import OutboxAbout
from streams.outbox.purge import AfterRestore, PurgedShard, purge
from streams.records import IncomingRecord, Output

CONFIG = RelayConfig(name="orders", database="sqlite:nowhere", bootstrap_servers="nowhere:1")


class RestoredOutbox:
    """The tables after a restore, and the rings of its shards. ``serials``: the batches in each ring, with a row of
    that id. ``noted``: by the database, for each shard. ``calls``: what was done to tables and rings. No claim is given
    before all have been asked for."""

    def __init__(self, serials: list[Sequence[int]], noted: list[int]) -> None:
        self.serials, self.noted = serials, noted
        self.foreign: tuple[bytes | None, bytes | None] | None = None  # key and value of a record that is no batch
        self.all_ask = threading.Barrier(len(serials), timeout=10)
        self.calls: list[tuple[object, ...]] = []
        self.claimed: list[int] = []
        self.open_at_once: list[int] = []
        self.is_open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def about(self) -> OutboxAbout:
        return OutboxAbout("outbox", 1, len(self.serials), "id", 0)

    def noted_serial(self, shard: int) -> int:
        return self.noted[shard]

    def drop_through(self, shard: int, highest: int, newest_ms: int) -> int:
        self.calls.append(("drop", shard, highest))
        return 2

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> int:
        self.calls.append(("delete", shard, len(rows)))
        return 0

    def claim(self, settings: object, transactional_id: str, topic: str, shard: int) -> RingClaim:
        self.claimed.append(shard)
        return RingClaim(self, shard)


class RingClaim:
    """The claim of one shard of a ``RestoredOutbox``."""

    topic = "orders.outbox"

    def __init__(self, outbox: RestoredOutbox, shard: int) -> None:
        self._outbox, self.partition, self.where = outbox, shard, f"orders.outbox[{shard}]"

    def close(self) -> None:
        self._outbox.is_open.discard(self.partition)

    def identity(self) -> tuple[str, int]:
        return "id", len(self._outbox.serials)

    def take(self) -> Watermarks:
        self._outbox.is_open.add(self.partition)
        self._outbox.open_at_once.append(len(self._outbox.is_open))
        self._outbox.all_ask.wait()
        return Watermarks(0, 1_000, 1_000)

    def read(self, start: int, end: int) -> list[IncomingRecord]:
        if self._outbox.foreign is not None:
            return [IncomingRecord(self.topic, self.partition, 7, *self._outbox.foreign, [])]
        batches = (SentBatch(serial, (RowId(serial, 5),)) for serial in self._outbox.serials[self.partition])
        return [
            IncomingRecord(self.topic, self.partition, at, record_key(one.serial), encode_batch("outbox", one), [])
            for at, one in enumerate(batches)
        ]

    def append(self, outputs: Sequence[Output]) -> int:
        self._outbox.calls.append(("fill", self.partition, len(outputs)))
        return 1_001


def restored(monkeypatch: pytest.MonkeyPatch, serials: list[Sequence[int]], noted: list[int]) -> RestoredOutbox:
    outbox = RestoredOutbox(serials, noted)
    session: Any = lambda database, table: outbox  # noqa: E731
    monkeypatch.setattr(module, "open_session", session)
    monkeypatch.setattr(module, "Claim", outbox.claim)
    return outbox


@pytest.mark.parametrize(
    ("serials", "noted", "dropped"),
    [
        (range(1, 11), 5, 0),  # the ring names all that may come back
        ([*range(1, 7), *range(9, 11)], 5, 2),  # batches 7 and 8 are missing, and the database has not noted them
        ([*range(1, 4), *range(5, 11)], 5, 0),  # what is missing was noted, and so deleted
        (range(37, 101), 5, 2),  # set back by more than the ring
    ],
    ids=["whole", "hole", "noted hole", "far"],
)
def test_rows_are_dropped_where_the_ring_does_not_name_all_that_may_come_back(
    monkeypatch: pytest.MonkeyPatch, serials: Sequence[int], noted: int, dropped: int
) -> None:
    outbox = restored(monkeypatch, [serials], [noted])
    assert purge(CONFIG, "drop") == [PurgedShard(0, serials[-1], 0, dropped)]
    assert (("drop", 0, serials[-1]) in outbox.calls) == bool(dropped)


def test_nothing_is_dropped_where_one_shard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = restored(monkeypatch, [range(37, 101), range(1, 3)], [5, 9])
    with pytest.raises(OffsetError, match=r"orders\.outbox\[1\] ends with batch 2, and the database has noted batch 9"):
        purge(CONFIG, "drop")
    assert outbox.calls == []


@pytest.mark.parametrize(("before", "after"), [(5, 9), (0, 64), (5, 5)])
def test_a_relay_that_goes_on_beside_it_is_no_topic_that_was_set_back(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """It claims its shard again, and notes batches that are behind the ring as it was read."""
    outbox = restored(monkeypatch, [range(1, 6)], [before])
    looks = iter([before, after])
    monkeypatch.setattr(outbox, "noted_serial", lambda shard: next(looks))
    assert purge(CONFIG) == [PurgedShard(0, 5, 0, 0)]
    assert outbox.calls == [("delete", 0, 5)]


def test_a_topic_that_was_set_back_is_refused_also_without_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = restored(monkeypatch, [range(1, 3), range(1, 6)], [2, 6])
    with pytest.raises(OffsetError, match=r"orders\.outbox\[1\] ends with batch 5, and the database has noted batch 6"):
        purge(CONFIG)
    assert outbox.calls == []  # nor is anything of the other one


BATCH = SentBatch(3, (RowId(1, 5),))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"3", b"by somebody else", "no batch of an outbox"),
        (b"3", None, "no batch of an outbox"),
        (b"3", encode_batch("outbox", BATCH)[:-1], "no batch of an outbox"),
        (b"3", encode_batch("other", BATCH), "each needs a name of its own"),
        (b"4", encode_batch("outbox", BATCH), "the key does not fit batch 3"),
        (None, encode_batch("outbox", BATCH), "the key does not fit batch 3"),
    ],
)
@pytest.mark.parametrize("decision", ["no", "send", "drop"])
def test_a_foreign_record_among_the_positions_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, key: bytes | None, value: bytes | None, reason: str, decision: AfterRestore
) -> None:
    outbox = restored(monkeypatch, [[]], [0])
    outbox.foreign = (key, value)
    with pytest.raises(OffsetError, match=rf"orders\.outbox\[0\].*7: .*{reason}"):
        purge(CONFIG, decision)
    assert outbox.calls == []


def test_each_shard_is_claimed_once_and_all_of_them_before_a_row_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = restored(monkeypatch, [range(37, 101), range(37, 90)], [5, 9])
    claimed_at_drop = list[int]()
    drop = outbox.drop_through
    monkeypatch.setattr(
        outbox, "drop_through", lambda *given: (claimed_at_drop.append(len(outbox.claimed)), drop(*given))[1]
    )
    assert [shard.dropped for shard in purge(CONFIG, "drop")] == [2, 2]
    assert sorted(outbox.claimed) == [0, 1]
    assert claimed_at_drop == [2, 2]


@pytest.mark.parametrize(("decision", "most"), [("no", 16), ("send", 32)])
def test_claims_are_kept_open_only_where_rings_may_be_filled(
    monkeypatch: pytest.MonkeyPatch, decision: AfterRestore, most: int
) -> None:
    """Each has threads and files, of which a process has a limited number, and there may be 256 shards."""
    outbox = restored(monkeypatch, [range(1, 3)] * 32, [2] * 32)
    outbox.all_ask = threading.Barrier(16, timeout=10)
    assert len(purge(CONFIG, decision)) == 32
    assert max(outbox.open_at_once) <= most
    assert outbox.is_open == set()
