"""Codecs of users': what is read back of what they write, and when that is an error."""

from __future__ import annotations

import os
import pickle
from enum import Enum
from typing import Any, cast

import msgspec
import pytest

from streams import Table
from streams.codecs import JsonCodec
from streams.errors import EncodeError
from streams.model.round_trips import everything_read_back
from streams.model.shortcuts import encoder_of
from streams.records import TopicPartition
from streams.stores import Heap, Index, SimpleStore, Stores, Windows
from tests.unit.waiting import said_by


class Renames:
    """A codec of a user's, which loses what is negative, and writes ``None`` only where it may."""

    def encode(self, value: int, /) -> bytes:
        return b"%d" % abs(value)

    def decode(self, data: bytes, /) -> int:
        return int(data)


def test_a_codec_of_a_users_is_read_back_by_sample_and_in_tests_always(caplog: pytest.LogCaptureFixture) -> None:
    """One that cannot read what it wrote is refused. One that rounds may mean it: that is said; tests refuse it."""
    encode = encoder_of(cast(Any, Renames()))
    assert [encode(value) for value in (5, 6, -7)] == [b"5", b"6", b"7"]  # the third is no sample
    assert not said_by(caplog, "streams.model")
    with everything_read_back(), pytest.raises(EncodeError, match=r"Renames does not come back .* lossy = True"):
        encode(-8)
    assert [encode(-value) for value in range(8, 24)] == [b"%d" % value for value in range(8, 24)]
    assert encoder_of(cast(Any, Renames()))(-1) == b"1"  # of another partition
    assert [line.partition(" (")[0] for line in said_by(caplog, "streams.model")] == [
        "Renames does not come back as it is written: it comes back as another int"
    ]
    with everything_read_back():
        assert encoder_of(cast(Any, Rounds()))(-9) == b"9"


class Rounds(Renames):
    lossy = True


class Unreadable(Renames):
    def decode(self, data: bytes, /) -> int:
        raise ValueError(data.decode())


def test_what_a_codec_of_a_users_cannot_read_is_refused_at_each_attempt() -> None:
    """Not until the attempts are no samples any more."""
    encode = encoder_of(cast(Any, Unreadable()))
    for _ in range(5):
        with pytest.raises(EncodeError, match="Unreadable is written so that it cannot be read back: ValueError: 7"):
            encode(7)


class NoEquals:
    def __init__(self) -> None:
        self.name = "".join(("na", "me"))  # pickle writes it once with its field's name, and twice after it was read


class Pickles:
    """With a nonce before it, as codecs that encrypt have it."""

    def encode(self, value: Any, /) -> bytes:
        return os.urandom(8) + pickle.dumps(value)

    def decode(self, data: bytes, /) -> Any:
        return pickle.loads(data[8:])


def test_other_bytes_for_the_same_value_are_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    with everything_read_back():
        for value in (NoEquals(), {"n": float("nan")}, [(1, 2)]):
            encoder_of(cast(Any, Pickles()))(value)
    assert not said_by(caplog, "streams.model")


class WritesOnly:
    def encode(self, value: int, /) -> bytes:
        return b"%d" % value

    def decode(self, data: bytes, /) -> int:
        raise NotImplementedError


def test_a_codec_that_only_writes_is_taken_at_its_word() -> None:
    assert encoder_of(cast(Any, WritesOnly()))(1) == b"1"


class Letter(Enum):
    A = "a"


class Names(msgspec.Struct):
    names: list[Letter]


class LeavesOut:
    """A codec that loses what begins with a dot, which a sample may miss."""

    def encode(self, value: str, /) -> bytes:
        return value.lstrip(".").encode()

    def decode(self, data: bytes, /) -> str:
        return data.decode()


def test_checked_stores_of_other_kinds_read_back_every_value_too() -> None:
    class Kinds(Stores):
        heap = Heap.of(str, str, priority=Index(str, lambda value: value), value_codec=LeavesOut(), checked=True)
        windows = Windows.tumbling(str, Names, size=10, add=lambda old, item: item, checked=True)

    simple = SimpleStore.factory(str, key=lambda item: "k", codec=LeavesOut(), checked=True)(TopicPartition("t", 0))
    store = Kinds(TopicPartition("t", 0))
    store.begin([])
    simple.begin([])
    names = Names([Letter.A])
    for _ in range(3):  # of the next one nothing is looked at
        store.heap.put("k", "a")
        store.windows.add("k", names, at_ms=0)
        simple.put("a")
    names.names = cast(Any, ["c"])
    for write in (
        lambda: store.heap.put("k", ".d"),
        lambda: store.windows.add("k", names, at_ms=0),
        lambda: simple.put(".d"),
    ):
        with pytest.raises(EncodeError):
            write()


def test_a_checked_table_reads_back_every_value() -> None:
    def puts(values: list[Any], **options: Any) -> list[str]:
        table = Table.factory(key=str, value=object, **options)(TopicPartition("t", 0))
        table.begin([])
        kept = []
        for value in values:
            try:
                table.put("k", value)
            except EncodeError:
                continue
            kept.append(value)
        return kept

    texts = ["a", "b", "c", ".d", "e"]  # of the fourth nothing is looked at
    assert puts(texts, value_codec=LeavesOut()) == texts
    assert puts(texts, value_codec=LeavesOut(), checked=True) == ["a", "b", "c", "e"]
    made = [Names([Letter.A]) for _ in range(5)]
    made[2].names = cast(Any, ["c"])
    assert puts(made, value_codec=JsonCodec(Names)) == made
    assert puts(made, value_codec=JsonCodec(Names), checked=True) == [made[0], made[1], made[3], made[4]]
    both = [
        Table.factory(key=str, value=object, value_codec=LeavesOut(), checked=checked)(TopicPartition("t", 0))
        for checked in (True, False)
    ]
    assert both[0].layout == both[1].layout, "a folder of one is a folder of the other"
