"""The contents of a transaction against a model that keeps everything and folds it when asked."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streams.core.transaction import Transaction, TransactionState
from streams.records import Change, Output
from tests.property.kit import seeded

events = st.lists(
    st.tuples(
        st.integers(0, 3),  # partition
        st.integers(0, 3),  # outputs
        st.lists(st.tuples(st.sampled_from([b"k1", b"k2", b"k3"]), st.none() | st.binary(max_size=2)), max_size=3),
        st.booleans(),  # somebody waits
    ),
    max_size=12,
)


class Model:
    """Every admitted event, as it came."""

    def __init__(self, script: list[Any]) -> None:
        self.txn = Transaction(7, 3, 1.0)
        self.told: list[tuple[int, BaseException | None]] = []
        self.admitted: list[tuple[int, int, list[Output], list[Change], int | None]] = []
        watermarks: dict[int, int] = {}
        for number, (partition, outputs, writes, waits) in enumerate(script):
            origin = watermarks.get(partition, 0)
            watermarks[partition] = origin + 1
            sent = [Output("out", b"%d.%d" % (number, n), None, None, -1, 0, partition, origin) for n in range(outputs)]
            changes = [Change(key, value, origin=origin) for key, value in writes]
            self.txn.admit(partition, origin + 1, list(sent), changes)
            if waits:
                self.txn.wait(partition, lambda error, number=number: self.told.append((number, error)))
            self.admitted.append((partition, origin, sent, changes, number if waits else None))

    def outputs(self, gone: set[int]) -> list[Output]:
        return [output for partition, _, sent, _, _ in self.admitted if partition not in gone for output in sent]

    def cuts(self, gone: set[int]) -> dict[int, tuple[int, dict[bytes, tuple[bytes | None, int]]]]:
        cuts: dict[int, tuple[int, dict[bytes, tuple[bytes | None, int]]]] = {}
        for partition, origin, _, changes, _ in self.admitted:
            if partition not in gone:
                latest = cuts.get(partition, (0, {}))[1]
                latest.update((change.key, (change.value, origin)) for change in changes)
                cuts[partition] = (origin + 1, latest)
        return cuts

    def waiting(self, gone: set[int]) -> list[int]:
        return [number for partition, *_, number in self.admitted if number is not None and partition not in gone]


def contents(txn: Transaction) -> dict[int, tuple[int, dict[bytes, tuple[bytes | None, int]]]]:
    return {
        partition: (cut.offset, {key: (change.value, change.origin) for key, change in cut.changes.items()})
        for partition, cut in txn.cuts.items()
    }


@seeded
@given(events, st.just(set[int]()) | st.sets(st.integers(0, 4)))
def test_without_takes_out_partitions_and_nothing_else(script: list[Any], gone: set[int]) -> None:
    model = Model(script)
    txn = model.txn
    released = [waiter for partition in sorted(gone) for waiter in txn.without(partition)]
    assert txn.outputs == model.outputs(gone)
    assert contents(txn) == model.cuts(gone)
    kept, left = Transaction(1, 0, 0.0), [event for event in model.admitted if event[0] not in gone]
    for partition, origin, sent, changes, _ in left:
        kept.admit(partition, origin + 1, sent, changes)
    assert txn.bytes == kept.bytes
    assert txn.events == len(left)
    assert txn.records == sum(len(sent) + len(changes) for _, _, sent, changes, _ in left)
    assert txn.size == max(txn.events, txn.records)
    for waiter in released:
        waiter(None)
    assert sorted(number for number, _ in model.told) == sorted(set(model.waiting(set())) - set(model.waiting(gone)))
    txn.seal(2.0)
    txn.settle(reason := RuntimeError("given up"))
    assert [entry for entry in model.told if entry[1] is reason] == [(n, reason) for n in model.waiting(gone)]


slices = st.lists(
    st.tuples(
        st.integers(0, 2),  # partition
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 2), st.lists(st.sampled_from([b"k1", b"k2"]), max_size=2))
        ),
        st.booleans(),  # handled together, as a batch
        st.booleans(),  # somebody waits
    ),
    max_size=6,
)
"""Events of a slice: how far behind the one before, outputs, keys that it changes."""


@seeded
@given(slices, st.integers(0, 60), st.booleans())
def test_cut_anywhere_it_has_the_same_effects_in_the_same_order(script: list[Any], most: int, hands_over: bool) -> None:
    whole = Transaction(7, 3, 1.0)
    told: list[int] = []
    expected: dict[int, list[tuple[int, int]]] = {}  # partition -> (watermark, waiter) as they were admitted
    watermarks: dict[int, int] = {}
    for number, (partition, members, together, waits) in enumerate(script):
        offset = watermarks.get(partition, 0)
        outputs: list[Output] = []
        changes: list[Change] = []
        last = offset + sum(gap for gap, _, _ in members) - 1
        for gap, sent, keys in members:
            offset += gap
            origin = (1 << 62) + last if together else offset - 1
            outputs += [
                Output("out", b"%d.%d" % (offset, n), None, None, -1, 0, partition, origin) for n in range(sent)
            ]
            changes += [Change(key, b"%d" % offset, origin=origin) for key in keys]
        if not members:
            continue
        watermarks[partition] = offset
        whole.admit(partition, offset, outputs, changes, len(members))
        if waits:
            whole.wait(partition, lambda error, number=number: told.append(number))
            expected.setdefault(partition, []).append((offset, number))
    whole.seal(2.0)
    whole.attempts = 2
    whole.taken_back(5.0)
    if hands_over and 0 in whole.cuts:
        whole.cuts[0].release = b"the last word"
    before, waiting = contents(whole), len(whole.waiters)
    parts = whole.cut(most)
    assert [output for part in parts for output in part.outputs] == whole.outputs
    assert sum(part.events for part in parts) == whole.events
    assert sum(part.records for part in parts) == whole.records
    assert sum(part.bytes for part in parts) == whole.bytes
    assert sum(len(part.waiters) for part in parts) == waiting
    reached: dict[int, int] = {}
    state: dict[int, dict[bytes, tuple[bytes | None, int]]] = {}
    for part in parts:
        assert part.cuts or part is whole, "a part without an offset has no fence"
        assert (part.state, part.first_failure_at) == (TransactionState.SENDABLE, 5.0)
        assert part.attempts == (2 if part is whole else 0), "a smaller one was not sent yet"
        origins = {(output.origin_partition, output.origin) for output in part.outputs}
        for partition, (offset, changes_of) in contents(part).items():
            assert offset > reached.get(partition, -1), "prefixes stay prefixes"
            origins |= {(partition, origin) for _, origin in changes_of.values()}
            for origin in (origin for number, origin in origins if number == partition):
                assert reached.get(partition, 0) <= origin % (1 << 62) < offset, "an event is in one part"
            assert part.cuts[partition].release is None or offset == whole.cuts[partition].offset
            reached[partition] = offset
            state.setdefault(partition, {}).update(changes_of)
        assert part.bytes <= most or len(origins) == 1, "it fits, or is one event"
        for _, _, waiter in part.waiters:
            waiter(None)
        for partition, entries in expected.items():
            due = [number for watermark, number in entries if watermark <= reached.get(partition, 0)]
            assert [number for number in told if number in dict(map(reversed, entries))] == due, "not before its event"
    assert {partition: (reached[partition], state[partition]) for partition in reached} == before
    released = [part.cuts[0].release for part in parts if 0 in part.cuts]
    assert released[-1:] == ([b"the last word"] if hands_over and released else [None] * bool(released))


@seeded
@given(events, st.integers(1, 4))
def test_taken_back_is_ready_for_another_attempt_with_the_same_records(script: list[Any], times: int) -> None:
    model = Model(script)
    txn = model.txn
    txn.seal(2.0)
    assert txn.sealed_at == 2.0
    txn.taken_back(5.0)  # behind a failed one, and not sent yet itself
    assert txn.state is TransactionState.SENDABLE
    for attempt in range(times):
        txn.to(TransactionState.SENDING)
        txn.to(TransactionState.FLUSHED)
        txn.to(TransactionState.COMMITTING)
        txn.commit_requested = True
        txn.taken_back(5.0 + attempt)
        assert (txn.state, txn.commit_requested) == (TransactionState.SENDABLE, False)
        assert txn.first_failure_at == 5.0, "patience counts from the first failure"
        assert txn.outputs == model.outputs(set())
        assert contents(txn) == model.cuts(set())
    assert model.told == [], "nobody hears of an attempt"
    for state in (TransactionState.SENDING, TransactionState.FLUSHED, TransactionState.COMMITTING):
        txn.to(state)
    txn.settle(None)
    assert txn.state is TransactionState.COMMITTED
    assert model.told == [(number, None) for number in model.waiting(set())]
    assert txn.waiters == []


@seeded
@given(events)
def test_an_open_one_that_is_taken_back_stays_open(script: list[Any]) -> None:
    txn = Model(script).txn
    txn.taken_back(3.0)
    assert (txn.state, txn.first_failure_at) == (TransactionState.OPEN, 3.0)
    txn.admit(0, 99, [], [])
    assert txn.cuts[0].offset == 99
