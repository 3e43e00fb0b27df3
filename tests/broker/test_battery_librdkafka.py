"""The battery, shortened, with librdkafka's members. In full: ``BANK_MEMBERSHIP=librdkafka`` (or ``broker``) before
``pytest tests/broker/test_battery_kills.py tests/broker/test_battery_members.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing.fixtures import BrokerAddress
from streams.testing.proxy import KafkaProxy
from tests.broker import test_battery_kills as kills
from tests.broker import test_battery_members as members
from tests.broker import test_battery_proxy as proxies
from tests.broker.battery_kit import Bank, seed_of
from tests.broker.contract_kit import set_broker_session

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.fixture(params=["librdkafka", "broker"])
def bank_group(
    request: pytest.FixtureRequest, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> Iterator[Bank]:
    bank = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path, request.param)
    yield bank
    bank.close()


@pytest.mark.parametrize("point", ["send_offsets.after", "revoke.before"])
def test_killed(bank_group: Bank, point: str) -> None:
    kills.test_killed_at_a_named_point(bank_group, point, 1)


def test_frozen_in_the_middle_of_a_commit(bank_group: Bank) -> None:
    members.test_frozen_past_its_session(bank_group, "send_offsets.before:20:freeze")


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
) -> None:
    monkeypatch.setenv("BANK_MEMBERSHIP", membership)
    bank = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path, membership)
    set_broker_session(kafka_broker.bootstrap_servers, bank.group, 6000)
    seed = seed_of()
    print(f"SEED={seed}")
    with KafkaProxy(kafka_broker.bootstrap_servers) as proxy:
        attacked = proxies.Attacked(bank, proxy, seed)
        try:
            proxies.test_rebalances_under_attack(attacked, api)
        finally:
            attacked._enough.set()
            bank.close()
