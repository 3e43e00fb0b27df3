"""How long a reading thread waits, reported by a consumer that is polled one poll at a time."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from streams import EventContext
from streams.model.group import Assigned, Assignment
from streams.records import IncomingRecord, PolledPartition
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.reading import poller as poller_thread
from streams.runtime.reading import thread
from streams.runtime.reading.poller import Poller
from streams.runtime.reading.thread import LONG_POLL_SECONDS, POLL_SECONDS
from tests.unit.runtime_kit import Bench, FakeConsumer
from tests.unit.waiting import PATIENCE
from tests.vocabulary import Named


class Turnstile(FakeConsumer):
    """Its polls last until the test says what they bring."""

    def __init__(self) -> None:
        super().__init__()
        self.polls: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def poll_batch(self, timeout_seconds: float, limit: int) -> Any:
        self.polls.put(timeout_seconds)
        return self.answers.get(timeout=PATIENCE)

    def next(self, answer: Any) -> float:
        """The poll under way brings this; how long may the next one take?"""
        self.answers.put(answer)
        return self.polls.get(timeout=PATIENCE)


@pytest.fixture
def consumer() -> Iterator[Turnstile]:
    made = Turnstile()
    yield made
    made.answers.put({})


@pytest.fixture
def poller(consumer: Turnstile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Poller]:
    monkeypatch.setattr(thread, "LONG_AFTER_SECONDS", 0.0)
    made = Poller(lambda: consumer, max_poll_records=10, room=100, room_bytes=1 << 20)
    loop = asyncio.new_event_loop()

    async def start() -> None:
        made.start(lambda _: None, lambda: None, lambda _: None)

    loop.run_until_complete(start())
    made.add(0, 0, 1)
    consumer.polls.get(timeout=PATIENCE)
    yield made
    made.close()
    loop.close()


def record() -> dict[int, PolledPartition]:
    return {0: PolledPartition([IncomingRecord("t", 0, 0, b"k", b"v", None)], 1, -1, False)}


SCRIPTS: dict[str, list[tuple[Callable[[Poller], object] | None, dict[int, PolledPartition], float]]] = {
    "nothing happens": [(None, {}, LONG_POLL_SECONDS)],
    "something is queued": [
        (None, record(), POLL_SECONDS),
        (None, {}, POLL_SECONDS),
        (lambda poller: poller.handled(1, 2), {}, LONG_POLL_SECONDS),
    ],
    "a partition is paused": [
        (lambda poller: (poller.add(2, 0, 1), poller.pause(0)), {}, POLL_SECONDS),
        (lambda poller: poller.resume(0), {}, LONG_POLL_SECONDS),
        (lambda poller: poller.pause(0), {}, POLL_SECONDS),
        (lambda poller: poller.remove([0, 1]), {}, LONG_POLL_SECONDS),
    ],
    "some are expected": [
        (lambda poller: poller.expect([1, 2]), {}, POLL_SECONDS),
        (lambda poller: poller.add(1, 0, 1), {}, POLL_SECONDS),
        (lambda poller: poller.add(2, 0, 1), {}, LONG_POLL_SECONDS),
        (lambda poller: poller.expect([3]), {}, POLL_SECONDS),
        (lambda poller: poller.expect([]), {}, LONG_POLL_SECONDS),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_polls_are_long_only_when_nothing_is_to_be_done(consumer: Turnstile, poller: Poller, script: Any) -> None:
    """An act, the answer to the poll under way, and how long the next one may take."""
    for act, answer, seconds in script:
        if act is not None:
            act(poller)
        assert consumer.next(answer) == seconds


def test_a_pause_follows_a_poll_that_brought_little_unless_there_is_something_to_do(
    consumer: Turnstile, poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_thread, "PAUSE_SECONDS", 2 * PATIENCE)
    (_, progress), *_ = record().items()
    monkeypatch.setattr(poller_thread, "FEW", 2)
    assert consumer.next({0: progress._replace(records=2 * progress.records)}) == POLL_SECONDS, "it was no little"
    consumer.answers.put(record())
    with pytest.raises(queue.Empty):
        consumer.polls.get(timeout=0.05)
    poller.expect([])
    assert consumer.polls.get(timeout=PATIENCE) == POLL_SECONDS
    assert consumer.next({}) == POLL_SECONDS, "it brought nothing"


@pytest.mark.parametrize("what", [record(), {}], ids=["record", "command"])
def test_it_is_not_calm_right_after_something_happened(
    consumer: Turnstile, poller: Poller, monkeypatch: pytest.MonkeyPatch, what: dict[int, PolledPartition]
) -> None:
    monkeypatch.setattr(thread, "LONG_AFTER_SECONDS", 1e9)
    poller._long_polls_at = 0.0
    assert consumer.next({}) == LONG_POLL_SECONDS
    if not what:
        poller.remove([7])
    assert consumer.next(what) == POLL_SECONDS
    if what:
        poller.handled(1, 2)
    assert consumer.next({}) == POLL_SECONDS


async def test_whatever_a_plan_may_make_ours_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no planned move, and no take-over, meets a long poll."""

    def handler(ctx: EventContext[Any], event: Named) -> None: ...

    bench, expected = Bench(), list[frozenset[int]]()
    monkeypatch.setattr(Poller, "expect", lambda _, partitions: expected.append(frozenset(partitions)))
    bench.make(handler, partitions=5)
    bench.run()
    group = bench.connections.membership
    group._all = frozenset({0})

    async def for_ever(*_: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(TakeOvers, "take_over", for_ever)
    await bench.until(lambda: expected == [{0}], "what is missing is expected")
    plan = Assignment(
        own=group._all,
        standby=frozenset({1}),
        preparing=frozenset({2}),
        incoming={3: 1},
        members=("me", "you"),
    )
    group._deliver(Assigned(0, 1, group._all, frozenset(), plan, incoming=plan.incoming))
    await bench.until(lambda: expected[1:] == [{0, 1, 2, 3}], "and what is copied, or still restored")
    await bench.cancel()
    await bench.until_all_threads_ended()
