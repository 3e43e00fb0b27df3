"""The engines of this package: under the suite that is shipped for users' own, killed at each step, within their memory
and their files."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.disk import RocksDB, SQLite
from streams.disk import rocksdb as rocksdb_module
from streams.disk.sqlite import SQLiteDatabase
from streams.errors import ConfigError, DiskDamaged
from streams.protocols import DiskDatabase, DiskEngine
from streams.testing.engine_suite import MEMORY_BYTES, EngineSuite, Script

needs_rocksdb = pytest.mark.skipif(
    importlib.util.find_spec("rocksdict") is None, reason="the extra rocksdb is not installed"
)
STEPS = ["batch", "mark", "commit", "done"]
ENGINES: list[Any] = [pytest.param("SQLite"), pytest.param("RocksDB", marks=needs_rocksdb)]


class TestSQLite(EngineSuite):
    def engine(self) -> DiskEngine:
        return SQLite()


@needs_rocksdb
class TestRocksDB(EngineSuite):
    flips = 20
    kills = 2

    def engine(self) -> DiskEngine:
        return RocksDB()


@needs_rocksdb
@pytest.mark.nightly
class TestRocksDBLonger(TestRocksDB):
    flips = 200
    kills = 5


def opened(name: str, folder: Path, partitions: int = 4) -> DiskDatabase:
    engine: DiskEngine = {"SQLite": SQLite, "RocksDB": RocksDB}[name]()
    return engine.open(str(folder), memory_bytes=MEMORY_BYTES, partitions=partitions)


# -- killed at each step -----------------------------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
from streams.testing.engine_suite import Script
from tests.unit.steps_kit import kill_in_last_write
from tests.unit.test_engines import opened

name, folder, step, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
kill_in_last_write(opened(name, folder), Script(seed, 10, keys=2_000, changes=900).writes[:7], step)
"""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))])
def test_killed_at_a_step_it_is_as_before_or_behind_it(tmp_path: Path, name: str, step: str, seed: int) -> None:
    arguments = [sys.executable, "-c", KILLED, name, str(tmp_path / "db"), step, str(seed)]
    killed = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    script = Script(seed, 10, keys=2_000, changes=900)
    database = opened(name, tmp_path / "db")
    assert script.check(database) == (7 if step == "done" else 6)
    database.write(script.writes[6], b"7")
    assert script.check(database) == 7, "written again, it is as if nothing had happened"
    database.close()


# -- SQLite ------------------------------------------------------------------------------------------------------------


def killed_behind_a_part_of_its_log(folder: Path, copy: Path) -> Script:
    """Copy a database whose log is in its file, too: a log that is cut then hides a part of what the file has. Each
    write has pages of its own."""
    script = Script(0, 0)
    database = opened("SQLite", folder)
    assert isinstance(database, SQLiteDatabase)
    for number in range(10):
        numbers = range(1_000) if number == 0 else range(100 * number, 100 * number + 90)
        script.writes.append([(b"key %05d" % key, b"%d " % number * 20) for key in numbers])
        script.states.append(script.states[-1] | {key: value for key, value in script.writes[-1] if value is not None})
        database.write(script.writes[-1], b"%d" % (number + 1))
        if number in (0, 9):
            how = "PASSIVE" if number else "TRUNCATE"
            database._writer.execute(f"PRAGMA wal_checkpoint({how})").fetchall()
    shutil.copytree(folder, copy)
    database.close()
    return script


def silent_logs(tmp_path: Path) -> int:
    """Spoil pages of the log of such a database, and count what is not noticed."""
    silent = 0
    script = killed_behind_a_part_of_its_log(tmp_path / "db", tmp_path / "killed")
    size = (tmp_path / "killed" / "state.db-wal").stat().st_size
    for at in range(100, size, 3 * 4_120):
        spoiled = tmp_path / "spoiled"
        shutil.copytree(tmp_path / "killed", spoiled)
        with open(spoiled / "state.db-wal", "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
        try:
            database = opened("SQLite", spoiled)
            try:
                script.check(database)
            except AssertionError:
                silent += 1
            finally:
                database.close()
        except DiskDamaged:
            pass
        shutil.rmtree(spoiled)
    return silent


def test_a_log_that_is_spoiled_mixes_no_times(tmp_path: Path) -> None:
    assert not silent_logs(tmp_path)


def test_without_number_and_sum_of_the_rows_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The safeguard is out: each row has a right checksum, and they are of different times."""
    check = SQLiteDatabase._check

    def trusting(self: SQLiteDatabase) -> None:
        try:
            check(self)
        except DiskDamaged as error:
            if "rows, and not the" not in str(error):
                raise

    monkeypatch.setattr(SQLiteDatabase, "_check", trusting)
    assert silent_logs(tmp_path)


def spoil(folder: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM state WHERE key = (SELECT min(key) FROM state)", "it holds 2 rows, and not the 3"),
        ("UPDATE state SET key = x'7a7a' WHERE key = (SELECT max(key) FROM state)", "wrong checksum"),
        ("UPDATE state SET value = 'text'", "wrong checksum"),
        ("UPDATE mark SET mark = x'39'", "its mark has a wrong checksum"),
        ("DELETE FROM mark", "its mark has a wrong checksum"),
        ("CREATE TABLE more (a)", "its tables are not those of this version"),
        ("DROP TABLE mark", "its tables are not those of this version"),
        ("CREATE TRIGGER t AFTER INSERT ON state BEGIN DELETE FROM state; END", "its tables are not those"),
    ],
)
def test_what_others_did_to_a_database_is_noticed(tmp_path: Path, statement: str, reason: str) -> None:
    database = opened("SQLite", tmp_path)
    database.write([(b"a", b"1"), (b"b", b"2"), (b"c", b"3")], b"1")
    database.close()
    spoil(tmp_path, statement)
    with pytest.raises(DiskDamaged, match=reason):
        opened("SQLite", tmp_path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1_000)
    with pytest.raises(DiskDamaged):
        opened("SQLite", tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "state.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"state\.db"):
        opened("SQLite", tmp_path / "db")
    assert not (tmp_path / "elsewhere").exists()


def test_another_program_that_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.disk.sqlite.BUSY_SECONDS", 0.05)
    database = opened("SQLite", tmp_path)
    database.write([(b"a", b"1")], b"1")
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="locked"):
        database.write([(b"a", b"2")], b"2")
    assert (database.get(b"a"), database.mark()) == (b"1", b"1")
    other.execute("ROLLBACK")
    other.close()
    database.write([(b"a", b"2")], b"2")
    assert (database.get(b"a"), database.mark()) == (b"2", b"2")
    database.close()


def test_a_full_disk_is_an_error_that_passes(tmp_path: Path) -> None:
    """``max_page_count`` is the room that is left."""
    database = opened("SQLite", tmp_path)
    assert isinstance(database, SQLiteDatabase)
    database.write([(b"a", b"1")], b"1")
    database._writer.execute("PRAGMA max_page_count = 8")
    with pytest.raises(OSError, match="full") as full:
        database.write([(b"%d" % number, b"v" * 1_000) for number in range(100)], b"2")
    assert full.value.errno == 28
    assert (database.count(), database.mark()) == (1, b"1")
    database._writer.execute("PRAGMA max_page_count = 100000")
    database.write([(b"%d" % number, b"v" * 1_000) for number in range(100)], b"2")
    database.close()
    database = opened("SQLite", tmp_path)
    assert (database.count(), database.mark()) == (101, b"2")
    database.close()


# -- RocksDB -----------------------------------------------------------------------------------------------------------


@needs_rocksdb
@pytest.mark.parametrize(
    "settings", ['{"raw_mode": false, "prefix_extractors": {}}', "{}", "[]", "", '{"raw_mode": 1}', "[" * 100_000]
)
def test_settings_that_ask_for_pickled_values_are_refused(tmp_path: Path, settings: str) -> None:
    database = opened("RocksDB", tmp_path / "db")
    database.write([(b"a", b"1")], None)
    database.close()
    found = tmp_path / "db" / "rocksdict-config.json"
    assert json.loads(found.read_text())["raw_mode"] is True
    found.write_text(settings)
    with pytest.raises(DiskDamaged, match=r"rocksdict-config\.json"):
        opened("RocksDB", tmp_path / "db")


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(rocksdb_module, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'kafka-event-source\[rocksdb\]'"):
        RocksDB()


# -- within bounds -----------------------------------------------------------------------------------------------------

MANY = """
import os, resource, sys
from tests.unit.test_engines import opened
from pathlib import Path

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
before, databases = len(os.listdir("/proc/self/fd")), []
for number in range(100):
    databases.append(opened(sys.argv[1], Path(sys.argv[2]) / str(number), 100))
    for turn in range(int(sys.argv[3])):
        databases[-1].write([(b"%d %d" % (turn, n), b"v" * 500) for n in range(20)], b"%d" % turn)
    assert databases[-1].get(b"0 0") == b"v" * 500
print(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENGINES)
def test_a_hundred_partitions_fit_into_the_files_that_a_process_may_open(tmp_path: Path, name: str) -> None:
    arguments = [sys.executable, "-c", MANY, name, str(tmp_path), "10"]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) <= 1024 - 64  # as many are left free for connections and checkpoints


SHORT = """
import errno, os, resource, sys
from pathlib import Path
from tests.unit.test_engines import opened

folder = Path(sys.argv[2])
opened(sys.argv[1], folder).write([(b"a", b"1")], b"1")
database = opened(sys.argv[1], folder / "other")  # its package is loaded
database.close()
limits, most = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
codes = set()
for more in range(30):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + more, limits[1]))
    try:
        opened(sys.argv[1], folder / "other").close()
    except OSError as error:
        codes.add(error.errno)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert codes == {errno.EMFILE}, codes
opened(sys.argv[1], folder / "other").close()
"""


@pytest.mark.parametrize("name", ENGINES)
def test_a_database_that_lacks_open_files_is_not_taken_for_damaged(tmp_path: Path, name: str) -> None:
    arguments = [sys.executable, "-c", SHORT, name, str(tmp_path)]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


SHORT_FOR_A_WHILE = """
import errno, os, resource, sys
from pathlib import Path
from tests.unit.test_engines import opened

database = opened(sys.argv[1], Path(sys.argv[2]))
limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
rows, codes = [(b"%d" % number, b"1") for number in range(9)], []
resource.setrlimit(resource.RLIMIT_NOFILE, (held, limits[1]))
for number in range(3):
    try:
        database.write(rows, b"%d" % number)
    except OSError as error:
        codes.append(error.errno)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert database.get(b"1") in (None, b"1")
database.write(rows, b"9")
assert database.scan(None, None, reverse=False, limit=99) == rows
assert database.mark() == b"9"
assert codes[-2:] == [errno.EMFILE] * 2, codes
"""


@needs_rocksdb
@pytest.mark.nightly
def test_a_database_that_lacked_open_files_is_written_to_when_there_are_some(tmp_path: Path) -> None:
    """RocksDB refuses every write after such an error, until it is opened again. (SQLite has its files open.)"""
    arguments = [sys.executable, "-c", SHORT_FOR_A_WHILE, "RocksDB", str(tmp_path)]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


FULL = """
import sys
from pathlib import Path
import pytest
from tests.unit.test_engines import opened

root, rows = Path(sys.argv[2]), [(b"%03d" % number, bytes(500)) for number in range(800)]

def fill():
    with open(root / "rest", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass

database = opened(sys.argv[1], root / "db")
database.write(rows[:100], b"1")
fill()
for _ in range(3):
    with pytest.raises(OSError, match="Errno 28"):
        database.write(rows, b"2")
assert database.get(b"001") == bytes(500)
(root / "rest").unlink()
database.write(rows, b"3")
database.close()
fill()
with pytest.raises(OSError, match="Errno 28"):
    opened(sys.argv[1], root / "db")
(root / "rest").unlink()
database = opened(sys.argv[1], root / "db")
assert (database.mark(), database.scan(None, None, reverse=False, limit=1_000)) == (b"3", rows)
"""


@pytest.mark.parametrize("name", ENGINES)
def test_a_disk_that_was_full_is_written_to_when_it_has_room(tmp_path: Path, name: str) -> None:
    """A small file system in a name space of its own."""
    space = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=8m tmpfs "$0" && "$@"'
    if shutil.which("unshare") is None or subprocess.run([*space, "sh", "-c", mount, str(tmp_path), "true"]).returncode:
        pytest.skip("this machine lets users mount nothing")
    arguments = [*space, "sh", "-c", mount, str(tmp_path), sys.executable, "-c", FULL, name, str(tmp_path)]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


FILLED = """
import random, sys
from pathlib import Path
from streams import Table, TopicPartition, disk
from streams.records import Change

name, folder, keys = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
cache, memory = (int(text) << 20 for text in sys.argv[4:])

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

start, peak, rng = resident(), 0, random.Random(1)
database = getattr(disk, name)().open(str(folder), memory_bytes=memory, partitions=4)
table = Table.factory(key=bytes, value=bytes, engine=getattr(disk, name)())(TopicPartition("in", 0))
table.attach(database, print)
table.limit_cache(cache)
for at in range(0, keys, 20_000):
    numbers = [number * 7_919 % keys for number in range(at, at + 20_000)]  # in no order
    changes = [Change(b"%016d" % number, rng.randbytes(50) * 2) for number in numbers]
    for change in changes:
        table.receive_change(change)
    database.write([(change.key, change.value) for change in changes], b"1")
    table.written(changes)
    peak = max(peak, resident())
for number in range(min(keys, 200_000)):
    assert table.get(b"%016d" % number) is not None
peak = max(peak, resident())
print(peak - start, peak)
"""


def peak_of(*arguments: str) -> tuple[int, int]:
    """Fill a table in a process of its own; return what it takes at most, in MiB: more than at its start, and in
    all."""
    found = subprocess.run([sys.executable, "-c", FILLED, *arguments], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    more, in_all = map(int, found.stdout.split())
    return more, in_all


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENGINES)
def test_the_memory_of_many_keys_is_that_of_the_caches(tmp_path: Path, name: str) -> None:
    """With a cache of 32 MiB for rows, and 16 MiB for the database. Both are full."""
    assert peak_of(name, str(tmp_path / "db"), "200000", "32", "16")[0] <= 120


@needs_rocksdb
@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_ten_million_keys_take_half_a_gigabyte_at_most(tmp_path: Path) -> None:
    """Of 116 bytes each, with the default of ``StateConfig.memory_bytes``: a half for rows, a half for databases."""
    assert peak_of("RocksDB", str(tmp_path / "db"), "10000000", "128", "128")[1] <= 512
