"""Indexes that a view keeps of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streams import Index
from streams.errors import ConfigError, EncodeError, StoreError
from tests.unit.global_log_kit import MemoryTopic
from tests.unit.view_kit import number, view_of, viewed_topic
from tests.unit.waiting import PATIENCE


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    yield from viewed_topic(monkeypatch)


async def test_it_keeps_indexes_of_its_own(topic: MemoryTopic) -> None:
    def tens(value: int) -> int | None:
        return value // 10 if value else None

    for n, name in enumerate(["c", "b", "a", "none"]):
        topic.put(name.encode(), number([11, 12, 25, 0][n]), n % 2)
    view = view_of(topic, ordered=False, index={"tens": Index(int, tens)})
    for _ in range(2):
        async with view:
            await view.ready(PATIENCE)
            topic.put(b"c", number(11))
            sent = topic.put(b"a", number(25))
            await view.wait_for({0: sent + 1}, PATIENCE)
            assert [*view.by("tens", 1)] == [("b", 12), ("c", 11)]
            assert [*view.by_range("tens", reverse=True)] == [("a", 25), ("c", 11), ("b", 12)]
            began = view.by_range("tens", 1, 2)
            topic.put(b"b", number(12))  # in the other partition: twice, as in scans
            sent = topic.put(b"c", number(31))
            await view.wait_for({0: sent + 1}, PATIENCE)
            assert [*began] == [("b", 12)], "what has moved meanwhile is not where the scan found it"
            assert [*view.by("tens", 1)] == [("b", 12), ("b", 12)]
            sent = topic.put(b"b", None)
            await view.wait_for({0: sent + 1}, PATIENCE)
            assert [*view.by_range("tens", 1, 3, include_high=True)] == [("b", 12), ("a", 25), ("c", 31)]
            with pytest.raises(StoreError, match=r"no index 'ones'; it has \['tens'\]"):
                view.by("ones", 1)
            with pytest.raises(EncodeError, match="'tens'"):
                view.by("tens", "1")
    with pytest.raises(StoreError, match="stopped"):
        view.by("tens", 1)


def test_what_is_no_index(topic: MemoryTopic) -> None:
    with pytest.raises(ConfigError, match=r"index 'tens' is <.*; it must be an Index"):
        view_of(topic, index={"tens": lambda value: value // 10})


async def test_an_index_that_cannot_place_a_value_refuses_its_reads_alone(topic: MemoryTopic) -> None:
    topic.put(b"zero", number(0), 1)
    async with view_of(topic, index={"inverse": Index(int, lambda value: 60 // value)}) as view:
        await view.ready(PATIENCE)
        with pytest.raises(StoreError, match=r"'inverse' of rates cannot be built.*'zero' first: ZeroDivisionError"):
            view.by("inverse", 1)
        assert view.get("zero") == 0
        sent = topic.put(b"zero", number(6), 1)
        await view.wait_for({1: sent + 1}, PATIENCE)
        assert [*view.by("inverse", 10)] == [("zero", 6)]
