"""The example ``id_service``: three processes, of which the leader is killed, frozen and stopped, again and again."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.id_service import NumberGiven
from streams import Journal
from streams.broker.probe import free_port
from streams.journal import JournalEntry
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import start_program, wait_until
from tests.broker.test_journal import all_of

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]

SESSION = 6.0
ATTACKS = 6


class Member:
    """A process of the example."""

    def __init__(self, name: str, servers: str, folder: Path, port: int) -> None:
        self.port = port
        words = ["-m", "examples.id_service", name, folder / str(port), str(port), str(SESSION), "1"]
        self.process = start_program(folder / f"{port}.log", *words, KES_BOOTSTRAP_SERVERS=servers)

    def ask(self, method: str = "POST", seconds: float = 8.0) -> tuple[int, dict[str, object]]:
        """Status and body; 0: no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, "/orders")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()

    @property
    def leads(self) -> bool:
        return bool(self.ask("GET", 1.0)[1].get("leads"))


class Service:
    """Three members, and the clients that ask them."""

    def __init__(self, name: str, servers: str, folder: Path) -> None:
        self.name, self.servers, self.folder = name, servers, folder
        self.members = [Member(name, servers, folder, free_port()) for _ in range(3)]
        self.numbers: list[int] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(4)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stopped.is_set():
            status, body = random.choice(self.members).ask()
            if status == 200:
                self.numbers.append(int(str(body["number"])))
            else:
                self._stopped.wait(0.02)

    def leader(self) -> Member:
        found: list[Member] = []

        def look() -> bool:
            found[:] = [member for member in self.members if member.process.poll() is None and member.leads]
            return bool(found)

        wait_until(look, "a member leads", 60)
        return found[0]

    def replace(self, member: Member) -> None:
        place = self.members.index(member)
        self.members[place] = Member(self.name, self.servers, self.folder, member.port)

    def more(self, count: int = 20) -> None:
        before = len(self.numbers)
        wait_until(lambda: len(self.numbers) >= before + count, "numbers are given out", 90)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(20)

    def close(self) -> None:
        self._stopped.set()
        for member in self.members:
            member.process.kill()
            member.process.wait()


@pytest.fixture
def service(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Service]:
    service = Service(topic_prefix + "ids", kafka_broker.bootstrap_servers, tmp_path)
    yield service
    service.close()


def test_no_number_is_given_out_twice_whatever_happens_to_the_members(
    service: Service, monkeypatch: pytest.MonkeyPatch, kafka_broker: BrokerAddress, seed: int
) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", kafka_broker.bootstrap_servers)
    luck = random.Random(seed)
    service.start()
    service.more()
    for attack in range(ATTACKS):
        victim = service.leader()
        kind = ("kill", "freeze", "stop")[attack % 3]
        if kind == "kill":
            victim.process.kill()
            victim.process.wait()
            service.replace(victim)
        elif kind == "freeze":
            victim.process.send_signal(signal.SIGSTOP)
            until = time.monotonic() + SESSION + luck.uniform(2, 6)
            wait_until(lambda until=until: time.monotonic() > until, "its session is over", 60)
            victim.process.send_signal(signal.SIGCONT)
        else:
            victim.process.terminate()
            assert victim.process.wait(30) == 0
            service.replace(victim)
        service.more()
    service.stop()
    given = service.numbers
    assert len(given) == len(set(given)), "a number was given out twice"

    journal = Journal(service.name, [NumberGiven], replication_factor=1, min_insync_replicas=1)
    items = asyncio.run(all_of(journal))
    logged = [item.event.number for item in items if isinstance(item, JournalEntry)]
    assert logged == list(range(1, len(logged) + 1)), "each number once, in order"
    assert set(given) <= set(logged), "what a client was given is in the log"
    terms = {item.term for item in items}
    assert len(terms) >= ATTACKS
