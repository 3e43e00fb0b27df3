"""TLS, SASL and ACLs of the embedded broker, with certificates and passwords that are made on the spot.

Clients come to a listener of its own, the only one that asks who they are. The broker's other two (from node to node,
and the controller's) stay plain on 127.0.0.1: any process of this machine could use them. It is for tests and trials.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from confluent_kafka import KafkaException, admin

from streams.broker.probe import HOST
from streams.errors import ConfigError, EmbeddedBrokerError

ADMIN: Final = "admin"
"""The user for whom no ACL is needed."""

LISTENER: Final = "CLIENTS"
_LOGIN: Final = "org.apache.kafka.common.security."
MECHANISMS: Final = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
    "OAUTHBEARER": "oauthbearer.OAuthBearerLoginModule",
}
_SCRAM: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_ITERATIONS: Final = 4096
_TOKEN_SECONDS: Final = 3600
_ADMIN_SECONDS: Final = 30

Tls = bool | Literal["mutual"]


@dataclass(frozen=True, slots=True)
class UnsecuredToken:
    """An ``oauth_cb`` for a broker without a validator of tokens: says who the user is, and proves nothing."""

    user: str

    def __call__(self, _config: str = "") -> tuple[str, float]:
        """Return a token without a signature, and the time when it expires, in seconds since 1970."""
        now = time.time()
        claims = {"sub": self.user, "iat": now - 1, "exp": now + _TOKEN_SECONDS}
        head, body = (
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
            for part in ({"alg": "none"}, claims)
        )
        return f"{head}.{body}.", now + _TOKEN_SECONDS


@dataclass(frozen=True, slots=True)
class ListenerSecurity:
    """The demands of the broker on its clients. ``passwords``: by user, always with ``admin``; ``repr`` shows none."""

    tls: Tls
    sasl: tuple[str, ...]
    acl: bool
    passwords: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(
        cls, tls: Tls, sasl: str | Sequence[str], acl: bool, users: Mapping[str, str] | Sequence[str]
    ) -> ListenerSecurity:
        """Check the arguments of ``KafkaBroker``. Raises ``ConfigError``."""
        mechanisms = tuple(name.upper() for name in ([sasl] if isinstance(sasl, str) else sasl) if name)
        for name in mechanisms:
            if name not in MECHANISMS:
                raise ConfigError(f"sasl must be one of {', '.join(MECHANISMS)}, not {name!r}")
        if tls not in (True, False, "mutual"):
            raise ConfigError(f"tls must be True, False or 'mutual', not {tls!r}")
        if (acl or users) and not (mechanisms or tls == "mutual"):
            raise ConfigError("acl and users need a way to know users: sasl, or mutual TLS")
        given = dict(users) if isinstance(users, Mapping) else dict.fromkeys(users, "")
        for name in given:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name):
                raise ConfigError(f"a user's name is 1 to 40 letters, digits, '.', '-' or '_', not {name!r}")
        if any(not password.isprintable() for password in given.values()):
            raise ConfigError("a user's password is printable characters in one line")
        passwords = {name: given.get(name) or secrets.token_urlsafe(16) for name in {ADMIN: "", **given}}
        return cls(tls, mechanisms, acl, passwords)

    @property
    def is_on(self) -> bool:
        """Check whether clients have a listener of their own."""
        return bool(self.tls or self.sasl)

    @property
    def protocol(self) -> str:
        """``security.protocol`` of the clients' listener."""
        return ("SASL_" if self.sasl else "") + ("SSL" if self.tls else "PLAINTEXT")

    def properties(self, folder: Path) -> dict[str, str]:
        """Return the server properties, without the addresses; ``folder`` is that of ``make_files``."""
        prefix = f"listener.name.{LISTENER.lower()}."
        found: dict[str, str] = {}
        if self.tls:
            found |= {
                f"{prefix}ssl.keystore.type": "PEM",
                f"{prefix}ssl.keystore.location": str(folder / "broker.pem"),
                f"{prefix}ssl.truststore.type": "PEM",
                f"{prefix}ssl.truststore.location": str(folder / "ca.pem"),
                f"{prefix}ssl.client.auth": "required" if self.tls == "mutual" else "none",
                # The user is the common name alone, by which ACLs are easier to write.
                "ssl.principal.mapping.rules": "RULE:^(?:.*,)?CN=([^,]+).*$/$1/,DEFAULT",
            }
        if self.sasl:
            found[f"{prefix}sasl.enabled.mechanisms"] = ",".join(self.sasl)
        for name in self.sasl:
            options = ""
            if name == "PLAIN":
                options = "".join(f' user_{user}="{_quoted(password)}"' for user, password in self.passwords.items())
            elif name == "OAUTHBEARER":
                options = f' unsecuredLoginStringClaim_sub="{ADMIN}"'
            found[f"{prefix}{name.lower()}.sasl.jaas.config"] = f"{_LOGIN}{MECHANISMS[name]} required{options};"
        if self.acl:
            found["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            # The nodes themselves come to the plain listeners, anonymously.
            found["super.users"] = f"User:ANONYMOUS;User:{ADMIN}"
        return found

    def make_files(self, folder: Path) -> None:
        """Make the CA, the certificates, and a file of settings for each user, readable by this user only."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.tls:
            certify(folder, list(self.passwords) if self.tls == "mutual" else [])
        for user in self.passwords:
            settings = self.client_settings(folder, user)
            if settings.pop("oauth_cb", None):
                settings["enable.sasl.oauthbearer.unsecure.jwt"] = "true"
                settings["sasl.oauthbearer.config"] = f"principal={user}"
            write_privately(
                folder / f"{user}.properties", "".join(f"{key}={value}\n" for key, value in settings.items())
            )

    def add_scram_users(self, address: str) -> None:
        """Give the users their SCRAM passwords, through the plain listener. Raises ``EmbeddedBrokerError``."""
        wanted = [name for name in self.sasl if name in _SCRAM]
        if not wanted:
            return
        kafka: Any = admin  # its types leave these names out
        client = kafka.AdminClient({"bootstrap.servers": address})
        for name in wanted:  # a request may name a user only once
            info = kafka.ScramCredentialInfo(kafka.ScramMechanism[name.replace("-", "_")], _ITERATIONS)
            entries = [
                kafka.UserScramCredentialUpsertion(user, info, password.encode())
                for user, password in self.passwords.items()
            ]
            try:
                for future in client.alter_user_scram_credentials(entries).values():
                    future.result(_ADMIN_SECONDS)
            except KafkaException as error:
                raise EmbeddedBrokerError(f"the broker does not take the SCRAM users: {error}") from None

    def client_settings(self, folder: Path, user: str, mechanism: str = "") -> dict[str, Any]:
        """Return a user's settings by librdkafka's names. Raises ``ConfigError`` for another user or mechanism."""
        if user not in self.passwords:
            raise ConfigError(f"the broker has no user {user!r}; it has {', '.join(self.passwords)}")
        if mechanism and mechanism not in self.sasl:
            raise ConfigError(f"the broker does not take {mechanism}; it takes {', '.join(self.sasl) or 'no SASL'}")
        settings: dict[str, Any] = {"security.protocol": self.protocol.lower()}
        if self.tls:
            settings["ssl.ca.location"] = str(folder / "ca.pem")
        if self.tls == "mutual":
            settings["ssl.certificate.location"] = str(folder / f"{user}.pem")
            settings["ssl.key.location"] = str(folder / f"{user}.key")
        if self.sasl:
            settings["sasl.mechanism"] = mechanism or self.sasl[0]
            if settings["sasl.mechanism"] == "OAUTHBEARER":
                settings["oauth_cb"] = UnsecuredToken(user)
            else:
                settings |= {"sasl.username": user, "sasl.password": self.passwords[user]}
        return settings


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def certify(
    folder: Path,
    users: Sequence[str] = (),
    *,
    hosts: Sequence[str] = (HOST, "localhost"),
    not_before: datetime | None = None,
    not_after: datetime | None = None,
) -> None:
    """Make a CA, the broker's certificate for these hosts and times, and one for each user. Raises ``ConfigError``."""
    try:
        import trustme
        from cryptography.hazmat.primitives import serialization
    except ModuleNotFoundError as error:
        raise ConfigError(f"tls needs the package {error.name!r}: pip install 'kafka-event-source[broker]'") from error

    def key_of(leaf: trustme.LeafCert) -> str:  # as PKCS #8, the only form that Kafka reads
        key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return key.private_bytes(*form).decode()

    authority = trustme.CA()
    write_privately(folder / "ca.pem", authority.cert_pem.bytes().decode())
    broker = authority.issue_cert(*hosts, common_name="broker", not_before=not_before, not_after=not_after)
    chain = "".join(part.bytes().decode() for part in broker.cert_chain_pems)
    write_privately(folder / "broker.pem", key_of(broker) + chain)
    for user in users:
        client = authority.issue_cert("localhost", common_name=user)  # Java takes none without an alternative name
        write_privately(folder / f"{user}.pem", "".join(part.bytes().decode() for part in client.cert_chain_pems))
        write_privately(folder / f"{user}.key", key_of(client))


def write_privately(path: Path, text: str) -> None:
    """Write a file that only this user can read, in place of an older one."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
