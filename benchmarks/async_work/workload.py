"""The waiting workload: what every system under test does, and how its output is judged.

Four partitions, 1,000 keys. Handling an event means to wait for the world (a sleep of 5 ms, of 500 ms for one
event in a hundred), to count it in its key's state (with a changelog), and to send one output with the same key.
Everything is drawn from a seed, so the judge knows what is due without having seen the input.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from benchmarks.workload import Job as AnyJob
from streams import event_type

PARTITIONS = 4
KEYS = 1_000
USUAL_MS, SLOW_MS, SLOW_SHARE = 5, 500, 0.01
TYPE: list[tuple[str, str | bytes | None]] = [("__grt__", b"Asked")]
MEAN_MS = USUAL_MS * (1 - SLOW_SHARE) + SLOW_MS * SLOW_SHARE


@event_type("Asked")
class Asked(msgspec.Struct, frozen=True):
    """The input: event ``number`` (from 1) of its key, the ``milliseconds`` its work takes, and the generator's clock
    (seconds since the epoch, 0 when nobody asks)."""

    key: str
    number: int
    milliseconds: int
    sent: float


@event_type("Answered")
class Answered(msgspec.Struct, frozen=True):
    """The output. ``count``: what the key's state said after this event."""

    key: str
    number: int
    count: int
    sent: float


class Ask(NamedTuple):
    """One event before it is sent."""

    partition: int
    key: str
    number: int
    milliseconds: int

    def encoded(self, sent: float = 0.0) -> bytes:
        """The event's value."""
        return _encode(Asked(self.key, self.number, self.milliseconds, sent))


class Plan(msgspec.Struct, frozen=True):
    """Which events there are. ``slow_share`` of them take ``SLOW_MS``. ``slow_at``: this one takes ``slow_ms``."""

    seed: int
    slow_share: float = SLOW_SHARE
    slow_at: int = -1
    slow_ms: int = 0

    def asks(self) -> Iterator[Ask]:
        """Without end; partitions in turn, each with a key of its own at random."""
        rng, numbers, position = random.Random(self.seed), Counter[int](), 0
        while True:
            partition = position % PARTITIONS
            key = rng.randrange(KEYS // PARTITIONS) * PARTITIONS + partition
            milliseconds = SLOW_MS if rng.random() < self.slow_share else USUAL_MS
            if position == self.slow_at:
                milliseconds = self.slow_ms
            numbers[key] += 1
            yield Ask(partition, f"key-{key:04d}", numbers[key], milliseconds)
            position += 1

    def due(self, handled: Mapping[int, int]) -> dict[str, int]:
        """Outputs per key when so many events of each partition were handled."""
        left, due = dict(handled), Counter[str]()
        for ask in islice(self.asks(), PARTITIONS * max(left.values(), default=0)):
            if left.get(ask.partition, 0) > 0:
                left[ask.partition] -= 1
                due[ask.key] += 1
        return dict(due)


def partition_of(key: str) -> int:
    """Where the events of a key are."""
    return int(key[-4:]) % PARTITIONS


def shares(events: int) -> dict[int, int]:
    """How many of the first ``events`` are in each partition."""
    return {partition: events // PARTITIONS + (partition < events % PARTITIONS) for partition in range(PARTITIONS)}


class Judge:
    """Hears every output and says whether each event was handled once, and those of a key in their order."""

    def __init__(self) -> None:
        self.outputs = 0
        self._heard: Counter[str] = Counter()
        self._wrong = 0
        self._first = ""

    def hear(self, key: str, answer: Answered) -> None:
        """One output, in the order of its partition."""
        self.outputs += 1
        due = self._heard[answer.key] + 1
        if (key, answer.number, answer.count) != (answer.key, due, due):
            self._wrong += 1
            self._first = self._first or f"{key}: {answer}, but number and count {due} were due"
        self._heard[answer.key] = max(due, answer.number)

    def verdict(self, due: Mapping[str, int]) -> str:
        """Empty if exactly so many events of each key were handled, in order; else what is wrong."""
        if self._wrong:
            return f"{self._wrong} outputs out of turn; the first: {self._first}"
        if dict(self._heard) != dict(due):
            return f"{self.outputs} outputs for {sum(due.values())} events that are committed"
        return ""


class Job(AnyJob, frozen=True, kw_only=True):
    """What a system under test is told. ``folder``: for whatever it keeps; it goes with the run."""

    folder: str = ""


def told(asks: Iterable[Ask], topic: str) -> Iterator[tuple[str, bytes, bytes, int]]:
    """As records for ``Cluster.write``."""
    for ask in asks:
        yield topic, ask.key.encode(), ask.encoded(), ask.partition


_encode = msgspec.json.Encoder().encode
