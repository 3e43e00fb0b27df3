"""pytest fixtures around a real Kafka: put ``pytest_plugins = ["streams.testing.fixtures"]`` into ``conftest.py``.

``kafka_broker``
    one broker for the whole session; ``.bootstrap_servers`` for clients. It is, in this order, the one that
    ``KES_BOOTSTRAP_SERVERS`` names, one that Docker runs through testcontainers, or the embedded one.
    ``KES_TEST_BROKER=environment``, ``docker`` or ``embedded`` allows one of the three only.
``topic_prefix``
    a text that no other test and no earlier run has used; begin the names of topics, groups and transactional ids
    with it, since the broker is shared.
``own_broker``
    makes embedded brokers that belong to one test, which may kill, freeze and restart them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from streams.broker import KafkaBroker
from streams.errors import ConfigError

_DOCKER_SECONDS = 5.0
_KINDS = ("environment", "docker", "embedded")


class BrokerAddress(Protocol):
    """The broker as tests may use it, embedded or not."""

    @property
    def bootstrap_servers(self) -> str:
        """``host:port``, or several with commas between."""
        ...


@dataclass(frozen=True, slots=True)
class GivenBroker:
    """A broker that is already running."""

    bootstrap_servers: str


OwnBroker = Callable[..., KafkaBroker]
"""The type of the fixture ``own_broker``: called with the arguments of ``KafkaBroker``, gives it started."""


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[BrokerAddress]:
    """One broker for all tests of the session."""
    with session_broker() as broker:
        yield broker


@pytest.fixture
def topic_prefix(request: pytest.FixtureRequest) -> str:
    """``<test's name>-<random>-``, made of characters that topic names may have."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "-", request.node.name)[:40].strip("-")
    return f"{name}-{uuid.uuid4().hex[:8]}-"


@pytest.fixture
def own_broker() -> Iterator[OwnBroker]:
    """A function that starts an embedded broker for this test; all are stopped at its end."""
    with contextlib.ExitStack() as brokers:

        def make(**arguments: Any) -> KafkaBroker:
            return brokers.enter_context(KafkaBroker(**arguments))

        yield make


@contextlib.contextmanager
def session_broker() -> Iterator[BrokerAddress]:
    """The broker that ``kafka_broker`` gives, outside of pytest."""
    named = os.environ.get("KES_BOOTSTRAP_SERVERS", "").strip()
    kind = os.environ.get("KES_TEST_BROKER", "").strip()
    if kind and kind not in _KINDS:
        raise ConfigError(f"KES_TEST_BROKER must be one of {', '.join(_KINDS)}, not {kind!r}")
    if kind == "environment" and not named:
        raise ConfigError("KES_TEST_BROKER=environment needs KES_BOOTSTRAP_SERVERS=host:port")
    if kind == "docker" and not docker_answers():
        raise ConfigError("KES_TEST_BROKER=docker, but no Docker engine answers, or testcontainers is not installed")
    if kind == "environment" or (not kind and named):
        yield GivenBroker(named)
    elif kind == "docker" or (not kind and docker_answers()):
        with _container() as broker:
            yield broker
    else:
        with KafkaBroker() as embedded:
            yield embedded


def docker_answers() -> bool:
    """Check whether testcontainers is installed and a Docker engine answers within five seconds."""
    if any(importlib.util.find_spec(name) is None for name in ("docker", "testcontainers")):
        return False
    # A process of its own: an address that swallows packets, or one over ssh, knows no time limit.
    ask = "import docker; docker.from_env(timeout=4).ping()"
    try:
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ask], capture_output=True, timeout=_DOCKER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


@contextlib.contextmanager
def _container() -> Iterator[GivenBroker]:
    try:
        module = importlib.import_module("testcontainers.community.kafka")
    except ImportError:  # its place before 4.15
        module = importlib.import_module("testcontainers.kafka")
    container = module.KafkaContainer().with_kraft()
    for name, value in {
        "GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
        "GROUP_MIN_SESSION_TIMEOUT_MS": "1000",
        "TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "TRANSACTION_STATE_LOG_NUM_PARTITIONS": "1",
        "OFFSETS_TOPIC_NUM_PARTITIONS": "1",
        "AUTO_CREATE_TOPICS_ENABLE": "false",
    }.items():
        container = container.with_env(f"KAFKA_{name}", value)
    with container:
        yield GivenBroker(container.get_bootstrap_server())
