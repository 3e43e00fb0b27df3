"""The broker's side fails while Spark commits: it dies, its replies are lost or late, the marker expires."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from streams.testing.faults import ArmedRule, KafkaProxy, Rule
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.spark.proof_kit import Trial, run_to_the_end
from tests.spark.proof_points import Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 12_000


def test_a_broker_killed_while_the_batch_is_committed(own_broker: OwnBroker, tmp_path: Path) -> None:
    broker = own_broker()
    trial = Trial(broker.bootstrap_servers, tmp_path, "killed-", EVENTS)
    with contextlib.closing(trial):
        spec = trial.spec(rows_per_batch=EVENTS // 4)
        strike = Strike("commit.before", 1, "hold")
        trial.start(strike, spec=spec)
        trial.wait_struck(strike)
        assert trial.open_transaction
        broker.kill()
        trial.release()
        broker.restart()
        run_to_the_end(trial, spec)
        trial.must_be_exact()


def test_replies_that_are_lost(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> None:
    """The broker has done it, the driver does not know: for each kind of request of a commit, twice."""
    with KafkaProxy(kafka_broker.bootstrap_servers) as proxy:
        trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
        with contextlib.closing(trial):
            rules = lost_replies(proxy, ("InitProducerId", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"))
            spec = trial.spec(servers=proxy.bootstrap_servers, rows_per_batch=EVENTS // 4)
            run_to_the_end(trial, spec)
            assert all(rule.struck == 2 for rule in rules), rules
            trial.must_be_exact()


def lost_replies(proxy: KafkaProxy, apis: tuple[str, ...]) -> list[ArmedRule]:
    """Twice for each, from the second on."""
    return [proxy.add(Rule(apis={api}, on="reply", action="drop", nth=2, times=2)) for api in apis]


def test_a_marker_that_is_gone_stops_the_query(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> None:
    """Never silently again, never silently on: it stops, and goes on where an operator says what has been written."""
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
    with contextlib.closing(trial):
        spec = trial.spec(rows_per_batch=EVENTS // 4)
        strike = Strike("commit.after", 1)
        trial.start(strike, spec=spec).must_be_killed()
        admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
        for future in admin.delete_consumer_groups([f"kes.spark.stream/{spec.target}/{spec.sink}"]).values():
            future.result()
        stopped = trial.start(spec=spec)
        assert stopped.wait() == 1
        assert stopped.said("the marker of what was written before is missing"), stopped.tail()
        assert trial.committed_rows() == EVENTS // 2
        said = {"lastWrittenBatch": f"{trial.query}:1"}
        trial.start(spec=trial.spec(rows_per_batch=EVENTS // 4, write_options=said)).must_finish()
        trial.must_be_exact()
