"""The security of connections (``security.Security``) as settings of kafka-python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.kafka.wire.kafka_python import AbstractTokenProvider
from streams.kafka.wire.sasl import Credentials, OAuthToken
from streams.kafka.wire.security import Security


def translated(security: Security) -> dict[str, Any]:
    """Return kafka-python's settings for this security."""
    settings: dict[str, Any] = {"security_protocol": "SASL_" * bool(security.sasl) + _TRANSPORT[bool(security.tls)]}
    if security.tls is not None:
        settings["ssl_context"] = security.tls
    return settings | _sasl(security.sasl)


_TRANSPORT = ("PLAINTEXT", "SSL")


def _sasl(credentials: Credentials | None) -> dict[str, Any]:
    if credentials is None:
        return {}
    settings: dict[str, Any] = {"sasl_mechanism": credentials.mechanism}
    if credentials.fetch_token is not None:
        settings["sasl_oauth_token_provider"] = _TokenProvider(credentials.fetch_token)
    elif credentials.mechanism == "GSSAPI":
        settings["sasl_kerberos_service_name"] = credentials.service
    else:
        settings |= {"sasl_plain_username": credentials.username, "sasl_plain_password": credentials.password}
    return settings


class _TokenProvider(AbstractTokenProvider):
    """kafka-python's idea of a token provider.

    Called on the IO thread for each connection: a function that blocks holds up heartbeats meanwhile.
    """

    def __init__(self, fetch_token: Callable[[], OAuthToken]) -> None:
        super().__init__()
        self._fetch_token = fetch_token
        self._extensions: Mapping[str, str] = {}

    def token(self) -> str:
        """Return a fresh token."""
        token = self._fetch_token()
        self._extensions = token.extensions
        return token.value

    def extensions(self) -> dict[str, str]:
        """Return the extensions that came with the last token."""
        return dict(self._extensions)
