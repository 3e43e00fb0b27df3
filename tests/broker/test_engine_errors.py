"""Error policies against a real broker: what each leaves behind in topics, store and offsets. All kinds of handlers,
failures and policies: ``tests/unit/test_driver_handlers.py``."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    ErrorPolicy,
    ErrorResponse,
    EventContext,
    EventSource,
    SourceState,
    TopicPartition,
)
from streams.metrics import EventFailed
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import PATIENCE, Lab, Running, own_headers, start_failure
from tests.broker.gate import gate
from tests.vocabulary import ADDED, Added, Total, Totals, Words, added, register, write

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]


def keep(lab: Lab, ctx: EventContext[Totals], event: Added) -> None:
    """Count, and tell the total; three keys and an output are touched before a deed may go wrong."""
    ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
    total = ctx.store.get(event.name, 0) + event.amount
    ctx.store.put(event.name, total)
    ctx.forward(lab.output, Total(event.name, total), key=event.name)
    if event.deed == "raise":
        ctx.store.delete("first")
        raise ValueError(f"no {event.name}, please")


def keeping(lab: Lab, source: EventSource[Totals], policy: ErrorPolicy, kind: str = "plain") -> list[tuple[str, int]]:
    """Register ``keep``. Returns the list of (name, attempt) that it fills."""
    seen: list[tuple[str, int]] = []

    def work(ctx: EventContext[Totals], event: Added) -> None:
        seen.append((event.name, ctx.attempt))
        keep(lab, ctx, event)

    register(source, work, kind, policy)
    return seen


AFTER = {"touched": 3, "first": 1, "second": 1, "third": 1}
"""The state when "first", "second", "third" were handled, and "bad" left no trace."""


async def play(lab: Lab) -> None:
    await lab.add("first", "second")
    await lab.add("bad", deed="raise")
    await lab.add("third")


async def test_dead_letter_in_the_same_transaction(lab: Lab) -> None:
    await lab.create()
    await lab.add("first", "second")
    headers = [*ADDED, ("trace", b"\xff\x00"), ("trace", None), ("empty", b"")]
    await lab.send(added("bad", deed="raise"), b"\x00key", headers)
    await lab.add("third")
    source = lab.source()
    keeping(lab, source, DEAD_LETTER, "async")
    async with Running(source) as run:
        await run.until_committed(4)
    [(letter, facts)] = await lab.dead_letters()
    assert (letter.key, letter.value) == (b"\x00key", added("bad", deed="raise"))
    assert own_headers(letter) == headers
    assert facts["error"] == "ValueError"
    assert facts["message"] == "no bad, please"
    assert (facts["topic"], facts["partition"], facts["offset"]) == (lab.topic, "0", "2")
    assert facts["attempts"] == "1"
    assert abs(time.time() * 1000 - int(facts["failed_at_ms"])) < 60_000
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER
    assert await lab.committed() == {0: 4}
    await lab.check_settled()


async def test_skip(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    await lab.create()
    await play(lab)
    failures: list[EventFailed] = []
    source = lab.source(metrics_handler=lambda m: failures.append(m) if isinstance(m, EventFailed) else None)
    keeping(lab, source, SKIP)
    async with Running(source) as run:
        await run.until_committed(4)
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER
    assert await lab.dead_letters() == []
    assert await lab.committed() == {0: 4}
    [failure] = failures
    assert (failure.partition, failure.offset, failure.response) == (0, 2, "continue")
    assert f"{lab.topic}[0]@2" in caplog.text, "a skipped record is named in the log"


async def test_leave_and_meet_it_again(lab: Lab) -> None:
    """FAIL_CONSUMER: what came before is committed, the group is left, the record is the next one's first."""
    await lab.create()
    await play(lab)
    first = lab.source(session_timeout_seconds=2 * PATIENCE)
    keeping(lab, first, STOP)
    error = await start_failure(first)
    assert f"{lab.topic}[0]@2" in str(error)
    assert "no bad, please" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert first.state is SourceState.FAILED
    assert await lab.totals() == [("first", 1), ("second", 1)]
    assert await lab.committed() == {0: 2}
    await lab.check_settled()
    second = lab.source()
    seen = keeping(lab, second, SKIP)
    async with Running(second) as run:  # in vain, if the group was not left
        await run.until_committed(2)
    assert seen == [("bad", 1), ("third", 1)]
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER


async def test_retry_with_backoff(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    """Attempts are counted and spaced, the partition keeps its order, the other one goes on, one effect is left. It
    fails until the other partition has gone on, four times at least."""
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, partitions=2)
    await lab.create()
    source = lab.source()
    attempts: list[tuple[int, float]] = []
    policy = ErrorPolicy(retries=100, backoff_seconds=0.2, max_backoff_seconds=0.3, then=ErrorResponse.FAIL_CONSUMER)
    done: list[str] = []

    def work(ctx: EventContext[Totals], event: Added) -> None:
        ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
        ctx.forward(lab.output, Total(event.name, ctx.attempt), key=event.name)
        if event.deed == "thrice":
            attempts.append((ctx.attempt, time.monotonic()))
            if ctx.attempt < 4 or "other" not in done:
                raise OSError("not yet")
        done.append(event.name)

    register(source, work, "plain", policy)
    async with Running(source) as run:
        await lab.add("stubborn", deed="thrice")
        await lab.add("behind")
        await run.until(lambda: attempts, "the first attempt")
        await lab.add("other", partition=1)
        await run.until_committed(3)
        assert done == ["other", "stubborn", "behind"]
    assert [number for number, _ in attempts] == list(range(1, len(attempts) + 1))
    assert len(attempts) >= 4
    gaps = [later - sooner for (_, sooner), (_, later) in itertools.pairwise(attempts)]
    assert gaps[0] >= 0.15
    assert min(gaps[1:]) >= 0.3 * 0.75
    assert sorted(await lab.totals()) == [("behind", 1), ("other", 1), ("stubborn", len(attempts))]
    assert await lab.counts() == {"touched": 2}


async def test_own_store_is_restored_after_a_failed_event(lab: Lab) -> None:
    """The engine cannot undo it: it is dropped, made anew and filled from the changelog; then the policy decides."""
    made: list[Words] = []
    await lab.create()

    def store(partition: TopicPartition) -> Words:
        made.append(Words(partition))
        return made[-1]

    source = EventSource(lab.config(), store)
    policy = ErrorPolicy(retries=1, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)
    attempts: list[tuple[int, dict[bytes, bytes]]] = []

    def work(ctx: EventContext[Words], event: Added) -> None:
        if event.deed in ("fail", "once"):
            attempts.append((ctx.attempt, dict(ctx.store.words)))
        write(ctx, event)
        ctx.forward(lab.output, Total(event.name, ctx.attempt), key=event.name)
        if event.deed == "fail" or (event.deed == "once" and ctx.attempt == 1):
            ctx.store.words.clear()
            raise ValueError("spoiled")

    register(source, work, on_error=policy)
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
    assert [(facts["offset"], facts["attempts"]) for _, facts in await lab.dead_letters()] == [("2", "2")]
    assert sorted(await lab.totals()) == sorted([("w", 1), ("v", 1), ("w", 1), ("w", 2), ("v", 1)])
    assert [one.revocations for one in made] == [1] * 4, "one, and a new one after each spoiled attempt"
    assert made[1].types == ["word", "word"], "the entry's type travels with it"
    await lab.check_settled()


PROGRAM = """
import os, sys
from streams import *
from streams.testing.faults import FaultPlan, consume_with_faults
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, TOTALS, Total
import asyncio

lab = Lab(sys.argv[1], sys.argv[2])
source = EventSource(lab.config(instance_id="process", session_timeout_seconds=2, transaction_timeout_seconds=1.5,
                                heartbeat_interval_seconds=0.3), TOTALS)
policy = ErrorPolicy(then=ErrorResponse[sys.argv[3]])

@source.register_event_type(Added, on_error=policy)
def handler(ctx, event):
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + 1)
    ctx.forward(lab.output, Total(event.name, 1), key=event.name)
    if event.deed:
        raise ValueError("no")

if os.environ.get("KES_FAULT"):
    asyncio.run(consume_with_faults(source, FaultPlan.from_environment()))
else:
    source.run()
"""


def start_program(lab: Lab, prefix: str, response: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, lab.bootstrap, prefix, response],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
    )


async def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        _, errors = await asyncio.to_thread(process.communicate, timeout=3 * PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)
    return process.returncode, errors.decode()


async def test_fatally_exit(lab: Lab, topic_prefix: str) -> None:
    """Exit code 70, on the spot; the record is not passed, and nothing half-done is seen."""
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    code, errors = await finish(start_program(lab, topic_prefix, "FATALLY_EXIT"))
    assert code == 70, errors
    assert f"{lab.topic}[0]@1" in errors
    source = lab.source()
    keeping(lab, source, SKIP)
    async with Running(source) as run:
        await run.until_handled(2)
    assert await lab.totals() == [("first", 1)]
    assert await lab.committed() == {0: 2}


@pytest.mark.parametrize("point", gate(["flush.after:1", "commit.before:1", "commit.after:1"], "commit.before:1"))
async def test_dead_letters_are_exactly_once_over_a_kill(lab: Lab, topic_prefix: str, point: str) -> None:
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    await lab.add("third")
    code, errors = await finish(start_program(lab, topic_prefix, "DEAD_LETTER", KES_FAULT=point))
    assert code == -9, errors
    source = lab.source(session_timeout_seconds=2, transaction_timeout_seconds=1.5)
    keeping(lab, source, DEAD_LETTER)
    async with Running(source) as run:
        await run.until_handled(3)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1"]
    assert await lab.totals() == [("first", 1), ("third", 1)]
    assert await lab.committed() == {0: 3}
    await lab.check_settled(lab.output, lab.changelog, lab.dead_letter_topic)
