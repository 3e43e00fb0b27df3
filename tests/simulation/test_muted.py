"""OLD and NEW in one world: NEW is muted, with members that die, and OLD commits, aborts, and was reset once.

OLD is its changelog: positions and timers in transactions, which stay open for a while. Each safeguard that is taken
out is missed by some seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams.core.following import Followed, News
from streams.core.timers import Timer
from streams.errors import StreamsError
from streams.events import to_record
from streams.runtime.changelog import (
    MUTED,
    OFFSET_KEY,
    RELEASE_KEY,
    TIMER_PREFIX,
    OffsetRecord,
    ReleaseMarker,
    encode_timer,
    timer_key,
)
from streams.runtime.ownership.following import _Copy
from streams.runtime.partition.delivery import DeliveredRecords
from streams.runtime.partition.muted import MutedTimers, QueuedRecords
from streams.runtime.partition.muted_worker import MutedWorker
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.transactions.muted_pool import MutedPool
from streams.runtime.transactions.pool import TransactionPool
from streams.testing import TestDriver
from streams.testing.driver_base import Unsettled
from streams.testing.simulation.broker import LogEntry
from streams.testing.world import CALM
from tests.unit.muted_kit import OLDS, OUT, TOPIC, Beside, Deposit, build

T0 = 1_699_900_000_000
STEPS = 40
SEEDS = range(6)
IN_PIECES = msgspec.structs.replace(CALM, tail_batch=2)
"""Changelogs come record by record, so that transactions are cut."""


class _World:
    """One seed. ``at``: OLD's committed positions; ``timers``: what it has pending."""

    def __init__(self, seed: int, driver: TestDriver[Any]) -> None:
        self.rng, self.driver, self.old = random.Random(seed), driver, Beside(driver)
        self.broker = self.old.broker
        self.partitions = range(2)
        self.at, self.open, self.time_ms = [0, 0], False, T0
        self.timers: list[dict[str, Timer]] = [{}, {}]
        self.begun: Callable[[], None] = lambda: None
        self.epoch = self.broker.init("old", 1e6) or 0
        self.next_member = 2

    def live(self) -> None:
        self.old.mute()
        for number in self.partitions:  # before it was reset
            self.old.at(50, number)
            self.old.at(0, number)
        self.driver.start()
        for _ in range(STEPS):
            self.rng.choice((self.sends, self.sends, self.commits, self.commits, self.dies, self.rests))()
        if self.open:
            self.ends(True)
        for number in self.partitions:
            while self.at[number] < self.broker.log(TOPIC, number).end:
                self.commits(number)
        if self.open:
            self.ends(True)
        self.driver.advance(40)

    def sends(self) -> None:
        number = self.rng.choice(self.partitions)
        for _ in range(self.rng.randint(1, 4)):
            offset = self.broker.log(TOPIC, number).end
            is_timed = offset > 0 and self.rng.random() < 0.4
            self.time_ms += self.rng.choice((1, 700, 3000))
            event = Deposit(f"t{number}-{offset}" if is_timed else "a", 1, 2 if is_timed else 0)
            record = msgspec.structs.replace(
                to_record(TOPIC, event, key="a", partition=number), timestamp_ms=self.time_ms
            )
            self.driver.send_record(record, wait=False)
        self.rests()

    def commits(self, number: int = -1) -> None:
        """OLD begins a transaction, or ends the one that is open."""
        if self.open:
            self.ends(number >= 0 or self.rng.random() < 0.6)
            return
        number = self.rng.choice(self.partitions) if number < 0 else number
        log, timers = self.broker.log(TOPIC, number), dict(self.timers[number])
        to = min(log.end, self.at[number] + self.rng.randint(1, 3))
        made: list[tuple[bytes, bytes | None]] = []
        for record in log.committed(self.at[number], to):
            event = msgspec.json.decode(record.value or b"", type=Deposit)
            if event.remind:
                due_ms = record.timestamp_ms + 2000 + self.rng.choice((0, 30))
                timers[event.account] = timer = Timer(event.account, due_ms, "Remind", b"{}", by=record.offset)
                made.append((timer_key(event.account), encode_timer(timer)))
        for name in [name for name in timers if self.rng.random() < 0.3]:
            del timers[name]
            made.append((timer_key(name), None))
        position = OffsetRecord(to, "old", 0, 0, self.old.id_of(TOPIC), self.old.id_of(OLDS))
        made.append((OFFSET_KEY, msgspec.json.encode(position)))
        olds = self.broker.log(OLDS, number)
        self.broker.enlist("old", self.epoch, [olds])
        for key, value in made:
            self.broker.produce("old", self.epoch, OLDS, number, LogEntry(key, value, None, None))
        self.open = True

        def done() -> None:
            self.at[number], self.timers[number] = to, timers

        self.begun = done

    def ends(self, commit: bool) -> None:
        self.broker.end("old", self.epoch, commit)
        self.open = False
        if commit:
            self.begun()
        self.driver.advance(self.rng.choice((0.1, 1.0)))

    def dies(self) -> None:
        alive = [number for number, member in self.driver._world.members.items() if not member.is_down]
        if self.rng.random() < 0.5:
            self.driver.crash(self.rng.choice(alive))
        self.driver._world.start(self.next_member)
        self.next_member += 1
        self.rests()

    def rests(self) -> None:
        self.driver.advance(self.rng.choice((0.05, 0.5, 5.0)))

    # -- what must hold ------------------------------------------------------------------------------------------------

    def judge(self) -> list[str]:
        found = [f"{OUT} has {len(self.driver.outputs(OUT))} records"] if self.driver.outputs(OUT) else []
        for number in self.partitions:
            found += self._judged(number)
        return found

    def _judged(self, number: int) -> list[str]:
        """Compare what NEW has written with what OLD had committed at that time."""
        olds, found = self.broker.log(OLDS, number), []
        ends = {entry.txn: entry.number for entry in olds.entries if entry.marker}
        positions = [(0, 0)]  # since the reset
        gone: dict[bytes | None, int] = {}
        for entry in olds.entries[2:]:
            if entry.marker or entry.txn is None or not entry.txn.outcome:
                continue
            if entry.key == OFFSET_KEY:
                positions.append((ends[entry.txn], msgspec.json.decode(entry.value or b"", type=OffsetRecord).offset))
            elif entry.value is None:
                gone[entry.key] = ends[entry.txn]
        last = 0
        for entry in self.broker.log(self.old.config.changelog, number).entries:
            if entry.marker or (entry.txn is not None and not entry.txn.outcome):
                continue
            key = entry.key or b""
            if key == OFFSET_KEY:
                record = msgspec.json.decode(entry.value or b"", type=OffsetRecord)
                last = record.offset
                if not record.is_muted:
                    found.append(f"[{number}]: a position is not marked")
                if last > max(at for when, at in positions if when < entry.number):
                    found.append(f"[{number}]: it was at {last}, beyond OLD")
            elif key == RELEASE_KEY and entry.value is not None:
                marker = msgspec.json.decode(entry.value, type=ReleaseMarker)
                found += [] if marker.to.startswith(MUTED) else [f"[{number}]: a release marker is not marked"]
            elif key.startswith(TIMER_PREFIX) and entry.value is None and gone.get(key, 1 << 60) > entry.number:
                found.append(f"[{number}]: {key!r} has fired, and OLD has it pending")
        if last != self.at[number]:
            found.append(f"[{number}]: it has stopped at {last}, and OLD is at {self.at[number]}")
        return found


def differences(seed: int) -> list[str]:
    try:
        with TestDriver(build(2), 2, seed, start=False, conditions=IN_PIECES) as driver:
            world = _World(seed, driver)
            world.live()
            return world.judge()
    except (StreamsError, Unsettled) as error:
        return [f"it stopped: {error}"]


@pytest.mark.parametrize("seed", SEEDS)
def test_new_is_never_beyond_old_and_never_speaks(seed: int) -> None:
    assert differences(seed) == []


def _whole_at_once(self: Any, *news: Any) -> News:
    return READ(self, *news)._replace(is_whole=True)


READ = _Copy.read
OUT_OF: dict[str, tuple[type[Any], str, Any, str]] = {
    "the cap": (Followed, "cap", lambda self, topic: 1 << 60, "beyond OLD|went back"),
    "all that was there is read first": (_Copy, "read", _whole_at_once, "beyond OLD|went back"),
    "outputs are dropped": (MutedPool, "admit", TransactionPool.admit, "totals has"),
    "positions are marked": (MutedWorker, "further_fields", PartitionWorker.further_fields, "not marked|by one record"),
    "release markers are marked": (MutedWorker, "release_marker", PartitionWorker.release_marker, "release marker is"),
    "OLD's pending timers stay": (Followed, "has", lambda self, name, mark: False, "OLD has it pending"),
    "no timer fires by the clock": (MutedTimers, "set_aside", lambda self, name: None, "OLD has it pending"),
    "deliveries are queued": (QueuedRecords, "take", DeliveredRecords.take, "beyond OLD|went back"),
    "news are taken in": (MutedWorker, "learned", lambda self, timers: None, "stopped at"),
}


@pytest.mark.parametrize("name", OUT_OF)
def test_without_a_safeguard_some_seed_misses_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, instead, said = OUT_OF[name]
    monkeypatch.setattr(owner, attribute, instead)
    found = [text for seed in SEEDS for text in differences(seed)]
    assert any(re.search(said, text) for text in found), found
