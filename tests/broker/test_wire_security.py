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
from streams.errors import TransactionFailed
from streams.kafka.settings import ClientSettings
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
