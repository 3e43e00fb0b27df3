"""A relay whose requests to Kafka, or the answers to them, are lost, late or doubled. Oracle: the ledger."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import psycopg
import pytest

from streams import Relay
from streams.outbox import relay as relay_module
from streams.outbox.shard import ShardLoop
from streams.runtime.claim import Claim
from streams.testing.faults import KafkaProxy, Rule
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.gate import gate
from tests.broker.outbox_kit import Ledger, PostgresServer
from tests.broker.test_battery_proxy import FAULTS

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("api", gate(["EndTxn", "Produce", "InitProducerId"], "EndTxn"))
def test_answers_of_kafka_that_are_lost(
    api: str,
    postgres: PostgresServer,
    kafka_broker: BrokerAddress,
    topic_prefix: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient = partial(ShardLoop, claim=partial(Claim, call_seconds=4.0, transaction_seconds=10.0))
    monkeypatch.setattr(relay_module, "ShardLoop", impatient)
    ledger, rng = Ledger(postgres, kafka_broker.bootstrap_servers, topic_prefix), random.Random(seed)
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kes-outbox'"
    with (
        KafkaProxy(kafka_broker.bootstrap_servers) as proxy,
        Relay(replace(ledger.config, bootstrap_servers=proxy.bootstrap_servers)),
        psycopg.connect(ledger.database, autocommit=True) as db,
    ):
        ledger.write(rng, 5)
        ledger.until_empty()
        for name, fault in FAULTS.items():
            armed = proxy.add(Rule(apis={api}, nth=rng.randrange(1, 4), times=1, seed=seed, **fault))

            def goes_on(armed: object = armed) -> bool:
                if api == "InitProducerId":
                    db.execute(end)  # each session makes a claim
                ledger.write(rng, 4)
                return bool(armed.wait_struck(seconds=0.5))  # type: ignore[attr-defined]

            wait_until(goes_on, f"{name}: it is struck", 60)
            armed.remove()
            ledger.write(rng, 10)
        ledger.until_empty()
        assert sum(proxy.struck.values()) == len(FAULTS)
    assert ledger.check() > 50
