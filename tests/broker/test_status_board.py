"""Notes of members on a real broker."""

from __future__ import annotations

import contextlib

import pytest

from streams.errors import ConfigError
from streams.kafka.group.status_board import LONGEST, Note, StatusBoard, status_group
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.wire.security import PLAINTEXT
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import create

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


def test_notes_are_kept_by_instance_and_partition(
    kafka_broker: BrokerAddress, admin: TopicAdmin, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}log"
    create(admin, topic)
    board = StatusBoard(kafka_broker.bootstrap_servers, "test", PLAINTEXT, f"{topic_prefix}group")
    with contextlib.closing(board):
        assert board.read(["a", "b"], 20) == {}
        board.publish("a", {(topic, 0): Note(7, "seven"), (topic, 2): Note(-1, "nothing yet")}, 20)
        board.publish("a", {(topic, 0): Note(8, "eight ✓")}, 20)
        board.publish("b", {(topic, 0): Note(1, "x" * 10_000)}, 20)
        assert board.read(["a", "b", "c"], 20) == {
            "a": {(topic, 0): Note(8, "eight ✓"), (topic, 2): Note(0, "nothing yet")},
            "b": {(topic, 0): Note(1, "x" * LONGEST)},
        }
        board.remove("a", 20)
        board.remove("a", 20)
        assert board.read(["a", "b"], 20).keys() == {"b"}


def test_names_that_could_be_another_group_are_refused() -> None:
    assert status_group("g", "a") == "g.a.status"
    with pytest.raises(ConfigError):
        status_group("g", "a.b")
