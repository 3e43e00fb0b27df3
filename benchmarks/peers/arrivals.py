"""A process that reads the committed outputs as they come, and notes how long each partition was silent, and when."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.child import job_of
from benchmarks.committed import batches

PATIENCE_SECONDS = 75.0
"""Longer than a transaction of a dead member can hold readers up by default (60 s), and its end by the broker."""
SHORTEST_SECONDS = 0.05


class Expect(msgspec.Struct, frozen=True, kw_only=True):
    """Read ``events`` outputs."""

    bootstrap_servers: str
    topic: str
    partitions: int
    events: int


class Gap(msgspec.Struct, frozen=True):
    """A partition without outputs. Seconds since the epoch by this machine's clock."""

    partition: int
    since: float
    until: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.until - self.since


def listen(expect: Expect) -> list[Gap]:
    """Until all are there, or nothing comes any more."""
    heard = 0
    last: dict[int, float] = {}
    gaps: list[Gap] = []
    found = batches(
        expect.bootstrap_servers, expect.topic, expect.partitions, lambda: heard >= expect.events, PATIENCE_SECONDS
    )
    for now, messages in found:
        heard += len(messages)
        for partition in {message.partition() or 0 for message in messages}:
            since = last.get(partition, now)
            if now - since > SHORTEST_SECONDS:
                gaps.append(Gap(partition, since, now))
            last[partition] = now
    return gaps


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(listen(job_of(Expect))))
