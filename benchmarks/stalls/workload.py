"""The account workload with one account per partition, so that every output partition has an input partition.

Deposits come in turn, one per partition, each a little after the one before. What a reader sees between two outputs of
a partition is then the silence of that partition.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from benchmarks.workload import PARTITIONS
from streams import event_type

LATE_FETCH_MS = 5
"""How long the reader lets the broker wait for more."""


@event_type("Stepped")
class Stepped(msgspec.Struct, frozen=True):
    """The output: the account after an event, who handled it, when, and when it was sent (seconds since the epoch)."""

    account: str
    count: int
    cents: int
    sent: float
    handled: float
    by: str


class Seen(NamedTuple):
    """One output as the reader saw it: seconds since the epoch; ``by``: the instance that wrote it."""

    arrived: float
    partition: int
    number: int
    sent: float
    handled: float
    by: str


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """The generator's job: ``rate`` deposits a second, in turn over the partitions, until SIGTERM."""

    bootstrap_servers: str
    topic: str
    rate: int


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """The reader's job: note every output until SIGTERM."""

    bootstrap_servers: str
    topic: str


def account(partition: int) -> str:
    """The partition's account."""
    return f"account-{partition:02d}"


def cents(count: int) -> int:
    """Of an account's deposit number ``count`` (from 1)."""
    return count * 7919 % 9_999 + 1


class Ledger:
    """Hears every output, partition by partition in order: counts 1, 2, 3 … and right sums, nothing else."""

    def __init__(self) -> None:
        self._counts = [0] * PARTITIONS
        self._sums = [0] * PARTITIONS
        self._fault = ""

    def hear(self, partition: int, key: str, step: Stepped) -> None:
        """The next output of a partition."""
        self._counts[partition] += 1
        self._sums[partition] += cents(self._counts[partition])
        right = account(partition), self._counts[partition], self._sums[partition]
        if (step.account, step.count, step.cents) != right or key != step.account:
            self._fault = self._fault or f"output partition {partition}: {key} {step}, but {right} was due"
            self._counts[partition], self._sums[partition] = step.count, step.cents

    def verdict(self, sent: list[int]) -> str:
        """Empty if exactly so many deposits per partition were handled, each once, else what is wrong."""
        if self._fault or self._counts == sent:
            return self._fault
        return f"outputs {self._counts} for deposits {sent}"
