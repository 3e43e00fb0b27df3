"""The ends of logs, by a scripted broker."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.kafka.reading.log_ends import LogEnds
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.codes import BrokerRefusal, Code
from streams.kafka.wire.connection import LostConnection
from tests.unit.fetch_kit import Log, LogBrokers, Row
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE
from tests.unit.topics_broker import TopicsBroker, served
from tests.unit.waiting import PATIENCE


def test_an_end_is_that_of_committed_records_at_the_leader_of_now() -> None:
    with served(TopicsBroker(brokers=2)) as broker, closing(LogEnds(ClientSettings(broker.bootstrap_servers))) as ends:
        for leader in (0, 1, 0):
            broker.lead_by(leader)
            assert ends.ask("t", 0, PATIENCE).result(PATIENCE) == broker.MARKS["stable"]
        assert [node for node, name, _ in broker.requests if name == "ListOffsets"] == [0, 1, 0]
        ends.close()
        assert ends.ask("t", 3, PATIENCE).result(PATIENCE) == broker.MARKS["stable"]


@pytest.mark.parametrize(
    ("topic", "answer", "failure"),
    [
        ("t", 6, Code.NOT_LEADER_OR_FOLLOWER),
        ("t", 29, Code.TOPIC_AUTHORIZATION_FAILED),
        ("nope", 0, Code.UNKNOWN_TOPIC_OR_PARTITION),
        ("t", GONE, None),
        ("t", GARBAGE, None),
        ("t", MUTE, None),
    ],
)
def test_a_question_fails_and_the_next_one_is_answered(topic: str, answer: Any, failure: Code | None) -> None:
    with served(TopicsBroker(brokers=2)) as broker, closing(LogEnds(ClientSettings(broker.bootstrap_servers))) as ends:
        broker.answer("ListOffsets", *[answer] * (topic == "t"))
        error = ends.ask(topic, 0, 1.0).exception(PATIENCE)
        if failure is None:
            assert isinstance(error, LostConnection)
        else:
            assert isinstance(error, BrokerRefusal)
            assert error.code == failure
        if answer != MUTE:  # a connection is taken for dead after ten seconds, not after one question
            assert ends.ask("t", 0, PATIENCE).result(PATIENCE) == broker.MARKS["stable"]


def test_a_partition_that_nobody_leads_has_no_end_for_now() -> None:
    with served(TopicsBroker()) as broker, closing(LogEnds(ClientSettings(broker.bootstrap_servers))) as ends:
        broker.leaderless = 1
        error = ends.ask("t", 0, PATIENCE).exception(PATIENCE)
        assert isinstance(error, BrokerRefusal)
        assert error.code == Code.LEADER_NOT_AVAILABLE
        assert ends.ask("t", 0, PATIENCE).result(PATIENCE) == broker.MARKS["stable"]


@pytest.mark.parametrize("versions", [(4, 12), (4, 16)])
def test_the_next_record_is_behind_markers_and_what_is_aborted(versions: tuple[int, int]) -> None:
    log = Log()
    log.append([Row()], producer=1)
    log.mark(1, commit=True)
    log.append([Row(), Row()], producer=2)
    log.mark(2, commit=False)
    brokers = LogBrokers({0: log})
    brokers.fetch_versions = versions
    with brokers.serving(), closing(LogEnds(ClientSettings(brokers.bootstrap_servers))) as ends:

        def following(position: int) -> int:
            return ends.ask_next("t", 0, position, PATIENCE).result(PATIENCE)

        assert [following(position) for position in range(6)] == [0, 5, 5, 5, 5, 5]
        log.append([Row()])
        log.append([Row()], producer=3)
        assert [following(position) for position in (1, 5, 6)] == [5, 5, 6], "not behind an open transaction"
        error = ends.ask_next("t", 0, 99, PATIENCE).exception(PATIENCE)
        assert isinstance(error, BrokerRefusal)


def test_settings_that_cannot_be_honoured_are_refused() -> None:
    ends = LogEnds(ClientSettings("127.0.0.1:1", {"ssl.keystore.location": "x"}))
    with pytest.raises(ConfigError, match=r"ssl\.keystore\.location"):
        ends.ask("t", 0, 1.0)
    ends.close()
