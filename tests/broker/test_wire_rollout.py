"""Members with one producer and the other, one after the other in one group: the same transactional ids, offsets and
changelog. On this Kafka; every night on others, and at each level of ``transaction.version``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streams.config import PRODUCERS
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, Bank, Worker, wait_until
from tests.broker.kafka_versions import kafka_of
from tests.broker.test_wire_producer import set_transaction_version

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = {"BANK_SESSION_SECONDS": "2"}
NAMES = ("first", "second")
SPOKEN = r"transactions v(\d)"


def roll(group: Bank, seed: int) -> set[str]:
    """Roll the wire producer out, and back, under load: a member ends in order, the other is killed with a transaction
    open. Returns the versions of transactions that the wire spoke."""
    librdkafka, wire = PRODUCERS
    spoken: set[str] = set()
    load = group.load(ENDLESS, 200, seed, 300)
    members: dict[str, Worker] = {}
    for producer in (librdkafka, wire, librdkafka):
        for name in NAMES:
            if name in members and (name == NAMES[0]) == (producer == wire):
                assert members[name].stop() == 0, members[name].last_words()
            elif name in members:
                members[name].kill()
            members[name] = member = group.start(name, **QUICK, BANK_PRODUCER=producer)
            group.wait_progress(50)
            there = [worker for worker in members.values() if worker.running]
            each = bank.PARTITIONS // len(there)
            wait_until(
                lambda there=there, each=each: all(worker.works_on() == each for worker in there),  # type: ignore[misc]
                f"each of {len(there)} members has {each} partitions",
            )
            assert bool(member.times(SPOKEN)) == (producer == wire)
            spoken |= {version for version in "12" if member.said(f"transactions v{version}")}
    load.stop()
    group.wait_handled()
    group.must_be_exact()
    return spoken


def test_a_rolling_change_of_producer_and_back(bank_group: Bank, seed: int) -> None:
    assert roll(bank_group, seed) == {"2"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("version", "level", "spoken"),
    [
        ("3.0.2", None, "1"),
        ("3.9.1", None, "1"),
        ("4.0.1", None, "2"),
        ("4.1.1", 0, "1"),
        ("4.1.1", 1, "1"),
        ("4.1.1", 2, "2"),
    ],
)
def test_on_another_kafka(version: str, level: int | None, spoken: str, tmp_path: Path, seed: int) -> None:
    """The embedded broker is of version 4.3. Older ones than 3.0 cannot list transactions, which a take-over asks."""
    with kafka_of(version) as broker:
        if level is not None:
            asyncio.run(set_transaction_version(broker.bootstrap_servers, level))
        group = Bank(broker.bootstrap_servers, "bank", tmp_path)
        try:
            assert roll(group, seed) == {spoken}
        finally:
            group.close()
