"""Tickets: what a question to a member carries in place of its asker's token, and the seal of the answer.

Both are an HMAC under the group's secret. A ticket covers method, path, body, the address that it is for, and when it
expires: an address that was forged in a status note gets no ticket that is of use at another one. The seal covers the
ticket, too: an answer is to one question, and only from a member of the group.
"""

from __future__ import annotations

import hmac
from typing import Final

from streams.errors import ConfigError, StreamsError
from streams.sak.private_files import read_private

TICKET_HEADER: Final = "x-kes-ticket"
SEAL_HEADER: Final = "x-kes-seal"
EXPIRES_SECONDS: Final = 30
_LEAST_SECRET: Final = 16
_FORM: Final = "kes1"


class TicketRefused(StreamsError):
    """A ticket is missing, not made with this group's secret, for another question or member, or too old; or an answer
    has no valid seal. The message shows nothing of the secret."""


def group_secret(path: str) -> bytes:
    """Return the secret in a file, without the spaces around it. Raises ``ConfigError``, also for no path, and for a
    file that other users can read or change."""
    if not path:
        raise ConfigError(
            "queries between processes need the group's secret: set QueryConfig.secret_file (KES_QUERIES_SECRET_FILE) "
            "to a file with at least 16 random bytes, the same for all members and readers"
        )
    try:
        found = read_private(path).strip()
    except OSError as error:
        raise ConfigError(f"QueryConfig.secret_file {path} cannot be read: {error.strerror}") from error
    if len(found) < _LEAST_SECRET:
        raise ConfigError(f"QueryConfig.secret_file {path} has less than {_LEAST_SECRET} bytes of secret")
    return found


def ticket(secret: bytes, method: str, path: str, body: bytes, target: str, now: float) -> str:
    """Make the ticket for one request to the member at ``target`` (its address, as its status note has it)."""
    expires = int(now) + EXPIRES_SECONDS
    return f"{_FORM}:{expires}:{_mac(secret, 'ticket', method, path, body, target, expires)}"


def check_ticket(secret: bytes, text: str, method: str, path: str, body: bytes, target: str, now: float) -> None:
    """Check that a request may be answered here. Raises ``TicketRefused``."""
    form, _, rest = text.partition(":")
    expiry, _, found = rest.partition(":")
    if form != _FORM or not (expiry.isascii() and expiry.isdecimal() and len(expiry) < 16):
        raise TicketRefused("the request has no ticket of this version")
    expected = _mac(secret, "ticket", method, path, body, target, int(expiry))
    if not hmac.compare_digest(expected.encode(), found.encode()):
        raise TicketRefused(
            f"the ticket is not for this request at {target}: the group's secret differs, or it was made for another"
        )
    if not now - 1 <= int(expiry) <= now + 2 * EXPIRES_SECONDS:
        raise TicketRefused(f"the ticket is too old, or the clocks differ by more than {EXPIRES_SECONDS} s")


def seal(secret: bytes, asked: str, status: int, body: bytes) -> str:
    """Make the seal of the answer to the request with this ticket."""
    return _mac(secret, "seal", asked, status, body)


def check_seal(secret: bytes, text: str, asked: str, status: int, body: bytes) -> None:
    """Check that an answer is from a member of the group, to this question. Raises ``TicketRefused``."""
    if not hmac.compare_digest(seal(secret, asked, status, body).encode(), text.encode()):
        raise TicketRefused("the answer has no valid seal: it is from no member with the group's secret")


def _mac(secret: bytes, *fields: str | bytes | int) -> str:
    """Sign the fields with their lengths: none can be moved into the next one."""
    framed = bytearray()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        framed += len(data).to_bytes(8, "big")
        framed += data
    return hmac.digest(secret, framed, "sha256").hex()
