"""RocksDB with more tables than files that it may open."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("rocksdict") is None, reason="needs the extra rocksdb"),
]

SHORT_FOR_READS = """
import errno, os, random, resource, sys
from pathlib import Path
from streams.disk.rocksdb import RocksDatabase

real = RocksDatabase._options

def of_many_files(self, memory_bytes, files):
    options = real(self, memory_bytes, files)
    options.set_target_file_size_base(64 << 10)
    options.set_max_bytes_for_level_base(1 << 20)
    return options

RocksDatabase._options = of_many_files
rows = {b"%d" % number: random.randbytes(400) for number in range(8_000)}
database = RocksDatabase(Path(sys.argv[1]), 8 << 20, 16)
for step in (1, 2, 3, 4, 5):
    for turn in range(step):
        database.write(list(rows.items())[turn::step], b"1")
database.close()
assert len(list(Path(sys.argv[1]).glob("*.sst"))) > 10, "more than a database opens at its start"
database = RocksDatabase(Path(sys.argv[1]), 8 << 20, 16)
limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (held - 1, limits[1]))
codes = []
for read in [lambda key=key: database.get(key) for key in rows] + [
    lambda: database.scan(None, None, reverse=False, limit=9_999, size=1 << 30)
]:
    try:
        read()
    except OSError as error:
        codes.append(error.errno)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert len(codes) > 1 and set(codes) == {errno.EMFILE}, codes
assert {key: database.get(key) for key in rows} == rows
"""


def test_a_read_that_lacks_open_files_is_not_taken_for_damage(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SHORT_FOR_READS, str(tmp_path / "db")]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
