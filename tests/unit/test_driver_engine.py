"""What the engine does about failures and strange records, in simulated time: on a broker it takes minutes, or luck."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, SKIP, ErrorResponse, EventContext, EventSource, Record, Retry
from streams.errors import NotOwned
from streams.metrics import EventFailed, Measurement
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord
from streams.runtime.partition.dead_letters import PREFIX
from streams.sak.murmur2 import partition_of
from streams.testing import TestDriver
from streams.testing.world import CALM
from tests.unit.bad_input import FAILING_KEYS, GOOD_HEADERS, GOOD_VALUE, Seen, counting, small_records
from tests.unit.handlers_kit import OUT, config, counts, driven, letters, send, totals
from tests.vocabulary import TOTALS, Added, count, register, tell_total


def test_a_retried_event_keeps_its_place_and_holds_up_its_partition_only() -> None:
    """Attempts are counted and spaced; the other partition goes on meanwhile; one effect is left."""
    tried: list[tuple[int, float]] = []
    done: list[str] = []

    def work(ctx: EventContext[Any], event: Added) -> None:
        ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
        tell_total(ctx, event, "out")
        if event.deed:
            tried.append((ctx.attempt, driver.now))
            if ctx.attempt < 5:
                raise OSError("not yet")
        done.append(event.name)

    policy = Retry(attempts=10, backoff_seconds=2.0, max_backoff_seconds=6.0, then=ErrorResponse.FAIL_CONSUMER)
    with driven(work, on_error=policy, partitions=2) as driver:
        send(driver, "stubborn", deed="five times", wait=False)
        send(driver, "behind", wait=False)
        driver.advance(3.0)
        send(driver, "other", partition=1, wait=False)
        driver.advance(1.0)
        assert (done, totals(driver)) == (["other"], [("other", 1)])
        driver.settle()
        assert done == ["other", "stubborn", "behind"]
        assert [number for number, _ in tried] == [1, 2, 3, 4, 5]
        gaps = [after - before for (_, before), (_, after) in itertools.pairwise(tried)]
        assert all(0.75 * wanted <= gap <= 1.25 * wanted + 0.1 for gap, wanted in zip(gaps, (2, 4, 6, 6), strict=True))
        assert totals(driver) == [("other", 1), ("stubborn", 1), ("behind", 1)]
        assert counts(driver) == {"touched": 2, "stubborn": 1, "behind": 1}
        driver.check()


def test_a_skipped_record_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def work(ctx: EventContext[Any], event: Added) -> None:
        count(ctx, event)
        if event.deed:
            raise ValueError(f"no {event.name}, please")

    with driven(work, on_error=SKIP) as driver:
        send(driver, "first")
        send(driver, "bad", deed="raise")
        assert (counts(driver), driver.committed_offsets()) == ({"first": 1}, {0: 2})
    assert "in[0]@1" in caplog.text


def test_a_key_that_another_partitioner_has_placed_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with driven(count, partitions=4) as driver:
        for name in ("a", "b", "c", "d"):
            driver.send(Added(name), key=name)
        assert "partitioner" not in caplog.text
        wrong = (partition_of(b"a", 4) + 1) % 4
        for _ in range(2):
            driver.send(Added("a"), key="a", partition=wrong)
    assert caplog.text.count(f"in[{wrong}]@") == caplog.text.count("partitioner=murmur2_random") == 1


def test_foreign_records_and_tombstones_in_the_changelog(caplog: pytest.LogCaptureFixture) -> None:
    """A record without a key is ignored and told; tombstones of keys that never were do no harm, nor does what a later
    version keeps there for itself."""
    source = EventSource(config(), TOTALS)
    register(source, count)
    with TestDriver(source) as driver:
        send(driver, "a", "b")
        driver.leave()
        broker = driver._world.broker
        foreign = [(None, b"who am I?"), *((b"never-%d" % number, None) for number in range(50))]
        for key, value in [*foreign * 9, (b"b", None), (b"\xff\xffkes.something-newer", b"1")]:
            broker.append("g.in.changelog", 0, key, value, None, broker.wall_ms())
        driver.restart()
        send(driver, "a", "b")
        assert dict(driver.store(0).items()) == {"a": 2, "b": 1}
    assert "without key" in caplog.text
    assert "g.in.changelog[0]@" in caplog.text


def test_positions_of_inputs_that_a_later_version_reads_are_carried_as_they_are() -> None:
    """Over a restart, a crash, moves with a warm copy and a refused record: or the later version, when it comes back,
    would begin these inputs anew. Without any the record has the fields that it always had."""
    inputs = b'{"payments":{"0":[7, "an-id"]},"later": 1.50}'
    written: list[bytes] = []

    def later(driver: TestDriver[Any], partition: int) -> bytes:
        """Let the last offset record be one of a later version."""
        broker = driver._world.broker
        last = [r for r in broker.log("g.in.changelog", partition).committed(0, 1 << 30) if r.key == OFFSET_KEY][-1]
        assert b"inputs" not in (last.value or b"")
        assert list(msgspec.json.decode(last.value or b"")) == [*OffsetRecord.__struct_fields__][:-1]
        value = (last.value or b"")[:-1] + b',"inputs":' + inputs + b"}"
        broker.append("g.in.changelog", partition, OFFSET_KEY, value, None, broker.wall_ms())
        return value

    def refuse(ctx: EventContext[Any], event: Added) -> None:
        count(ctx, event)
        if event.deed:
            ctx.forward("elsewhere", event, key="k")

    source = EventSource(config(2, num_standbys=1, error_policy=SKIP), TOTALS)
    source.output(OUT)
    register(source, refuse)
    with TestDriver(source, members=1) as driver:
        for partition in (0, 1):
            send(driver, "a", partition=partition)
        driver.leave()
        written += [later(driver, partition) for partition in (0, 1)]
        driver.restart()
        disturbances: list[Callable[[], object]] = [
            lambda: None,
            driver.join,
            lambda: driver.crash(0),
            lambda: driver.restart(0),
            lambda: driver.leave(1),
        ]
        for disturb in disturbances:
            disturb()
            for partition in (0, 1):
                send(driver, "a", partition=partition)
                send(driver, "a", deed="refused", partition=partition)
        for partition in (0, 1):
            log = driver._world.broker.log("g.in.changelog", partition)
            values = [record.value or b"" for record in log.committed(0, log.end) if record.key == OFFSET_KEY]
            behind = values[values.index(written[partition]) :]
            assert len(behind) > 4
            assert all(value.endswith(b',"inputs":' + inputs + b"}") for value in behind)
            assert dict(driver.store(partition).items()) == {"a": 6}


@pytest.mark.parametrize("partition", [2, -1, 99])
def test_an_interjection_of_a_partition_that_is_not_there(partition: int) -> None:
    with driven(count, partitions=2) as driver, pytest.raises(NotOwned):
        driver._run(driver._world.members[0].source.interject(partition, lambda ctx: None))


@pytest.mark.parametrize("policy", [DEAD_LETTER, SKIP], ids=["dead letter", "skip"])
def test_records_that_cannot_be_read_among_good_ones(policy: Retry, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a dead letter as it came, or skipped and named in the log; those around it are counted once, in order."""
    cases = small_records()
    failed: list[int] = []

    def measure(measurement: Measurement) -> None:
        if isinstance(measurement, EventFailed):
            failed.append(measurement.offset)

    with TestDriver(counting(config(decode_policy=policy, metrics_handler=measure), "out", policy)) as driver:
        for case in cases:
            driver.send_record(Record("in", GOOD_VALUE, b"good", GOOD_HEADERS, 0), wait=False)
            driver.send_record(Record("in", case.value, case.key, case.headers, 0), wait=False)
        driver.settle()
        failing = {
            2 * number + 1: case
            for number, case in enumerate(cases)
            if case.ending != "decoded" or case.name in FAILING_KEYS
        }
        assert failed == list(failing)
        seen = [event.count for event in driver.outputs("out", Seen)]
        assert seen == list(range(1, 2 * len(cases) - len(failing) + 1))
        assert driver.store(0).get(b"all") == len(seen)
        found = [
            (letter.key, letter.value, [pair for pair in letter.headers or () if not pair[0].startswith(PREFIX)])
            for letter in driver.dead_letters()
        ]
        assert found == [
            (case.key, case.value, case.headers or []) for case in failing.values() if policy is DEAD_LETTER
        ]
        errors = ["StoreError" if case.name in FAILING_KEYS else "DecodeError" for case in failing.values()]
        assert letters(driver, "error") == [(error,) for error in errors if policy is DEAD_LETTER]
        assert all(0 < len(message) < 2_001 for (message,) in letters(driver, "message"))
        driver.check()
    named = {int(offset) for offset in re.findall(r"in\[0\]@(\d+)", caplog.text)}
    assert named >= failing.keys(), "no silent skip"


def test_restore_and_readiness_are_a_line_each_and_a_long_restore_tells_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "streams.runtime.ownership.readiness")

    def said() -> list[str]:
        lines = [re.sub(r"[\d.]+ s\b", "N s", text) for text in caplog.messages]
        caplog.clear()
        return [text for text in lines if text.startswith(("rest", "ready"))]

    source = EventSource(config(4), TOTALS)
    register(source, count, "plain")
    slow = msgspec.structs.replace(CALM, tail_batch=10, tail_pause=1.0)
    ready = "ready: partitions 0-3 of in are at work, of 4"
    with TestDriver(source, conditions=slow) as driver:
        log = driver._world.config.changelog
        driver.advance(1.0)
        assert said() == [f"restored partitions 0-3: 0 records of {log}, N s", ready]
        for number in range(28):
            send(driver, f"name-{number}", partition=number % 4)
        driver.crash()
        driver.restart()
        driver.advance(1.0)
        *progress, restored, last = said()
        assert (restored, last) == (f"restored partitions 0-3: 56 records of {log}, N s", ready)
        assert len(progress) >= 2
        left = [
            re.fullmatch(
                rf"restoring partitions .+ for N s: \d+ records of {log} read, (\d+) offsets to go, about N s left",
                text,
            )
            for text in progress
        ]
        assert all(left), progress
