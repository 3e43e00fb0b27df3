"""Notes of members on a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.clients.status_board import LONGEST, Note, StatusBoard, status_group
from streams.errors import ConfigError
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def topic(kafka_broker: BrokerAddress, topic_prefix: str) -> str:
    name = f"{topic_prefix}log"
    admin = TopicAdmin(ClientSettings(kafka_broker.bootstrap_servers, {}, client_id="test"))
    admin.create([TopicSpec(name=name, partitions=3, replication_factor=1)])
    admin.close()
    return name


@pytest.fixture
def board(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[StatusBoard]:
    board = StatusBoard(kafka_broker.bootstrap_servers, "test", {}, f"{topic_prefix}group")
    yield board
    board.close()


def test_notes_are_kept_by_instance_and_partition(board: StatusBoard, topic: str) -> None:
    assert board.read(["a", "b"], 20) == {}
    board.publish("a", {(topic, 0): Note(7, "seven"), (topic, 2): Note(-1, "nothing yet")}, 20)
    board.publish("a", {(topic, 0): Note(8, "eight ✓")}, 20)
    board.publish("b", {(topic, 0): Note(1, "b's")}, 20)
    assert board.read(["a", "b", "c"], 20) == {
        "a": {(topic, 0): Note(8, "eight ✓"), (topic, 2): Note(0, "nothing yet")},
        "b": {(topic, 0): Note(1, "b's")},
    }
    board.remove("a", 20)
    board.remove("a", 20)
    assert board.read(["a", "b"], 20).keys() == {"b"}


def test_a_long_note_is_cut_not_refused(board: StatusBoard, topic: str) -> None:
    board.publish("a", {(topic, 0): Note(1, "x" * 10_000)}, 20)
    assert len(board.read(["a"], 20)["a"][topic, 0].text) == LONGEST


def test_names_that_could_be_another_group_are_refused() -> None:
    assert status_group("g", "a") == "g.a.status"
    with pytest.raises(ConfigError):
        status_group("g", "a.b")
