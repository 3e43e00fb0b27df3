"""Names that have changed, and events of an older version of which upcasters make several, or none."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, EventSource, EventSourceConfig, Record, event_type, upcaster
from streams.errors import DecodeError, RegistrationError
from streams.events import event_type_of
from streams.looks.records import Decoder
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord
from streams.runtime.replay import PartitionReplay
from streams.stores.table import Table
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT


@event_type("split.Order", version=3, aliases=("split-order", "Order"))
class SplitOrder(msgspec.Struct, frozen=True):
    order: str
    lines: int = 0


@event_type("split.Line")
class Line(msgspec.Struct, frozen=True):
    order: str
    number: int


@upcaster(SplitOrder, from_version=1)
def renamed(old: dict[str, Any]) -> dict[str, Any]:
    return {"order": old["id"], "lines": old.get("lines", 0), **({"wrong": 1} if "wrong" in old else {})}


@upcaster(SplitOrder, from_version=2, many=True)
def in_lines(old: dict[str, Any]) -> Any:
    count = old.pop("lines")
    if count < 0:
        return {-1: old, -2: ["split.Line"], -3: [(7, {})], -4: [("split.Gone", {})], -5: [(Line, {})]}[count]
    if not count:
        return []
    parts: list[Any] = [(Line if number % 2 else "split.Line", old | {"number": number}) for number in range(count)]
    return [(SplitOrder, old | {"lines": count}), *parts]


def source_of(got: list[Any]) -> EventSource[Any]:
    config = EventSourceConfig(
        group_id="g", topic="orders", num_partitions=1, decode_policy=DEAD_LETTER, error_policy=DEAD_LETTER
    )
    source = EventSource(config, Table.factory(key=str, value=int))

    @source.on
    def order(ctx: Any, event: SplitOrder) -> None:
        got.append(event)
        ctx.store.put(event.order, ctx.store.get(event.order, 0) + 1)

    @source.on
    async def line(ctx: Any, event: Line) -> None:
        got.append(event)
        ctx.store.put(event.order, ctx.store.get(event.order, 0) + 1)
        ctx.forward(OUT, event, key=event.order)
        if event.number == 999:
            raise ValueError("the last of a thousand")

    return source


def sent(value: Any, version: int, name: str = "split.Order") -> Record:
    headers = [(TYPE_HEADER, name.encode()), (VERSION_HEADER, b"%d" % version)]
    return Record("orders", msgspec.json.encode(value), b"k", headers)


def test_aliases_are_read_and_never_written() -> None:
    got: list[Any] = []
    source = source_of(got)
    with TestDriver(source) as driver:
        for name in ("split.Order", "split-order", "Order"):
            driver.send_record(sent({"order": name}, 3, name))
        assert [event.order for event in got] == ["split.Order", "split-order", "Order"]
        assert [handler.event for handler in source.topology.handlers] == ["split.Order", "split.Line"]
        assert driver.outputs("orders", SplitOrder)[1].order == "split-order"
    assert event_type_of(SplitOrder).headers == [(TYPE_HEADER, b"split.Order"), (VERSION_HEADER, b"3")]


@pytest.mark.parametrize("aliases", ["Old", ("split.Other",), ("a", "a"), ("",), (1,), (["a"],), ["a"], None], ids=repr)
def test_what_are_no_aliases(aliases: Any) -> None:
    with pytest.raises(RegistrationError):
        event_type("split.Other", aliases=aliases)(type("Other", (msgspec.Struct,), {}))


def test_two_types_that_share_a_name_are_refused() -> None:
    @event_type("split.Third", aliases=("Order",))
    class Third(msgspec.Struct, frozen=True):
        pass

    with pytest.raises(RegistrationError, match=r"'Order' has a handler already.*is an alias"):
        source_of([]).register_event_type(Third, lambda ctx, event: None)


def test_the_parts_of_an_event_are_handled_in_turn_as_one() -> None:
    got: list[Any] = []
    with TestDriver(source_of(got)) as driver:
        driver.send_record(sent({"id": "a", "lines": 3}, 1))
        driver.send_record(sent({"order": "b", "lines": 0}, 2))
        driver.send_record(sent({"order": "c", "lines": 5}, 3))
        driver.check()
        assert got == [SplitOrder("a", 3), Line("a", 0), Line("a", 1), Line("a", 2), SplitOrder("c", 5)]
        assert driver.store(0).get("a") == 4
        assert driver.outputs(OUT, Line) == [Line("a", 0), Line("a", 1), Line("a", 2)]
        assert driver.committed_offsets()[0] >= 3


def test_a_thousand_parts_the_last_of_which_fails_leave_nothing() -> None:
    with TestDriver(source_of([])) as driver:
        driver.send_record(sent({"id": "a", "lines": 1000}, 1))
        driver.check()
        [letter] = driver.dead_letters()
        assert letter.value == b'{"id":"a","lines":1000}'
        assert letter.header("__kes_dlq_handler") == b"tests.unit.test_split_events.source_of.<locals>.line"
        assert driver.outputs(OUT) == []
        assert driver.store(0).get("a") is None


def test_a_parked_event_names_the_handler_of_its_part_too() -> None:
    config = EventSourceConfig(group_id="g", topic="orders", num_partitions=1, error_policy=PARK)
    source = EventSource(config)

    @source.on
    def order(ctx: Any, event: SplitOrder) -> None:
        raise ValueError("not this one")

    source.register_event_type(Line, lambda ctx, event: None)
    with TestDriver(source) as driver:
        driver.send_record(sent({"id": "a", "lines": 2}, 1))
        [queue] = driver._worker(0).timers.parked.by_name.values()  # type: ignore[union-attr]
        assert queue.state.handler.endswith("test_a_parked_event_names_the_handler_of_its_part_too.<locals>.order")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (-1, "returned dict, not a list"),
        (-2, "something else than .class or name, dict."),
        (-3, "something else than .class or name, dict."),
        (-4, "'split.Gone', which has no handler"),
        (-5, "did not make a Line"),
        (20_000, "more than 10000 events"),
    ],
)
def test_parts_that_cannot_be_are_the_record_s_problem(lines: int, said: str) -> None:
    with TestDriver(source_of([])) as driver:
        driver.send_record(sent({"id": "a", "lines": lines}, 1))
        [letter] = driver.dead_letters()
        message = letter.header("__kes_dlq_message") or b""
        assert re.search(said, message.decode())


def test_a_part_whose_handler_has_no_turn_is_refused_by_name() -> None:
    config = EventSourceConfig(group_id="g", topic="orders", num_partitions=1, decode_policy=DEAD_LETTER)
    source = EventSource(config)
    source.register_event_type(SplitOrder, lambda ctx, event: None)
    source.register_event_type(Line, lambda ctx, event: None, blocking=True)
    with TestDriver(source) as driver:
        driver.send_record(sent({"id": "a", "lines": 1}, 1))
        assert b"makes a 'split.Line', which is handled in its turn" in (
            driver.dead_letters()[0].header("__kes_dlq_message") or b""
        )


def test_a_timer_of_an_older_release_is_split_too() -> None:
    got: list[Any] = []
    source = source_of(got)
    with TestDriver(source) as driver:
        driver.interject(0, lambda ctx: ctx.schedule_in(5, SplitOrder("a", 2), name="late"))
        engine = driver._world.members[0].engine
        assert engine is not None
        timer = engine.workers[0].timers.get("late")
        assert timer is not None
        old = msgspec.structs.replace(timer, version=2, value=b'{"order":"a","lines":1}')
        driver.interject(0, lambda ctx: ctx._timer_changes.update({"late": old}) if ctx._timer_changes else
                         setattr(ctx, "_timer_changes", {"late": old}))  # fmt: skip
        driver.advance(10)
    assert got == [SplitOrder("a", 1), Line("a", 0)]


def test_replays_and_looks_do_the_same_and_others_say_why_not() -> None:
    record = IncomingRecord(
        "orders", 0, 0, b"k", b'{"id":"a","lines":1}', ((TYPE_HEADER, b"split-order"), (VERSION_HEADER, b"1"))
    )

    async def replayed() -> list[Any]:
        got: list[Any] = []
        replay = PartitionReplay(source_of(got).program(), 0, wall_ms=0)
        await replay.handle([record])
        replay.close()
        return got

    assert asyncio.run(replayed()) == [SplitOrder("a", 1), Line("a", 0)]
    content = Decoder(source_of([])).content(record)
    assert content.value == [{"order": "a", "lines": 1}, {"order": "a", "number": 0}]
    with pytest.raises(DecodeError, match="several events of one, which only an event source handles"):
        event_type_of(SplitOrder).decode(record.value, 1)
