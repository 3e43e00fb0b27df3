"""``Table.get`` and ``Table.put``, compiled and in plain Python: the same answers, errors, changes and contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.codecs import RESERVED_KEY_PREFIX
from streams.records import Change, TopicPartition
from streams.sak.compiling import fields_of
from streams.stores import table_access
from streams.stores.table import Table
from streams.stores.table_fields import TableFields
from tests.property.leaves_kit import needs_compiled, outcome, plain

pytestmark = needs_compiled
PLAIN = plain(table_access)


class Account(msgspec.Struct):
    balance: int
    rate: float | None = None


class Textual:
    """A codec of the user's, which decodes what it did not write as an error, and the number 8."""

    def __init__(self) -> None:
        self._written: dict[bytes, Any] = {}

    def encode(self, value: Any) -> bytes:
        data = repr(value).encode()
        if data != b"8":
            self._written[data] = value
        return data

    def decode(self, data: bytes) -> Any:
        return self._written[data]


KINDS: dict[str, dict[str, Any]] = {
    "text": {"key": str, "value": Account},
    "ordered": {"key": int, "value": Account, "ordered": True},
    "anything": {"key": bytes, "value": Any},
    "own codecs": {"key": str, "value": int, "key_codec": Textual(), "value_codec": Textual()},
}
buffers: list[Any] = [bytearray(b"array"), memoryview(b"view")]
weird = st.sampled_from(
    [None, 7, 1.5, "text", "\ud800", b"bytes", RESERVED_KEY_PREFIX + b"k", [], {}, float("nan"), *buffers]
)
keys = st.one_of(st.text(max_size=2), st.binary(max_size=2), st.integers(), weird)
values = st.one_of(
    st.builds(Account, st.integers(), st.one_of(st.none(), st.floats())),
    st.sampled_from([Account("no number"), Account(1, float("nan")), Account(1 << 80)]),  # type: ignore[arg-type]
    weird,
)
calls = st.one_of(
    st.tuples(st.just("get"), keys), st.tuples(st.just("get"), keys, weird), st.tuples(st.just("put"), keys, values)
)
steps = st.one_of(calls, calls, calls, st.sampled_from([("begin",), ("end",), ("revoked",)]))


def trace(module: Any, kind: str, lost: str | None, taken: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Each outcome of these steps, and what is there at the end. ``lost``: a field that is deleted first."""
    table = Table.factory(**KINDS[kind])(TopicPartition("t", 0))
    journal: list[Change] = []
    table.begin(journal)
    module.put(table, *{"ordered": (7, Account(7)), "anything": (b"a", "x")}.get(kind, ("a", Account(7))))
    if lost is not None:
        delattr(table, lost)
    for name, *arguments in taken:
        if name in ("get", "put"):
            yield outcome(getattr(module, name), table, *arguments)
        else:
            yield outcome(getattr(table, name), *([journal] if name == "begin" else []))
    yield journal
    yield outcome(lambda: sorted(table.dump()))


@given(st.sampled_from(sorted(KINDS)), st.lists(steps, max_size=12))
@example("text", [("get", "a"), ("put", "b", Account(1)), ("get", "b"), ("get", "c", 5)])
@example("own codecs", [("put", "b", 7), ("get", "b"), ("put", "b", 8), ("get", "b")])
def test_tables_answer_and_change_alike(kind: str, taken: list[tuple[Any, ...]]) -> None:
    assert repr([*trace(table_access, kind, None, taken)]) == repr([*trace(PLAIN, kind, None, taken)])


@pytest.mark.parametrize("kind", ["text", "ordered"])
@pytest.mark.parametrize("lost", fields_of(TableFields))
def test_a_table_that_has_lost_a_field_fails_alike(kind: str, lost: str) -> None:
    """As one does whose ``__init__`` did not call its base's."""
    key: Any = 7 if kind == "ordered" else "a"
    taken = [("get", key), ("put", key, Account(8)), ("put", key, 5), ("get", key), ("put", None, 5), ("get", b"x")]
    ours, theirs = (repr([*trace(module, kind, lost, taken)]) for module in (table_access, PLAIN))
    assert ours == theirs


def test_what_is_no_table_is_refused() -> None:
    class Hollow(Table[str, str]):
        def __init__(self) -> None: ...

    with pytest.raises(AttributeError, match="_bare_encode_key"):
        Hollow().get("k")
    with pytest.raises(TypeError):
        table_access.get(object(), "k")  # type: ignore[arg-type]
