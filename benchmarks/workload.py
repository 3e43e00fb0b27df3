"""The account workload, which every system under test does, and the judge of its outputs.

Ten partitions, 10,000 keys. An event is a deposit of 150 bytes of JSON with a type header. Handling it reads and writes
its account's ``{count, cents}``, writes one changelog record and sends one output with the same key. Everything is
drawn from a seed, so the judge knows the final sums without having seen the input. Systems of the asynchronous work
wait before that, for ``wait_seconds``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice

import msgspec

from streams import event_type
from streams.sak.murmur2 import partition_of

PARTITIONS = 10
KEYS = 10_000
VALUE_BYTES = 150


@event_type("Deposited")
class Deposited(msgspec.Struct, frozen=True):
    """The input. ``sent``: seconds since the epoch by the generator's clock, 0 in a backlog."""

    account: str
    cents: int
    sent: float
    note: str


@event_type("Balance")
class Balance(msgspec.Struct, frozen=True):
    """The output: the account after the event, with the event's own time."""

    account: str
    count: int
    cents: int
    sent: float


class Signed(Balance, frozen=True):
    """An output that may name the process that wrote it."""

    by: str = ""


class Account(msgspec.Struct):
    """A key's state."""

    count: int = 0
    cents: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The topics and the group of one run. ``options`` are the system's own."""

    bootstrap_servers: str
    group: str
    source: str
    output: str
    changelog: str
    options: dict[str, str] = {}
    partitions: int = PARTITIONS


def deposits(seed: int, *, in_turn: bool = False) -> Iterator[tuple[str, int]]:
    """Draw (account, cents), without end; the same for the same seed. ``in_turn``: one account per partition, each in
    its turn, instead of ``KEYS`` at random."""
    rng, turns = random.Random(seed), cycle(ONE_EACH)
    while True:
        account = next(turns) if in_turn else f"account-{rng.randrange(KEYS):05d}"
        yield account, rng.randrange(1, 10_000)


def wait_seconds(cents: int) -> float:
    """Return the time that the asynchronous work for a deposit takes: 5 ms, and 500 ms for one in a hundred."""
    return 0.5 if cents % 100 == 0 else 0.005


def encoded(account: str, cents: int, sent: float) -> bytes:
    """Encode an event's value: as long as every other one, give or take the digits of its numbers."""
    return msgspec.json.encode(Deposited(account, cents, sent, _NOTE))


_NOTE = "n" * (VALUE_BYTES - len(msgspec.json.encode(Deposited("account-00000", 5000, 1_700_000_000.123456, ""))))
_BY_PARTITION = {partition_of(name.encode(), PARTITIONS): name for name in (f"account-{n:05d}" for n in range(KEYS))}
ONE_EACH = [_BY_PARTITION[partition] for partition in range(PARTITIONS)]
"""An account of each partition, in the order of the partitions."""


class Judge:
    """Checks every output: per account the counts 1, 2, 3 ... once each and in order, and the right sums."""

    def __init__(self) -> None:
        self.outputs = 0
        self._counts: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._wrong = 0
        self._first = ""

    def add(self, key: str, balance: Balance) -> None:
        """Take one output, in the order of its partition."""
        self.outputs += 1
        due = self._counts.get(balance.account, 0) + 1
        if balance.count != due or key != balance.account:
            self._wrong += 1
            self._first = self._first or f"{key}: {balance}, but count {due} was due"
        self._counts[balance.account] = max(balance.count, due)
        self._sums[balance.account] = balance.cents

    def order(self, outputs: int) -> str:
        """Return the fault, empty if there are so many outputs, and those of each account in their order."""
        wrong = f"{self._wrong} outputs out of turn; the first: {self._first}" if self._wrong else ""
        return wrong or ("" if self.outputs == outputs else f"{self.outputs} outputs instead of {outputs}")

    def verdict(self, seed: int, handled: int, written: int = 0, *, in_turn: bool = False) -> str:
        """Return the fault, empty if ``handled`` of the first ``written`` deposits of the seed (all of them, if it is
        not given) were counted exactly once: of each account the first ones."""
        if self._wrong:
            return f"{self._wrong} outputs out of turn; the first: {self._first}"
        counts: dict[str, int] = {}
        sums: dict[str, int] = {}
        for account, cents in islice(deposits(seed, in_turn=in_turn), written or handled):
            if counts.get(account, 0) < self._counts.get(account, 0):
                counts[account] = counts.get(account, 0) + 1
                sums[account] = sums.get(account, 0) + cents
        if self.outputs != handled or counts != self._counts:
            return f"{self.outputs} outputs for {handled} events"
        wrong = sum(self._sums[account] != due for account, due in sums.items())
        return f"{wrong} accounts with a wrong sum" if wrong else ""
