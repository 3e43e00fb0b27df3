"""What is gathered and written, in any order, whatever fails: the folder is the log up to its mark (rules K2, K5)."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import EventSourceConfig, StateConfig
from streams.core.transaction import Cut
from streams.records import Change, IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.keeper import StateKeeper
from streams.runtime.keeping.kept_partition import KeptPartition
from tests.unit.kept_kit import IDENTITY, State, now_ms, reopened

CHANGES = st.dictionaries(st.sampled_from([b"a", b"b", b"c", b"d"]), st.none() | st.binary(max_size=3), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("own"), CHANGES, st.booleans()),
        st.tuples(st.just("log"), CHANGES, st.booleans()),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("write"), st.sampled_from([1, 8 << 20])),
        st.tuples(st.just("full"), st.integers(0, 60)),
        st.tuples(st.just("kill")),
        st.tuples(st.just("close")),
    ),
    max_size=25,
)


class Disk:
    """Takes so many bytes; ``None``: any number."""

    def __init__(self) -> None:
        self.room: int | None = None

    def pwrite(self, handle: int, data: bytes, at: int) -> int:
        if self.room is None:
            return REAL(handle, data, at)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "no room")
        written = REAL(handle, data[: self.room], at)
        self.room -= written
        return written


REAL = os.pwrite


class Bench:
    """One partition's log, and who keeps it: as owner, or as a copy that reads in batches."""

    def __init__(self, parent: Path) -> None:
        self.parent, self.disk = parent, Disk()
        self.log: list[IncomingRecord] = []
        self.read_to = 0
        self.states: dict[int, State] = {-1: {}}
        state = StateConfig(folder=str(parent / "unused"))
        config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, bootstrap_servers="nowhere", state=state)
        nothing: Any = None
        self.keeper = StateKeeper(config, lambda: nothing, nothing, nothing, now=lambda: 0.0, wall_ms=now_ms)
        self.kept = self.open()

    def open(self) -> KeptPartition:
        folder = StateFolder.find(self.parent, 0)
        folder.check(IDENTITY, now_ms=now_ms(), tombstones_ms=1 << 40)
        kept = KeptPartition(self.keeper, IDENTITY, folder)
        self.keeper.open_ones = [kept]
        self.read_to = 0 if kept.point is None else kept.point.offset
        return kept

    def append(self, changes: dict[bytes, bytes | None], release: bool) -> Cut:
        """One committed transaction, and its marker behind it."""
        cut = Cut()
        last = self.states[max(self.states)]
        for key, value in changes.items():
            cut.changes[key] = Change(key, value)
            self._record(key, value)
        cut.record = b'{"n":%d}' % len(self.log)
        cut.end = len(self.log)
        self._record(OFFSET_KEY, cut.record)
        state = {**last, **{key: value or b"" for key, value in changes.items()}}
        self.states[cut.end] = {key: value for key, value in state.items() if changes.get(key, b"") is not None}
        if release:
            self._record(RELEASE_KEY, b"{}")
        self._record(None, None)
        return cut

    def _record(self, key: bytes | None, value: bytes | None) -> None:
        self.log.append(IncomingRecord("changelog", 0, len(self.log), key, value, None, now_ms()))

    def read(self, count: int) -> None:
        batch = self.log[self.read_to : self.read_to + count]
        if batch:
            self.read_to += len(batch)
            self.kept.receive(batch)

    def step(self, name: str, *rest: Any) -> None:
        match name:
            case "own":
                self.read(len(self.log))  # a take-over reads to the end before
                self.kept.committed(self.append(*rest), now_ms())
                self.read_to = len(self.log)
            case "log":
                self.append(*rest)
            case "read":
                self.read(*rest)
            case "write":
                self.keeper.config = config_with(self.keeper.config, rest[0])
                self.kept.write(pause=False)
            case "full":
                self.disk.room = rest[0]
                self.kept.write(pause=False)
                self.disk.room = None
            case "kill":
                self.kept.abandon()
                self.check()
                self.kept = self.open()
            case "close":
                goal = -1 if self.kept.point is None else self.kept.point.offset
                self.kept.finish()
                assert self.check() == goal, "nothing that was committed is lost by a stop"
                self.kept = self.open()

    def check(self) -> int:
        offset, state = reopened(self.parent)
        assert state == self.states[offset], f"at offset {offset}"
        return offset


def config_with(config: EventSourceConfig, checkpoint_bytes: int) -> EventSourceConfig:
    """With 1, what has no mark yet is written early."""
    state = msgspec.structs.replace(config.state, checkpoint_bytes=checkpoint_bytes)
    return msgspec.structs.replace(config, state=state)


@pytest.fixture(scope="module", autouse=True)
def unflushed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module.os, "fsync", lambda handle: None)
        patch.setattr(folder_module, "LEAST_REWRITE", 100)
        yield


def run(steps: list[tuple[Any, ...]]) -> None:
    parent = Path(tempfile.mkdtemp(prefix="kes-kept-"))

    async def on_a_loop() -> None:
        bench = Bench(parent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder_module.os, "pwrite", bench.disk.pwrite)
            for step in steps:
                bench.step(*step)
            bench.kept.abandon()
        bench.check()

    try:
        asyncio.run(on_a_loop())
    finally:
        shutil.rmtree(parent)


@given(STEPS)
def test_a_folder_is_its_log_up_to_the_mark(steps: list[tuple[Any, ...]]) -> None:
    run(steps)


HALF: list[tuple[Any, ...]] = [
    ("log", {b"a": b"1"}, False), ("log", {b"a": b"2", b"b": b"2"}, False), ("read", 4), ("write", 8 << 20), ("kill",),
]  # fmt: skip
"""A copy has read a half of the second transaction."""
UNMARKED: list[tuple[Any, ...]] = [
    ("log", {b"a": b"1"}, False), ("log", {b"a": b"2", b"b": b"2"}, False), ("read", 4), ("write", 1), ("write", 1),
    ("read", 1), ("full", 0), ("kill",),
]  # fmt: skip
FULL: list[tuple[Any, ...]] = [
    ("own", {b"a": b"1"}, False), ("full", 0), ("own", {b"b": b"1"}, False), ("write", 8 << 20), ("kill",),
]  # fmt: skip


def advances_at_any_record(self: KeptPartition, records: list[IncomingRecord]) -> None:
    REAL_RECEIVE(self, records)
    if self.point is not None and self._behind:
        self._advance(self.point)


def forgets_what_was_not_written(self: KeptPartition, changes: Any, point: Any, pause: bool) -> None:
    try:
        self.folder.append(changes.values(), pause=pause)
    except OSError:
        self._writing = 0


REAL_RECEIVE = KeptPartition.receive
SAFEGUARDS: dict[str, tuple[str, Callable[..., Any], list[tuple[Any, ...]]]] = {
    "K5, a copy is cut at offset records": ("receive", advances_at_any_record, HALF),
    "K2, a disk that is full keeps the mark back": ("_append", forgets_what_was_not_written, FULL),
}


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_it_is_missed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attribute, instead, steps = SAFEGUARDS[name]
    run(steps)
    monkeypatch.setattr(KeptPartition, attribute, instead)
    with pytest.raises(AssertionError):
        run(steps)


def test_what_is_written_early_does_not_count_before_its_mark() -> None:
    run(UNMARKED)
