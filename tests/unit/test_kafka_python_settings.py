"""librdkafka's security settings, said to kafka-python: all of it or a refusal, and no secret in sight."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.kafka.wire.kafka_python_client import KafkaPythonClient, _quiet_kafka_python
from streams.kafka.wire.kafka_python_manager import with_last_words
from streams.kafka.wire.kafka_python_settings import security_only, translate

SECRET = "planted-secret"


def test_nothing_said_is_plaintext() -> None:
    assert translate({}) == {"security_protocol": "PLAINTEXT"}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "scram-sha-512"])
@pytest.mark.parametrize("key", ["sasl.mechanism", "sasl.mechanisms"])
def test_user_and_password(mechanism: str, key: str) -> None:
    settings = {"security.protocol": "sasl_plaintext", key: mechanism, "sasl.username": "u", "sasl.password": SECRET}
    assert translate(settings) == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism.upper(),
        "sasl_plain_username": "u",
        "sasl_plain_password": SECRET,
    }


def test_tls_checks_the_certificate_and_the_host_unless_told_otherwise() -> None:
    context = translate({"security.protocol": "SSL"})["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    context = translate({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"})["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)
    context = translate({"security.protocol": "ssl", "enable.ssl.certificate.verification": "false"})["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


def test_a_token_comes_from_the_function() -> None:
    settings: dict[str, Any] = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda config: (SECRET, 1e10, "me", {"k": "v"}),
    }
    provider = translate(settings)["sasl_oauth_token_provider"]
    assert (provider.token(), provider.extensions()) == (SECRET, {"k": "v"})
    assert SECRET not in repr(provider)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"security.protocol": "tls"}, "security.protocol"),
        ({"sasl.oauthbearer.client.secret": SECRET}, "sasl.oauthbearer.client.secret"),
        ({"ssl.keystore.password": SECRET}, "ssl.keystore.password"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "MAGIC"}, "sasl.mechanism"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.password": SECRET}, "sasl.username"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}, "oauth_cb"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"}, "ssl.ca.location"),
        ({"security.protocol": "SSL", "ssl.ca.pem": SECRET}, "ssl.ca.pem"),
        ({"security.protocol": "SSL", "ssl.crl.location": "/no/such/file"}, "ssl.crl.location"),
        ({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "dns"}, "identification"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        translate(settings)
    assert SECRET not in str(refused.value)


def test_a_broken_certificate_names_setting_and_file(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("nothing")
    for name in ("ssl.ca.location", "ssl.certificate.location", "ssl.crl.location"):
        with pytest.raises(ConfigError, match=r"cert\.pem") as refused:
            translate({"security.protocol": "SSL", name: str(broken), "ssl.key.password": SECRET})
        assert name in str(refused.value)
        assert SECRET not in str(refused.value)


def test_only_security_is_taken_from_a_whole_configuration() -> None:
    settings = {"linger.ms": 1, "security.protocol": "ssl", "sasl.username": "u", "ssl.ca.location": "x", "acks": "all"}
    assert security_only(settings).keys() == {"security.protocol", "sasl.username", "ssl.ca.location"}


def test_the_client_shows_no_secret() -> None:
    who = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": SECRET}
    client = KafkaPythonClient("127.0.0.1:1", "me", translate({"security.protocol": "sasl_plaintext", **who}))
    assert SECRET not in repr(client)
    client.close(1.0)


def test_the_answer_before_the_end_of_a_connection_is_read() -> None:
    """A broker that refuses a login answers, and closes the connection at once."""
    here, there = socket.socketpair()
    there.sendall(b"refused")
    there.close()
    transport = with_last_words(import_module("kafka.net.transport").KafkaTCPTransport(None, here))
    data, error = transport._sock_recv()
    assert (data, error) == (b"refused", None)
    data, error = transport._sock_recv()
    assert (data, str(error)) == (b"", "KafkaConnectionError: socket disconnected")
    here.close()


@pytest.mark.parametrize("servers", ["host:port", "host:99999999", "host", "", "a:1,,b:2", ":9092"])
def test_addresses_that_are_none_are_refused(servers: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap_servers (must be host:port|is empty)"):
        KafkaPythonClient(servers, "me", {}).close(1.0)


@pytest.mark.parametrize("kind", ["SaslAuthenticateRequest", "SaslBytesRequest"])
def test_no_credentials_are_logged_although_the_application_wants_every_line(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """kafka-python logs each request whole; that of a login has the password in it."""
    sasl, parser = import_module("kafka.protocol.sasl"), import_module("kafka.protocol.parser")
    caplog.set_level(logging.DEBUG, "kafka")
    _quiet_kafka_python()
    assert logging.getLogger("kafka").level == logging.DEBUG, "the application's choice"
    request = getattr(sasl, kind)(b"\0user\0planted-secret")
    if kind == "SaslAuthenticateRequest":
        request.API_VERSION = 1
        parser.KafkaProtocol(client_id="me").send_request(request)
    logging.getLogger("kafka.net.connection").debug("%s Request %d: %s", "connection", 7, request)
    assert f"connection Request 7: {kind}" in caplog.text
    assert SECRET not in caplog.text
    assert len(caplog.records) == (2 if kind == "SaslAuthenticateRequest" else 1)


def test_a_bootstrap_that_does_not_go_on_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of kafka-python it waits for: its connection, or the metadata that another one wanted."""
    future = import_module("kafka.future").Future
    client = KafkaPythonClient("127.0.0.1:1", "test", {})
    monkeypatch.setattr("streams.kafka.wire.kafka_python_client.LOST_SECONDS", 0.05)
    began, metadata = [], future()

    async def bootstrap(deadline: float | None) -> bool:
        began.append(deadline)
        if len(began) == 1:
            client.manager.cluster._refresh_future = metadata
            await future()
        return True

    async def attempt() -> str:
        return "answered"

    monkeypatch.setattr(client.manager, "_do_bootstrap", bootstrap)
    client.start()
    try:
        assert client.ask("a question", time.monotonic() + 10, attempt) == "answered"
    finally:
        client.close(1.0)
    assert len(began) == 2
    assert metadata.failed(), "who waits for it goes on"
