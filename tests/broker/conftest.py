"""What many tests begin with: a lab for an engine, a bank under attack, and the seed of this run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streams import EventSource
from streams.broker import KafkaBroker
from streams.cli import logging_setup, main
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.battery_kit import Bank, seed_of, wait_until
from tests.broker.client_kit import Writer, writing
from tests.broker.engine_kit import Lab
from tests.broker.gate import gate
from tests.broker.membership_kit import STEADY_MS, Desk, laid_desk
from tests.broker.membership_kit import untyped as acl
from tests.broker.outbox_kit import PostgresServer


@pytest.fixture
def lab(request: pytest.FixtureRequest, kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    """Topics and a group, with as many partitions as the module's ``PARTITIONS``, or one."""
    return Lab(kafka_broker.bootstrap_servers, topic_prefix, getattr(request.module, "PARTITIONS", 1))


@pytest.fixture
def settings(kafka_broker: BrokerAddress) -> ClientSettings:
    return ClientSettings(kafka_broker.bootstrap_servers)


@pytest.fixture
def admin(settings: ClientSettings) -> Iterator[TopicAdmin]:
    with closing(TopicAdmin(settings)) as admin:
        yield admin


@pytest.fixture
def writer(settings: ClientSettings, topic: str) -> Iterator[Writer]:
    """Transactions into the module's ``topic``."""
    with writing(settings, topic) as writer:
        yield writer


@pytest.fixture
def no_reader_is_left() -> Iterator[None]:
    """Wait until the threads of logs and views have ended, behind the test."""
    yield
    names = ("kes-tail", "kes-topic-questions", "kes-view")
    wait_until(lambda: not any(thread.name in names for thread in threading.enumerate()), str(names))


@pytest.fixture
def seed() -> int:
    """``SEED``, or one by the clock; shown if the test fails."""
    seed = seed_of()
    print(f"SEED={seed}")
    return seed


@pytest.fixture
def membership() -> str:
    """Which client speaks the group protocol for a bank: by default as ``BANK_MEMBERSHIP`` says."""
    return ""


@pytest.fixture
def bank_group(membership: str, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Bank]:
    bank = Bank(kafka_broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path, membership)
    yield bank
    bank.close()


@pytest.fixture
def kes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """The command in this process, as ``kes(source, *words)`` with ``shop:source`` (behind the first two words) and
    ``--json`` for this source (``None``: for no source): exit code, answer, messages."""
    monkeypatch.setattr(logging_setup, "configure_logging", lambda options: None)

    def run(source: EventSource[Any] | None, *words: str, behind: int = 2) -> tuple[int, Any, str]:
        module = ModuleType("shop")
        vars(module).update(source=source)
        monkeypatch.setitem(sys.modules, "shop", module)
        named = ["shop:source"] if source is not None else []
        code = main.main([*words[:behind], *named, *words[behind:], "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


@pytest.fixture
def kind() -> str:
    """Of the members of a desk: one of the ``KINDS``."""
    return "streams"


@pytest.fixture
def session_ms() -> int:
    """Of all members of a desk; where sessions have to end, the test has a value of its own."""
    return STEADY_MS


@pytest.fixture
def desk(kind: str, kafka_broker: BrokerAddress, topic_prefix: str, session_ms: int) -> Iterator[Desk]:
    with laid_desk(kind, kafka_broker.bootstrap_servers, topic_prefix, session_ms) as desk:
        yield desk


@pytest.fixture
def broker(own_broker: OwnBroker) -> KafkaBroker:
    """One of the test's own: it may be killed, and started anew while members are at work."""
    return own_broker(start_timeout=150.0)


class GuardedBroker:
    """A broker that asks for rights. Everybody has those that nobody has set."""

    def __init__(self, make: OwnBroker) -> None:
        authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        broker = make(properties={"authorizer.class.name": authorizer, "allow.everyone.if.no.acl.found": "true"})
        self.bootstrap_servers = broker.bootstrap_servers
        self._admin = acl.AdminClient({"bootstrap.servers": self.bootstrap_servers})

    @staticmethod
    def rights(kind: str, name: str) -> Callable[[str, str], tuple[Any, ...]]:
        """Makes the right to do something with this resource, or the denial, by their names."""
        of = getattr(acl.ResourceType, kind), name, acl.ResourcePatternType.LITERAL, "User:ANONYMOUS", "*"
        return lambda deed, verdict: (*of, acl.AclOperation[deed], acl.AclPermissionType[verdict])

    def set(self, *rights: tuple[Any, ...]) -> None:
        for future in self._admin.create_acls([acl.AclBinding(*right) for right in rights]).values():
            future.result(30)

    def delete(self, right: tuple[Any, ...]) -> None:
        (deleted,) = self._admin.delete_acls([acl.AclBindingFilter(*right)]).values()
        deleted.result(30)


@pytest.fixture
def guarded_broker(own_broker: OwnBroker) -> GuardedBroker:
    return GuardedBroker(own_broker)


@pytest.fixture
def fragile_group(broker: KafkaBroker, topic_prefix: str, tmp_path: Path) -> Iterator[Bank]:
    """A bank on a broker of its own."""
    bank = Bank(broker.bootstrap_servers, f"{topic_prefix}bank", tmp_path)
    yield bank
    bank.close()


@pytest.fixture(scope="module")
def far_broker() -> Iterator[KafkaBroker]:
    """Another cluster."""
    with KafkaBroker() as broker:
        yield broker


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for all tests, with a database for each. A machine that cannot start one fails: none is skipped."""
    with closing(PostgresServer()) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_16() -> Iterator[PostgresServer]:
    """The older one of the two that the wheel brings."""
    with closing(PostgresServer(16)) as server:
        yield server


@pytest.fixture(params=gate([18, 16], 18))
def each_postgres(request: pytest.FixtureRequest) -> PostgresServer:
    """Each version in turn; the older one nightly."""
    server: PostgresServer = request.getfixturevalue("postgres" if request.param == 18 else "postgres_16")
    return server
