"""The example ``id_service``: three processes, of which the leader is killed. All else that may happen to a journal's
members: ``test_battery_journal.py``."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.id_service import NumberGiven
from streams import Journal
from streams.broker.probe import free_port
from streams.journal import JournalEntry
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import start_program, wait_until
from tests.broker.test_journal import all_of

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(180)]


class Member:
    """A process of the example."""

    def __init__(self, name: str, servers: str, folder: Path) -> None:
        self.port = free_port()
        words = ["-m", "examples.id_service", name, str(folder / str(self.port)), str(self.port), "6", "1"]
        self.process = start_program(folder / f"{self.port}.log", *words, KES_BOOTSTRAP_SERVERS=servers)

    def ask(self, method: str) -> dict[str, Any]:
        """The body of an answer; empty: there is none, or it names another member."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=8.0)
        try:
            connection.request(method, "/orders")
            answer = connection.getresponse()
            return json.loads(answer.read()) if answer.status == 200 else {}
        except (OSError, http.client.HTTPException):
            return {}
        finally:
            connection.close()


@pytest.fixture
def members(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[list[Member]]:
    members = [Member(topic_prefix + "ids", kafka_broker.bootstrap_servers, tmp_path) for _ in range(3)]
    yield members
    for member in members:
        member.process.kill()
        member.process.wait()


def test_no_number_is_given_out_twice_when_the_leader_is_killed(
    members: list[Member], kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    given: list[int] = []

    def take() -> bool:
        given.extend(body["number"] for body in (member.ask("POST") for member in members) if body)
        return len(given) >= wanted

    wanted = 20
    wait_until(take, "numbers are given out")
    (leader,) = [member for member in members if member.ask("GET").get("leads")]
    leader.process.kill()
    leader.process.wait()
    wanted = len(given) + 20
    wait_until(take, "the next leader gives out numbers")
    others = [member for member in members if member is not leader]
    for member in others:
        member.process.terminate()
    assert [member.process.wait(30) for member in others] == [0, 0]
    settings: dict[str, Any] = {"replication_factor": 1, "min_insync_replicas": 1}
    settings["bootstrap_servers"] = kafka_broker.bootstrap_servers
    items = asyncio.run(all_of(Journal(topic_prefix + "ids", [NumberGiven], **settings)))
    logged = [item.event.number for item in items if isinstance(item, JournalEntry)]
    assert logged == list(range(1, len(logged) + 1)), "each number once, in order"
    assert given == sorted(set(given) & set(logged)), "what a client was given is in the log, and was given once"
