"""Producer and client of the wire on a broker with TLS and SASL: each way to authenticate; what is wrong is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from streams.broker import KafkaBroker, security
from streams.broker.probe import HOST
from streams.broker.security import MECHANISMS
from streams.errors import BrokerUnavailable, ConfigError, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.schemas.list_groups import ListGroupsRequest
from streams.kafka.wire.security import Security
from streams.model.topics import TopicSpec
from tests.broker.wire_kit import create, slot_at, transact

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SESSION_MS = 2_000


def no_token(_: str) -> tuple[str, float]:
    raise KeyError("secret")


@pytest.fixture(scope="module")
def sasl() -> Iterator[KafkaBroker]:
    """SASL over TLS, with a certificate for one name of its host. Sessions last two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(security, "certify", partial(security.certify, hosts=[HOST]))
        more = {"connections.max.reauth.ms": str(SESSION_MS)}
        with KafkaBroker(tls=True, sasl=list(MECHANISMS), users={"alice": "secret"}, properties=more) as broker:
            yield with_topic(broker)


@pytest.fixture(scope="module")
def mutual() -> Iterator[KafkaBroker]:
    """TLS where the client shows a certificate, too."""
    with KafkaBroker(tls="mutual", users=["alice"]) as broker:
        yield with_topic(broker)


def with_topic(broker: KafkaBroker) -> KafkaBroker:
    create(ClientSettings(broker.plain_bootstrap_servers), TopicSpec(name="t", partitions=2, replication_factor=1))
    return broker


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "MUTUAL"])
async def test_each_way_to_authenticate(request: pytest.FixtureRequest, mechanism: str) -> None:
    """A connection is replaced before its session ends, and no transaction fails."""
    is_mutual = mechanism == "MUTUAL"
    broker: KafkaBroker = request.getfixturevalue("mutual" if is_mutual else "sasl")
    settings = broker.client_settings("alice", "" if is_mutual else mechanism)
    until = time.monotonic() + (0 if is_mutual else SESSION_MS / 1000 * 1.5)
    async with slot_at(broker.bootstrap_servers, mechanism, settings, "t") as slot:
        first = slot._session.connections.values()
        while True:
            await transact(slot, "t", 0)
            if time.monotonic() > until:
                break
        replaced = first != slot._session.connections.values()
        assert replaced != is_mutual


def asked(address: str, settings: dict[str, Any], seconds: float, repeat_seconds: float = 0.0) -> int:
    """Ask a broker of its own again and again, by the client; the number of connections that it took."""
    client, until = WireClient(address, "test", Security.of(settings)), time.monotonic() + repeat_seconds
    client.start()
    try:
        connections = set()
        while True:
            deadline = time.monotonic() + seconds

            async def attempt(deadline: float = deadline) -> int:
                answer = await client.send(ListGroupsRequest(), 1, deadline)
                connections.add(await client._lines.get(client.brokers()[1]).open())
                return answer.error_code

            assert client.ask("asking", deadline, attempt) == 0
            if time.monotonic() > until:
                return len(connections)
            time.sleep(0.01)
    finally:
        client.close(5.0)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "MUTUAL"])
def test_each_way_to_authenticate_of_the_client(request: pytest.FixtureRequest, mechanism: str) -> None:
    """Its connections are replaced before their sessions end, too, and no question fails."""
    is_mutual = mechanism == "MUTUAL"
    broker: KafkaBroker = request.getfixturevalue("mutual" if is_mutual else "sasl")
    settings = broker.client_settings("alice", "" if is_mutual else mechanism)
    taken = asked(broker.bootstrap_servers, settings, 20.0, 0 if is_mutual else SESSION_MS / 1000 * 1.5)
    assert (taken > 1) != is_mutual


WRONG = [
    ({"sasl.password": "wrong"}, "_AUTHENTICATION", "credentials"),
    ({"sasl.mechanism": "GSSAPI"}, "_AUTHENTICATION", "GSSAPI"),
    ({"ssl.ca.location": ""}, "_SSL", "certificate"),
    ({"host": "localhost"}, "_SSL", "ostname mismatch.*'localhost'"),
    ({"sasl.mechanism": "OAUTHBEARER", "oauth_cb": no_token}, "_TRANSPORT", "KeyError"),
    ({"security.protocol": "plaintext"}, "_TRANSPORT", "list_topics"),
]
IDS = ["password", "mechanism", "authority", "host", "token", "no TLS"]


def wrongly(broker: KafkaBroker, wrong: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The address and the settings with this in place of what is right."""
    settings = {**broker.client_settings("alice", "PLAIN"), **wrong}
    if wrong.get("security.protocol") == "plaintext":
        settings = {**wrong}
    return broker.bootstrap_servers.replace(HOST, settings.pop("host", HOST)), settings


@pytest.mark.parametrize(("wrong", "code", "said"), WRONG, ids=IDS)
def test_what_is_wrong_is_said_by_the_client_too(
    sasl: KafkaBroker, wrong: dict[str, Any], code: str, said: str
) -> None:
    """At once, where trying again does not help."""
    address, settings = wrongly(sasl, wrong)
    is_outage = code == "_TRANSPORT"
    said = said.replace("list_topics", "no broker answers")
    before = time.monotonic()
    with pytest.raises(BrokerUnavailable if is_outage else ConfigError, match=said) as failed:
        asked(address, settings, 2.0 if is_outage else 30.0)
    assert time.monotonic() - before < 10.0
    assert address in str(failed.value)
    assert "wrong" not in str(failed.value)
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(("wrong", "code", "said"), WRONG, ids=IDS)
async def test_what_is_wrong_is_said_without_secrets(
    sasl: KafkaBroker, wrong: dict[str, Any], code: str, said: str
) -> None:
    address, settings = wrongly(sasl, wrong)
    with pytest.raises(TransactionFailed, match=said) as failed:
        async with slot_at(address, "id", settings, "t"):
            pass
    assert failed.value.code == code
    assert address in str(failed.value)
    assert "wrong" not in str(failed.value)
    assert "secret" not in str(failed.value)
