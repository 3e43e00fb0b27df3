"""The way of a query to the member that owns its partition. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from streams.errors import ConfigError
from streams.kafka.questions.group_view import GroupView
from streams.runtime.status import status_of

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server(NamedTuple):
    """A member that answers queries: ``address`` as ``http://host:port``, and the partitions that it owns, is about to
    take, and keeps copies of, as the group knows it."""

    instance: str
    address: str
    owned: frozenset[int] = frozenset()
    incoming: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()


def is_likely(server: Server, partition: int) -> bool:
    """Check whether a member has the partition, or a copy, as far as the group knows."""
    return partition in server.owned or partition in server.incoming or partition in server.copies


def servers_of(view: GroupView, notes: Mapping[str, str], topic: str) -> tuple[Server, ...]:
    """Join the group's description with the status notes of its instances. Notes are written by any program: one that
    cannot be read, or has no address, or none that may be used, is passed over."""
    found = []
    for member in view.members:
        try:
            status = status_of(notes[member.instance])
            address = checked_address(status.address)
        except (KeyError, ValueError, msgspec.MsgspecError, ConfigError):
            continue
        owned, incoming = member.owned.get(topic, frozenset()), frozenset[int]()
        if member.assignment is not None:
            # What it is to hand over is its own until the marker is committed.
            assignment = member.assignment
            owned, incoming = assignment.own.union(assignment.release), frozenset(assignment.incoming)
        elif member.report is not None:
            owned = member.report.owned
        found.append(Server(member.instance, address, owned, incoming, frozenset(status.copies)))
    return tuple(found)


def candidates(
    servers: Sequence[Server], partition: int, *, copies: bool, silent: Collection[str] = ()
) -> list[Server]:
    """Return the members to ask about a partition, the likeliest first, each once: the owner, the one that is
    about to take it, then (``copies``) those with a copy, and all others, because the description may be behind a
    move. Those at the addresses in ``silent`` come behind all of them."""

    def rank(server: Server) -> int:
        if partition in server.owned:
            return 0
        if partition in server.incoming:
            return 1
        return 2 if copies and partition in server.copies else 3

    return sorted(servers, key=lambda server: (server.address in silent, rank(server), server.instance))


def checked_address(address: str) -> str:
    """Check an address of a member: ``https://host:port``, or ``http`` on the loopback. Raises ``ConfigError``."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the address of a member is {address!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise ConfigError(f"the address of a member is {address!r}; it must be https://HOST:PORT")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("the address of a member must be a host and a port only")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ConfigError(f"the address of a member is {address!r}: without TLS it may be on the loopback only")
    return address
