"""Answers to the wire producer, cut, joined and spoiled: each is read, or the connection ends; nothing else happens."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.kafka.wire import messages
from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.messages import MalformedAnswer, compact
from streams.kafka.wire.wide_connection import WideConnection

ASKED = [("topic", 3)]
DECODERS: list[Callable[[bytes], Any]] = [
    partial(messages.refused, asked=ASKED),
    partial(messages.partition_codes, asked=ASKED),
    messages.code_of,
    messages.ended,
]
PRODUCED = b"".join(
    [
        *(b"\0\0\0\7\0\2", compact("topic"), b"\2", struct.pack(">ih24x", 3, 87), b"\2", struct.pack(">i", 5)),
        *(compact("no key"), b"\0", compact("refused"), b"\0\0\0\0\0\0\0"),
    ]
)
"""An answer to Produce that names a record."""


def test_an_answer_that_leaves_a_partition_out_is_malformed() -> None:
    assert messages.refused(PRODUCED, ASKED) == {("topic", 3): (87, "refused", [(5, "no key")])}
    with pytest.raises(MalformedAnswer, match=r"nothing of topic\[4\]"):
        messages.refused(PRODUCED, [*ASKED, ("topic", 4)])
    with pytest.raises(MalformedAnswer, match=r"nothing of topic\[3\]"):
        messages.partition_codes(b"\0\0\0\7\0\0\0\0\0\1\0", ASKED)


@given(st.one_of(st.binary(max_size=60), st.binary(min_size=1, max_size=6)), st.integers(0, len(PRODUCED)))
def test_a_spoiled_answer_is_malformed_or_read(noise: bytes, at: int) -> None:
    for frame in (noise, PRODUCED[:at], PRODUCED[:at] + noise + PRODUCED[at + len(noise) :]):
        for decode in DECODERS:
            with contextlib.suppress(MalformedAnswer):
                decode(frame)


class Line(asyncio.Transport):
    """A transport that goes nowhere."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def setsockopt(self, *_: int) -> None:
        """Take an option of the socket."""

    def writelines(self, parts: Any) -> None:
        """Send nothing."""

    def abort(self) -> None:
        """Close nothing."""


@given(
    st.lists(st.binary(max_size=20), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1),
    st.one_of(st.none(), st.tuples(st.integers(0, 10), st.binary(min_size=1, max_size=4))),
    st.integers(0, 4),
)
def test_frames_in_any_pieces(
    bodies: list[bytes], sizes: list[int], noise: tuple[int, bytes] | None, together: int
) -> None:
    """Each request gets its own answer, and those behind a fault get none."""

    async def play() -> None:
        connection = BrokerConnection("host:1", "client")
        connection.connection_made(Line())
        calls = connection.calls([(0, 9, [b"x"]) for _ in bodies[:together]])
        calls += [connection.call(0, 9, [b"x"]) for _ in bodies[together:]]
        stream = bytearray()
        for number, body in enumerate(bodies, 1):
            stream += struct.pack(">ii", len(body) + 4, number) + body
        if noise is not None:
            stream[noise[0] : noise[0]] = noise[1]
        at = turn = 0
        while at < len(stream):
            size = sizes[turn % len(sizes)]
            connection.data_received(bytes(stream[at : at + size]))
            at, turn = at + size, turn + 1
        connection.close()
        for number, (call, body) in enumerate(zip(calls, bodies, strict=True), 1):
            if noise is None:
                assert await call == struct.pack(">i", number) + body
            elif isinstance(call.exception(), LostConnection):
                assert "host:1: " in str(call.exception())
            else:
                assert (await call)[:4] == struct.pack(">i", number)

    asyncio.run(play())


@given(
    st.lists(st.sampled_from([0, 5, 65_000, 65_532, 65_533, 70_000, 300_000]), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 3, 4, 5, 100, 65_536, 100_000]), min_size=1, max_size=5),
    st.booleans(),
)
def test_large_frames_in_any_pieces(lengths: list[int], sizes: list[int], torn: bool) -> None:
    """As a loop gives them to a connection that has the memory: as much as there is room for, at most."""

    async def play() -> None:
        connection = WideConnection("host:1", "client")
        connection.connection_made(Line())
        calls = [connection.call(0, 9, [b"x"]) for _ in lengths]
        bodies = [bytes([number]) * length for number, length in enumerate(lengths)]
        stream = b"".join(struct.pack(">ii", len(body) + 4, number) + body for number, body in enumerate(bodies, 1))
        left = memoryview(stream[:-1] if torn else stream)
        turn = 0
        while left:
            room = connection.get_buffer(-1)
            size = min(sizes[turn % len(sizes)] if len(left) < 1000 or turn < 50 else 1 << 20, len(room), len(left))
            room[:size] = left[:size]
            connection.buffer_updated(size)
            left, turn = left[size:], turn + 1
        connection.close()
        for number, (call, body) in enumerate(zip(calls, bodies, strict=True), 1):
            if torn and number == len(calls):
                assert isinstance(call.exception(), LostConnection)
            else:
                assert bytes(await call) == struct.pack(">i", number) + body

    asyncio.run(play())
