"""What runs on a cluster need: the bank on three brokers, and a reader that notes when it had to wait."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition

from streams.broker import KafkaCluster, probe
from tests.broker import bank
from tests.broker.battery_kit import Bank, wait_until

PARTITIONS = 8


def bank_on(cluster: KafkaCluster, group: str, folder: Path) -> Bank:
    """The bank, with three copies of its topics."""
    made = Bank(cluster.bootstrap_servers, group, folder, partitions=PARTITIONS, copies=len(cluster.nodes))
    cluster.wait_in_sync()
    topics = {bank.topic_of(group), bank.output_of(group)}

    def known(port: int) -> bool:
        return topics <= {name for name, _ in probe.partitions(port) or {}}

    for node in cluster.nodes.values():  # each answers for itself, and may be the first one that a member asks
        port = int(node.bootstrap_servers.rpartition(":")[2])
        wait_until(partial(known, port), f"node {node.number} knows the topics")
    return made


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
