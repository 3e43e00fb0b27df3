"""Orders that are joined with their customers' rows, and the judge of what comes out.

Each of 10,000 customers has a row; then ten orders and a change of one row come in turn. An order is 150 bytes of JSON
with a type header, a row about 100. Handling an order reads the row of its customer and sends one output with the
customer's key: the order with the version and the address of the row. Everything is drawn from a seed, and has a time
that leaves no doubt which row an order should meet.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from benchmarks.cluster import TYPE, Cluster, Headers
from benchmarks.workload import KEYS, VALUE_BYTES, deposits, encoded
from streams import event_type
from streams.sak.murmur2 import partition_of

ORDERS_PER_CHANGE = 10
STEP_MS = 2
"""Of event time: ten orders in its first half, a change in the second."""
RECORDS_PER_MS = 50
"""Of event time, of deposits in one input or two."""
FIRST_ORDERS = 200
"""They are there before the others, so that group, table and state are up when the backlog comes."""
MISSING = -1
"""The version of an order that has met no row."""


@event_type("Ordered")
class Ordered(msgspec.Struct, frozen=True):
    """An order. ``number``: 1, 2, 3 ... of its customer's."""

    customer: str
    number: int
    cents: int
    note: str


class Customer(msgspec.Struct, frozen=True):
    """A row. ``version``: 0, 1, 2 ... of its key's."""

    version: int
    address: str


@event_type("Invoiced")
class Invoiced(msgspec.Struct, frozen=True):
    """The output: an order with the row that it has met, or with ``MISSING`` and no address."""

    customer: str
    number: int
    cents: int
    version: int
    address: str


ORDERED: Headers = [("__grt__", b"Ordered")]
_NOTE = "n" * (VALUE_BYTES - len(msgspec.json.encode(Ordered("account-00000", 10, 5000, ""))))


def customer(number: int) -> str:
    """Return a customer's key; the same names as those of the accounts."""
    return f"account-{number:05d}"


def row(key: str, version: int) -> Customer:
    """Make a customer's row of a version."""
    return Customer(version, f"{version} High Street, the house of {key}, in a town with a rather long name")


def order(key: str, number: int, cents: int) -> Ordered:
    """Make a customer's order of a number."""
    return Ordered(key, number, cents, _NOTE)


def history(seed: int, orders: int) -> Iterator[tuple[int, str, Ordered | Customer]]:
    """Draw (milliseconds, key, order or row), in the order of time; the same for the same seed."""
    rng, numbers, versions = random.Random(seed), Counter[str](), Counter[str]()
    for number in range(KEYS):
        yield 0, customer(number), row(customer(number), 0)
    for number in range(orders):
        key = customer(rng.randrange(KEYS))
        numbers[key] += 1
        at_ms = STEP_MS * (1 + number // ORDERS_PER_CHANGE)
        yield at_ms, key, order(key, numbers[key], rng.randrange(1, 10_000))
        if number % ORDERS_PER_CHANGE == ORDERS_PER_CHANGE - 1:
            key = customer(rng.randrange(KEYS))
            versions[key] += 1
            yield at_ms + STEP_MS // 2, key, row(key, versions[key])


class Backlog:
    """The records of one run: ``first`` writes a row of each customer and ``FIRST_ORDERS`` orders, ``rest`` all others,
    which readers of committed records find at once. Both raise ``Failed``. ``orders``: in each partition."""

    def __init__(self, cluster: Cluster, source: str, table: str, seed: int, orders: int) -> None:
        self._cluster, self._topics = cluster, (source, table)
        self._began = int(time.time() * 1000) - STEP_MS * orders // ORDERS_PER_CHANGE
        self._history = history(seed, orders)
        places = Counter(
            partition_of(key.encode(), cluster.partitions)
            for _, key, event in history(seed, orders)
            if isinstance(event, Ordered)
        )
        self.orders = [places[number] for number in range(cluster.partitions)]

    def first(self) -> None:
        """Write what is there before the system starts."""
        first = KEYS + FIRST_ORDERS + FIRST_ORDERS // ORDERS_PER_CHANGE
        self._cluster.write(self._records(islice(self._history, first)))

    def rest(self) -> float:
        """Write the backlog. Returns the time right before its commit, in seconds since the epoch."""
        return self._cluster.write(self._records(self._history), f"{self._topics[0]}-backlog")

    def _records(
        self, history: Iterable[tuple[int, str, Ordered | Customer]]
    ) -> Iterator[tuple[str, str, bytes, Headers, int]]:
        source, table = self._topics
        for at_ms, key, event in history:
            topic, headers = (source, ORDERED) if isinstance(event, Ordered) else (table, [])
            yield topic, key, msgspec.json.encode(event), headers, self._began + at_ms


def fill_deposits(cluster: Cluster, topics: tuple[str, ...], seed: int, records: int) -> None:
    """Write the first deposits of the seed into these topics in turn: the same records at the same times, however many
    topics there are. Raises ``Failed``."""
    began = int(time.time() * 1000) - records // RECORDS_PER_MS
    cluster.write(
        (topics[number % len(topics)], account, encoded(account, cents, 0.0), TYPE, began + number // RECORDS_PER_MS)
        for number, (account, cents) in enumerate(islice(deposits(seed), records))
    )


class JoinJudge:
    """Checks every output: of each customer the orders 1, 2, 3 ... once each and in order, with the right amount, and
    with a row that was there, never an older one than before."""

    def __init__(self, seed: int, orders: int) -> None:
        self.outputs = self.met = 0
        """Outputs; those that have met the very row of their time."""
        self._due: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._versions: dict[str, int] = {}
        self._numbers, self._last = Counter[str](), Counter[str]()
        self._wrong, self._orders = 0, orders
        self._first = ""
        for _, key, event in history(seed, orders):
            if isinstance(event, Customer):
                self._versions[key] = event.version
            else:
                self._due[key].append((event.cents, self._versions[key]))

    def add(self, key: str, found: Invoiced) -> None:
        """Take one output, in the order of its partition."""
        self.outputs += 1
        due, number = self._due.get(key, []), self._numbers[key]
        cents, version = due[number] if number < len(due) else (0, MISSING)
        is_row = self._last[key] <= found.version <= self._versions.get(key, MISSING)
        is_right = (found.customer, found.number, found.cents) == (key, number + 1, cents)
        if not (is_right and is_row and found.address == row(key, found.version).address):
            self._wrong += 1
            self._first = self._first or (
                f"{key}: {found}, but order {number + 1} of {cents} cents was due, with a version from "
                f"{self._last[key]} on"
            )
        self.met += found.version == version
        self._numbers[key] = max(found.number, number + 1)
        self._last[key] = max(found.version, self._last[key])

    def verdict(self) -> str:
        """Return the fault, empty if every order was joined exactly once."""
        if self._wrong:
            return f"{self._wrong} outputs are wrong or out of turn; the first: {self._first}"
        return "" if self.outputs == self._orders else f"{self.outputs} outputs for {self._orders} orders"
