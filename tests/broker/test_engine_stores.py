"""What a failed event leaves in a store (nothing), for each kind of store, and that the changelog says the same."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    Change,
    ErrorPolicy,
    ErrorResponse,
    EventContext,
    EventSource,
    SimpleStore,
    Table,
    TopicPartition,
)
from streams.errors import StoreError
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Added, Lab, Running, Total, Totals, raised_by, start_failure

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


@pytest.fixture
def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    return Lab(kafka_broker.bootstrap_servers, topic_prefix)


class Basket(msgspec.Struct):
    """A mutable value with a mutable part."""

    items: list[str] = []
    total: int = 0


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_failed_handler_leaves_no_trace_in_a_table(lab: Lab, kind: str, ordered: bool) -> None:
    """It changed what it had read, wrote several keys, deleted others, wrote one key twice and deleted what it made."""
    await lab.create()
    source = EventSource(lab.config(), Table.factory(key=str, value=Basket, ordered=ordered))

    def work(ctx: EventContext[Table[str, Basket]], event: Added) -> None:
        basket = ctx.store.get(event.name) or Basket()
        basket.items.append(event.deed)
        basket.total += event.amount
        ctx.store.put(event.name, basket)
        if event.deed == "raise":
            for name in ("a", "b"):
                other = ctx.store.get(name)
                assert other is not None
                other.items.clear()
                ctx.store.put(name, other)
            ctx.store.delete("a")
            ctx.store.put("new", Basket(["x"], 1))
            ctx.store.put("new", Basket(["y"], 2))
            ctx.store.delete("new")
            ctx.store.put("newer", Basket())
            basket.total = 1_000_000  # a reference that was put stays the handler's own
            raise ValueError("after all that")

    async def patient(ctx: EventContext[Table[str, Basket]], event: Added) -> None:
        work(ctx, event)

    source.register_event_type(Added, patient if kind == "async" else work, on_error=SKIP)
    seen: list[dict[str, Basket]] = []
    async with Running(source) as run:
        await lab.add("a", "b", deed="one")
        await lab.add("b", deed="raise")
        await run.until_committed(3)
        await source.interject(0, lambda ctx: seen.append(dict(ctx.store.items())))
        await lab.add("a", deed="two")
        await run.until_committed(4)
    assert seen == [{"a": Basket(["one"], 1), "b": Basket(["one"], 1)}]
    assert {key: msgspec.json.decode(value, type=Basket) for key, value in (await lab.state()).items()} == {
        b"a": Basket(["one", "two"], 2),
        b"b": Basket(["one"], 1),
    }


async def test_deletes_are_tombstones_and_survive(lab: Lab) -> None:
    await lab.create()

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        if event.deed == "delete":
            ctx.store.delete(event.name)
        else:
            ctx.store.put(event.name, ctx.store.get(event.name, 0) + event.amount)

    first = lab.source()
    first.register_event_type(Added, handler)
    async with Running(first) as run:
        await lab.add("a", "b", "c")
        await run.until_committed(3)
        await lab.add("a", "c", "never", deed="delete")
        await lab.add("c", amount=5)
        await run.until_committed(7)
    assert await lab.counts() == {"b": 1, "c": 5}
    second = lab.source()
    second.register_event_type(Added, handler)
    async with Running(second) as run:
        await lab.add("a", "b", "c")
        await run.until_committed(3)
    assert await lab.counts() == {"a": 1, "b": 2, "c": 6}


class Item(msgspec.Struct, frozen=True):
    name: str
    count: int


async def test_simple_store(lab: Lab) -> None:
    """With ``record_change`` at each step, as the ancestor's handlers do it, and without; a failure leaves nothing."""
    await lab.create()
    made = SimpleStore.factory(Item, key=lambda item: item.name)

    def handler(ctx: EventContext[SimpleStore[Item]], event: Added) -> None:
        old = ctx.store.get(event.name)
        change = ctx.store.put(Item(event.name, event.amount + (old.count if old else 0)))
        if event.deed == "record":
            ctx.record_change(change)
        if event.deed == "raise":
            ctx.record_change(change)
            ctx.store.delete("a")
            raise ValueError("no")
        if event.deed == "delete":
            gone = ctx.store.delete(event.name)
            assert gone is not None
            ctx.record_change(gone)

    def register() -> EventSource[SimpleStore[Item]]:
        source = EventSource(lab.config(), made)
        source.register_event_type(Added, handler, on_error=SKIP)
        return source

    source = register()
    async with Running(source) as run:
        await lab.add("a", deed="record")
        await lab.add("a", "b", "c")
        await lab.add("b", deed="raise")
        await lab.add("c", deed="delete")
        await run.until_committed(6)
    source = register()
    seen: list[list[Item]] = []
    async with Running(source) as run:
        await lab.add("b")
        await run.until_committed(1)
        await source.interject(0, lambda ctx: seen.append(list(ctx.store)))
    assert seen == [[Item("a", 2), Item("b", 2)]]


class Journal:
    """An own store in memory: a list of words, no journal; it must be told what to undo by being made anew."""

    made: ClassVar[list[Journal]] = []

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.words: dict[bytes, bytes] = {}
        self.types: list[str] = []
        self.revocations = 0
        Journal.made.append(self)

    def receive_change(self, change: Change, /) -> None:
        assert not self.revocations
        self.types.append(change.type)
        if change.value is None:
            self.words.pop(change.key, None)
        else:
            self.words[change.key] = change.value

    def revoked(self) -> None:
        self.revocations += 1


def write(ctx: EventContext[Journal], event: Added) -> None:
    """Append a letter to a word, and record it."""
    key = event.name.encode()
    word = ctx.store.words.get(key, b"") + event.deed[:1].encode()
    ctx.store.words[key] = word
    ctx.record_change(Change(key, word, type="word"))


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_own_store_is_restored_after_a_failed_event(lab: Lab, kind: str) -> None:
    """The engine cannot undo it: it is dropped, made anew and filled from the changelog; then the policy decides."""
    Journal.made = []
    await lab.create()
    source = EventSource(lab.config(), Journal)
    policy = ErrorPolicy(retries=1, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)
    attempts: list[tuple[int, dict[bytes, bytes]]] = []

    def work(ctx: EventContext[Journal], event: Added) -> None:
        if event.deed in ("fail", "once"):
            attempts.append((ctx.attempt, dict(ctx.store.words)))
        write(ctx, event)
        ctx.forward(lab.output, Total(event.name, ctx.attempt), key=event.name)
        if event.deed == "fail" or (event.deed == "once" and ctx.attempt == 1):
            ctx.store.words.clear()
            raise ValueError("spoiled")

    async def patient(ctx: EventContext[Journal], event: Added) -> None:
        work(ctx, event)

    source.register_event_type(Added, patient if kind == "async" else work, on_error=policy)
    async with Running(source) as run:
        await lab.add("w", "v", deed="a")
        await lab.add("w", deed="fail")
        await lab.add("w", deed="b")
        await lab.add("w", deed="once")
        await lab.add("v", deed="c")
        await run.until_committed(6)
        await run.until(lambda: run.active == 1, "it is at work after all the restarts")
    spoiled = {b"w": b"a", b"v": b"a"}
    assert attempts == [(1, spoiled), (2, spoiled), (1, {b"w": b"ab", b"v": b"a"}), (2, {b"w": b"ab", b"v": b"a"})]
    assert await lab.state() == {b"w": b"abo", b"v": b"ac"}
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["2"]
    assert [facts["attempts"] for _, facts in await lab.dead_letters()] == ["2"]
    assert sorted(await lab.totals()) == sorted([("w", 1), ("v", 1), ("w", 1), ("w", 2), ("v", 1)])
    assert [store.revocations for store in Journal.made] == [1] * len(Journal.made)
    assert len(Journal.made) == 4, "one, and a new one after each spoiled attempt"
    assert Journal.made[1].types == ["word", "word"], "the entry's type travels with it"
    await lab.check_settled()


async def test_own_store_survives_and_deletes(lab: Lab) -> None:
    Journal.made = []
    await lab.create()

    def handler(ctx: EventContext[Journal], event: Added) -> None:
        if event.deed == "delete":
            ctx.record_change(Change(event.name.encode(), None))
            del ctx.store.words[event.name.encode()]
        else:
            write(ctx, event)

    for names, deed in ((("a", "b"), "x"), (("a",), "delete"), (("b", "c"), "y")):
        source = EventSource(lab.config(), Journal)
        source.register_event_type(Added, handler)
        await lab.add(*names, deed=deed)
        async with Running(source) as run:
            await run.until_committed(len(names))
    source = EventSource(lab.config(), Journal)
    source.register_event_type(Added, handler)
    async with Running(source):
        assert Journal.made[-1].words == {b"b": b"xy", b"c": b"y"}


async def test_an_own_store_that_cannot_restore_stops_the_source(lab: Lab) -> None:
    """The state cannot be trusted: no policy applies."""
    await lab.create()

    class Picky(Journal):
        def receive_change(self, change: Change, /) -> None:
            raise ValueError("what is this?")

    first = EventSource(lab.config(), Journal)
    first.register_event_type(Added, write)
    await lab.add("a", deed="x")
    async with Running(first) as run:
        await run.until_committed(1)
    second = EventSource(lab.config(decode_policy=SKIP, error_policy=SKIP), Picky)
    second.register_event_type(Added, write)
    error = await start_failure(second)
    assert "what is this?" in str(error)


async def test_a_store_that_is_none(lab: Lab) -> None:
    """The factory's mistake is told where it is made."""
    await lab.create()
    factory: Any = dict.fromkeys
    source = EventSource(lab.config(), factory)
    assert "receive_change" in str(await start_failure(source))


async def test_writes_outside_of_an_event_are_refused(lab: Lab) -> None:
    await lab.create()
    source = lab.source()
    kept: list[Totals] = []
    source.register_event_type(Added, lambda ctx, event: kept.append(ctx.store))
    async with Running(source) as run:
        await lab.add("a")
        await run.until_committed(1)
        [store] = kept
        with pytest.raises(StoreError, match="outside of an event"):
            store.put("a", 1)
    with pytest.raises(StoreError, match="revoked"):
        store.get("a")


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda ctx: ctx.store.put(None, 1), id="null key"),
        pytest.param(lambda ctx: ctx.store.put("a", "text"), id="wrong value"),
        pytest.param(lambda ctx: ctx.store.put(5, 1), id="wrong key"),
        pytest.param(lambda ctx: ctx.record_change(Change(b"\xff\xffkes.offset", b"{}")), id="reserved key"),
        pytest.param(lambda ctx: ctx.forward("out", object()), id="no event class"),
        pytest.param(lambda ctx: ctx.forward("out", Total("a", 1), key=5), id="wrong key of an output"),
    ],
)
async def test_misuse_in_a_handler_is_a_failed_event(lab: Lab, use: Any) -> None:
    await lab.create()
    source = lab.source()

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        ctx.store.put(event.name, 1)
        if event.deed:
            use(ctx)

    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    await lab.add("bad", deed="misuse")
    await lab.add("good")
    async with Running(source) as run:
        await run.until_committed(2)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["0"]
    assert await lab.counts() == {"good": 1}


@pytest.mark.parametrize("kind", ["async", "interjection"])
async def test_a_handler_that_is_cancelled_from_within(lab: Lab, kind: str) -> None:
    """It awaits something that somebody else cancelled: an error like any other, not the partition's silent end."""
    await lab.create()
    source = lab.source()

    async def cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def handler(ctx: EventContext[Totals], event: Added) -> None:
        ctx.store.put(event.name, 1)
        if event.deed:
            await cancelled()

    async def interjection(ctx: EventContext[Totals]) -> None:
        ctx.store.put("interjected", 1)
        await cancelled()

    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    async with Running(source) as run:
        if kind == "async":
            await lab.add("bad", deed="cancel")
        else:
            await raised_by(source.interject(0, interjection))
        await lab.add("good")
        await run.until(
            lambda: source.statistics().partitions[0].next_offset == (2 if kind == "async" else 1), "it goes on"
        )
    assert await lab.counts() == {"good": 1}
