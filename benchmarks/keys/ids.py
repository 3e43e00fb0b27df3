"""The memory that the ids of one partition take: ``python -m benchmarks.keys.ids`` prints the bytes of one."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from streams.core.seen import DIGEST, encode, width_of
from streams.records import Change
from streams.runtime.changelog import SEEN_PREFIX
from streams.runtime.partition.seen_ids import RowsInMemory

IDS = 1_000_000
WEEK = 7 * 86_400


def bytes_of_an_id() -> float:
    """Measure it in a process of its own, whose memory nothing else has used before."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _measure() -> float:
    rows, process = RowsInMemory(width_of(WEEK)), psutil.Process()
    before = process.memory_info().rss
    for number in range(IDS):
        digest = os.urandom(DIGEST)
        value = encode(1_800_000_000 + number // 100)  # a hundred a second
        rows.set(digest, Change(SEEN_PREFIX + digest, value))
    return (process.memory_info().rss - before) / IDS


if __name__ == "__main__":
    print(_measure())
