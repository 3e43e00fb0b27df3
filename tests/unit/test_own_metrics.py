"""Metrics of a source's own, which count committed events; and the figures about age, bytes and what cannot be read."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from typing import Any

import pytest

from streams import DEAD_LETTER, SKIP, EventSource, EventSourceConfig, Record, Retry
from streams.errors import ConfigError, RegistrationError
from streams.formats import ByFunction, CloudEvents
from streams.metrics import EventFailed, Measurement, OwnMeasured, TransactionSettled
from streams.model.own_metrics import OwnMetric
from streams.observability.health import SourceHealth
from streams.observability.prometheus import PrometheusMetrics
from streams.statistics import PartitionStatistics, SourceState, SourceStatistics
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config
from tests.unit.runtime_kit import Bench, nothing
from tests.unit.test_metrics_export import in_thread
from tests.unit.test_metrics_export import source_of as exported_source
from tests.vocabulary import TOTALS, Added


def source_of(seen: list[Measurement], **settings: Any) -> EventSource[Any]:
    settings = {"decode_policy": SKIP, "error_policy": DEAD_LETTER, **settings}
    source = EventSource(config(1, metrics_handler=seen.append, **settings), TOTALS)
    source.metric("orders", labels=("kind",), help="Orders.")
    source.metric("amount", "histogram", buckets=(1, 10))
    return source


def own(seen: list[Measurement]) -> list[tuple[str, float, tuple[str, ...]]]:
    return [(one.name, one.value, one.labels) for one in seen if isinstance(one, OwnMeasured)]


def counting(ctx: Any, event: Added) -> None:
    ctx.count("orders", 2, kind=event.name)
    ctx.observe("amount", event.amount)
    ctx.forward(OUT, event, key=event.name)
    if event.deed == "fail" or (event.deed == "once" and ctx.attempt == 1):
        raise ValueError(event.deed)


async def counting_later(ctx: Any, event: Added) -> None:
    counting(ctx, event)


KINDS: list[Any] = [
    (counting, {}), (counting_later, {}), (counting, {"blocking": True}), (counting_later, {"concurrency": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("handler", "options"), KINDS, ids=["plain", "async", "blocking", "concurrent"])
def test_own_metrics_count_committed_events_once(handler: Any, options: dict[str, Any]) -> None:
    """Not the attempts that failed, nor the transaction that was aborted, nor the event that ended as a letter."""
    seen: list[Measurement] = []
    source = source_of(seen)
    policy = Retry(attempts=2, backoff_seconds=0.01, then=DEAD_LETTER.then)
    source.register_event_type(Added, handler, on_error=policy, **options)
    with TestDriver(source) as driver:
        for at, deed in enumerate(["", "once", "fail", ""]):
            driver.send(Added(f"n{at}", at, deed), key="k", wait=False)
        driver.at("commit.before", driver.abort)
        driver.settle()
        driver.check()
        assert sorted(own(seen)) == sorted(
            [("orders", 2.0, (f"n{at}",)) for at in (0, 1, 3)] + [("amount", float(at), ()) for at in (0, 1, 3)]
        )
        assert [record.value for record in driver.outputs("")] == []
        assert len(driver.outputs(OUT)) == 3
    settled = [one for one in seen if isinstance(one, TransactionSettled) and one.committed]
    assert sum(one.outputs for one in settled) == 4  # three outputs and a letter: a metric is no record


def test_own_metrics_of_timers_and_interjections_and_with_a_form() -> None:
    seen: list[Measurement] = []
    source = source_of(seen)
    source.output(OUT, form=CloudEvents(source="/bank"))

    @source.on
    def added(ctx: Any, event: Added) -> None:
        ctx.count("orders", kind="timer" if ctx.timer else "event")
        if ctx.timer is None:
            ctx.schedule_in(1, event)
        ctx.forward(OUT, event, key="k")

    with TestDriver(source) as driver:
        driver.send(Added("a", 1, ""), key="k")
        driver.advance(2)
        driver.interject(0, lambda ctx: ctx.count("orders", kind="interjection"))
        assert [labels for _, _, (labels,) in own(seen)] == ["event", "timer", "interjection"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ctx: ctx.count("other"), "there is no metric 'other'; declare it"),
        (lambda ctx: ctx.count("orders"), "was given the labels"),
        (lambda ctx: ctx.count("orders", kind="a", more="b"), "was given the labels"),
        (lambda ctx: ctx.count("orders", -1, kind="a"), "it must be a number, 0 or more"),
        (lambda ctx: ctx.count("orders", float("nan"), kind="a"), "it must be a number"),
        (lambda ctx: ctx.observe("amount", float("inf")), "it must be a number, finite"),
        (lambda ctx: ctx.observe("amount", True), "it must be a number"),
        (lambda ctx: ctx.count("amount"), r"is a histogram: ctx\.observe is for it"),
    ],
)
def test_what_cannot_be_counted_is_the_handlers_error(call: Any, said: str) -> None:
    seen: list[Measurement] = []
    source = source_of(seen)
    source.register_event_type(Added, lambda ctx, event: call(ctx))
    with TestDriver(source) as driver:
        driver.send(Added("a", 1, ""), key="k")
        [failed] = [one for one in seen if isinstance(one, EventFailed)]
        assert re.search(said, failed.error)
        assert own(seen) == []


@pytest.mark.parametrize(
    ("name", "kind", "labels", "buckets"),
    [
        ("kes_orders", "counter", (), (1,)), ("process_cpu", "counter", (), (1,)), ("a_total", "counter", (), (1,)),
        ("a b", "counter", (), (1,)), ("", "counter", (), (1,)), ("a\n", "counter", (), (1,)), (7, "counter", (), (1,)),
        ("a", "gauge", (), (1,)), ("a", "counter", "kind", (1,)), ("a", "counter", ("group",), (1,)),
        ("a", "counter", ("x", "x"), (1,)), ("a", "counter", ("1",), (1,)), ("a", "histogram", (), ()),
        ("a", "histogram", (), (2, 1)), ("a", "histogram", (), (float("inf"),)), ("x" * 101, "counter", (), (1,)),
    ],
)  # fmt: skip
def test_what_is_no_metric(name: Any, kind: Any, labels: Any, buckets: Any) -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
    with pytest.raises(ConfigError):
        source.metric(name, kind, labels=labels, buckets=buckets)


def test_a_metric_is_declared_once_and_before_the_start() -> None:
    source = source_of([])
    with pytest.raises(RegistrationError, match="there is a metric 'orders' already"):
        source.metric("orders")
    source._declared.router.freeze()
    with pytest.raises(RegistrationError, match="comes too late"):
        source.metric("more")


def test_labels_are_bounded_and_harmless() -> None:
    metric = OwnMetric("orders", "counter", ("kind",), (1.0,), "")
    values = {metric.bounded(metric.values("counter", 1, {"kind": f"k{number}"})[1]) for number in range(10_000)}
    assert len(values) == 101
    assert ("other",) in values
    assert metric.values("counter", 1, {"kind": "\ud800" + "x" * 1000})[1] == ("?" + "x" * 99,)


def test_own_metrics_are_exported() -> None:
    seen: list[Measurement] = []
    source = source_of(seen)
    metrics, measure = PrometheusMetrics(source), source._run.measured(source.config).metrics_handler
    assert measure is not None
    for amount, kind in ((2, "eu"), (3, 'us"\n\\')):
        measure(OwnMeasured("orders", amount, (kind,)))
        measure(OwnMeasured("amount", amount))
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    assert (found["orders_total", "eu", "g"], found["orders_total", "g", 'us"\n\\']) == (2, 3)
    assert (found["amount_bucket", "1.0", "g"], found["amount_bucket", "10.0", "g"], found["amount_sum", "g"]) == (
        0,
        2,
        5,
    )


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with (
        PrometheusMetrics(exported_source()).serve("127.0.0.1:0") as server,
        pytest.raises(ConfigError, match=rf"cannot be served at 127.0.0.1:{server.port}: Address already in use; stop"),
    ):
        PrometheusMetrics(exported_source()).serve(f"127.0.0.1:{server.port}")
    PrometheusMetrics(exported_source()).serve(f"127.0.0.1:{server.port}").close()
    with pytest.raises(ConfigError, match=r"cannot be served at nowhere\.invalid:1: "):
        PrometheusMetrics(exported_source()).serve("nowhere.invalid:1")


# -- figures of the toolkit's own --------------------------------------------------------------------------------------


def kind_of(record: Any) -> Any:
    return {b"none": None, b"broken": 1}.get(record.value, "unknown" if record.value == b"unknown" else Added)


def test_what_cannot_be_read_is_counted_by_its_reason() -> None:
    seen: list[Measurement] = []
    source = EventSource(config(1, metrics_handler=seen.append, decode_policy=SKIP), types=ByFunction(kind_of))
    source.register_event_type(Added, lambda ctx, event: None)
    with TestDriver(source) as driver:
        for value in (None, b"none", b"broken", b"unknown", b"{}"):
            driver.send_record(Record(source.config.topic, value, b"k"))
    found = [(one.topic, one.unread) for one in seen if isinstance(one, EventFailed)]
    assert found == [(source.config.topic, why) for why in ("null", "untyped", "refused", "unknown_type", "value")]


def test_bytes_of_outputs_and_changelog() -> None:
    seen: list[Measurement] = []
    source = source_of(seen)

    @source.on
    def added(ctx: Any, event: Added) -> None:
        ctx.store.put(event.name, event.amount)
        ctx.forward(Record(OUT, b"x" * 1000, b"k"))

    with TestDriver(source) as driver:
        driver.send(Added("a", 1, ""), key="k")
    settled = [one for one in seen if isinstance(one, TransactionSettled) and one.committed]
    assert 1000 < sum(one.output_bytes.get(OUT, 0) for one in settled) < 1100
    assert {topic for one in settled for topic in one.output_bytes} == {OUT}
    assert sum(one.changelog_bytes for one in settled) > 50


def test_the_age_of_events_and_the_lag_in_seconds() -> None:
    source = EventSource(config(2), TOTALS)
    topic = source.config.topic

    @source.on
    async def added(ctx: Any, event: Added) -> None:
        if event.deed == "slow":
            with contextlib.suppress(TimeoutError):  # in virtual time
                await asyncio.wait_for(asyncio.Event().wait(), 100)

    with TestDriver(source) as driver:
        driver.send(Added("a", 1, ""), key="k", partition=0)
        old = round((driver.time() - 50) * 1000)
        value = b'{"name":"a","amount":1,"deed":"slow"}'
        headers = [("__grt__", b"Added")]
        driver.send_record(Record(topic, value, b"k", headers, 0, old), wait=False)
        driver.send(Added("b", 1, ""), key="k", partition=0, wait=False)
        driver.advance(20)
        first, second = driver.statistics().partitions
        assert first.lag_seconds[topic] == pytest.approx(70, abs=1)  # that of the record under way
        assert topic not in second.lag_seconds  # nothing is known of its next record, nor of its end
        driver.settle(patience=200)
        first, _ = driver.statistics().partitions
        assert topic not in first.lag_seconds
        assert first.event_age_seconds[topic] == pytest.approx(100, abs=2)  # the last one has waited for the slow one


def test_a_bound_of_seconds_for_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    one = PartitionStatistics(3, "active", 1, 0, 0, False, lag_seconds={"in": 7.5})
    statistics = SourceStatistics(SourceState.RUNNING, "i", 1, (one,), 0, 0, 0)
    health = SourceHealth(EventSource(config(1)))
    monkeypatch.setattr(health, "statistics", lambda *_: statistics)
    assert health.ready(None, 8.0).is_good
    assert health.ready(None, 7.0) == (False, "g: partitions are more than 7 s behind: 3 (7.5 in in)")


async def test_a_look_that_a_closed_loop_left_behind_is_not_waited_for(bench: Bench) -> None:
    """As when a source runs, ends with a look under way, and runs again in the same process."""
    source = bench.make(nothing)
    now, left = [0.0], concurrent.futures.Future[Any]()
    health = SourceHealth(source, lambda: now[0])
    health._looking, health._loop, health._since = left, asyncio.new_event_loop(), 0.0
    health._loop.close()
    now[0] = 1_000.0
    await bench.start()
    assert await in_thread(health.live) == (True, "g: live")
    await bench.stop()
