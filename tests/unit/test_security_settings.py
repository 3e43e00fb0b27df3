"""The security of connections, from librdkafka's settings: all of it or a refusal, and no secret in sight."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.kafka.wire.sasl import Credentials, OAuthToken
from streams.kafka.wire.security import PLAINTEXT, Security

SECRET = "planted-secret"


def context_of(settings: dict[str, Any]) -> ssl.SSLContext:
    context = Security.of(settings).tls
    assert context is not None
    return context


def test_no_setting_means_plaintext() -> None:
    assert Security.of({"linger.ms": 1, "acks": "all"}) == PLAINTEXT


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "scram-sha-512"])
@pytest.mark.parametrize("key", ["sasl.mechanism", "sasl.mechanisms"])
def test_user_and_password(mechanism: str, key: str) -> None:
    settings = {"security.protocol": "sasl_plaintext", key: mechanism, "sasl.username": "u", "sasl.password": SECRET}
    found = Security.of(settings)
    assert found == Security(None, Credentials(mechanism.upper(), "u", SECRET))
    assert SECRET not in repr(found)


def test_tls_checks_the_certificate_and_the_host_unless_told_otherwise() -> None:
    context = context_of({"security.protocol": "SSL"})
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    context = context_of({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"})
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)
    context = context_of({"security.protocol": "ssl", "enable.ssl.certificate.verification": "false"})
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


def test_a_token_comes_from_the_function() -> None:
    settings: dict[str, Any] = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda config: (SECRET, 1e10, "me", {"k": "v"}),
    }
    credentials = Security.of(settings).sasl
    assert credentials is not None
    assert credentials.fetch_token is not None
    token = credentials.fetch_token()
    assert token == OAuthToken(SECRET, {"k": "v"})
    assert SECRET not in repr(token)
    assert credentials.login_at("host").first() == b"n,,\x01auth=Bearer planted-secret\x01k=v\x01\x01"


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
        Security.of(settings)
    assert SECRET not in str(refused.value)


def test_a_broken_certificate_names_setting_and_file(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("nothing")
    for name in ("ssl.ca.location", "ssl.certificate.location", "ssl.crl.location"):
        with pytest.raises(ConfigError, match=r"cert\.pem") as refused:
            Security.of({"security.protocol": "SSL", name: str(broken), "ssl.key.password": SECRET})
        assert name in str(refused.value)
        assert SECRET not in str(refused.value)
