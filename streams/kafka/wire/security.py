"""Security of connections, from the settings of librdkafka: one set of settings serves all clients.

A setting that has no counterpart is refused (``ConfigError``), never dropped: a member that connects with less security
than its settings demand would be worse than none. Messages name settings and files, never values of secrets.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streams.errors import ConfigError
from streams.kafka.wire.sasl import MECHANISMS, Credentials, OAuthToken

_PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "oauth_cb", "oauthbearer_")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_SASL = (
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "sasl.kerberos.service.name",
    "oauth_cb",
)
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


@dataclass(frozen=True, slots=True)
class Security:
    """A way to make connections: with TLS where there is a context, and with a login where there are credentials."""

    tls: ssl.SSLContext | None = None
    sasl: Credentials | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Security:
        """Read librdkafka's ``security.protocol``, ``sasl.*`` and ``ssl.*``; other settings are left alone.

        Certificates are read here, so a wrong file is found before anything connects. Raises ``ConfigError`` for a
        setting that cannot be honoured, and for a file or a value that is wrong.
        """
        rest = {name: value for name, value in settings.items() if name.startswith(_PREFIXES)}
        protocol = str(rest.pop("security.protocol", "plaintext")).upper()
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"security.protocol must be one of {', '.join(_PROTOCOLS).lower()}")
        tls = {name: rest.pop(name) for name in _TLS & rest.keys()}
        context = _tls_context(tls) if protocol.endswith("SSL") else None
        sasl = {name: rest.pop(name) for name in _SASL if name in rest}
        credentials = _credentials(sasl) if protocol.startswith("SASL") else None
        if rest:
            names = ", ".join(sorted(rest))
            raise ConfigError(
                f"the group member cannot honour {names}; leave it out, or use another way to authenticate"
            )
        return cls(context, credentials)


PLAINTEXT: Final = Security()
"""Connections without TLS and without a login."""


def _credentials(settings: Mapping[str, Any]) -> Credentials:
    mechanism = str(settings.get("sasl.mechanism", settings.get("sasl.mechanisms", "GSSAPI"))).upper()
    if mechanism not in MECHANISMS:
        raise ConfigError(f"sasl.mechanism must be one of {', '.join(MECHANISMS)}")
    if mechanism == "PLAIN" or mechanism.startswith("SCRAM"):
        missing = [name for name in ("sasl.username", "sasl.password") if not settings.get(name)]
        if missing:
            raise ConfigError(f"sasl.mechanism={mechanism} needs {' and '.join(missing)}")
    oauth_cb = settings.get("oauth_cb")
    if mechanism == "OAUTHBEARER" and not callable(oauth_cb):
        raise ConfigError("sasl.mechanism=OAUTHBEARER needs oauth_cb, a function that returns (token, expiry)")
    return Credentials(
        mechanism,
        str(settings.get("sasl.username", "")),
        str(settings.get("sasl.password", "")),
        _fetching(oauth_cb) if mechanism == "OAUTHBEARER" and callable(oauth_cb) else None,
        str(settings.get("sasl.kerberos.service.name", "kafka")),  # librdkafka's default
    )


def _fetching(oauth_cb: Callable[[str], Any]) -> Callable[[], OAuthToken]:
    """Return what fetches a fresh token by librdkafka's ``oauth_cb``, with the extensions of its fourth value."""

    def fetch() -> OAuthToken:
        answer = oauth_cb("")
        extensions = dict(answer[3]) if len(answer) > 3 else {}
        return OAuthToken(str(answer[0]), {str(name): str(value) for name, value in extensions.items()})

    return fetch


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
