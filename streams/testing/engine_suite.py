"""Tests that an engine of one's own must pass (``streams.protocols.DiskEngine``), as a class for pytest::

    from streams.testing.engine_suite import EngineSuite

    class TestMine(EngineSuite):
        def engine(self):
            return MyEngine()

The engine must be picklable: processes that are killed open it, too. The engines of this package pass the same tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

from streams.errors import DiskDamaged, StoreError
from streams.protocols import DiskDatabase, DiskEngine

Changes = list[tuple[bytes, bytes | None]]
State = dict[bytes, bytes]

MEMORY_BYTES = 16 << 20
KILLS_SECONDS = 30.0


class Script:
    """The same writes every time: number ``n`` ends with the mark ``n``. ``states``: what is there after each."""

    def __init__(self, seed: int, writes: int, *, keys: int = 400, changes: int = 120) -> None:
        rng = random.Random(seed)
        self.writes: list[Changes] = []
        self.states: list[State] = [{}]
        for number in range(1, writes + 1):
            batch: dict[bytes, bytes | None] = {}
            for _ in range(changes):
                key = b"key %05d" % rng.randrange(keys)
                batch[key] = None if rng.random() < 0.2 else b"%d " % number + rng.randbytes(rng.randrange(60))
            state = dict(self.states[-1])
            for key, value in batch.items():
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
            self.writes.append(list(batch.items()))
            self.states.append(state)

    def number(self, database: DiskDatabase) -> int:
        """The number of the last write, by the mark."""
        mark = database.mark()
        return 0 if mark is None else int(mark)

    def check(self, database: DiskDatabase) -> int:
        """Compare everything, by ``get`` and by ``scan``, with a write that has returned; maybe a part of the next one.
        Returns its number. Raises ``DiskDamaged`` as the database does."""
        number = self.number(database)
        state = self.states[number]
        following = dict(self.writes[number]) if number < len(self.writes) else {}
        found = dict(scan_all(database))
        for key in state.keys() | following.keys() | found.keys():
            value = found.get(key)
            assert database.get(key) == value, f"get({key!r}) is not what scan has"
            assert value == state.get(key) or (key in following and value == following[key]), (
                f"{key!r} is not as at mark {number}"
            )
        return number


def scan_all(database: DiskDatabase, *, reverse: bool = False, limit: int = 50) -> Iterator[tuple[bytes, bytes]]:
    """Everything, page by page."""
    low: bytes | None = None
    high: bytes | None = None
    while True:
        page = database.scan(low, high, reverse=reverse, limit=limit)
        yield from page
        if len(page) < limit:
            return
        if reverse:
            high = page[-1][0]
        else:
            low = page[-1][0] + b"\0"


class EngineSuite:
    """Tests of a ``DiskEngine``. ``flips``: bytes that are spoiled; ``kills``: processes that are killed."""

    flips: ClassVar[int] = 200
    kills: ClassVar[int] = 5

    @abstractmethod
    def engine(self) -> DiskEngine:
        """Make the engine."""

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[DiskDatabase]:
        """Open a database, and close it at the end."""
        database = self.engine().open(str(folder), memory_bytes=MEMORY_BYTES, partitions=4)
        try:
            yield database
        finally:
            database.close()

    def test_name(self) -> None:
        assert self.engine().name.isalnum()

    def test_reading_is_what_was_written(self, tmp_path: Path) -> None:
        odd: State = {
            b"": b"empty key", b"a": b"", b"\0": b"\0", b"a\0": b"1", b"\xff\xff": b"2", b"\xff\xffkes.timer": b"t",
            b"k" * 100_000: b"long key", b"long value": b"v" * 1_000_000, "ä".encode(): b"3",
        }  # fmt: skip
        with self.opened(tmp_path / "db") as database:
            assert database.mark() is None
            assert database.scan(None, None, reverse=False, limit=5) == []
            database.write([*odd.items(), (b"not there", None)], None)
            assert database.mark() is None
            for _ in range(2):
                _compare(database, odd)
                database.write([], b"mark")
            del odd[b"a"]
            database.write([(b"a", None)], None)
        with self.opened(tmp_path / "db") as database:
            _compare(database, odd)
            assert database.mark() == b"mark", "a write without a mark leaves the one before"

    def test_order_and_ends_of_scans(self, tmp_path: Path) -> None:
        script, rng = Script(1, 8), random.Random(1)
        with self.opened(tmp_path / "db") as database:
            for number, changes in enumerate(script.writes, 1):
                database.write(changes, b"%d" % number)
            state = script.states[-1]
            keys = sorted(state)
            for _ in range(200):
                ends = [None, b"", b"key", b"z", rng.choice(keys), rng.choice(keys) + b"\0"]
                low, high, limit = rng.choice(ends), rng.choice(ends), rng.choice([1, 3, 1_000])
                reverse = rng.random() < 0.5
                wanted = [key for key in keys if (low is None or low <= key) and (high is None or key < high)]
                wanted = wanted[::-1][:limit] if reverse else wanted[:limit]
                found = database.scan(low, high, reverse=reverse, limit=limit)
                assert found == [(key, state[key]) for key in wanted], (low, high, limit, reverse)
            assert abs(database.count() - len(state)) <= len(state), "the estimate is far away"

    def test_a_page_ends_with_its_bytes(self, tmp_path: Path) -> None:
        rows = [(b"%d" % number, bytes(1_000)) for number in range(9)]
        with self.opened(tmp_path / "db") as database:
            database.write(list(rows), None)
            for reverse in (False, True):
                wanted = rows[::-1] if reverse else rows
                for size, number in ((1, 1), (1_001, 1), (1_002, 2), (3_003, 3), (100_000, 9)):
                    assert database.scan(None, None, reverse=reverse, limit=100, size=size) == wanted[:number]

    def test_reading_goes_on_while_it_is_written(self, tmp_path: Path) -> None:
        """Readers on two threads see whole values, in order, never older ones than before, and all keys."""
        keys = [b"key %d" % number for number in range(50)]
        failures: list[BaseException] = []
        with self.opened(tmp_path / "db") as database:
            database.write([(key, b"0") for key in keys], None)

            def write() -> None:
                try:
                    for number in range(1, 60):
                        database.write([(key, b"%d" % number) for key in keys], b"%d" % number)
                except BaseException as error:
                    failures.append(error)

            def read_all(by_key: bool) -> None:
                before = dict.fromkeys(keys, 0)
                while writer.is_alive():
                    found = [(key, database.get(key)) for key in keys] if by_key else []
                    pages = list(scan_all(database, limit=7))
                    assert [key for key, _ in pages] == sorted(keys)
                    for key, value in [*found, *pages]:
                        assert value is not None
                        assert int(value) >= before[key], "an older value than before"
                        before[key] = int(value)

            def scan() -> None:  # as one that makes a snapshot
                try:
                    read_all(False)
                except BaseException as error:
                    failures.append(error)

            writer, scanner = threading.Thread(target=write), threading.Thread(target=scan)
            writer.start()
            scanner.start()
            read_all(True)
            writer.join()
            scanner.join()
            assert not failures
            assert [database.get(key) for key in keys] == [b"59"] * len(keys)

    def test_the_end(self, tmp_path: Path) -> None:
        database = self.engine().open(str(tmp_path / "db"), memory_bytes=MEMORY_BYTES, partitions=4)
        database.write([(b"a", b"1")], None)
        database.close()
        database.close()
        uses: Sequence[Callable[[], object]] = (
            lambda: database.get(b"a"),
            lambda: database.scan(None, None, reverse=False, limit=1),
        )
        for use in uses:
            raised: type | None = None
            try:
                use()
            except StoreError as error:
                raised = type(error)
            assert raised is not None, "a database that is closed was read"
            assert not issubclass(raised, DiskDamaged), "nothing is damaged"

    def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        threads = files = 0
        for number in range(22):
            if number == 2:
                threads, files = threading.active_count(), _open_files()
            with self.opened(tmp_path / "db") as database:
                database.write([(b"%d" % number, b"")], None)
                assert len(database.scan(None, None, reverse=False, limit=100)) == number + 1
        assert (threading.active_count(), _open_files()) == (threads, files)

    def test_killed_processes_leave_a_write_or_a_part_of_the_next(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        for seed in range(self.kills):
            folder, script = tmp_path / str(seed), Script(seed, 100)
            ours, theirs = context.Pipe()
            process = context.Process(target=_write_until_killed, args=(self.engine(), str(folder), seed, theirs))
            process.start()
            theirs.close()
            done, wanted = 0, random.Random(seed).randrange(1, 60)
            while done < wanted and ours.poll(KILLS_SECONDS):
                done = ours.recv()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            with contextlib.suppress(EOFError):
                while ours.poll():
                    done = ours.recv()
            assert done >= wanted, "it did not come so far"
            with self.opened(folder) as database:
                assert script.check(database) >= done, "a write that has returned is gone"

    def test_spoiled_bytes_are_noticed_or_harmless(self, tmp_path: Path) -> None:
        """One byte of one file is another one: reading gives what was written, or raises ``DiskDamaged``."""
        rng = random.Random(7)
        noticed = 0
        for name, is_closed in (("closed", True), ("killed", False)):
            script, folder, copy = Script(2, 12), tmp_path / "db" / name, tmp_path / name
            folder.parent.mkdir(exist_ok=True)
            with self.opened(folder) as database:
                for number, changes in enumerate(script.writes, 1):
                    database.write(changes, b"%d" % number)
                if not is_closed:
                    _copy_of_a_moment(folder, copy)
            if is_closed:
                shutil.copytree(folder, copy)
            files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
            sizes = [path.stat().st_size for path in files]
            for turn in range(self.flips // 2):
                path = rng.choice(files) if turn % 4 == 0 else rng.choices(files, sizes)[0]
                at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
                spoiled = tmp_path / f"{name} {turn}"
                shutil.copytree(copy, spoiled)
                with open(spoiled / path.relative_to(copy), "r+b") as file:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ bit]))
                try:
                    with self.opened(spoiled) as database:
                        script.check(database)
                except DiskDamaged:
                    noticed += 1
                except AssertionError as error:
                    error.add_note(f"byte {at} of {path.relative_to(copy)}, bit {bit}")
                    raise
                shutil.rmtree(spoiled)
        assert noticed > self.flips // 10, "nothing was spoiled"


def _copy_of_a_moment(folder: Path, copy: Path) -> None:
    """Copy the files of an open database, as a kill would leave them: once more if it replaces some meanwhile."""
    until = time.monotonic() + 30
    while True:
        before = sorted(os.listdir(folder))
        with contextlib.suppress(shutil.Error):
            shutil.copytree(folder, copy)
            if sorted(os.listdir(folder)) == before:
                return
        assert time.monotonic() < until, f"the files of {folder} change all the time"
        shutil.rmtree(copy)


def _compare(database: DiskDatabase, state: State) -> None:
    assert dict(scan_all(database, limit=2)) == state
    assert list(scan_all(database)) == sorted(state.items())
    assert list(scan_all(database, reverse=True, limit=3)) == sorted(state.items(), reverse=True)
    assert {key: database.get(key) for key in state} == state
    assert database.get(b"not there") is None


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def _write_until_killed(engine: DiskEngine, folder: str, seed: int, done: Connection) -> None:
    database = engine.open(folder, memory_bytes=MEMORY_BYTES, partitions=4)
    for number, changes in enumerate(Script(seed, 100).writes, 1):
        database.write(changes, b"%d" % number)
        done.send(number)
    signal.pause()
