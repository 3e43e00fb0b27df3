"""The battery, shortened, with librdkafka's members. In full: ``BANK_MEMBERSHIP=librdkafka`` (or ``broker``) before
``pytest tests/broker/test_battery_kills.py tests/broker/test_battery_members.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.testing.fixtures import BrokerAddress
from streams.testing.proxy import KafkaProxy
from tests.broker import test_battery_kills as kills
from tests.broker import test_battery_members as members
from tests.broker import test_battery_proxy as proxies
from tests.broker.battery_kit import Bank
from tests.broker.contract_kit import set_broker_session
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


MEMBERSHIPS = ("librdkafka", "broker")


@pytest.mark.parametrize("membership", gate(MEMBERSHIPS, "broker"))
def test_killed(bank_group: Bank, seed: int) -> None:
    kills.test_killed_at_named_points(bank_group, ("send_offsets.after",), seed)


@pytest.mark.parametrize("membership", gate(MEMBERSHIPS, "librdkafka"))
def test_killed_in_a_revocation(bank_group: Bank, seed: int) -> None:
    kills.test_killed_in_a_revocation(bank_group, "revoke.before", seed)


@pytest.mark.nightly
@pytest.mark.parametrize("membership", MEMBERSHIPS)
def test_frozen_in_the_middle_of_a_commit(bank_group: Bank, seed: int) -> None:
    members.test_frozen_past_its_session(bank_group, "send_offsets.before:20:freeze", seed)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("membership", "api"),
    [("librdkafka", "JoinGroup"), ("librdkafka", "SyncGroup"), ("broker", "ConsumerGroupHeartbeat")],
)
def test_requests_of_the_group_lost_late_and_doubled(
    membership: str,
    api: str,
    kafka_broker: BrokerAddress,
    topic_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setenv("BANK_MEMBERSHIP", membership)
    bank = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path, membership)
    set_broker_session(kafka_broker.bootstrap_servers, bank.group, 6000)
    with KafkaProxy(kafka_broker.bootstrap_servers) as proxy:
        attacked = proxies.Attacked(bank, proxy, seed)
        try:
            proxies.test_rebalances_under_attack(attacked, api)
        finally:
            attacked._enough.set()
            bank.close()
