"""What the soak run needs: the group on a cluster, a steady load, and a reader that notes when it had to wait."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from streams.broker import KafkaCluster, questions
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.topics import TopicSpec
from tests.broker import bank
from tests.broker.battery_kit import Bank, Worker, wait_until
from tests.soak.member import PARTITIONS, build


class Member(Worker):
    """One process of the group. It is started again under the same name by a new ``Member``."""

    program = Path(__file__).with_name("member.py")


class SoakBank(Bank):
    """The bank's topics with three copies, made before anybody starts, and members with standbys."""

    partitions = PARTITIONS

    def __init__(self, cluster: KafkaCluster, group: str, folder: Path) -> None:
        self.bootstrap, self.group, self.folder = cluster.bootstrap_servers, group, folder
        self.workers: list[Worker] = []
        self.produced = 0
        self._settings = ClientSettings(self.bootstrap, {}, client_id="soak")
        output = TopicSpec(name=bank.output_of(group), partitions=PARTITIONS, replication_factor=3)
        specs = [*build(self.bootstrap, group, "maker").specs(), output]
        admin = TopicAdmin(self._settings)
        admin.create(specs, 60.0)
        admin.close()
        cluster.wait_in_sync()
        for node in cluster.nodes.values():  # each answers for itself, and may be the first one that a member asks
            port = int(node.bootstrap_servers.rpartition(":")[2])
            wait_until(
                partial(self._known, port, {spec.name for spec in specs}), f"node {node.number} knows the topics"
            )

    @staticmethod
    def _known(port: int, names: set[str]) -> bool:
        return names <= {name for name, _ in questions.partitions(port) or {}}

    def start(self, instance: str, **environment: str) -> Worker:
        member = Member(self.bootstrap, self.group, instance, self.folder)
        self.workers.append(member)
        return member

    def generations(self) -> int:
        """The highest generation that any member has told of."""
        found = (re.findall(r": generation (\d+)", worker.log.read_text(errors="replace")) for worker in self.workers)
        return max((int(number) for numbers in found for number in numbers), default=0)


class Load:
    """Deposits at a steady rate until ``stop``. ``sent``: account -> how many."""

    def __init__(self, group: SoakBank, seed: int, keys: int, per_second: float) -> None:
        self.sent: Counter[str] = Counter()
        self.failed: list[str] = []
        self._group, self._rate, self._keys = group, per_second, keys
        self._events = random.Random(seed)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the load; returns how many deposits are in the topic."""
        self._enough.set()
        self._thread.join(200)
        assert not self._thread.is_alive(), "the load could not be produced"
        assert not self.failed, self.failed[:3]
        self._group.produced = self.sent.total()
        return self._group.produced

    def _run(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self._group.bootstrap,
                "client.id": "load",
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
                "message.timeout.ms": 180_000,
                "reconnect.backoff.max.ms": 500,
                "on_delivery": lambda error, _: self.failed.append(str(error)) if error is not None else None,
            }
        )
        topic = bank.topic_of(self._group.group)
        began = time.monotonic()
        number = 0
        while not self._enough.is_set():
            event = bank.Deposited(f"account-{self._events.randrange(self._keys)}", self._events.randrange(1, 1000))
            producer.produce(
                topic, msgspec.json.encode(event), event.account.encode(), headers=[("__grt__", b"Deposited")]
            )
            self.sent[event.account] += 1
            number += 1
            if number % 10 == 0:
                producer.poll(0)
                ahead = number / self._rate - (time.monotonic() - began)
                if ahead > 0:
                    time.sleep(ahead)  # the rate, not luck
        if producer.flush(180):
            self.failed.append("some deposits were not delivered within 180 s")


class Watch:
    """A read_committed reader of the outputs: when each partition made it wait, and what was there twice or never."""

    NOTED_SECONDS = 0.25

    def __init__(self, group: Bank) -> None:
        self.last: dict[int, float] = {}
        self.gaps: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """Partition -> (when it began, when it ended) of each wait above ``NOTED_SECONDS``, by ``time.monotonic``."""
        self.records = 0
        self.seen: Counter[tuple[str, int]] = Counter()
        """(account, number of its deposit) -> how often."""
        self.failure: BaseException | None = None
        self._group = group
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; what is there is read to its end first."""
        self._enough.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the reader does not end"
        if self.failure is not None:
            raise self.failure

    def all_since(self, moment: float) -> bool:
        """Whether every partition gave something after this moment."""
        return len(self.last) == self._group.partitions and all(last > moment for last in list(self.last.values()))

    def largest_gaps(self, begin: float, end: float) -> dict[int, float]:
        """Partition -> the longest wait, in seconds, between these moments (0: none above the threshold)."""
        return {
            number: max(
                (till - max(since, begin) for since, till in list(self.gaps[number]) if begin < till and since < end),
                default=0.0,
            )
            for number in range(self._group.partitions)
        }

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.failure = error

    def _read(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._group.bootstrap,
                "client.id": "watch",
                "group.id": "watch",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
                "fetch.error.backoff.ms": 50,
                "reconnect.backoff.max.ms": 500,
                "topic.metadata.refresh.interval.ms": 5_000,
                "log_level": 0,
            }
        )
        output = bank.output_of(self._group.group)
        consumer.assign([TopicPartition(output, number, 0) for number in range(self._group.partitions)])
        decode = msgspec.json.Decoder(bank.Balance).decode
        quiet_since = time.monotonic()
        while not self._enough.is_set() or time.monotonic() - quiet_since < 3:
            for message in consumer.consume(500, 0.05):
                error = message.error()
                if error is not None:
                    if error.retriable() or not error.fatal():
                        continue
                    raise KafkaException(error)
                now = time.monotonic()
                number = message.partition()
                assert number is not None
                before = self.last.get(number, now)
                if now - before > self.NOTED_SECONDS:
                    self.gaps[number].append((before, now))
                self.last[number] = quiet_since = now
                balance = decode(message.value() or b"")
                self.seen[balance.account, balance.count] += 1
                self.records += 1
        consumer.close()
