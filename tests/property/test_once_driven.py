"""Events that are handled once over random histories, against an oracle that takes the first copy of each id.

Copies are sent again at random: right behind the first, later, beside the first that is parked, behind its letter, and
under another key. Members die, leave, freeze and come back, commits are lost and aborted, an operator lets events go.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streams import DEAD_LETTER, PARK, ErrorResponse, Retry
from streams.disk import SQLite
from streams.errors import ConfigError, MembershipLost, NotOwned
from streams.runtime.partition.seen_ids import SeenIds
from streams.runtime.partition.state import Partition
from streams.sak.murmur2 import partition_of
from streams.settings import GroupConfig, Once, ParkingConfig, StateConfig
from streams.testing import TestDriver, Unsettled
from tests.broker.engine_kit import facts
from tests.broker.gate import nightly
from tests.property.kit import trouble
from tests.unit.once_kit import WEEK, ids
from tests.unit.parking_kit import AHEAD, Add, Bank
from tests.unit.test_once_safeguards import before_completion, decided_ahead, not_restored, not_written

pytestmark = pytest.mark.usefixtures("quiet")

WAYS = ("plain", "batch", "async", "blocking", *AHEAD)
KEYS = "acd"
FIRST = 200  # smaller numbers mean something else to the bank
STEPS = (
    ["send"] * 6
    + ["time"] * 3
    + ["repair", "repair", "operate", "operate", "crash", "restart", "restart", "leave", "trouble", "trouble"]
)


def has_id(number: int) -> bool:
    return number % 7 > 0


class OnceHistory:
    """One random history. ``sent``: (partition, offset, key, number) of each record."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = chance = random.Random(seed)
        self.partitions = 1 + seed // len(WAYS) % 2
        self.sent: list[tuple[int, int, str, int]] = []
        self.keys: dict[int, set[str]] = {}
        self.number = FIRST
        self.folder = folder
        waits = Retry(attempts=3, backoff_seconds=0.5, waits="key", then=ErrorResponse.PARK)
        self.bank = bank = Bank(
            chance.choice([PARK, PARK, waits, DEAD_LETTER]),
            WAYS[seed % len(WAYS)],
            concurrency=2,
            num_partitions=self.partitions,
            parking=ParkingConfig(first_retry_seconds=5, max_retry_seconds=20, max_keys=4, max_key_events=10),
            group=GroupConfig(num_standbys=chance.randrange(2)),
            state=StateConfig(folder="state", checkpoint_seconds=1.0),
        )
        bank.engine = chance.choice([None, SQLite()])
        bank.once = Once(
            lambda record, event: event.number if has_id(event.number) else None, within=WEEK, engine=bank.engine
        )

    def run(self, steps: int) -> None:
        chance, bank = self.chance, self.bank
        options = {"seed": chance.getrandbits(30), "state_folder": str(self.folder)}
        with bank.driver(members=2, **options) as driver:
            for _ in range(steps):
                with suppress(Unsettled):  # a partition may hold the line
                    self.step(driver, chance.choice(STEPS))
            bank.broken, bank.broken_ahead = set(), set()
            for number in (0, 1):
                if number not in driver.members:
                    driver.restart(number)
            driver.advance(120)
            driver.settle()
            self.judge(driver)

    def step(self, driver: TestDriver[Any], what: str) -> None:
        chance, bank = self.chance, self.bank
        if what == "send":
            for _ in range(chance.randrange(1, 6)):
                self.send(driver)
        elif what == "repair":
            bank.broken = {number for number in bank.broken if chance.random() < 0.5}
            bank.broken_ahead &= bank.broken
        elif what == "time":
            driver.advance(chance.choice([0.01, 1, 4, 30]))
        elif what == "crash" and len(driver.members) > 1:
            driver.crash(chance.choice(driver.members))
        elif what == "restart" and len(driver.members) < 2:
            driver.restart(next(number for number in (0, 1) if number not in driver.members))
        elif what == "leave" and len(driver.members) > 1:
            driver.leave(chance.choice(driver.members))
        elif what == "trouble" and driver.members:
            trouble(driver, chance, driver.forget_group)
        elif what == "operate":
            self.operate(driver)

    def send(self, driver: TestDriver[Any]) -> None:
        """Send a new event, or a copy of one of the last; now and then under another key of its partition."""
        chance, bank = self.chance, self.bank
        if self.sent and chance.random() < 0.5:
            _, _, key, number = chance.choice(self.sent[-12:])
            if chance.random() < 0.15:
                key = chance.choice([other for other in KEYS if self.place_of(other) == self.place_of(key)])
        else:
            self.number, key = self.number + 1, chance.choice(KEYS)
            number = self.number
            if chance.random() < 0.25:
                bank.broken.add(number)
                if chance.random() < 0.5:
                    bank.broken_ahead.add(number)
            bank.seconds[number] = chance.choice([0, 0, 0.01, 1, 3])
        record = driver.send(Add(number, key), key=key, wait=False)
        self.sent.append((record.partition, record.offset, key, number))
        self.keys.setdefault(number, set()).add(key)

    def place_of(self, key: str) -> int:
        return partition_of(key.encode(), self.partitions)

    def operate(self, driver: TestDriver[Any]) -> None:
        """Act on a parked key. What is let go becomes a letter, which tells the oracle of it."""
        with suppress(Unsettled):
            driver.settle(5)
        found = [parked.key for parked in driver.parked() if parked.key is not None]
        if not found:
            return
        key, act = self.chance.choice(found), self.chance.choice(["retry", "skip", "drop"])
        with suppress(MembershipLost, NotOwned, ConfigError):  # or the queue has changed meanwhile
            if act == "retry":
                driver.retry_parked(key)
            elif act == "skip":
                driver.skip_head(key, dead_letter=True)
            else:
                driver.drop_parked(key, dead_letter=True)

    def judge(self, driver: TestDriver[Any]) -> None:
        driver.check()
        assert not driver.parked()
        gone = [(int(found["partition"]), int(found["offset"])) for found in map(facts, driver.dead_letters())]
        assert len(set(gone)) == len(gone), "a letter is there twice"
        kept = [one for one in self.sent if one[:2] not in gone]
        numbers = {key: list(driver.store(self.place_of(key)).get(key) or ()) for key in KEYS}
        for key, there in numbers.items():
            assert [event.number for event in driver.outputs("out", Add) if event.key == key] == there
            of_key = [number for _, _, name, number in kept if name == key]
            # Which of two copies under two keys is the first depends on what is parked at their turns.
            alone = {number for number in of_key if self.bank.policy == DEAD_LETTER or self.keys[number] == {key}}
            first = {number: at for at, (_, _, _, number) in reversed([*enumerate(kept)])}
            expected = [
                number
                for at, (_, _, name, number) in enumerate(kept)
                if name == key and number in alone and (not has_id(number) or first[number] == at)
            ]
            assert [number for number in there if number in alone] == expected, key
        every = sorted(number for there in numbers.values() for number in there if has_id(number))
        assert every == sorted({number for *_, number in kept if has_id(number)}), "each id once"
        without = sorted(number for there in numbers.values() for number in there if not has_id(number))
        assert without == sorted(number for *_, number in kept if not has_id(number)), "without an id each one"
        seen = driver.seen("Add")
        assert [number for number in range(FIRST, self.number + 1) if number in seen] == every
        assert sum(len(ids(driver, partition)) for partition in range(self.partitions)) == len(every)


@pytest.mark.parametrize("seed", [*range(10), *(nightly(seed) for seed in range(10, 1000))])
def test_any_history_counts_each_id_once(seed: int, tmp_path: Path) -> None:
    OnceHistory(seed, tmp_path).run(40)


def kept_by_a_new_worker(patch: pytest.MonkeyPatch) -> None:
    """Ids stay where the store is dropped: those of a transaction that was not committed, too."""
    kept = dict[tuple[int, int], SeenIds]()
    adopt = Partition.adopt

    def adopted(self: Any, restored: Any) -> None:
        adopt(self, restored)
        self.timers.seen = kept.setdefault((id(self.engine), self.partition), self.timers.seen)

    patch.setattr(Partition, "adopt", adopted)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.parametrize("out", [not_restored, before_completion, not_written, decided_ahead, kept_by_a_new_worker])
def test_each_safeguard_is_missed(
    out: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(60):
        with monkeypatch.context() as patch:
            out(patch)
            try:
                OnceHistory(seed, tmp_path / f"{seed}").run(40)
            except Exception as wrong:
                print(f"seed {seed}: {str(wrong)[:200]}")
                break
    else:
        pytest.fail("no history misses it")
    OnceHistory(seed, tmp_path / f"{seed} again").run(40)
