"""What the battery needs: topics, deposits, worker processes, and waiting for conditions."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from confluent_kafka import Producer

from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec, changelog_name
from streams.testing.oracle import ReplayOracle, Report
from tests.broker import bank
from tests.broker.bank import Dump, Held, Store
from tests.broker.membership_kit import set_broker_session
from tests.unit import waiting

ROOT = Path(__file__).parents[2]
PATIENCE = 90.0
BROKER_ENDS_SECONDS = 60.0
QUICK = {"BANK_SESSION_SECONDS": "2"}
"""Tests wait for sessions to expire: a short session makes them short, and nothing else."""
JOINED = r"(?:engine|lifecycle) generation (\d+)"
"""Lifecycle is the name of the engine's logger in the releases that a rolling upgrade begins with."""
Headers = list[tuple[str, str | bytes | None]]
TYPE: Headers = [("__grt__", b"Deposited")]
ENDLESS = 1_000_000_000
"""More deposits than any test waits for: such a load goes on until it is stopped. One that ends may end before what it
was for has begun, on a machine that stands still for seconds, and then there is no work left that could go on."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE, step: float = 0.05) -> None:
    """Wait for a condition that takes its time to be looked at."""
    waiting.wait_until(condition, what, seconds, step)


def let_pass(seconds: float) -> None:
    """Until the moment, drawn from a seed, at which the next thing happens."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, "time passes")


def start_program(log: Path, *words: str | Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with these words as a process, which writes to the end of a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


class Worker:
    """One worker process. ``log`` is what it wrote. A ``PYTHONPATH`` names the tree whose code it runs."""

    program = Path(__file__).with_name("bank.py")

    def __init__(self, bootstrap: str, group: str, instance: str, folder: Path, **environment: str) -> None:
        self.instance = instance
        self.log = folder / f"{instance}-{time.monotonic_ns()}.log"
        self._dump = self.log.with_suffix(".dump")
        program = Path(environment.get("PYTHONPATH", ROOT)) / self.program.relative_to(ROOT)
        environment.setdefault("BANK_DUMP", str(self._dump))
        self.process = start_program(self.log, program, bootstrap, group, instance, **environment)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGCONT)  # a frozen process is killed as well, but reaps faster awake
            self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self, seconds: float = PATIENCE) -> int:
        """SIGTERM, and wait: returns the exit code. A process that does not end is left with its threads' traces at the
        end of its log."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR2)
            wait_until(lambda: self.said("(most recent call first)"), "traces are in the log")
            raise AssertionError(f"{self.instance} did not end in {seconds:g} s:\n{self.last_words(200)}") from None

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def last_words(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def times(self, pattern: str) -> int:
        """How often its log has this."""
        return len(re.findall(pattern, self.log.read_text(errors="replace")))

    def dump(self) -> Dump | None:
        """All its stores, as they are now; ``None``: it does not say (not started yet, frozen, dead)."""
        if not self.running or not self.times(JOINED):
            return None
        self._dump.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not self._dump.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return msgspec.json.decode(self._dump.read_bytes(), type=Dump)

    def works_on(self) -> int:
        """How many partitions it works on."""
        dump = self.dump()
        return 0 if dump is None else sum(store.role == "active" for store in dump.stores)


class Load:
    """Deposits at a rate, while the test does its worst: ``count`` of them, or until ``stop``."""

    def __init__(self, group: Bank, count: int, keys: int, seed: int, per_second: float) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(
            target=group.deposit,
            args=(count, keys, seed),
            kwargs={"per_second": per_second, "enough": self._enough},
            daemon=True,
        )
        self._thread.start()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def finish(self, seconds: float = 120.0) -> None:
        """Wait until all are deposited."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the load could not be produced"

    def stop(self) -> None:
        """These are enough."""
        self._enough.set()
        self.finish()


class Bank:
    """A group under attack, on one broker. ``membership``: who speaks the group protocol for its members (by default
    as ``BANK_MEMBERSHIP`` says). ``copies``: of its topics."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        folder: Path,
        membership: str = "",
        partitions: int = bank.PARTITIONS,
        copies: int = 1,
    ) -> None:
        self.bootstrap, self.group, self.folder = bootstrap, group, folder
        self.partitions, self._copies = partitions, copies
        self._store = "Table"
        self.membership = membership or os.environ.get("BANK_MEMBERSHIP") or "streams"
        self.of_members = bootstrap
        """What members are told to connect to: it may be a proxy."""
        self.workers: list[Worker] = []
        self.produced = 0
        self._settings = ClientSettings(bootstrap, {}, client_id="battery")
        admin = TopicAdmin(self._settings)
        specs = [
            TopicSpec(name=name, partitions=partitions, replication_factor=copies)
            for name in (bank.topic_of(group), bank.output_of(group))
        ]
        admin.create(specs, 30.0)
        admin.close()

    def deposit(
        self,
        count: int,
        keys: int,
        seed: int,
        *,
        per_second: float | None = None,
        enough: threading.Event | None = None,
    ) -> None:
        """Produce deposits, all at once or at a rate; fewer if ``enough`` is set meanwhile."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
                "message.timeout.ms": 300_000,
                "socket.timeout.ms": 10_000,  # else a frozen broker stops the input for a minute
                "reconnect.backoff.max.ms": 500,
            }
        )
        began = time.monotonic()
        for number, (event, headers) in enumerate(self._records(count, keys, seed)):
            if enough is not None and enough.is_set():
                count = number
                break
            producer.produce(
                bank.topic_of(self.group),
                msgspec.json.encode(event),
                event.account.encode(),
                headers=headers,
            )
            if number % 1000 == 0:
                producer.poll(0)
            if per_second is not None and number % 20 == 0:
                ahead = number / per_second - (time.monotonic() - began)
                if ahead > 0:
                    time.sleep(ahead)  # the rate, not luck
        assert producer.flush(300) == 0
        self.produced += count

    def _records(self, count: int, keys: int, seed: int) -> Iterator[tuple[bank.Deposited, Headers]]:
        """The deposits that are produced, with their headers."""
        for event in bank.events(count, keys, seed):
            yield event, TYPE

    def strike_at_random(
        self, members: dict[str, Worker], victims: Sequence[str], kills: int, seed: int, **settings: str
    ) -> None:
        """Kill one of the victims after another, each of which is started again soon; work goes
        on after each."""
        rng = random.Random(seed)
        for _ in range(kills):
            name = rng.choice(victims)
            members[name].kill()
            let_pass(rng.uniform(0.1, 2.0))
            members[name] = self.start(name, **settings)
            self.wait_progress()

    def load(self, count: int, keys: int, seed: int, per_second: float) -> Load:
        """The same, beside the test."""
        return Load(self, count, keys, seed, per_second)

    def start(self, instance: str, **environment: str) -> Worker:
        environment = {
            "BANK_MEMBERSHIP": self.membership,
            "BANK_PARTITIONS": str(self.partitions),
            "BANK_COPIES": str(self._copies),
            **environment,
        }
        self._store = environment.get("BANK_STORE", self._store)
        if self.membership == "broker":  # where the session is a setting of the broker
            session = float(environment.get("BANK_SESSION_SECONDS") or os.environ.get("BANK_SESSION_SECONDS") or "6")
            set_broker_session(self.bootstrap, self.group, int(session * 1000))
        worker = Worker(self.of_members, self.group, instance, self.folder, **environment)
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

    def wait_progress(self, events: int = 1) -> None:
        """Until so many more are committed, of a load that goes on."""
        before = max(self.handled(), 0)
        wait_until(lambda: self.handled() >= before + events, f"{events} more events committed after {before}")

    def check(self) -> Report:
        """The oracle's word."""
        return self._oracle().check()

    def _oracle(self) -> ReplayOracle:
        return ReplayOracle(
            self.bootstrap,
            group_id=self.group,
            topic=bank.topic_of(self.group),
            outputs=[bank.output_of(self.group)],
            fold=bank.fold(self.group, self._store),
        )

    def must_be_exact(self) -> Report:
        """Stop everybody in good order; then nothing may be lost, doubled, or out of order. What a fenced one began and
        did not end is ended by the broker, when its time is over."""
        self.stop_all()
        deadline = time.monotonic() + BROKER_ENDS_SECONDS
        report = self.check()
        while any("a transaction hangs" in text for text in report.differences) and time.monotonic() < deadline:
            time.sleep(0.5)
            report = self.check()
        assert not report.differences, report
        assert report.inputs == self.produced, report
        return report

    def generations(self) -> int:
        """The highest generation that any member has told of."""
        found = (re.findall(JOINED, worker.log.read_text(errors="replace")) for worker in self.workers)
        return max((int(number) for numbers in found for number in numbers), default=0)

    def times(self, pattern: str) -> int:
        """How often the members' logs have this."""
        return sum(worker.times(pattern) for worker in self.workers)

    def check_stores(self, standbys: int = 0, seconds: float = PATIENCE) -> None:
        """At rest, the stores of the members are byte for byte what the changelog's last values are: those that are
        worked on, each partition at one member, and the copies, ``standbys`` of each or more."""
        deadline = time.monotonic() + seconds
        while wrong := self._differences(standbys):
            assert time.monotonic() < deadline, f"no rest within {seconds:g} s, or stores that differ: {wrong}"
            time.sleep(0.2)

    def _differences(self, standbys: int) -> list[str]:
        dumps = [worker.dump() for worker in self.workers if worker.running]
        told = [dump for dump in dumps if dump is not None]
        held = [(dump.member, store) for dump in told for store in dump.stores]
        active = Counter(store.partition for _, store in held if store.role == "active")
        copies = Counter(store.partition for _, store in held if store.role == "ready" and not store.left)
        wanted = min(standbys, len(told) - 1)
        wrong = [f"{len(dumps) - len(told)} members do not answer"] if len(told) < len(dumps) else []
        wrong += [f"{dump.member} has moves under way" for dump in told if dump.moves]
        wrong += [f"[{number}] is worked on {active[number]} times" for number in self._numbers if active[number] != 1]
        wrong += [f"[{number}] has {copies[number]} copies" for number in self._numbers if copies[number] < wanted]
        wrong += [f"{name} has [{store.partition}] {store.role}" for name, store in held if not _at_rest(store)]
        if wrong:
            return wrong
        changelog = self._changelog()
        for name, store in held:
            items, expected = dict(store.items), changelog[store.partition]
            differing = [key for key in items.keys() | expected.keys() if items.get(key) != expected.get(key)]
            if differing:
                where = f"{name}, {store.role} [{store.partition}]"
                wrong.append(f"{where}: {len(differing)} of {len(expected)} keys differ, as {min(differing)!r}")
        return wrong

    @property
    def _numbers(self) -> range:
        return range(self.partitions)

    def _changelog(self) -> dict[int, Store]:
        name = changelog_name(self.group, bank.topic_of(self.group))
        admin, reader = TopicAdmin(self._settings), PartitionReader(self._settings)
        try:
            states, _ = self._oracle()._changelog_state(reader, admin.watermarks(name))
            return states
        finally:
            reader.close()
            admin.close()

    def stop_all(self) -> None:
        """Drain every worker that runs, all at once; each must end with exit code 0."""
        running = [worker for worker in self.workers if worker.running]
        for worker in running:
            wait_until(lambda worker=worker: worker.said("generation"), f"{worker.instance} is in the group")  # type: ignore[misc]
            worker.signal(signal.SIGTERM)
        for worker in running:
            assert worker.process.wait(PATIENCE) == 0, worker.log.read_text()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            print(f"-- the end of {worker.log.name}\n{worker.last_words()}")  # shown if the test failed


def _at_rest(store: Held) -> bool:
    return store.role == "active" or (store.role == "ready" and not store.left)


def seed_of(environment: Mapping[str, str] = os.environ) -> int:
    """The seed of this run: ``SEED`` if it is set, else by the clock; printed by whoever uses it."""
    return int(environment.get("SEED") or time.time_ns() % 1_000_000)
