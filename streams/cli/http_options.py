"""The options of the monitor on a command line, shared by ``kes run`` and ``kes web``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from streams.errors import ConfigError

if TYPE_CHECKING:
    from streams.web.monitor import WebOptions

TokenFile = Annotated[
    str,
    typer.Option(
        "--http-tokens", metavar="FILE", help="File with the monitor's tokens. Default: a new token, printed."
    ),
]
Certificate = Annotated[
    str, typer.Option("--http-certificate", metavar="FILE", help="Certificate (PEM): serve the monitor over TLS.")
]
CertificateKey = Annotated[
    str, typer.Option("--http-key", metavar="FILE", help="Private key of the certificate (PEM).")
]
Names = Annotated[
    list[str] | None, typer.Option("--http-name", metavar="HOST", help="Accept this host name, too. Repeatable.")
]
BehindProxy = Annotated[
    bool, typer.Option("--http-behind-tls-proxy", help="Declare that a proxy in front terminates TLS.")
]


def web_options(
    http: str,
    token_file: str,
    certificate: str,
    key: str,
    names: list[str] | None,
    behind_tls_proxy: bool,
) -> WebOptions:
    """Return the options of a command line, checked. Raises ``ConfigError``."""
    from streams.web.monitor import WebOptions

    if not token_file and not sys.stderr.isatty():
        raise ConfigError(
            "standard error is not a terminal, so a generated token would end up in a log: name a file with a token "
            "(--http-tokens FILE; python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a token)"
        )
    return WebOptions(
        address=http,
        token_file=token_file,
        certificate=certificate,
        key=key,
        names=tuple(names or ()),
        behind_tls_proxy=behind_tls_proxy,
    ).checked()
