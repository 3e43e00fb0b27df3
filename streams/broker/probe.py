"""Probe for a broker by a Metadata request on a plain socket; find ports that a broker can have for long."""

from __future__ import annotations

import random
import socket
import struct
from dataclasses import dataclass

HOST = "127.0.0.1"

_METADATA, _VERSION, _CORRELATION = 3, 1, 7
_LONGEST_ANSWER = 16 << 20

# Below the ranges that Linux (32768) and macOS (49152) take the ports of outgoing connections from. A client that
# tries again and again to reach a stopped broker on a port of that range is in the end given that very port for its
# own side, is connected to itself, and the broker cannot have its port back.
_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True)
class Answer:
    """A Metadata answer: numbers of the brokers that are alive, and the controller's (-1: none yet)."""

    brokers: tuple[int, ...]
    controller: int


def metadata(port: int, timeout: float = 2.0) -> Answer | None:
    """Return the metadata of the broker on this machine's ``port``; nothing if none answers as a broker does."""
    try:
        return _parse(ask(port, _METADATA, _VERSION, struct.pack(">i", 0), timeout))
    except (OSError, struct.error):
        return None


def ask(port: int, api: int, version: int, body: bytes, timeout: float, *, flexible: bool = False) -> bytes:
    """Send one request to the broker on this machine's ``port``; return the answer from its correlation number on.

    ``flexible``: the request is of a version with tagged fields. Raises ``OSError`` without an answer, and
    ``struct.error`` for one that is not a broker's.
    """
    client = b"probe"
    header = struct.pack(f">hhih{len(client)}s", api, version, _CORRELATION, len(client), client)
    request = header + (b"\0" if flexible else b"") + body
    with socket.create_connection((HOST, port), timeout) as connection:
        connection.settimeout(timeout)
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        if not 12 <= size <= _LONGEST_ANSWER:
            raise struct.error(f"an answer of {size} bytes")
        answer = _read(connection, size)
    if struct.unpack_from(">i", answer) != (_CORRELATION,):
        raise struct.error("not an answer to our request")
    return answer


def _read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed half way")
        parts += part
    return parts


def _parse(body: bytes) -> Answer:
    (count,) = struct.unpack_from(">i", body, 4)
    at, brokers = 8, []
    for _ in range(count):
        number, host = struct.unpack_from(">ih", body, at)
        at += 6 + host + 4
        (rack,) = struct.unpack_from(">h", body, at)
        at += 2 + max(rack, 0)
        brokers.append(number)
    (controller,) = struct.unpack_from(">i", body, at)
    return Answer(tuple(brokers), controller)


def is_free(port: int) -> bool:
    """Check whether a server could listen on this machine's ``port`` now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
            server.listen(1)
        except OSError:
            return False
    return True


def free_port(avoid: frozenset[int] = frozenset()) -> int:
    """A port that is free now; it may be taken by another process a moment later."""
    for port in random.sample(_PORTS, 200):
        if port not in avoid and is_free(port):
            return port
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])
