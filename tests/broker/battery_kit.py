"""What the battery needs: topics, deposits, worker processes, and waiting for conditions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from confluent_kafka import Producer

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable
from streams.testing.oracle import ReplayOracle, Report
from streams.topics import TopicSpec
from tests.broker import bank
from tests.broker.contract_kit import set_broker_session

PROGRAM = Path(__file__).with_name("bank.py")
PATIENCE = 90.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition, with a deadline; never for luck."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.05)


class Worker:
    """One worker process. ``log`` is what it wrote."""

    def __init__(self, bootstrap: str, group: str, instance: str, folder: Path, **environment: str) -> None:
        self.instance = instance
        self.log = folder / f"{instance}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), bootstrap, group, instance],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGCONT)  # a frozen process is killed as well, but reaps faster awake
            self.process.kill()
        self.process.wait(10)

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM, and wait: returns the exit code."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


class Bank:
    """A group under attack, on one broker. ``membership``: who speaks the group protocol for its members (by default
    as ``BANK_MEMBERSHIP`` says)."""

    def __init__(self, bootstrap: str, group: str, folder: Path, membership: str = "") -> None:
        self.bootstrap, self.group, self.folder = bootstrap, group, folder
        self.membership = membership or os.environ.get("BANK_MEMBERSHIP") or "streams"
        self.workers: list[Worker] = []
        self.produced = 0
        self._settings = ClientSettings(bootstrap, {}, client_id="battery")
        admin = TopicAdmin(self._settings)
        specs = [
            TopicSpec(name=name, partitions=bank.PARTITIONS, replication_factor=1)
            for name in (bank.topic_of(group), bank.output_of(group))
        ]
        admin.create(specs, 30.0)
        admin.close()

    def deposit(self, count: int, keys: int, seed: int, *, per_second: float | None = None) -> None:
        """Produce deposits, all at once or at a rate."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
                "message.timeout.ms": 300_000,
                "reconnect.backoff.max.ms": 500,
            }
        )
        began = time.monotonic()
        for number, event in enumerate(bank.events(count, keys, seed)):
            producer.produce(
                bank.topic_of(self.group),
                msgspec.json.encode(event),
                event.account.encode(),
                headers=[("__grt__", b"Deposited")],
            )
            if number % 1000 == 0:
                producer.poll(0)
            if per_second is not None and number % 20 == 0:
                ahead = number / per_second - (time.monotonic() - began)
                if ahead > 0:
                    time.sleep(ahead)  # the rate, not luck
        assert producer.flush(300) == 0
        self.produced += count

    def start(self, instance: str, **environment: str) -> Worker:
        environment = {"BANK_MEMBERSHIP": self.membership, **environment}
        if self.membership == "broker":  # where the session is a setting of the broker
            session = float(environment.get("BANK_SESSION_SECONDS") or os.environ.get("BANK_SESSION_SECONDS") or "6")
            set_broker_session(self.bootstrap, self.group, int(session * 1000))
        worker = Worker(self.bootstrap, self.group, instance, self.folder, **environment)
        self.workers.append(worker)
        return worker

    def handled(self) -> int:
        """Input records below the committed offsets; -1 while the broker does not say."""
        admin = TopicAdmin(self._settings)
        try:
            return sum(admin.committed(self.group, bank.topic_of(self.group), 5.0).values())
        except BrokerUnavailable:
            return -1
        finally:
            admin.close()

    def wait_handled(self, count: int | None = None, seconds: float = PATIENCE) -> None:
        """Until so many (all that were produced, by default) are committed."""
        wanted = self.produced if count is None else count
        wait_until(lambda: self.handled() >= wanted, f"{wanted} events committed, seen {self.handled()}", seconds)

    def check(self) -> Report:
        """The oracle's word."""
        return ReplayOracle(
            self.bootstrap,
            group_id=self.group,
            topic=bank.topic_of(self.group),
            outputs=[bank.output_of(self.group)],
            fold=bank.fold(self.group),
        ).check()

    def stop_all(self) -> None:
        """Drain every worker that runs; each must end with exit code 0."""
        for worker in self.workers:
            if worker.running:
                wait_until(lambda worker=worker: worker.said("generation"), f"{worker.instance} is in the group")  # type: ignore[misc]
                assert worker.stop() == 0, worker.log.read_text()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


def seed_of(environment: Mapping[str, str] = os.environ) -> int:
    """The seed of this run: ``SEED`` if it is set, else by the clock; printed by whoever uses it."""
    return int(environment.get("SEED") or time.time_ns() % 1_000_000)
