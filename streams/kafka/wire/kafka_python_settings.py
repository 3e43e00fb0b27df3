"""Security settings of librdkafka, translated for kafka-python: one set of settings serves both clients.

A setting that has no counterpart is refused (``ConfigError``), never dropped: a member that connects with less security
than its settings demand would be worse than none. Messages name settings and files, never values of secrets.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streams.errors import ConfigError
from streams.kafka.wire.kafka_python import AbstractTokenProvider

_PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "oauth_cb", "oauthbearer_")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")
_SASL = {
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
}
_TLS = {
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.crl.location",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
}


def security_only(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of librdkafka settings that is about security: what ``translate`` takes."""
    return {name: value for name, value in settings.items() if name.startswith(_PREFIXES)}


def security_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """kafka-python's settings for the security of these librdkafka settings. Raises as ``translate``."""
    return translate(security_only(settings))


def translate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """librdkafka's ``security.protocol``, ``sasl.*`` and ``ssl.*`` as kafka-python settings.

    Certificates are read here, so a wrong file is found before anything connects. Raises ``ConfigError`` for a setting
    that the group member cannot honour, and for a file or a value that is wrong.
    """
    rest = dict(settings)
    protocol = str(rest.pop("security.protocol", "plaintext")).upper()
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"security.protocol must be one of {', '.join(_PROTOCOLS).lower()}")
    translated: dict[str, Any] = {"security_protocol": protocol}
    tls = {name: rest.pop(name) for name in _TLS & rest.keys()}
    if protocol.endswith("SSL"):
        translated["ssl_context"] = _tls_context(tls)
    sasl = {name: rest.pop(name) for name in ("sasl.mechanism", "sasl.mechanisms", "oauth_cb", *_SASL) if name in rest}
    if protocol.startswith("SASL"):
        translated |= _sasl(sasl)
    if rest:
        names = ", ".join(sorted(rest))
        raise ConfigError(f"the group member cannot honour {names}; leave it out, or use another way to authenticate")
    return translated


def _sasl(settings: Mapping[str, Any]) -> dict[str, Any]:
    mechanism = str(settings.get("sasl.mechanism", settings.get("sasl.mechanisms", "GSSAPI"))).upper()
    if mechanism not in _MECHANISMS:
        raise ConfigError(f"sasl.mechanism must be one of {', '.join(_MECHANISMS)}")
    translated = {theirs: settings[ours] for ours, theirs in _SASL.items() if ours in settings}
    translated["sasl_mechanism"] = mechanism
    if mechanism == "PLAIN" or mechanism.startswith("SCRAM"):
        missing = [name for name in ("sasl.username", "sasl.password") if not settings.get(name)]
        if missing:
            raise ConfigError(f"sasl.mechanism={mechanism} needs {' and '.join(missing)}")
    if mechanism == "OAUTHBEARER":
        if not callable(settings.get("oauth_cb")):
            raise ConfigError("sasl.mechanism=OAUTHBEARER needs oauth_cb, a function that returns (token, expiry)")
        translated["sasl_oauth_token_provider"] = _TokenProvider(settings["oauth_cb"])
    return translated


def _tls_context(settings: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host name, until a setting says no
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    naming = str(settings.get("ssl.endpoint.identification.algorithm", "https")).lower()
    if naming not in ("https", "none"):
        raise ConfigError("ssl.endpoint.identification.algorithm must be https or none")
    verified = str(settings.get("enable.ssl.certificate.verification", True)).lower() != "false"
    context.check_hostname = naming == "https" and verified  # first: ssl refuses CERT_NONE while names are checked
    context.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
    authorities, pem = settings.get("ssl.ca.location"), settings.get("ssl.ca.pem")
    if authorities and authorities != "probe":
        path = _existing("ssl.ca.location", authorities)
        with _named("ssl.ca.location", path):
            context.load_verify_locations(**({"capath": path} if Path(path).is_dir() else {"cafile": path}))
    elif pem:
        with _named("ssl.ca.pem", "its text"):
            context.load_verify_locations(cadata=str(pem))
    else:
        context.load_default_certs()
    if settings.get("ssl.certificate.location"):
        certificate = _existing("ssl.certificate.location", settings["ssl.certificate.location"])
        key = settings.get("ssl.key.location")
        with _named("ssl.certificate.location or ssl.key.location or ssl.key.password", certificate):
            # A function, so that OpenSSL never asks on the terminal when a key has a password that was not given.
            password = str(settings.get("ssl.key.password") or "")
            context.load_cert_chain(certificate, _existing("ssl.key.location", key) if key else None, lambda: password)
    if settings.get("ssl.crl.location"):
        path = _existing("ssl.crl.location", settings["ssl.crl.location"])
        with _named("ssl.crl.location", path):
            context.load_verify_locations(cafile=path)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


@contextlib.contextmanager
def _named(setting: str, path: str) -> Iterator[None]:
    """Turn the errors of reading a certificate into one that names the setting and the file."""
    try:
        yield
    except ConfigError:
        raise
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"{setting} ({path}) cannot be used: {reason}") from None


def _existing(setting: str, path: object) -> str:
    if not Path(str(path)).exists():
        raise ConfigError(f"{setting}: there is no {path}")
    return str(path)


class _TokenProvider(AbstractTokenProvider):
    """kafka-python's idea of a token provider around librdkafka's ``oauth_cb``.

    Called on the IO thread for each connection: an ``oauth_cb`` that blocks holds up heartbeats meanwhile.
    """

    def __init__(self, oauth_cb: Callable[[str], Sequence[Any]]) -> None:
        super().__init__()
        self._oauth_cb = oauth_cb
        self._extensions: dict[str, str] = {}

    def token(self) -> str:
        """A fresh token. The function may return extensions too, as its fourth value."""
        answer = self._oauth_cb("")
        self._extensions = dict(answer[3]) if len(answer) > 3 else {}
        return str(answer[0])

    def extensions(self) -> dict[str, str]:
        """Return the extensions that came with the last token."""
        return self._extensions
