"""One of three brokers stands still, or is gone: the members work with the other two."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from streams.broker import KafkaCluster
from streams.model.group import transactional_id
from tests.broker.battery_kit import ENDLESS, wait_until
from tests.broker.wire_kit import set_transaction_version
from tests.soak.kit import Watch, bank_on

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

MEMBER_SESSION, BROKER_SESSION = 6.0, 9.0  # Kafka's default: the take-over begins while the frozen one still counts
MARKERS = 6.0
"""The brokers' ``request.timeout.ms``: so long a marker waits for the frozen one before its successor gets it."""
MARGIN = 10.0
RECOVERY = 90.0


@pytest.mark.nightly
def test_a_frozen_broker_does_not_hold_up_a_take_over(tmp_path: Path) -> None:
    """While it stands still, for longer than any time-out of a client, so that nothing here waits for its thaw."""
    with KafkaCluster(3, properties={"broker.session.timeout.ms": f"{BROKER_SESSION * 1000:.0f}"}) as cluster:
        group = bank_on(cluster, "frozen", tmp_path)
        watch, load = Watch(group), group.load(ENDLESS, 100, 1, 100)
        dead, survivor = (group.start(name, BANK_STANDBYS="1") for name in ("dead", "survivor"))
        wait_until(lambda: group.generations() >= 2 and watch.all_since(0.0), "both work")
        coordinator = cluster.group_coordinator(group.group)
        slots = [cluster.transaction_coordinator(transactional_id(group.group, "dead", slot)) for slot in range(3)]
        # One that keeps transactions of the dead, if the group's own coordinator is not the only one that does.
        frozen = next((number for number in slots if number != coordinator), coordinator % 3 + 1)
        cluster.node(frozen).freeze()
        try:
            before = time.monotonic()
            dead.kill()
            wait_until(lambda: watch.all_since(before + 1.0), "every partition gives something again", RECOVERY)
            silence = max(watch.largest_gaps(before, time.monotonic()).values())
        finally:
            cluster.node(frozen).thaw()
        print(f"silence {silence:.1f} s; sessions: {MEMBER_SESSION:g} s of a member, {BROKER_SESSION:g} s of a broker")
        cluster.wait_in_sync()
        load.stop()
        group.wait_handled(seconds=RECOVERY)
        assert survivor.stop(60) == 0
        watch.stop()
        assert not group.check().differences
        said = survivor.log.read_text(errors="replace")
        assert silence < MEMBER_SESSION + BROKER_SESSION + MARKERS + MARGIN, said  # one after the other: 50 s


@pytest.mark.nightly
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_partitions_of_a_broker_that_is_gone_get_other_leaders(how: str, version: int, tmp_path: Path) -> None:
    """Leaders of outputs, changelog and input, under both protocols of transactions. The group's coordinator stays."""
    with KafkaCluster(3, properties={"broker.session.timeout.ms": f"{BROKER_SESSION * 1000:.0f}"}) as cluster:
        asyncio.run(set_transaction_version(cluster.bootstrap_servers, version))
        group = bank_on(cluster, "gone", tmp_path)
        watch, load = Watch(group), group.load(ENDLESS, 100, 1, 100)
        member = group.start("member")
        wait_until(lambda: watch.all_since(0.0), "it works")
        assert member.said(f"transactions v{version}")
        gone = cluster.node(cluster.group_coordinator(group.group) % 3 + 1)
        before = time.monotonic()
        gone.kill() if how == "killed" else gone.freeze()
        try:
            wait_until(lambda: watch.all_since(before + BROKER_SESSION), "every partition gives something", RECOVERY)
            print(f"silence {max(watch.largest_gaps(before, time.monotonic()).values()):.1f} s")
        finally:
            gone.restart() if how == "killed" else gone.thaw()
        cluster.wait_in_sync()
        load.stop()
        group.wait_handled(seconds=RECOVERY)
        assert member.stop(60) == 0
        watch.stop()
        assert not group.check().differences
