"""kafka-python's client: security, addresses and log lines, and no secret in sight."""

from __future__ import annotations

import logging
import socket
import threading
import time
from importlib import import_module
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.kafka.wire.kafka_python_client import KafkaPythonClient, _quiet_kafka_python
from streams.kafka.wire.kafka_python_manager import with_last_words
from streams.kafka.wire.kafka_python_settings import translated
from streams.kafka.wire.security import Security

SECRET = "planted-secret"


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, {"security_protocol": "PLAINTEXT"}),
        (
            {
                "security.protocol": "sasl_plaintext",
                "sasl.mechanism": "plain",
                "sasl.username": "u",
                "sasl.password": "p",
            },
            {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": "u",
                "sasl_plain_password": "p",
            },
        ),
        (
            {"security.protocol": "sasl_plaintext", "sasl.kerberos.service.name": "broker"},
            {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "GSSAPI",
                "sasl_kerberos_service_name": "broker",
            },
        ),
    ],
    ids=["plaintext", "PLAIN", "GSSAPI"],
)
def test_security_for_kafka_python(settings: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert translated(Security.of(settings)) == theirs


def test_tls_and_tokens_for_kafka_python() -> None:
    settings = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    found = translated(Security.of({**settings, "oauth_cb": lambda _: (SECRET, 1e10, "me", {"k": "v"})}))
    provider = found["sasl_oauth_token_provider"]
    assert (provider.token(), provider.extensions()) == (SECRET, {"k": "v"})
    assert SECRET not in repr(provider)
    assert (found["security_protocol"], found["ssl_context"].check_hostname) == ("SASL_SSL", True)


def test_the_client_shows_no_secret() -> None:
    who = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": SECRET}
    security = Security.of({"security.protocol": "sasl_plaintext", **who})
    client = KafkaPythonClient("127.0.0.1:1", "me", translated(security))
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
    began, metadata, answered = [], future(), threading.Event()

    async def bootstrap(deadline: float | None) -> bool:
        began.append(deadline)
        if len(began) == 1:
            client.manager.cluster._refresh_future = metadata
            await future()
        return True

    async def connect() -> None:
        await client.connected(time.monotonic() + 10)
        answered.set()

    monkeypatch.setattr(client.manager, "_do_bootstrap", bootstrap)
    client.start()
    try:
        assert client.post(connect)
        assert answered.wait(10)
    finally:
        client.close(1.0)
    assert len(began) == 2
    assert metadata.failed(), "who waits for it goes on"
