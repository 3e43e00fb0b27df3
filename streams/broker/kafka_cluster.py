"""``KafkaCluster``: several Kafka nodes on this machine, to be killed, stopped and frozen one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any, Self, TypeVar

from streams.broker import diagnosis, probe
from streams.broker.jars import Progress, kafka_jars, silent
from streams.broker.kafka_broker import KafkaBroker
from streams.broker.probe import PartitionReplicas, free_port, metadata
from streams.broker.settings import Seat, cluster_defaults
from streams.errors import ConfigError, EmbeddedBrokerError

log = logging.getLogger(__name__)

T = TypeVar("T")

_PORT_ATTEMPTS = 3
_POLL_SECONDS = 0.05


class KafkaNode(KafkaBroker):
    """One node of a ``KafkaCluster``: ``kill()``, ``shut_down()``, ``restart()``, ``freeze()`` and ``thaw()`` it, and
    look at its ``pid``, ``is_running`` and ``data_dir``. The cluster starts and stops it."""

    @property
    def number(self) -> int:
        """Node number, from 1."""
        return self._seat.node

    @classmethod
    def of_cluster(cls, seat: Seat, **arguments: Any) -> Self:
        """The node of this seat, not started; arguments as of ``KafkaBroker``."""
        node = cls(**arguments)
        node._seat = seat
        return node

    def give_up(self) -> None:
        """End the process at once, also while ``start()`` waits for it in another thread."""
        kept = self._kept
        if kept is not None:
            kept.order("k")


class KafkaCluster:
    """Kafka nodes that are brokers and controllers both; each ends with this process, however this process ends.

    Every record is on up to three nodes and is acknowledged when two have it, so that with three nodes any one of them
    may be away. A node takes some 200 MB of memory and, when idle, a few percent of a core.

    ``nodes``
        how many.
    ``heap_mb``
        the largest Java heap of each.
    ``data_dir``
        a folder for the nodes' data, made if missing; by default a temporary one that ``stop()`` removes.
    ``properties``
        further server properties, of every node; they win over the defaults.
    ``start_timeout``
        seconds until a start, also of one node, is given up.
    ``durable``, ``progress``
        as of ``KafkaBroker``.

    Use it as a context manager, or call ``start()`` and ``stop()``. Methods may be called from any thread; they block.
    Raised: ``EmbeddedBrokerError`` when Kafka cannot be fetched or started, ``ConfigError`` for a wrong argument.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        heap_mb: int = 288,
        data_dir: Path | str | None = None,
        durable: bool = False,
        properties: Mapping[str, str] | None = None,
        start_timeout: float = 90.0,
        progress: Progress = silent,
    ) -> None:
        if not 1 <= nodes <= 9:
            raise ConfigError(f"nodes must be 1 to 9, not {nodes}")
        self._count = nodes
        self._data_dir = Path(data_dir).expanduser().absolute() if data_dir is not None else None
        self._arguments: dict[str, Any] = {
            "heap_mb": heap_mb,
            "durable": durable,
            "properties": {**cluster_defaults(nodes), **(properties or {})},
            "start_timeout": start_timeout,
        }
        self._start_timeout = start_timeout
        self._progress = progress
        self._lock = threading.RLock()
        self._nodes: dict[int, KafkaNode] = {}
        KafkaBroker(**self._arguments)  # a wrong argument is an error here, not at the start

    # -- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all nodes, and return once they know each other. The first time on a machine, fetch Kafka."""
        with self._lock:
            if self._nodes:
                raise EmbeddedBrokerError(f"the cluster at {self.bootstrap_servers} is started already")
            kafka_jars(self._progress)
            began = time.monotonic()
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                try:
                    self._start_all()
                    break
                except diagnosis.PortTaken:  # another process was faster with one of our ports
                    self.stop()
                    if attempt == _PORT_ATTEMPTS:
                        raise
                except BaseException:
                    self.stop()
                    raise
            log.info("a cluster of %d nodes serves after %.1f s", self._count, time.monotonic() - began)
        return self

    def stop(self) -> None:
        """End all nodes, and remove their data unless ``data_dir`` was given. Safe to repeat."""
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
            if self._data_dir is None:
                for node in nodes:
                    node.give_up()  # nothing to be saved; in good order the last ones would wait for the others
            _in_parallel([node.stop for node in nodes])

    def __enter__(self) -> Self:
        return self if self._nodes else self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        running = sum(node.is_running for node in self._nodes.values())
        return f"<KafkaCluster of {self._count} nodes, {running} running>"

    # -- its nodes ----------------------------------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of all nodes, with commas between, from ``start()`` to ``stop()``."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    @property
    def nodes(self) -> Mapping[int, KafkaNode]:
        """Number of node, from 1 -> the node, from ``start()`` to ``stop()``."""
        if not self._nodes:
            raise EmbeddedBrokerError("the cluster is not started: call start(), or use it as a context manager")
        return dict(self._nodes)

    def node(self, number: int) -> KafkaNode:
        """The node with this number."""
        try:
            return self.nodes[number]
        except KeyError:
            raise ConfigError(f"there is no node {number}; the cluster has 1 to {self._count}") from None

    # -- where things are ---------------------------------------------------------------------------------------------

    def leader_of(self, topic: str, partition: int, seconds: float = 30.0) -> int:
        """The node that leads this partition, one that runs. Waits for that; raises ``EmbeddedBrokerError`` after
        ``seconds``."""

        def leader(port: int) -> int | None:
            state = (probe.partitions(port) or {}).get((topic, partition))
            return state.leader if state is not None else None

        return self._running(leader, f"who leads {topic}[{partition}]", seconds)

    def group_coordinator(self, group: str, seconds: float = 30.0) -> int:
        """The node that keeps this consumer group; waits as ``leader_of`` does."""
        return self._running(
            lambda port: probe.coordinator(port, probe.GROUP, group), f"who keeps group {group}", seconds
        )

    def transaction_coordinator(self, transactional_id: str, seconds: float = 30.0) -> int:
        """The node that keeps the transactions of this id; waits as ``leader_of`` does."""
        return self._running(
            lambda port: probe.coordinator(port, probe.TRANSACTION, transactional_id),
            f"who keeps the transactions of {transactional_id}",
            seconds,
        )

    def controller(self, seconds: float = 60.0) -> int:
        """The node that leads the metadata quorum; waits as ``leader_of`` does, but longer: brokers hand the question
        on to the controller, and hang on a frozen one for 30 s (measured) although the others have elected another."""
        return self._running(probe.controller, "who the controller is", seconds)

    def partitions(self, seconds: float = 30.0) -> Mapping[tuple[str, int], PartitionReplicas]:
        """(topic, partition) -> leader, replicas and those in sync, of all topics, Kafka's own too."""
        return self._answer(probe.partitions, "the partitions", seconds)

    def wait_in_sync(self, seconds: float = 60.0) -> None:
        """Wait until every partition has a leader and all its replicas are in sync: then any node may go. Raises
        ``EmbeddedBrokerError`` after ``seconds``."""
        until = time.monotonic() + seconds
        while True:
            behind = [
                f"{topic}[{partition}]"
                for (topic, partition), state in self.partitions(max(until - time.monotonic(), 1.0)).items()
                if state.leader < 0 or len(state.in_sync) < len(state.replicas)
            ]
            if not behind:
                return
            if time.monotonic() > until:
                raise EmbeddedBrokerError(
                    f"not in sync after {seconds:g} s: {', '.join(behind[:5])}{' ...' if len(behind) > 5 else ''}; "
                    "are all nodes running?"
                )
            time.sleep(_POLL_SECONDS)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        ports: list[int] = []
        for _ in range(2 * self._count):
            ports.append(free_port(frozenset(ports)))
        numbers = range(1, self._count + 1)
        voters = dict(zip(numbers, ports[self._count :], strict=True))
        self._nodes = {
            number: KafkaNode.of_cluster(
                Seat(number, voters),
                port=port,
                data_dir=self._data_dir / f"node-{number}" if self._data_dir else None,
                **self._arguments,
            )
            for number, port in zip(numbers, ports, strict=False)
        }
        _in_parallel([node.start for node in self._nodes.values()], self._give_up)
        self._answer(self._complete, "of all nodes", self._start_timeout)

    def _give_up(self) -> None:
        for node in self._nodes.values():
            node.give_up()

    def _complete(self, port: int) -> bool | None:
        answer = metadata(port)
        return True if answer is not None and len(answer.brokers) == self._count else None

    def _running(self, question: Callable[[int], int | None], what: str, seconds: float) -> int:
        """Ask for a node, as ``_answer`` does. Brokers name one that has just died for a while yet."""

        def checked(port: int) -> int | None:
            number = question(port)
            node = self._nodes.get(number) if number is not None else None
            return number if node is not None and node.is_running else None

        return self._answer(checked, what, seconds)

    def _answer(self, question: Callable[[int], T | None], what: str, seconds: float) -> T:
        """Return the first answer of a node that runs; frozen nodes and those that do not know are passed over."""
        until = time.monotonic() + seconds
        while True:
            for node in self.nodes.values():
                if node.is_running:
                    found = question(int(node.bootstrap_servers.rpartition(":")[2]))
                    if found is not None:
                        return found
            if time.monotonic() > until:
                raise EmbeddedBrokerError(f"no node of the cluster answers {what} within {seconds:g} s")
            time.sleep(_POLL_SECONDS)


def _in_parallel(calls: list[Callable[[], object]], give_up: Callable[[], None] = lambda: None) -> None:
    """Do all at once. When one raises, give the others up, and raise it when all have ended."""
    if not calls:
        return
    with ThreadPoolExecutor(len(calls)) as threads:
        done = [threads.submit(call) for call in calls]
        try:
            for each in as_completed(done):
                each.result()
        except BaseException:
            while wait(done, _POLL_SECONDS).not_done:
                give_up()
            raise
