"""What Kafka's own Java clients and brokers have said (``tests.wire.record``): read, and written again byte by byte."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from streams.kafka.wire.codec import WireBytes, decode, encode
from streams.kafka.wire.message import Request, is_flexible
from streams.testing.proxy_wire import request_header
from tests.wire.generate import underscored
from tests.wire.record import FRAMES
from tests.wire.schemas import APIS

_FRAMES: list[dict[str, Any]] = [one for one in json.loads(FRAMES.read_text("utf-8")) if one["api"] in APIS]


def _kind(api: str) -> type[Request[Any]]:
    module = import_module(f"streams.kafka.wire.schemas.{underscored(api)}")
    found: type[Request[Any]] = getattr(module, f"{api}Request")
    return found


@pytest.mark.parametrize("api", sorted({one["api"] for one in _FRAMES}))
def test_frames_are_the_same_again(api: str) -> None:
    kind, seen = _kind(api), 0
    for one in _FRAMES:
        version = one["version"]
        if one["api"] != api or not kind.FIRST_VERSION <= version <= kind.LAST_VERSION:
            continue
        flexible = is_flexible(kind, version)
        request, answer = bytes.fromhex(one["request"]), bytes.fromhex(one["answer"])
        asked = WireBytes(request, 10 + len(request_header(request).client_id.encode()))
        heard = WireBytes(answer, 4)
        if flexible:
            asked.tags()
            if api != "ApiVersions":  # whose answer every client must be able to read
                heard.tags()
        assert encode(decode(kind, request, version, asked.at), version) == request[asked.at :], one
        assert encode(decode(kind.ANSWER, answer, version, heard.at), version) == answer[heard.at :], one
        seen += 1
    assert seen


def test_what_java_clients_do_not_say() -> None:
    """It is said by brokers, on TLS and SASL listeners, where there are rights, or by older tools."""
    elsewhere = {"DescribeLogDirs", "DescribeQuorum", "SaslAuthenticate", "SaslHandshake", "WriteTxnMarkers"}
    assert set(APIS) - {one["api"] for one in _FRAMES} == elsewhere
