"""One partition's handlers over records that are not Kafka's: the worker is the engine's, its host keeps everything."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    Change,
    ErrorPolicy,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    ExecutionState,
    Table,
    TopicPartition,
    event_type,
)
from streams.codecs import codec_for
from streams.errors import RegistrationError, StreamsError
from streams.events import event_type_of
from streams.records import IncomingRecord
from streams.runtime.partition.dead_letters import PREFIX
from streams.runtime.replay import Completed, PartitionReplay, Program

Totals = Table[str, int]
INTS = codec_for(int)
NOW = 1_700_000_000_000


@event_type("Counted")
class Counted(msgspec.Struct, frozen=True):
    """Adds to a name; ``fails``: how many attempts of it fail, after they wrote."""

    name: str
    fails: int = 0


def program(
    handler: Callable[..., Any], *, on_error: ErrorPolicy = STOP, store: Any = None, blocking: bool = False
) -> Program:
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=4, error_policy=on_error)
    source: EventSource[Any] = EventSource(config, store or Table.factory(key=str, value=int))
    source.register_event_type(Counted, handler, blocking=blocking)
    return source.program()


def records(*events: Counted | bytes, start: int = 0, step: int = 1) -> list[IncomingRecord]:
    kind = event_type_of(Counted)
    return [
        IncomingRecord(
            "in", 2, start + step * number, b"k", e if isinstance(e, bytes) else kind.encode(e), kind.headers, 7
        )
        for number, e in enumerate(events)
    ]


def count(ctx: EventContext[Totals], event: Counted) -> None:
    total = (ctx.store.get(event.name) or 0) + 1
    ctx.store.put(event.name, total)
    ctx.forward("out", event, key=event.name)
    if ctx.attempt <= event.fails:
        raise ValueError("once more")


async def replayed(of: Program, *events: Counted | bytes, step: int = 1) -> tuple[PartitionReplay, Completed]:
    replay = PartitionReplay(of, 2, wall_ms=NOW)
    return replay, await replay.handle(records(*events, step=step))


def counts(replay: PartitionReplay) -> dict[str, int]:
    return {change.key.decode(): INTS.decode(change.value or b"") for change in replay.contents()}


async def test_outputs_state_and_position() -> None:
    replay, completed = await replayed(program(count), Counted("a"), Counted("b"), Counted("a"), step=3)
    assert [(output.topic, output.key, output.origin) for output in completed.outputs] == [
        ("out", b"a", 0), ("out", b"b", 3), ("out", b"a", 6)
    ]  # fmt: skip
    assert counts(replay) == {"b": 1, "a": 2}
    assert (replay.watermark, replay.records, replay.stopped) == (7, 3, None)
    replay.close()


async def test_a_failed_attempt_leaves_no_trace_and_retries_do_not_wait() -> None:
    policy = ErrorPolicy(retries=3, backoff_seconds=3600, max_backoff_seconds=3600)
    replay = PartitionReplay(program(count, on_error=policy), 2, wall_ms=NOW)
    completed = await asyncio.wait_for(replay.handle(records(Counted("a", fails=3))), 30)
    assert (counts(replay), len(completed.outputs), completed.failed) == ({"a": 1}, 1, [])


@pytest.mark.parametrize("response", list(ErrorResponse))
async def test_the_last_word_of_each_policy(response: ErrorResponse) -> None:
    policy = ErrorPolicy(then=response)
    replay, completed = await replayed(
        program(count, on_error=policy), Counted("a"), Counted("a", fails=9), Counted("a")
    )
    stops = response in (ErrorResponse.FAIL_CONSUMER, ErrorResponse.FATALLY_EXIT)
    assert (replay.stopped is not None) == stops
    assert replay.watermark == (1 if stops else 3)
    assert counts(replay) == {"a": 1 if stops else 2}
    assert [(failed.offset, failed.response) for failed in completed.failed] == [(1, response.value)]
    assert completed.dead == ({1} if response is ErrorResponse.DEAD_LETTER else set())
    if stops:
        assert (await replay.handle(records(Counted("a"), start=3))).outputs == []
        assert replay.watermark == 1


async def test_its_failures_are_in_the_results_and_other_sources_go_on_logging_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = logging.getLogger("streams.runtime.partition.execution")

    def fail(ctx: EventContext[Totals], event: Counted) -> None:
        elsewhere = threading.Thread(target=others.warning, args=("another source's event failed",))
        elsewhere.start()
        elsewhere.join()
        raise ValueError(event.name)

    await PartitionReplay(program(fail, on_error=DEAD_LETTER), 2, wall_ms=NOW).handle(records(Counted("a")))
    others.warning("after it")
    assert [record.getMessage() for record in caplog.records] == ["another source's event failed", "after it"]


async def test_a_dead_letter_is_the_engines() -> None:
    _replay, completed = await replayed(program(count, on_error=DEAD_LETTER), Counted("a", fails=1))
    (letter,) = completed.outputs
    assert (letter.topic, letter.key, letter.partition, letter.origin) == ("g.in.dead-letters", b"k", 2, 0)
    assert dict(letter.headers or [])[f"{PREFIX}failed_at_ms"] == str(NOW).encode()


async def test_what_cannot_be_read_meets_the_decode_policy() -> None:
    replay, _ = await replayed(program(count), Counted("a"), b"{")
    assert replay.watermark == 1
    assert "in[2]@1" in str(replay.stopped)


async def test_an_answer_of_fatal_stops_whatever_the_policy_says() -> None:
    replay, _ = await replayed(program(lambda ctx, event: ExecutionState.FATAL, on_error=SKIP), Counted("a"))
    assert replay.stopped is not None


async def test_async_and_blocking_handlers() -> None:
    threads: list[str] = []

    async def later(ctx: EventContext[Totals], event: Counted) -> None:
        await asyncio.get_running_loop().run_in_executor(None, len, event.name)
        count(ctx, event)

    def heavy(ctx: EventContext[Totals], event: Counted) -> None:
        threads.append(threading.current_thread().name)
        count(ctx, event)

    for made in (program(later), program(heavy, blocking=True)):
        replay = PartitionReplay(made, 2, wall_ms=NOW)
        completed = await replay.handle(records(*[Counted(f"n{number % 3}") for number in range(50)]))
        assert [output.origin for output in completed.outputs] == list(range(50))
        assert sum(counts(replay).values()) == 50
        replay.close()
    assert set(threads) == {"kes-handler-2"}


async def test_it_goes_on_from_a_state() -> None:
    first = PartitionReplay(program(count), 2, wall_ms=NOW)
    whole = records(*[Counted(f"n{number % 3}") for number in range(10)])
    await first.handle(whole[:6])
    second = PartitionReplay(program(count), 2, wall_ms=NOW)
    second.begin(first.watermark)
    second.restore(first.contents())
    completed = await second.handle(whole)  # what is below the position was handled already
    assert [output.origin for output in completed.outputs] == [6, 7, 8, 9]
    assert counts(second) == {"n0": 4, "n1": 3, "n2": 3}


async def test_a_state_with_a_key_twice_is_refused() -> None:
    replay = PartitionReplay(program(count), 2, wall_ms=NOW)
    with pytest.raises(StreamsError, match="the state of partition 2 has the key b'a' twice"):
        replay.restore([Change(b"a", b"1"), Change(b"b", b"1"), Change(b"a", b"2")])


async def test_records_twice_or_out_of_order_are_refused() -> None:
    replay, _ = await replayed(program(count), Counted("a"), Counted("a"))
    with pytest.raises(StreamsError, match=r"in\[2\]@1 comes after offset 1: is it in the data twice"):
        await replay.handle(records(Counted("a"), start=1))


class OwnStore:
    """Tells the engine about its changes, and cannot be undone."""

    made = 0

    def __init__(self, partition: TopicPartition) -> None:
        OwnStore.made += 1
        self.counts: dict[bytes, int] = {}

    def receive_change(self, change: Change) -> None:
        assert change.type == "Count"
        self.counts[change.key] = int(change.value or b"0")

    def revoked(self) -> None:
        self.counts.clear()


async def test_an_own_store_is_made_again_from_what_completed() -> None:
    def own(ctx: EventContext[OwnStore], event: Counted) -> None:
        key = event.name.encode()
        ctx.store.counts[key] = ctx.store.counts.get(key, 0) + 1
        ctx.record_change(Change(key, b"%d" % ctx.store.counts[key], type="Count"))
        if ctx.attempt <= event.fails:
            raise ValueError("its store is soiled now")

    OwnStore.made = 0
    policy = ErrorPolicy(retries=1, backoff_seconds=0, then=ErrorResponse.CONTINUE)
    replay = PartitionReplay(program(own, on_error=policy, store=OwnStore), 2, wall_ms=NOW)
    events = [Counted("a"), Counted("a", fails=1), Counted("b"), Counted("a", fails=2), Counted("a")]
    completed = await replay.handle(records(*events))
    assert {change.key: change.value for change in replay.contents()} == {b"b": b"1", b"a": b"3"}
    assert [change.type for change in replay.contents()] == ["Count", "Count"]
    assert [failed.offset for failed in completed.failed] == [3]
    assert OwnStore.made == 4  # one, and another one for each failed attempt


async def test_a_store_that_is_none_is_refused() -> None:
    replay = PartitionReplay(program(count, store=lambda partition: {}), 2, wall_ms=NOW)
    with pytest.raises(RegistrationError, match="the store factory made a dict"):
        await replay.handle(records(Counted("a")))


async def test_state_does_not_hold_what_was_replaced() -> None:
    """A changelog's last values, not those before them: twice the memory."""
    replay, _ = await replayed(program(count), Counted("a"), Counted("a"))
    assert [change.previous for change in replay.contents()] == [None]


def timed(ctx: EventContext[Totals], event: Counted) -> None:
    """Counts, and sets the name's timer anew; ``fails`` cancels it instead."""
    told = ctx.cancel_timer(event.name) if event.fails else bool(ctx.schedule_in(-5, event, name=event.name))
    ctx.store.put(f"{event.name} {told}", ctx.attempt)


async def test_a_timer_that_is_set_is_refused() -> None:
    replay, _ = await replayed(program(timed), Counted("a", fails=1))
    with pytest.raises(StreamsError, match=r"offset 1: an event sets the timer 'a'.*interjections='ignore'"):
        await replay.handle(records(Counted("a"), start=1))
    replay.close()


async def test_a_timer_that_the_next_event_removes_is_refused_as_well() -> None:
    """Both events are admitted at once, and no timer is left then."""

    def set_and_removed(ctx: EventContext[Totals], event: Counted) -> None:
        told = ctx.cancel_timer("t") if event.fails else bool(ctx.schedule_in(5, event, name="t"))
        assert told

    replay = PartitionReplay(program(set_and_removed), 2, wall_ms=NOW)
    with pytest.raises(StreamsError, match="offset 0: an event sets the timer 't'"):
        await replay.handle(records(Counted("a"), Counted("a", fails=1)))
    replay.close()


async def test_timers_that_are_ignored_do_not_fire_and_are_no_state() -> None:
    """They can be cancelled, and replays of stores that cannot undo have them, too."""
    replay = PartitionReplay(program(timed), 2, wall_ms=NOW, ignores_timers=True)
    for start, event in enumerate([Counted("a"), Counted("a", fails=1), Counted("a", fails=1)]):
        await replay.handle(records(event, start=start))
    assert counts(replay) == {"a True": 1, "a False": 1}
    replay.close()
