"""The wire producer on a broker with TLS and SASL: each way to authenticate, and what is wrong is named."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from streams.broker import KafkaBroker, kafka_broker
from streams.broker.probe import HOST, free_port
from streams.clients.settings import ClientSettings
from streams.errors import TransactionFailed
from streams.topics import TopicSpec
from tests.broker.wire_kit import create, slot_at, transact

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SESSION_MS = 2_000


def token(_: str) -> tuple[str, float]:
    """An unsigned token, which Kafka takes where no other validator is set."""
    now = time.time()
    claims = {"sub": "alice", "iat": now - 1, "exp": now + 3600}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in ({"alg": "none"}, claims)
    ]
    return f"{parts[0]}.{parts[1]}.", now + 3600


def no_token(_: str) -> tuple[str, float]:
    raise KeyError("secret")


def certificates(folder: Path) -> None:
    """A CA, and certificates that it signed for the broker and for a client, each with its key in one file."""

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    for name, alternative in (("server", "IP:127.0.0.1"), ("client", "DNS:client")):
        (folder / "extensions").write_text(f"subjectAltName={alternative}\n")
        openssl("req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")
        (folder / f"{name}.pem").write_text((folder / f"{name}.key").read_text() + (folder / f"{name}.crt").read_text())


LOGIN = "org.apache.kafka.common.security."
MECHANISMS = {
    "PLAIN": LOGIN + 'plain.PlainLoginModule required user_alice="secret";',
    "SCRAM-SHA-256": LOGIN + "scram.ScramLoginModule required;",
    "SCRAM-SHA-512": LOGIN + "scram.ScramLoginModule required;",
    "OAUTHBEARER": LOGIN + 'oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="alice";',
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, dict[str, str], Path]]:
    """A broker with further listeners: SASL over TLS, and TLS where the client shows a certificate, too."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificates")
    certificates(folder)
    ports = {"SASL": free_port(), "MUTUAL": free_port()}
    plain = kafka_broker.server_settings

    def with_more(path: Path, port: int, controller: int, *others: Any) -> str:
        more = {
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_SSL,MUTUAL:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "server.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.sasl.sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "connections.max.reauth.ms": str(SESSION_MS),
        }
        for name, number in ports.items():
            for setting in ("listeners", "advertised.listeners"):
                more[setting] += f",{name}://{HOST}:{number}"
        for name, login in MECHANISMS.items():
            more[f"listener.name.sasl.{name.lower()}.sasl.jaas.config"] = login
        return plain(path, port, controller, *others) + "".join(f"{key}={value}\n" for key, value in more.items())

    with pytest.MonkeyPatch.context() as patch, KafkaBroker() as broker:
        patch.setattr(kafka_broker, "server_settings", with_more)
        broker.restart()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            wanted = UserScramCredentialUpsertion("alice", ScramCredentialInfo(mechanism, 4096), b"secret")
            admin.alter_user_scram_credentials([wanted])["alice"].result()
        create(ClientSettings(broker.bootstrap_servers), TopicSpec(name="t", partitions=2, replication_factor=1))
        yield broker, {name: f"{HOST}:{number}" for name, number in ports.items()}, folder


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "MUTUAL"])
async def test_each_way_to_authenticate(secure: tuple[KafkaBroker, dict[str, str], Path], mechanism: str) -> None:
    """Sessions last two seconds: a connection is replaced in time, and no transaction fails."""
    _, addresses, folder = secure
    settings: dict[str, Any] = {"ssl.ca.location": str(folder / "ca.pem")}
    if mechanism == "MUTUAL":
        address = addresses["MUTUAL"]
        settings |= {"security.protocol": "ssl", "ssl.certificate.location": str(folder / "client.crt")}
        settings |= {"ssl.key.location": str(folder / "client.key")}
    else:
        address = addresses["SASL"]
        settings |= {"security.protocol": "sasl_ssl", "sasl.mechanism": mechanism}
        settings |= (
            {"oauth_cb": token} if mechanism == "OAUTHBEARER" else {"sasl.username": "alice", "sasl.password": "secret"}
        )
    until = time.monotonic() + (0 if mechanism == "MUTUAL" else SESSION_MS / 1000 * 1.5)
    async with slot_at(address, mechanism, settings, "t") as slot:
        first = slot._connections.values()
        while True:
            await transact(slot, "t", 0)
            if time.monotonic() > until:
                break
        replaced = first != slot._connections.values()
        assert replaced == (mechanism != "MUTUAL")


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ({"sasl.password": "wrong"}, "_AUTHENTICATION", "credentials"),
        ({"sasl.mechanism": "GSSAPI"}, "_AUTHENTICATION", "GSSAPI"),
        ({"ssl.ca.location": ""}, "_SSL", "certificate"),
        ({"host": "localhost"}, "_SSL", "ostname mismatch.*'localhost'"),
        ({"sasl.mechanism": "OAUTHBEARER", "oauth_cb": no_token}, "_TRANSPORT", "KeyError"),
        ({"security.protocol": "plaintext"}, "_TRANSPORT", "list_topics"),
    ],
    ids=["password", "mechanism", "authority", "host", "token", "no TLS"],
)
async def test_what_is_wrong_is_said_without_secrets(
    secure: tuple[KafkaBroker, dict[str, str], Path], wrong: dict[str, Any], code: str, said: str
) -> None:
    _, addresses, folder = secure
    settings: dict[str, Any] = {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}
    settings |= {"sasl.password": "secret", "ssl.ca.location": str(folder / "ca.pem"), **wrong}
    if wrong.get("security.protocol") == "plaintext":
        settings = wrong
    address = addresses["SASL"].replace(HOST, settings.pop("host", HOST))
    with pytest.raises(TransactionFailed, match=said) as failed:
        async with slot_at(address, "id", settings, "t"):
            pass
    assert failed.value.code == code
    assert address in str(failed.value)
    assert "wrong" not in str(failed.value)
    assert "secret" not in str(failed.value)
