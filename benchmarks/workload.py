"""The account workload: what every system under test does, and how its output is judged.

Ten partitions, 10,000 keys. An event is a deposit of 150 bytes of JSON with a type header. Handling it reads and writes
its account's ``{count, cents}``, writes one changelog record and sends one output with the same key. Everything is
drawn from a seed, so the judge knows the final sums without having seen the input. A ``Shape`` makes one of its
dimensions larger or smaller.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import cast

import msgspec

from streams import event_type

PARTITIONS = 10
KEYS = 10_000
VALUE_BYTES = 150


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of the workload. ``partitions`` of input, output and changelog; ``keys`` that events are drawn
    from; ``value_bytes`` of an event; ``types`` of events, all handled alike; ``stored``: so many further accounts get
    one deposit each before anything else, so that a large state lies there."""

    partitions: int = PARTITIONS
    keys: int = KEYS
    value_bytes: int = VALUE_BYTES
    types: int = 1
    stored: int = 0


USUAL = Shape()


@event_type("Deposited")
class Deposited(msgspec.Struct, frozen=True):
    """The input. ``sent``: seconds since the epoch by the generator's clock, 0 when nobody asks."""

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


class Account(msgspec.Struct):
    """A key's state."""

    count: int = 0
    cents: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a system under test is told: where to read and write. ``options`` are the system's own."""

    bootstrap_servers: str
    group: str
    source: str
    output: str
    changelog: str
    options: dict[str, str] = {}
    shape: Shape = USUAL


def deposits(seed: int, shape: Shape = USUAL) -> Iterator[tuple[str, int]]:
    """(account, cents), without end; the same for the same seed."""
    rng = random.Random(seed)
    keys = shape.keys
    for number in range(shape.stored):
        yield f"{STORED}{number:07d}", rng.randrange(1, 10_000)
    while True:
        yield f"account-{rng.randrange(keys):05d}", rng.randrange(1, 10_000)


STORED = "stored-"
"""How the accounts begin that get one deposit each, before the others."""


def encoded(account: str, cents: int, sent: float, note: str = "") -> bytes:
    """The event's value: as long as every other one, give or take the digits of its numbers. ``note``: of
    ``note_of``, for another size than the usual one."""
    return msgspec.json.encode(Deposited(account, cents, sent, note or _NOTE))


def note_of(value_bytes: int) -> str:
    """What fills a value up to this size. Raises ``ValueError`` for one that the other fields fill already."""
    bare = len(msgspec.json.encode(Deposited("account-00000", 5000, 1_700_000_000.123456, "")))
    if value_bytes <= bare:
        raise ValueError(f"an event of {value_bytes} bytes; the smallest has {bare + 1}")
    return "n" * (value_bytes - bare)


_NOTE = note_of(VALUE_BYTES)


@cache
def kinds(types: int) -> tuple[type[Deposited], ...]:
    """So many types of events, alike but for their names; the first is ``Deposited``."""
    found = [Deposited]
    for number in range(1, types):
        name = f"Deposited{number:02d}"
        kind = msgspec.defstruct(name, [], bases=(Deposited,), frozen=True, module=__name__)
        found.append(event_type(name)(cast("type[Deposited]", kind)))
    return tuple(found)


def kind_of(cents: int, types: int) -> int:
    """The number, in ``kinds``, of the type that the deposit of so many cents has."""
    return cents % types


class Judge:
    """Hears every output and says whether it was exactly once: per account the counts 1, 2, 3 … and the right sum."""

    def __init__(self, shape: Shape = USUAL) -> None:
        self.shape = shape
        self.outputs = 0
        self.out_of_turn = 0
        self.first_fault = ""
        self._counts: dict[str, int] = {}
        self._sums: dict[str, int] = {}

    def hear(self, key: str, balance: Balance) -> None:
        """One output, in the order of its partition."""
        self.outputs += 1
        due = self._counts.get(balance.account, 0) + 1
        if balance.count != due or key != balance.account:
            self.out_of_turn += 1
            self.first_fault = self.first_fault or f"{key}: {balance}, but count {due} was due"
        self._counts[balance.account] = max(balance.count, due)
        self._sums[balance.account] = balance.cents

    def verdict(self, seed: int, events: int) -> str:
        """Empty if the first ``events`` deposits of this seed were handled exactly once, else what is wrong."""
        if self.out_of_turn:
            return f"{self.out_of_turn} outputs out of turn; the first: {self.first_fault}"
        counts: dict[str, int] = {}
        sums: dict[str, int] = {}
        for _, (account, cents) in zip(range(events), deposits(seed, self.shape), strict=False):
            counts[account] = counts.get(account, 0) + 1
            sums[account] = sums.get(account, 0) + cents
        if self.outputs != events or counts != self._counts:
            return f"{self.outputs} outputs for {events} events"
        wrong = sum(self._sums[account] != due for account, due in sums.items())
        return f"{wrong} accounts with a wrong sum" if wrong else ""
