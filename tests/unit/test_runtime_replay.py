"""One partition's handlers over records that are not Kafka's: the worker is the engine's, its host keeps everything."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    Change,
    ErrorResponse,
    EventContext,
    EventSource,
    ExecutionState,
    Retry,
)
from streams.errors import RegistrationError, StreamsError
from streams.events import event_type_of
from streams.outcomes import ErrorPolicy
from streams.records import IncomingRecord
from streams.runtime.partition.dead_letters import PREFIX
from streams.runtime.replay import Completed, PartitionReplay, Program
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import INTS, TOTALS, Added, Flaky, Totals, Words, register, write

NOW = 1_700_000_000_000
EXIT = Retry(attempts=1, then=ErrorResponse.FATALLY_EXIT)
PATIENT = Retry(attempts=4, backoff_seconds=3600, max_backoff_seconds=3600)


def program(handler: Callable[..., Any], policy: ErrorPolicy = STOP, store: Any = TOTALS, kind: str = "") -> Program:
    source: EventSource[Any] = EventSource(config(4, error_policy=policy), store)
    register(source, handler, kind, event_class=Flaky)
    return source.program()


def records(words: str, start: int = 0, step: int = 1) -> list[IncomingRecord]:
    """``a!2``: an event whose first two attempts fail; ``{``: one that cannot be read."""
    described = event_type_of(Flaky)
    values = []
    for word in words.split():
        name, _, fails = word.partition("!")
        values.append(b"{" if word == "{" else described.encode(Flaky(name, int(fails or 0))))
    return [
        IncomingRecord("in", 2, start + step * number, b"k", value, described.headers, 7)
        for number, value in enumerate(values)
    ]


def count(ctx: EventContext[Totals], event: Flaky) -> None:
    ctx.store.put(event.name, (ctx.store.get(event.name) or 0) + 1)
    ctx.forward(OUT, event, key=event.name)
    if ctx.attempt <= event.times:
        raise ValueError("once more")


async def replayed(of: Program, words: str, step: int = 1) -> tuple[PartitionReplay, Completed]:
    replay = PartitionReplay(of, 2, wall_ms=NOW)
    return replay, await asyncio.wait_for(replay.handle(records(words, step=step)), 30)


def counts(replay: PartitionReplay) -> dict[str, int]:
    return {change.key.decode(): INTS.decode(change.value or b"") for change in replay.contents()}


FATAL = ExecutionState.FATAL


@pytest.mark.parametrize(
    ("handler", "policy", "words", "outputs", "state", "failed", "stopped"),
    [
        (count, STOP, "a b a", "a@0 b@1 a@2", {"b": 1, "a": 2}, [], ""),
        (count, PATIENT, "a!3", "a@0", {"a": 1}, [], ""),  # a failed attempt leaves no trace, and none is waited for
        (count, SKIP, "a a!9 a", "a@0 a@2", {"a": 2}, [(1, "continue")], ""),
        (count, DEAD_LETTER, "a a!9 a", "a@0 letter@1 a@2", {"a": 2}, [(1, "dead_letter")], ""),
        (count, STOP, "a a!9 a", "a@0", {"a": 1}, [(1, "fail_consumer")], "in[2]@1"),
        (count, EXIT, "a a!9 a", "a@0", {"a": 1}, [(1, "fatally_exit")], "@1"),
        (count, SKIP, "a {", "a@0", {"a": 1}, [(1, "fail_consumer")], "in[2]@1"),  # the decode policy
        (lambda ctx, event: FATAL, SKIP, "a", "", {}, [(0, "fail_consumer")], "FATAL"),
    ],
    ids=["all", "retried", "skip", "dead letter", "stop", "exit", "unreadable", "fatal"],
)
async def test_what_is_left_of_a_replay(
    handler: Any, policy: Retry, words: str, outputs: str, state: Any, failed: Any, stopped: str
) -> None:
    replay, completed = await replayed(program(handler, policy), words)
    letters = [output for output in completed.outputs if output.topic == "g.in.dead-letters"]
    names = [(b"letter" if output in letters else output.key or b"").decode() for output in completed.outputs]
    origins = [output.origin for output in completed.outputs]
    assert " ".join(f"{name}@{origin}" for name, origin in zip(names, origins, strict=True)) == outputs
    assert (counts(replay), stopped in str(replay.stopped)) == (state, True)
    assert (replay.stopped is None) == (not stopped)
    assert [(one.offset, one.response) for one in completed.failed] == failed
    assert completed.dead == ({1} if letters else set())
    handled = failed[-1][0] if stopped else len(words.split())
    assert (replay.watermark, replay.records) == (handled, handled)
    for letter in letters:
        assert (letter.key, letter.partition) == (b"k", 2)
        assert dict(letter.headers or [])[f"{PREFIX}failed_at_ms"] == str(NOW).encode()
    if stopped:
        assert (await replay.handle(records("a", start=3))).outputs == []
        assert replay.watermark == handled
    replay.close()


async def test_async_and_blocking_handlers() -> None:
    threads: set[str] = set()

    def noting(ctx: EventContext[Totals], event: Flaky) -> None:
        threads.add(threading.current_thread().name)
        count(ctx, event)

    for kind in ("async", "blocking"):
        replay, completed = await replayed(program(noting, kind=kind), "a b c " * 17)
        assert [output.origin for output in completed.outputs] == list(range(51))
        assert counts(replay) == dict.fromkeys("abc", 17)
        replay.close()
    assert threads == {threading.current_thread().name, "kes-handler-2"}


async def test_it_goes_on_from_a_state_over_offsets_with_holes() -> None:
    """A changelog's last values are state, not those before them: twice the memory."""
    whole = records("a b c " * 3, step=3)
    first, second = (PartitionReplay(program(count), 2, wall_ms=NOW) for _ in range(2))
    await first.handle(whole[:6])
    assert [change.previous for change in first.contents()] == [None] * 3
    second.begin(first.watermark)
    second.restore(first.contents())
    completed = await second.handle(whole)  # what is below the position was handled already
    assert [output.origin for output in completed.outputs] == [18, 21, 24]
    assert (counts(second), second.watermark) == (dict.fromkeys("abc", 3), 25)


async def test_its_failures_are_in_the_results_and_other_sources_go_on_logging_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = logging.getLogger("streams.runtime.partition.execution")

    def fail(ctx: EventContext[Totals], event: Flaky) -> None:
        elsewhere = threading.Thread(target=others.warning, args=("another source's event failed",))
        elsewhere.start()
        elsewhere.join()
        raise ValueError(event.name)

    await replayed(program(fail, DEAD_LETTER), "a")
    others.warning("after it")
    assert [record.getMessage() for record in caplog.records] == ["another source's event failed", "after it"]


async def test_a_state_with_a_key_twice_is_refused() -> None:
    replay = PartitionReplay(program(count), 2, wall_ms=NOW)
    with pytest.raises(StreamsError, match="the state of partition 2 has the key b'a' twice"):
        replay.restore([Change(b"a", b"1"), Change(b"b", b"1"), Change(b"a", b"2")])


async def test_records_twice_or_out_of_order_are_refused() -> None:
    replay, _ = await replayed(program(count), "a a")
    with pytest.raises(StreamsError, match=r"in\[2\]@1 comes after offset 1: is it in the data twice"):
        await replay.handle(records("a", start=1))


async def test_a_store_that_cannot_undo_is_made_again_from_what_completed() -> None:
    made: list[Words] = []

    def store(partition: Any) -> Words:
        made.append(Words(partition))
        return made[-1]

    def own(ctx: EventContext[Words], event: Flaky) -> None:
        write(ctx, Added(event.name, deed="x"))
        if ctx.attempt <= event.times:
            raise ValueError("its store is soiled now")

    policy = Retry(attempts=2, backoff_seconds=0, then=ErrorResponse.CONTINUE)
    replay, completed = await replayed(program(own, policy, store), "a a!1 b a!2 a")
    assert {change.key: change.value for change in replay.contents()} == {b"b": b"x", b"a": b"xxx"}
    assert [change.type for change in replay.contents()] == ["word", "word"]
    assert [failed.offset for failed in completed.failed] == [3]
    assert len(made) == 4, "one, and another one for each failed attempt"


async def test_a_store_that_is_none_is_refused() -> None:
    with pytest.raises(RegistrationError, match="the store factory made a dict"):
        await replayed(program(count, store=lambda partition: {}), "a")


def timed(ctx: EventContext[Totals], event: Flaky) -> None:
    """Counts, and sets the name's timer anew; ``fails`` cancels it instead."""
    told = ctx.cancel_timer(event.name) if event.times else bool(ctx.schedule_in(-5, event, name=event.name))
    ctx.store.put(f"{event.name} {told}", ctx.attempt)


@pytest.mark.parametrize("words", ["a", "a a!1"])
async def test_a_timer_that_is_set_is_refused(words: str) -> None:
    """Also one that the next event removes: both are admitted at once, and no timer is left then."""
    replay, _ = await replayed(program(timed), "a!1")
    with pytest.raises(StreamsError, match=r"offset 1: an event sets the timer 'a'.*interjections='ignore'"):
        await replay.handle(records(words, start=1))
    replay.close()


async def test_timers_that_are_ignored_do_not_fire_and_are_no_state() -> None:
    """They can be cancelled, and replays of stores that cannot undo have them, too."""
    replay = PartitionReplay(program(timed), 2, wall_ms=NOW, ignores_timers=True)
    for start, word in enumerate(["a", "a!1", "a!1"]):
        await replay.handle(records(word, start=start))
    assert counts(replay) == {"a True": 1, "a False": 1}
    replay.close()
