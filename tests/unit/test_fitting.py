"""What has to fit: a transaction into its time, and what is kept into the bounds that are said to hold it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from streams import EventContext, PoolConfig, Record
from streams.core import batching
from streams.core.admission import size_of_records
from streams.core.transaction import Transaction
from streams.errors import TransactionFailed
from streams.records import Change, Headers, IncomingRecord, Output
from tests.unit.runtime_kit import OUT, Bench, Records, Slot
from tests.unit.test_refused_records import driver_of
from tests.vocabulary import Added, Named, touch

BIG = 1_000


def forward(ctx: EventContext[Any], event: Named) -> None:
    touch(ctx, event.name[0])
    ctx.forward(OUT, event, key=event.name.encode(), headers=[("more", b"x" * BIG)])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that can be sent in the time of a transaction: one number, to be set. Notes what was asked of it behind."""
    asked = [1 << 30]

    taken = Slot.flush

    async def flush(self: Slot, records: Records, *of: Any) -> None:
        sizes = (len(sent.value or b"") + sum(len(v or b"") for _, v in sent.headers or ()) for sent in records.outputs)
        asked.append(sum(sizes))
        if asked[-1] > asked[0]:
            raise TransactionFailed("flush", "_MSG_TIMED_OUT", "unknown")
        await taken(self, records, *of)

    monkeypatch.setattr(Slot, "flush", flush)
    return asked


async def test_a_backlog_goes_in_parts_that_fit_their_time(bench: Bench, line: list[int]) -> None:
    line[0] = 40 * BIG
    names = [f"{number % 3}-{number}" for number in range(400)]
    bench.broker.send(*names)
    bench.make(forward)
    bench.run()
    await bench.until(lambda: bench.broker.reached() == len(names), "all of it is committed")
    assert bench.broker.outputs() == names
    timed_out = [size for size in line[1:] if size > line[0]]
    behind = [after for size, after in pairwise(line[1:]) if size > line[0]]
    assert all(after < size for size, after in zip(timed_out, behind, strict=True)), "tried again in smaller parts"
    assert len(timed_out) < 10, "and what comes behind it is smaller from the start"


async def test_one_event_that_does_not_fit_names_itself_and_the_rate_that_it_needs(
    bench: Bench, line: list[int]
) -> None:
    def handler(ctx: EventContext[Any], event: Named) -> None:
        ctx.forward(Record(OUT, b"x" * (50_000 if event.name == "b" else 10)))

    line[0] = 20 * BIG
    bench.broker.send("a", "b", "c")
    bench.make(handler, recovery_timeout_seconds=2.0)
    with pytest.raises(TransactionFailed, match=r"the event in\[0\]@1 sends .* 50000 bytes.* at 12500 bytes/s"):
        await bench.run()
    assert bench.broker.reached() == 1, "what is before it is committed"


H: Headers = [("name", b"12345"), ("none", None)]


@pytest.mark.parametrize(
    ("outputs", "changes", "size"),
    [
        ([Output("t", b"123", b"12", None, -1, 0, 0, 0)], [], 5),
        ([Output("t", None, None, H, -1, 0, 0, 0)] * 2, [], 26),
        ([Output("t", b"", b"1", H, -1, 0, 0, 0), Output("t", b"1", None, None, -1, 0, 0, 0)], [], 15),
        ([Output("t", b"1", None, [("odd", 5)], -1, 0, 0, 0)], [], 1),  # type: ignore[list-item]
        ([], [Change(b"1234", b"12"), Change(b"1234", None)], 10),
    ],
    ids=["keys", "headers", "both", "no headers at all, which the client refuses", "changes"],
)
def test_bytes_of_a_transaction(outputs: list[Output], changes: list[Change], size: int) -> None:
    txn = Transaction(1, 0, 0.0)
    txn.admit(0, 1, outputs, changes)
    assert txn.bytes == size
    txn.without(1)
    assert txn.bytes == size


def test_bytes_of_what_was_read() -> None:
    shared = (("name", b"12345"),)
    records = [
        IncomingRecord("t", 0, 0, b"key", b"value", shared),
        IncomingRecord("t", 0, 1, None, None, shared),
        IncomingRecord("t", 0, 2, b"key", None, None),
    ]
    assert size_of_records(records) == 8 + 9 + 9 + 3


def test_an_outage_is_not_taken_for_a_slow_line() -> None:
    """What is in flight when the broker goes away is small, as a rule, and says nothing about the line."""
    with driver_of() as driver:
        driver.send(Added("x", 1))
        driver.send(Added("x", 2), wait=False)
        driver.outage(15.0)
        driver.settle()
        pool = driver._world.members[0].source._run.engine.pool
        assert pool.rule.max_batch_bytes == PoolConfig().max_batch_bytes


def test_the_bound_in_bytes_is_halved_and_grows_slowly() -> None:
    most = PoolConfig().max_batch_bytes
    rule = batching.smaller(PoolConfig(), most + 5)
    assert rule.max_batch_bytes == most // 2
    assert batching.smaller(rule, 3_000_000).max_batch_bytes == 1_500_000, "of what was too much"
    assert batching.smaller(rule, 10).max_batch_bytes == batching.LEAST_BYTES
    assert batching.smaller(PoolConfig(max_batch_bytes=9), 8).max_batch_bytes == 9, "never more than what was set"
    assert batching.larger(rule, most // 8, most) is rule, "a small one says nothing"
    steps = 0
    while rule.max_batch_bytes < most:
        rule = batching.larger(rule, rule.max_batch_bytes, most)
        steps += 1
    assert rule.max_batch_bytes == most
    assert steps == 23
