"""Views over a topic in memory: their life, what they refuse, what they wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from streams import (
    SKIP,
    Delivery,
    EventSource,
    EventSourceConfig,
    NamedTable,
    Record,
    SimpleStore,
    Stores,
    Table,
    View,
    ViewState,
)
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    DecodeError,
    NotCaughtUp,
    OffsetError,
    RegistrationError,
    Stopped,
    StoreError,
    TopicError,
)
from streams.runtime.reading import followed_topic, log_reader
from streams.runtime.system import elapsed_seconds
from streams.views import blocking
from tests.unit.global_log_kit import MemoryTopic
from tests.unit.view_kit import changed, number, view_of, viewed_topic
from tests.unit.waiting import PATIENCE, give_own, until


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    yield from viewed_topic(monkeypatch)


# -- its life ---------------------------------------------------------------------------------------------------------


async def test_it_reads_follows_and_may_be_entered_again(topic: MemoryTopic) -> None:
    for n, name in enumerate(["apples", "pears", "oranges"]):
        topic.put(name.encode(), number(n), n % 2)
    view = view_of(topic)
    with pytest.raises(StoreError, match="not running"):
        view.get("apples")
    with pytest.raises(Stopped, match="not running"):
        await view.ready()
    for n in range(3):
        async with view:
            await view.ready(PATIENCE)
            assert (view.get("apples"), view.get("none"), view.get("none", 7)) == (n and 100 + n, None, 7)
            assert ("pears" in view, "none" in view, len(view)) == (True, False, 3)
            assert list(view.range("b", "p")) == [("oranges", 2)]
            assert list(view.prefix("pe", reverse=True)) == [("pears", 1)]
            assert (view.first(), view.last()) == (("apples", n and 100 + n), ("pears", 1))
            assert [*view.keys()] == sorted(view.keys())
            assert dict(view.items()) == dict(zip(view.keys(), view.values(), strict=True))
            assert view.of_partition(1).get("pears") == 1
            with pytest.raises(RegistrationError, match="in use"):
                await view.__aenter__()
            assert view.state is ViewState.LIVE
            assert await view.fresh_within(PATIENCE)
            sent = topic.put(b"apples", number(101 + n))
            await view.wait_for({0: sent + 1}, PATIENCE)
            assert view.get("apples") == 101 + n
        assert view.state is ViewState.STOPPED
        with pytest.raises(StoreError, match="stopped"):
            view.get("apples")
        with pytest.raises(StoreError, match="stopped"):
            view.snapshot()
        for wait in (view.ready, view.fresh_within, view.wait_for):
            with pytest.raises(Stopped):
                await wait({} if wait == view.wait_for else PATIENCE)


async def test_it_refuses_reads_while_it_is_incomplete(topic: MemoryTopic) -> None:
    topic.put(b"a", number(1))
    topic.may_answer.clear()
    view = view_of(topic)
    entering = asyncio.create_task(_enter(view))
    await until(lambda: view.state is ViewState.STARTING)
    for read in (view.snapshot, view.__len__, view.changes, lambda: view.get("a"), lambda: "a" in view):
        with pytest.raises(NotCaughtUp, match=r"the view of rates is not complete yet .*ready\(\)"):
            read()
    with pytest.raises(NotCaughtUp, match="not complete yet"):
        await view.wait_for_key("a")
    assert bool(view)
    topic.may_answer.set()
    stop = await entering
    await until(lambda: view.state is ViewState.LIVE)  # by itself
    assert view.get("a") == 1
    stop.set()
    await until(lambda: view.state is ViewState.STOPPED)


async def _enter(view: View[Any, Any]) -> asyncio.Event:
    entered, stop = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with view:
            entered.set()
            await stop.wait()

    holding = asyncio.create_task(hold())
    stop.task = holding  # type: ignore[attr-defined]  # else it is collected
    await entered.wait()
    return stop


async def test_its_states_are_told(topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(log_reader, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(followed_topic, "REQUEST_SECONDS", 0.05)
    view, seen = view_of(topic), list[ViewState]()

    async def watch() -> None:
        async for state in view.states():
            seen.append(state)

    watching = asyncio.create_task(watch())
    await until(lambda: seen == [ViewState.CREATED])
    topic.put(b"a", number(1))
    async with view:
        await until(lambda: seen[-1] is ViewState.LIVE)
        topic.answers = False
        await until(lambda: seen[-1] is ViewState.STALE)
        assert view.get("a") == 1  # what is known may be read
        with pytest.raises(BrokerUnavailable):
            await view.fresh_within(1.0, timeout_seconds=0.1)
        topic.answers = True
        await until(lambda: seen[-1] is ViewState.LIVE)
    await watching
    assert seen[-1] is ViewState.STOPPED


@pytest.mark.parametrize("trouble", ["deleted", "recreated", "record", "policy", "missing"])
async def test_a_topic_that_cannot_be_viewed_is_an_error(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.05)
    topic.put(b"a", number(1))
    view = view_of(topic, topic_timeout_seconds=0.1)
    if trouble == "policy":
        topic.policy = "delete"
        with pytest.raises(TopicError, match=r"rates has cleanup\.policy=delete, not compact"):
            await view.__aenter__()
        topic.policy = "compact,delete"
    elif trouble == "missing":
        topic.exists = False
        with pytest.raises(TopicError, match="topic rates does not exist at memory:9092"):
            await view.__aenter__()
        topic.exists = True
    else:
        expected = {"deleted": TopicError, "recreated": OffsetError, "record": DecodeError}[trouble]
        with pytest.raises(expected, match="rates"):  # noqa: PT012
            async with view:
                await view.ready(PATIENCE)
                changes = view.changes()
                if trouble == "deleted":
                    topic.exists = False
                elif trouble == "recreated":
                    topic.identity = "id-2"
                else:
                    topic.put(b"b", b"no number")
                with pytest.raises(expected):
                    await anext(changes)
                assert view.state is ViewState.FAILED
                with pytest.raises(StoreError, match="not kept up to date any more"):
                    view.get("a")
                await asyncio.Event().wait()  # is cancelled
        assert view.statistics().keys == 0
        topic.exists, topic.logs[0].records[1:] = True, []
    async with view:  # when that is repaired
        await view.ready(PATIENCE)
        assert view.get("a") == 1


async def test_two_partitioners_are_an_error_where_they_differ(topic: MemoryTopic) -> None:
    topic.put(b"k", number(1), 0)
    topic.put(b"k", number(2), 1)
    topic.put(b"only", number(3), 1)
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        assert view.get("only") == 3
        with pytest.raises(StoreError, match=r"the key b'k' is in partitions 0, 1.*two partitioners"):
            view.get("k")
        with view.snapshot() as frozen, pytest.raises(StoreError, match="two partitioners"):
            frozen.get("k")


async def test_a_record_may_be_skipped(topic: MemoryTopic) -> None:
    topic.put(b"a", b"no number")
    topic.put(b"b", number(2))
    async with view_of(topic, on_error=SKIP) as view:
        await view.ready(PATIENCE)
        with view.snapshot() as frozen:
            assert (dict(frozen.items()), frozen.positions) == ({"b": 2}, {0: 2, 1: 0})


# -- waiting ----------------------------------------------------------------------------------------------------------


async def test_what_was_written_is_waited_for(topic: MemoryTopic) -> None:
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        record = Record(topic.name, number(1), b"a")
        waiting = asyncio.create_task(view.wait_for(Delivery(record, 1, 0), PATIENCE))
        with pytest.raises(NotCaughtUp, match=r"rates: not there within 0.05 s: \[1\] at 0 of 1"):
            await view.wait_for(Delivery(record, 1, 0), 0.05)
        topic.put(b"a", number(1), 1)
        await waiting
        assert view.get("a") == 1
        topic.pass_over(1, 3)  # markers move the position as well
        await view.wait_for({0: 0, 1: 4}, PATIENCE)
        assert view.positions == {0: 0, 1: 4}
        for wrong in ({2: 1}, {-1: 1}, {0: -1}):
            with pytest.raises(ConfigError, match="no place in it"):
                await view.wait_for(wrong)
        with pytest.raises(ConfigError, match="not in the view of rates"):
            await view.wait_for(Delivery(Record("other", b"", b""), 0, 1))
        waiting = asyncio.create_task(view.wait_for({0: 100}))
        await until(lambda: view._running()._waiters)
    with pytest.raises(Stopped):
        await waiting


async def test_a_key_is_waited_for(topic: MemoryTopic) -> None:
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        waiting = asyncio.create_task(view.wait_for_key("a"))
        with pytest.raises(NotCaughtUp, match=r"no value for 'a' within 0\.05 s"):
            await view.wait_for_key("a", 0.05)
        topic.put(b"b", number(1))
        topic.put(b"a", number(2), 1)
        assert await waiting == await view.wait_for_key("a", 0.0) == 2
        waiting = asyncio.create_task(view.wait_for_key("c"))
        await until(lambda: view._current()._observers)
    with pytest.raises(Stopped):
        await waiting


async def test_freshness_is_proven_by_a_question_and_one_proof_serves_many(topic: MemoryTopic) -> None:
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        topic.put(b"a", number(1))
        assert await view.fresh_within(PATIENCE)
        assert view.get("a") == 1
        questions = topic.questions
        assert await asyncio.gather(*(view.fresh_within(PATIENCE) for _ in range(50))) == [True] * 50
        assert topic.questions == questions
        view._running().running().pause(None)
        topic.put(b"a", number(2))
        await until(lambda: view._proof is not None and elapsed_seconds() > view._proof[0] + 0.01)
        with pytest.raises(NotCaughtUp, match=r"\[0\] at 1 of 2 \(paused\)"):
            await view.fresh_within(0.01, 0.1)
        view._running().running().resume(None, None)
        await until(lambda: view._proof is not None and elapsed_seconds() > view._proof[0] + 0.1)
        assert await view.fresh_within(0.1, PATIENCE)
        assert view.get("a") == 2
        topic.open_transaction(0)
        requested, _ = view._proof or (0.0, True)
        await until(lambda: elapsed_seconds() > requested + 0.2)
        assert await view.fresh_within(0.2, PATIENCE) is False
        assert topic.questions > questions
        with pytest.raises(ConfigError, match="more than 0"):
            await view.fresh_within(0)
        topic.may_answer.clear()
        proving = asyncio.create_task(view.fresh_within(0.001))
        await until(view._proving.locked)
        with pytest.raises(NotCaughtUp, match=r"not proven to be fresh within 0.001 s, for 0.05 s"):
            await view.fresh_within(0.001, 0.05)
        topic.may_answer.set()
        proving.cancel()


# -- without a loop ---------------------------------------------------------------------------------------------------


def test_it_needs_no_loop_of_the_caller(topic: MemoryTopic) -> None:
    topic.put(b"a", number(1))
    view = view_of(topic)
    for _ in range(2):
        with view as prices:
            prices.ready(PATIENCE)
            assert (prices.get("a"), prices.state, prices.positions) == (1, ViewState.LIVE, {0: 1, 1: 0})
            every = prices.changes(initial=True)
            assert next(every) == changed("a", None, 1)
            later = threading.Timer(0.05, lambda: topic.put(b"b", number(2), 1))
            later.start()
            assert prices.wait_for_key("b", PATIENCE) == 2
            assert next(every) == changed("b", None, 2, 1)
            every.close()
            assert prices.fresh_within(PATIENCE)
            prices.wait_for({1: 1}, PATIENCE)
            assert (prices.statistics().keys, len(prices.statistics().partitions)) == (2, 2)
            with prices.snapshot() as frozen:
                assert dict(frozen.items()) == {"a": 1, "b": 2}
            with pytest.raises(NotCaughtUp):
                prices.wait_for({0: 9}, 0.01)
        with pytest.raises(StoreError, match="stopped"):
            prices.get("a")
        topic.put(b"b", None, 1)
        topic.logs[1].records.clear()
        topic.logs[1].stable = topic.logs[1].end = 0


def test_an_interrupt_before_the_wait_ends_the_changes(topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between handing the work to the loop and waiting for it: there is no future yet to cancel it by."""
    hand_over, calls = asyncio.run_coroutine_threadsafe, 0

    def interrupted(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
        nonlocal calls
        calls += 1
        future = hand_over(coroutine, loop)
        if calls == 1:
            raise KeyboardInterrupt
        return future

    with view_of(topic) as prices:
        prices.ready(PATIENCE)
        changes = prices.changes()
        give_own(monkeypatch, "asyncio", blocking, run_coroutine_threadsafe=interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(changes)
        assert calls == 2
        topic.put(b"a", number(1))
        assert prices.wait_for_key("a", PATIENCE) == 1


def test_without_a_loop_the_failure_is_raised_at_the_end(topic: MemoryTopic) -> None:
    topic.policy = "delete"
    with pytest.raises(TopicError, match="not compact"), view_of(topic):
        raise AssertionError("it was entered")
    topic.policy = "compact"
    with pytest.raises(DecodeError, match=r"rates\[0\]@0"), view_of(topic) as prices:  # noqa: PT012
        topic.put(b"a", b"no number")
        with pytest.raises(DecodeError):
            prices.wait_for({0: 1}, PATIENCE)
    with pytest.raises(KeyError), view_of(topic) as prices:  # the caller's own error is the one that counts
        raise KeyError("mine")


# -- of a source ------------------------------------------------------------------------------------------------------


class Shop(Stores):
    orders = NamedTable.of(str, dict[str, str], ordered=True)
    mails = NamedTable.of(str, str)


def source_with(store: Callable[..., Any]) -> EventSource[Any]:
    config = EventSourceConfig(group_id="bank", topic="bank-events", num_partitions=2, bootstrap_servers="memory:9092")
    return EventSource(config, store)


async def test_one_structure_of_a_source_is_viewed(topic: MemoryTopic) -> None:
    shop = source_with(Shop.factory())
    topic.name = shop.config.changelog
    for key, value in ((b"orders\0o1", b'{"customer":"ann"}'), (b"mails\0o1", b"no order"), (b"\0time", number(7))):
        topic.put(b"\xfe" + key, value, 1)
    async with View.of(shop, table="orders") as orders:
        await orders.ready(PATIENCE)
        assert list(orders.range()) == [("o1", {"customer": "ann"})], "what is of no structure, or another, is left out"
    async with View.of(shop, table="mails") as mails:
        await mails.ready(PATIENCE)
        assert mails.get("o1") == "no order"
    assert orders._new_table().layout != mails._new_table().layout, "a folder of one is none of the other"
    with pytest.raises(ConfigError, match="several structures, so one is to be named; it has orders, mails"):
        View.of(shop)


async def test_the_state_of_a_source_is_viewed_with_its_types(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_with(Table.factory(key=int, value=dict[str, int], ordered=True))
    topic.name = source.config.changelog
    topic.put(number(-3), b'{"cents":5}')
    topic.put(b"\xff\xffkes.offset", b"{}")
    async with View.of(source) as view:
        await view.ready(PATIENCE)
        assert list(view.items()) == [(-3, {"cents": 5})]
    unordered = View.of(source_with(Table.factory(key=str, value=int)))
    assert unordered._new_table().is_ordered is False
    nowhere = EventSource(msgspec.structs.replace(source.config, bootstrap_servers=""), source._declared.store_factory)
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match="no broker is named"):
        View.of(nowhere)
    async with View.of(nowhere, bootstrap_servers="memory:9092") as view:
        await view.ready(PATIENCE)
        assert view.get(-3) == {"cents": 5}
    with pytest.raises(ConfigError, match=r"the store of bank is SimpleStore, and only a Table and a Stores"):
        View.of(source_with(SimpleStore.factory(dict, key=str)))
    with pytest.raises(ConfigError, match="does not keep keys in order"):
        View("rates", key=float, value=int, ordered=True)
