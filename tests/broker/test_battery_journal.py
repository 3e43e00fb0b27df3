"""A replicated bank with five members under attack: members and brokers are killed, frozen, stopped; a history of its
register is kept.

Oracles: each move that was acknowledged is in the log once, each that was refused is not; the total is the same at each
entry; terms grow; snapshots of one position are equal, and what the log makes; barrier reads are linearizable.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.broker import KafkaCluster
from streams.broker.probe import free_port
from streams.journal import JournalEntry, SnapshotFolder
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import start_program, wait_until
from tests.broker.journal_program import TOTAL, BankMoved, Machine, journal_of
from tests.broker.register_history import Operation, is_linearizable
from tests.broker.test_journal import all_of

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(900)]

MEMBERS, SESSION = 5, 6.0
ATTACKS = int(os.environ.get("JOURNAL_ATTACKS", "20"))
REGISTER_SECONDS = 0.05
"""Between two operations of a client on the register: their number bounds the search of the checker."""


class Client(threading.Thread):
    """Sends requests to any member, one after the other; a new connection after each failure."""

    def __init__(self, battery: Battery, number: int) -> None:
        super().__init__(daemon=True)
        self.battery, self.number = battery, number
        self.acknowledged: list[int] = []
        self.refused: list[int] = []
        self.history: list[Operation] = []
        self._luck = random.Random(number)
        self._connection: Any = None

    def run(self) -> None:
        turn = 0
        while not self.battery.stopped.is_set():
            turn += 1
            unique = turn * 100 + self.number
            if self.number % 2:
                self._move(unique)
            else:
                self._register(unique)
        if self._connection is not None:
            self._drop()

    def _move(self, unique: int) -> None:
        source, target = self._luck.sample(range(10), 2)
        answer = self._ask({"op": "move", "number": unique, "source": source, "target": target})
        if answer is not None:
            (self.acknowledged if "ok" in answer else self.refused).append(unique)

    def _register(self, unique: int) -> None:
        self.battery.stopped.wait(REGISTER_SECONDS)
        is_write = self._luck.random() < 0.4
        called = time.monotonic()
        answer = self._ask({"op": "set", "value": unique} if is_write else {"op": "get"})
        answered = time.monotonic()
        if answer is not None and "no" in answer:
            return  # it never happened
        if is_write:
            self.history.append(Operation("write", unique, called, None if answer is None else answered))
        elif answer is not None:
            self.history.append(Operation("read", answer["value"], called, answered))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """``None``: no answer came, so it happened or not."""
        if self._connection is None:
            try:
                port = self.battery.leading or self._luck.choice(list(self.battery.members))
                self._connection = socket.create_connection(("127.0.0.1", port), 2.0)
                self._connection.settimeout(20.0)
            except OSError:
                self._connection = None
                self.battery.stopped.wait(0.05)
                return {"no": "not sent"}
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                if not (piece := self._connection.recv(4096)):
                    raise OSError("closed")
                line += piece
        except OSError:
            self._drop()
            return None
        answer: dict[str, Any] = json.loads(line)
        if "no" in answer:
            self._drop()
            self.battery.stopped.wait(0.02)
        return answer

    def _drop(self) -> None:
        self._connection.close()
        self._connection = None


class Battery:
    """Members by their ports, and clients."""

    def __init__(self, name: str, servers: str, folder: Path, replicas: int = 1) -> None:
        self.name, self.servers, self.folder, self.replicas = name, servers, folder, replicas
        self.stopped = threading.Event()
        self.members: dict[int, subprocess.Popen[bytes]] = {}
        self.leading = 0
        for _ in range(MEMBERS):
            self.start(free_port())
        self.clients = [Client(self, number) for number in range(6)]

    def start(self, port: int) -> None:
        program = Path(__file__).with_name("journal_program.py")
        words = [self.name, self.servers, str(self.folder / str(port)), str(port), str(SESSION), str(self.replicas)]
        self.members[port] = start_program(self.folder / f"{port}.log", program, *words)

    def leader(self) -> int:
        """Wait for a member that leads, and return its port."""
        wait_until(self._look, "a member leads", 90)
        return self.leading

    def _look(self) -> bool:
        self.leading = next((port for port in self.members if self._leads(port)), 0)
        return bool(self.leading)

    def _leads(self, port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.settimeout(1.0)
                connection.sendall(b'{"op": "leads"}\n')
                return bool(json.loads(connection.recv(4096))["ok"])
        except (OSError, ValueError, KeyError):
            return False

    def more(self, count: int = 40) -> None:
        """Wait until so many more moves are acknowledged."""
        before = self.done()
        wait_until(lambda: self._look() and self.done() >= before + count, "moves are acknowledged", 120)

    def done(self) -> int:
        return sum(len(client.acknowledged) for client in self.clients)

    def begin(self) -> None:
        """Have a member lead, and all clients at work."""
        self.leader()
        for client in self.clients:
            client.start()
        self.more()

    def close(self) -> None:
        self.stopped.set()
        for process in self.members.values():
            process.kill()
            process.wait()


@pytest.fixture
def battery(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Battery]:
    battery = Battery(topic_prefix + "bank", kafka_broker.bootstrap_servers, tmp_path)
    yield battery
    battery.close()


def attack(battery: Battery, luck: random.Random) -> None:
    """Do something to the leader, or to another member."""
    port = battery.leader() if luck.random() < 0.8 else luck.choice(list(battery.members))
    process = battery.members[port]
    kind = luck.choice(["kill", "kill", "freeze", "stop"])
    if kind == "freeze":
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + luck.choice([1.0, SESSION + 6.0])  # longer than a transaction may take, too
        wait_until(lambda: time.monotonic() > until, "it was frozen for long", 60)
        process.send_signal(signal.SIGCONT)
        return
    (process.kill if kind == "kill" else process.terminate)()
    process.wait(40)
    battery.start(port)


def test_a_bank_with_five_members_under_attack(battery: Battery, seed: int) -> None:
    luck = random.Random(seed)
    battery.begin()
    for _ in range(ATTACKS):
        attack(battery, luck)
        battery.more()
    judge(battery, ATTACKS)


CLUSTER_ATTACKS = [
    # what of the journal the broker keeps that is attacked, and how
    ("log", "kill"),
    ("writer", "freeze"),
    ("group", "kill"),
    ("log", "freeze"),
    ("writer", "kill"),
    ("group", "freeze"),
]


def test_a_bank_on_three_brokers_that_are_killed_and_frozen(topic_prefix: str, tmp_path: Path) -> None:
    """Leader of the log, coordinator of the writer and of the group, one after the other: each moves to another broker,
    while the members go on with the two that are left."""
    with KafkaCluster() as cluster:
        battery = Battery(topic_prefix + "bank", cluster.bootstrap_servers, tmp_path, replicas=3)
        places = {
            "log": lambda: cluster.leader_of(battery.name, 0),
            "writer": lambda: cluster.transaction_coordinator(f"{battery.name}.writer"),
            "group": lambda: cluster.group_coordinator(f"{battery.name}.leader"),
        }
        try:
            battery.begin()
            for place, how in CLUSTER_ATTACKS:
                number = places[place]()
                node = cluster.node(number)
                (node.kill if how == "kill" else node.freeze)()
                try:
                    wait_until(lambda at=place, gone=number: places[at]() != gone, f"{place} moves", 60)  # type: ignore[misc]
                    battery.more()
                finally:
                    (node.restart if how == "kill" else node.thaw)()
                cluster.wait_in_sync()
                battery.more()
            judge(battery, len(CLUSTER_ATTACKS))
        finally:
            battery.close()


def judge(battery: Battery, attacks: int) -> None:
    """Have the clients end, and compare what they were answered, and all snapshots, with the log."""
    battery.stopped.set()
    for client in battery.clients:
        client.join(30)

    journal = journal_of(battery.name, battery.servers, SESSION, battery.replicas)
    items = asyncio.run(all_of(journal))
    assert (terms := [item.term for item in items]) == sorted(terms)
    states: dict[int, bytes] = {}
    machine = Machine()
    for item in items:
        if isinstance(item, JournalEntry):
            machine.apply(item.event)
            assert sum(machine.accounts) == TOTAL
        states[item.position] = state_of(machine)
    logged = Counter(
        item.event.number for item in items if isinstance(item, JournalEntry) and isinstance(item.event, BankMoved)
    )
    assert max(logged.values()) == 1, "a move is in the log twice"
    for client in battery.clients:
        assert not set(client.acknowledged) - logged.keys(), "acknowledged, and lost"
        assert not set(client.refused) & logged.keys(), "refused, and there"
    compare_snapshots(battery, states)
    history = [operation for client in battery.clients for operation in client.history]
    assert len(history) > 5 * attacks
    assert is_linearizable(history), f"a stale read, in {len(history)} operations"


def state_of(machine: Machine) -> bytes:
    file = io.BytesIO()
    machine.save(file)
    return file.getvalue()


def compare_snapshots(battery: Battery, states: dict[int, bytes]) -> None:
    """Each is what the log makes; a position between two entries has the state of the one before."""
    places = sorted(states)
    compared = 0
    for port in battery.members:
        for snapshot in SnapshotFolder(battery.folder / str(port)).whole():
            before = max(place for place in places if place <= snapshot.head.position)
            assert snapshot.state == states[before], f"member {port} differs at {snapshot.head.position}"
            compared += 1
    assert compared
