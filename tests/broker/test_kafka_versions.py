"""Members under kills on other Kafkas than the embedded one, and at each level of ``transaction.version``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.broker.battery_kit import ENDLESS, Bank
from tests.broker.kafka_versions import kafka_of
from tests.broker.test_wire_producer import set_transaction_version

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(300)]

QUICK = {"BANK_SESSION_SECONDS": "2"}


def restarted(group: Bank, seed: int) -> set[str]:
    """Start members again under load: one ends in order, the other is killed with a transaction open. Returns the
    versions of transactions that they speak."""
    spoken: set[str] = set()
    load = group.load(ENDLESS, 200, seed, 300)
    members = {name: group.start(name, **QUICK) for name in ("first", "second")}
    for name in ("first", "second", "second", "first"):
        group.wait_progress(50)
        if name == "first":
            assert members[name].stop() == 0, members[name].last_words()
        else:
            members[name].kill()
        spoken |= {version for version in "12" if members[name].said(f"transactions v{version}")}
        members[name] = group.start(name, **QUICK)
    group.wait_progress(50)
    load.stop()
    group.wait_handled()
    group.must_be_exact()
    return spoken


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
            assert restarted(group, seed) == {spoken}
        finally:
            group.close()
