"""Error policies against a real broker: what each leaves behind in topics, store and offsets."""

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
    ExecutionState,
    SourceState,
)
from streams.metrics import EventFailed
from streams.runtime.dead_letters import LONGEST_TEXT
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import (
    ADDED,
    PATIENCE,
    Added,
    Lab,
    Running,
    Total,
    Totals,
    added,
    own_headers,
    start_failure,
)

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

KINDS = ["plain", "async", "blocking"]


@pytest.fixture
def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    return Lab(kafka_broker.bootstrap_servers, topic_prefix)


def keep(lab: Lab, ctx: EventContext[Totals], event: Added) -> None:
    """Count, and tell the total; three keys and an output are touched before a deed may go wrong."""
    ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
    total = ctx.store.get(event.name, 0) + event.amount
    ctx.store.put(event.name, total)
    ctx.forward(lab.output, Total(event.name, total), key=event.name)
    if event.deed == "raise":
        ctx.store.delete("first")
        raise ValueError(f"no {event.name}, please")


def register(lab: Lab, source: EventSource[Totals], kind: str, policy: ErrorPolicy | None) -> list[tuple[str, int]]:
    """Register ``keep`` as that kind of handler. Returns the list of (name, attempt) that it fills."""
    seen: list[tuple[str, int]] = []

    def plain(ctx: EventContext[Totals], event: Added) -> None:
        seen.append((event.name, ctx.attempt))
        keep(lab, ctx, event)

    async def patient(ctx: EventContext[Totals], event: Added) -> None:
        await asyncio.sleep(0)
        plain(ctx, event)

    if kind == "async":
        source.register_event_type(Added, patient, on_error=policy)
    else:
        source.register_event_type(Added, plain, on_error=policy, blocking=kind == "blocking")
    return seen


AFTER = {"touched": 3, "first": 1, "second": 1, "third": 1}
"""The state when "first", "second", "third" were handled, and "bad" left no trace."""


async def play(lab: Lab) -> None:
    await lab.add("first", "second")
    await lab.add("bad", deed="raise")
    await lab.add("third")


@pytest.mark.parametrize("kind", KINDS)
async def test_dead_letter_in_the_same_transaction(lab: Lab, kind: str) -> None:
    await lab.create()
    await lab.add("first", "second")
    headers = [*ADDED, ("trace", b"\xff\x00"), ("trace", None), ("empty", b"")]
    await lab.send(added("bad", deed="raise"), b"\x00key", headers)
    await lab.add("third")
    source = lab.source()
    register(lab, source, kind, DEAD_LETTER)
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
    register(lab, source, "plain", SKIP)
    async with Running(source) as run:
        await run.until_committed(4)
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER
    assert await lab.dead_letters() == []
    assert await lab.committed() == {0: 4}
    [failure] = failures
    assert (failure.partition, failure.offset, failure.response) == (0, 2, "continue")
    assert f"{lab.topic}[0]@2" in caplog.text, "a skipped record is named in the log"


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_leave_and_meet_it_again(lab: Lab, kind: str) -> None:
    """FAIL_CONSUMER: what came before is committed, the group is left, the record is the next one's first."""
    await lab.create()
    await play(lab)
    first = lab.source(session_timeout_seconds=2 * PATIENCE)
    register(lab, first, kind, STOP)
    error = await start_failure(first)
    assert f"{lab.topic}[0]@2" in str(error)
    assert "no bad, please" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert first.state is SourceState.FAILED
    assert await lab.totals() == [("first", 1), ("second", 1)]
    assert await lab.committed() == {0: 2}
    await lab.check_settled()
    second = lab.source()
    seen = register(lab, second, kind, SKIP)
    async with Running(second) as run:  # in vain, if the group was not left
        await run.until_committed(2)
    assert seen == [("bad", 1), ("third", 1)]
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER


@pytest.mark.parametrize("kind", KINDS)
async def test_retry_with_backoff(kafka_broker: BrokerAddress, topic_prefix: str, kind: str) -> None:
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

    async def patient(ctx: EventContext[Totals], event: Added) -> None:
        work(ctx, event)

    source.register_event_type(
        Added, patient if kind == "async" else work, on_error=policy, blocking=kind == "blocking"
    )
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


async def test_retries_are_used_up(lab: Lab) -> None:
    await lab.create()
    await play(lab)
    source = lab.source()
    seen = register(lab, source, "plain", ErrorPolicy(retries=2, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER))
    async with Running(source) as run:
        await run.until_committed(4)
    assert seen == [("first", 1), ("second", 1), ("bad", 1), ("bad", 2), ("bad", 3), ("third", 1)]
    [(_, facts)] = await lab.dead_letters()
    assert facts["attempts"] == "3"
    assert await lab.counts() == AFTER


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_instead_of_exceptions(lab: Lab, kind: str) -> None:
    """``ctx.fail`` and ``FAIL`` go by the policy, ``FATAL`` stops whatever the policy is."""
    await lab.create()
    source = lab.source()

    def answer(ctx: EventContext[Totals], event: Added) -> ExecutionState | None:
        ctx.store.put(event.name, 1)
        ctx.forward(lab.output, Total(event.name, 1), key=event.name)
        match event.deed:
            case "ctx.fail":
                return ctx.fail(KeyError("the reason"))
            case "fail":
                return ExecutionState.FAIL
            case "fatal":
                return ExecutionState.FATAL
            case "complete":
                return ExecutionState.COMPLETE
        return None

    async def patient(ctx: EventContext[Totals], event: Added) -> ExecutionState | None:
        return answer(ctx, event)

    source.register_event_type(
        Added, patient if kind == "async" else answer, on_error=DEAD_LETTER, blocking=kind == "blocking"
    )
    for deed in ("", "ctx.fail", "fail", "complete", "fatal", "complete"):
        await lab.add(deed or "none", deed=deed)
    error = await start_failure(source)
    assert f"{lab.topic}[0]@4" in str(error)
    letters = await lab.dead_letters()
    assert [letter.offset for letter, _ in letters] == sorted(letter.offset for letter, _ in letters)
    assert [facts["offset"] for _, facts in letters] == ["1", "2"]
    assert (letters[0][1]["error"], letters[0][1]["message"]) == ("KeyError", "'the reason'")
    assert await lab.totals() == [("none", 1), ("complete", 1)]
    assert await lab.counts() == {"none": 1, "complete": 1}
    assert await lab.committed() == {0: 4}


async def test_a_policy_per_event_type_and_the_default_handler(lab: Lab) -> None:
    await lab.create()
    source = lab.source(error_policy=DEAD_LETTER)

    def refuse(ctx: EventContext[Totals], event: object) -> None:
        ctx.store.put("trace", 1)
        raise RuntimeError(f"{event!r}")

    source.register_event_type(Added, refuse, on_error=SKIP)
    source.register_event_type(Total, refuse)
    source.register_default_handler(refuse, on_error=ErrorPolicy(retries=1, backoff_seconds=0))
    await lab.add("a")
    await lab.send(b'{"name":"a","amount":1}', headers=[("__grt__", b"Total")])
    await lab.send(b"\xff\x00", headers=None)
    await lab.flush()
    error = await start_failure(source)
    assert f"{lab.topic}[0]@2" in str(error)
    assert "2 attempt(s)" in str(error)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1"]
    assert await lab.counts() == {}


async def test_a_long_and_unprintable_cause(lab: Lab) -> None:
    """A dead letter stays a small record, and its headers stay UTF-8, whatever the exception says."""
    await lab.create()
    source = lab.source()

    class Rude(Exception):
        def __str__(self) -> str:
            return "\ud800" + "x" * 5_000_000

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        raise Rude

    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    await lab.add("a", "b")
    async with Running(source) as run:
        await run.until_committed(2)
    letters = await lab.dead_letters()
    assert [facts["error"] for _, facts in letters] == ["Rude", "Rude"]
    assert {len(facts["message"]) for _, facts in letters} == {LONGEST_TEXT}


async def test_an_exception_that_cannot_be_shown(lab: Lab) -> None:
    """``str(error)`` may raise itself; the policy holds all the same."""
    await lab.create()
    source = lab.source()

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def handler(ctx: EventContext[Totals], event: Added) -> None:
        if event.deed:
            raise Broken
        ctx.store.put(event.name, event.amount)

    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    await lab.add("bad", deed="raise")
    await lab.add("good")
    async with Running(source) as run:
        await run.until_committed(2)
    assert [facts["error"] for _, facts in await lab.dead_letters()] == ["Broken"]
    assert await lab.counts() == {"good": 1}


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_what_a_context_does_after_its_handler_is_refused(lab: Lab, kind: str) -> None:
    await lab.create()
    source = lab.source()
    kept: list[EventContext[Totals]] = []

    def plain(ctx: EventContext[Totals], event: Added) -> None:
        kept.append(ctx)

    async def patient(ctx: EventContext[Totals], event: Added) -> None:
        kept.append(ctx)

    source.register_event_type(Added, patient if kind == "async" else plain)
    await lab.add("a")
    async with Running(source) as run:
        await run.until_committed(1)
        [ctx] = kept
        with pytest.raises(Exception, match="after the handler"):
            ctx.forward(lab.output, Total("late", 1))
        with pytest.raises(Exception, match="outside of an event"):
            ctx.store.put("late", 1)
    assert await lab.records() == []
    assert await lab.counts() == {}


PROGRAM = """
import os, sys
from streams import *
from streams.testing.faults import FaultPlan, consume_with_faults
from tests.broker.engine_kit import Added, Lab, TOTALS, Total
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
    register(lab, source, "plain", SKIP)
    async with Running(source) as run:
        await run.until_handled(2)
    assert await lab.totals() == [("first", 1)]
    assert await lab.committed() == {0: 2}


@pytest.mark.parametrize("point", ["flush.after:1", "commit.before:1", "commit.after:1"])
async def test_dead_letters_are_exactly_once_over_a_kill(lab: Lab, topic_prefix: str, point: str) -> None:
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    await lab.add("third")
    code, errors = await finish(start_program(lab, topic_prefix, "DEAD_LETTER", KES_FAULT=point))
    assert code == -9, errors
    source = lab.source(session_timeout_seconds=2, transaction_timeout_seconds=1.5)
    register(lab, source, "plain", DEAD_LETTER)
    async with Running(source) as run:
        await run.until_handled(3)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1"]
    assert await lab.totals() == [("first", 1), ("third", 1)]
    assert await lab.committed() == {0: 3}
    await lab.check_settled(lab.output, lab.changelog, lab.dead_letter_topic)


async def test_one_bad_record_among_many(lab: Lab) -> None:
    """Order and completeness where failures fall into the middle of slices and of batches."""
    await lab.create()
    expected: list[tuple[str, int]] = []
    counts: dict[str, int] = {}
    for number in range(1_000):
        name, bad = f"n{number % 7}", number % 97 == 13
        await lab.send(added(name, 1, "raise" if bad else ""), name.encode())
        if not bad:
            counts[name] = counts.get(name, 0) + 1
            expected.append((name, counts[name]))
    await lab.flush()
    source = lab.source()
    register(lab, source, "plain", DEAD_LETTER)
    async with Running(source) as run:
        await run.until_committed(1_000)
    assert await lab.totals() == expected
    assert [int(f["offset"]) for _, f in await lab.dead_letters()] == [n for n in range(1_000) if n % 97 == 13]
    assert await lab.counts() == {"touched": len(expected), **counts}
    await lab.check_settled()
