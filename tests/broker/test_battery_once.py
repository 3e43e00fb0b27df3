"""Battery T2 with events that are handled once: SIGKILL between two copies, and in transactions with copies.

The oracle is that of the battery, which takes the first copy of each id. Ids are read again from the changelog, from a
folder, or from a database on disk.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from streams.records import IncomingRecord
from streams.runtime.changelog import SEEN_PREFIX
from streams.testing.fixtures import BrokerAddress
from streams.testing.oracle import ReplayOracle, Sent, State
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, QUICK, TYPE, Headers
from tests.broker.gate import nightly
from tests.broker.test_battery_kills import count_for
from tests.broker.test_battery_parked import TRANSACTION, ParkedBank, dies
from tests.broker.test_kept_stores import restored

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = 50
ID = "kes-id"
EACH = ("handler.after", "store.after", "send_offsets.before", *TRANSACTION)
CHEAP = ("commit.before", "flush.after")


class OnceBank(ParkedBank):
    """A bank whose deposits have ids, and copies. Nothing is parked. ``sent``: each deposit with its headers, once."""

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        super().__init__(bootstrap, group, folder)
        self.settings = {**QUICK, "BANK_ONCE": "1"}
        self.sent: list[tuple[bank.Deposited, Headers]] = []

    def _records(self, count: int, keys: int, seed: int) -> Iterator[tuple[bank.Deposited, Headers]]:
        """Four in ten are copies: of one of the last three, which is in the same slice, or of an earlier one."""
        chance, new = random.Random(seed), bank.events(ENDLESS, keys, seed)
        for _ in range(count):
            if self.sent and chance.random() < 0.4:
                yield chance.choice(self.sent[-3:] if chance.random() < 0.5 else self.sent)
            else:
                self.sent.append((next(new), [*TYPE, (ID, f"id-{len(self.sent)}")]))
                yield self.sent[-1]

    def again(self) -> None:
        """Produce a copy of each deposit."""
        made, self._records = self._records, lambda *_: iter(self.sent)  # type: ignore[method-assign]
        self.deposit(len(self.sent), KEYS, 0)
        self._records = made  # type: ignore[method-assign]

    def _oracle(self) -> ReplayOracle:
        seen, fold = set[tuple[int, bytes | None]](), bank.fold(self.group, self._store)

        def first_copies(state: State, record: IncomingRecord) -> Iterator[Sent]:
            place = record.partition, record.header(ID)
            if place not in seen:
                seen.add(place)
                yield from fold(state, record)

        return ReplayOracle(
            self.bootstrap,
            group_id=self.group,
            topic=bank.topic_of(self.group),
            outputs=[bank.output_of(self.group)],
            fold=first_copies,
        )

    def check_ids(self, side: str = "changelog") -> None:
        """There is a record of each id, and of no other."""
        there = [key for entries in self.entries(side) for key in entries if key.startswith(SEEN_PREFIX)]
        assert len(there) == len(self.sent)


@pytest.fixture
def once_bank(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[OnceBank]:
    """A bank whose deposits are handled once."""
    made = OnceBank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("engine", "is_kept", "points"),
    [
        pytest.param("SQLite", True, CHEAP, id="SQLite"),
        nightly("", False, EACH),
        nightly("", True, EACH),
        nightly("SQLite", True, EACH),
        nightly("RocksDB", True, EACH),
    ],
)
def test_copies_count_once_wherever_their_owner_is_killed(
    once_bank: OnceBank, tmp_path: Path, engine: str, is_kept: bool, points: Sequence[str], seed: int
) -> None:
    """The only member dies between the deposits and their copies, and then at one point after another."""
    rng, folder = random.Random(seed), tmp_path / "state"
    settings = {**once_bank.settings, "BANK_ENGINE": engine, "BANK_FOLDER": str(folder) if is_kept else ""}
    once_bank.deposit(1_000, KEYS, seed)
    first = once_bank.start("victim", **settings)
    once_bank.wait_handled()
    first.kill()
    once_bank.again()
    load = once_bank.load(ENDLESS, KEYS, seed + 1, 500)
    for point in rng.sample(points, len(points)):
        fault = f"{point}:{count_for(point, rng)}"
        dies(once_bank.start("victim", **settings, KES_FAULT=fault))
        print(f"killed at {fault}: {once_bank.handled()} of {once_bank.produced} handled")
    last = once_bank.start("victim", **settings)
    once_bank.wait_progress(200)
    load.stop()
    once_bank.wait_handled()
    assert last.stop() == 0, last.last_words()
    if is_kept and not engine:
        assert once_bank.entries(f"folder:{folder}") == once_bank.entries()
    last = once_bank.start("victim", **settings)
    once_bank.again()
    once_bank.wait_handled()
    once_bank.check_stores()
    read = restored(last.log)
    assert read <= once_bank.partitions if is_kept else read >= len(once_bank.sent), "where its ids come from"
    once_bank.must_be_exact()
    once_bank.check_ids()
    copies = once_bank.produced - len(once_bank.sent)
    passed = sum(int(events) for worker in once_bank.workers for events in _passed(worker.log))
    assert passed >= copies > 0
    print(f"{len(once_bank.sent)} ids, {copies} copies, {passed} passed")


def _passed(log: Path) -> list[str]:
    return re.findall(r"EventDuplicate\(.*?events=(\d+)", log.read_text())
