"""Metrics for Prometheus and probes: every measurement and figure is exported, labels are bounded, no client and no
loop that hangs holds up anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any, get_args

import pytest
from prometheus_client import make_asgi_app
from prometheus_client.parser import text_string_to_metric_families

from streams import EventSource, EventSourceConfig
from streams.errors import ConfigError
from streams.metrics import (
    BatchFailed,
    CallAbandoned,
    CallbackFailed,
    CommandHandled,
    DurableJobEnded,
    EventDuplicate,
    EventFailed,
    HandlerTimed,
    HeadTried,
    IdMissing,
    IdsForgotten,
    JobEnded,
    Measurement,
    MembershipChanged,
    OffsetMismatch,
    OutOfTime,
    OwnMeasured,
    PartitionMoved,
    PartitionsAdded,
    TakeOverDone,
    TransactionSettled,
)
from streams.observability import HttpServer, PrometheusMetrics, http_server, observed_source
from streams.observability.catalogue import INSTRUMENTS, WORKER_STARTS, WORKER_UP, Kind
from streams.observability.health import Verdict
from streams.observability.http_server import parse_address
from streams.statistics import (
    CopyStatistics,
    FolderStatistics,
    InputStatistics,
    LookupStatistics,
    MoveStatistics,
    PartitionStatistics,
    SourceState,
    SourceStatistics,
    StageStatistics,
    VisitStatistics,
)
from tests import vocabulary
from tests.unit.runtime_kit import Bench, nothing
from tests.unit.waiting import threads_since, wait_until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def config_of(group: str, **settings: Any) -> EventSourceConfig:
    return vocabulary.config_of(group_id=group, topic="in", num_partitions=4, **settings)


def source_of(group: str = "g", **settings: Any) -> EventSource[Any]:
    source = EventSource(config_of(group, **settings))
    source.metric("orders", labels=("kind",))
    return source


def get(server: HttpServer, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(metrics: PrometheusMetrics) -> Samples:
    with metrics.serve("127.0.0.1:0") as server:
        code, text = get(server, "/metrics")
        assert code == 200
        return samples(text)


def value(found: Samples, metric: str, /, **labels: str) -> float | None:
    return found.get((metric, tuple(sorted({"group": "g", **labels}.items()))))


# -- what is exported --------------------------------------------------------------------------------------------------

MEASURED: list[tuple[Measurement, dict[str, float]]] = [
    (
        TransactionSettled(True, 3, 5, 6, 7, 2, 0.02, 0.2, 0.1, {"out": 40}, 90),
        {'kes_transactions_total outcome=committed': 1, 'kes_transactions_total outcome=not_committed': 0,
         "kes_output_bytes_total topic=out": 40, "kes_changelog_bytes_total": 90,
         "kes_transactions_resent_total": 2, "kes_events_total": 5, "kes_outputs_total": 6, "kes_changes_total": 7,
         "kes_transaction_open_seconds_sum": 0.02, "kes_transaction_flush_seconds_sum": 0.1,
         "kes_transaction_commit_seconds_sum": 0.2, "kes_transaction_commit_seconds_bucket le=0.1": 0,
         "kes_transaction_commit_seconds_bucket le=0.25": 1, "kes_transaction_commit_seconds_bucket le=+Inf": 1},
    ),
    (TransactionSettled(False, 1, 5, 6, 7, 2, 0.02, 20.0),
     {"kes_transactions_total outcome=not_committed": 1, "kes_events_total": 0, "kes_transactions_resent_total": 0,
      "kes_transaction_commit_seconds_count": 0}),
    (EventFailed(1, 2, "KeyError: 'x'", "dead_letter"),
     {"kes_failed_events_total response=dead_letter": 1, "kes_failed_events_total response=continue": 0}),
    (EventFailed(1, 2, "no", "continue", "in", "untyped", True),
     {"kes_decode_failures_total topic=in,reason=untyped": 1, "kes_unreadable_values_total": 1}),
    (OwnMeasured("orders", 3, ("eu",)), {"orders_total kind=eu": 3}),
    (EventDuplicate(1, 2, "Paid", 3), {"kes_once_duplicates_total type=Paid": 3}),
    (IdMissing(1, "Paid", 2), {"kes_once_missing_total type=Paid": 2}),
    (IdsForgotten(1, 4), {"kes_once_forgotten_total": 4}),
    (HandlerTimed("Paid", 0.0002), {"kes_handler_seconds_bucket type=Paid,le=0.00025": 1}),
    (BatchFailed(1, 2, "no"), {"kes_failed_batches_total": 1}),
    (DurableJobEnded("mail", 1, "done"), {"kes_jobs_ended_total name=mail,outcome=done": 1}),
    (CommandHandled(1, "Withdraw", "done", 0.02),
     {"kes_commands_total type=Withdraw,outcome=done": 1, "kes_command_seconds_sum": 0.02,
      "kes_command_seconds_bucket le=0.01": 0, "kes_command_seconds_bucket le=0.025": 1}),
    (HeadTried(1, "completed"), {"kes_parked_retries_total outcome=completed": 1}),
    (OutOfTime(1, "late", "Shop", "minutes", 3), {"kes_late_items_total store=Shop,window=minutes": 3}),
    (OutOfTime(1, "expired_early", "Shop", "carts", 2), {"kes_expired_early_total store=Shop,table=carts": 2}),
    (OutOfTime(1, "time_jump", "Shop", "", 1), {"kes_time_jumps_total partition=1": 1}),
    (JobEnded("call", 1, 99.0, 4, "failed"),
     {"kes_jobs_total name=call,outcome=failed": 1, "kes_job_retries_total name=call": 3,
      "kes_job_seconds_bucket name=call,le=10.0": 0, "kes_job_seconds_bucket name=call,le=+Inf": 1}),
    (MembershipChanged(1, 2, 3, lost=False), {"kes_rebalances_total": 1, "kes_memberships_lost_total": 0}),
    (MembershipChanged(-1, 0, 0, lost=True), {"kes_rebalances_total": 0, "kes_memberships_lost_total": 1}),
    (TakeOverDone(1, 2, 3, 0.1, 0.2, 0.4, True),
     {"kes_takeovers_total warm=true": 1, "kes_takeovers_total warm=false": 0, "kes_takeover_seconds_sum": 0.7,
      "kes_restore_seconds_sum": 0.4}),
    (PartitionMoved(1, "in", "", 2.0), {"kes_moves_total direction=in": 1, "kes_moves_total direction=out": 0,
                                        "kes_move_seconds_sum direction=in": 2.0}),
    (OffsetMismatch(1, -1, 5), {"kes_offset_mismatches_total": 1}),
    (CallAbandoned("commit", 2), {"kes_abandoned_calls_total": 1}),
    (CallbackFailed("on_revoked", 2, "KeyError('x')"),
     {"kes_failed_callbacks_total callback=on_revoked": 1, "kes_failed_callbacks_total callback=on_assigned": 0}),
    (PartitionsAdded("in", 4, 6), {"kes_unread_partitions": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("measurement", "expected"), MEASURED, ids=[type(one).__name__ for one, _ in MEASURED])
def test_a_measurement_is_exported(measurement: Measurement, expected: dict[str, float]) -> None:
    source = source_of()
    metrics = PrometheusMetrics(source)
    source._run.measured(source.config).metrics_handler(measurement)  # type: ignore[misc]
    found = scraped(metrics)
    for wanted, number in expected.items():
        name, _, labels = wanted.partition(" ")
        given = dict(label.split("=") for label in labels.split(",")) if labels else {}
        assert value(found, name, **given) == pytest.approx(number), wanted


def test_every_measurement_and_every_kind_of_figure_has_its_metric() -> None:
    assert {type(one) for one, _ in MEASURED} == set(get_args(Measurement))
    exported = {name for name, _ in scraped(full()) if name.startswith("kes_")}
    expected = {f"{each.name}_total" if each.kind is Kind.COUNTER else f"{each.name}_bucket"
                if each.kind is Kind.HISTOGRAM else each.name for each in INSTRUMENTS
                if each not in (WORKER_UP, WORKER_STARTS)}  # fmt: skip
    assert expected <= exported
    assert not [name for name in exported if name.endswith("_created")]


FULL = SourceStatistics(
    SourceState.RUNNING, "i-1", 7,
    (PartitionStatistics(0, "active", 10, 3, 300, True, 4, 5, 1_700_000_000_500, 25,
                         (InputStatistics("in", 10, 3, True, 25), InputStatistics("more", 7, 0)),
                         (VisitStatistics("look", "r", 8, (), {}, {}),), {}, 2, 9, 77, 1_700_000_000_250, "max_keys",
                         {"in": 2.5}, {"in": 1.25}, 3, 1, 1_700_000_000_125, 2, "mail", 6, 1, 2, 3, 4),
     PartitionStatistics(1, "restoring", -1, 0, 0, False)),
    11, 12, 2,
    (CopyStatistics(1, "restoring", 5, 9, 4, 5, 50, 1.0, None, 2.5),),
    (MoveStatistics(1, "in", "", 7, 1.0),), "m-1", (), (StageStatistics("calls", 1, 2, 3, 4, 1.5),), 6,
    (FolderStatistics(0, "kept", 30, 400, 5, 60, 0.7, 0.08, 0.9, 1.5),
     FolderStatistics(1, "left", -1, 0, 0, 0, 0.0, 0, 0)),
    2, (LookupStatistics("rates", SourceState.RUNNING, True, False, True, 8, 2, 90, 1),),
    {"in": 1234}, "compiled", (), {"Paid": 8}, {"Paid": {"dead_letter": 3}}, "bank", {"out": 5},
)  # fmt: skip


class _FullSource(EventSource[Any]):
    """Has all that there is to export."""

    def statistics(self) -> SourceStatistics:
        return FULL


def full() -> PrometheusMetrics:
    metrics = PrometheusMetrics(source := _FullSource(config_of("g")))
    source.metric("orders", labels=("kind",))
    for measurement, _ in MEASURED:
        source._run.measured(source.config).metrics_handler(measurement)  # type: ignore[misc]
    return metrics


def test_the_figures_of_a_source_are_exported() -> None:
    found = scraped(full())
    expected = {
        "kes_source_info topic=in,instance_id=i-1": 1, "kes_loop_answered": 1, "kes_source_state state=running": 1,
        "kes_source_state state=failed": 0, "kes_group_generation": 7, "kes_unsettled_transactions": 2,
        "kes_hung_calls": 6, "kes_partitions state=active": 1, "kes_partitions state=draining": 0,
        "kes_partitions state=restoring": 1, "kes_moves_under_way direction=in": 1, "kes_copies state=restoring": 1,
        "kes_copies state=failed": 0, "kes_copy_records_left partition=1": 4, "kes_copy_lag_seconds partition=1": 2.5,
        "kes_partition_next_offset partition=0": 10, "kes_partition_lag partition=0": 15,
        "kes_input_next_offset partition=0,topic=more": 7, "kes_input_lag partition=0,topic=in": 15,
        "kes_lag_seconds partition=0,topic=in": 2.5, "kes_event_age_seconds partition=0,topic=in": 1.25,
        "kes_handled_events type=Paid,outcome=completed": 8, "kes_handled_events type=Paid,outcome=dead_letter": 3,
        "kes_input_bytes topic=in": 1234, "kes_partition_paused partition=0": 1,
        "kes_partition_queued_records partition=0": 3, "kes_partition_queued_bytes partition=0": 300,
        "kes_input_awaited partition=0,topic=in": 1, "kes_partition_events_ahead partition=0": 4,
        "kes_partition_timers partition=0": 5, "kes_parked_keys partition=0": 2, "kes_parked_events partition=0": 9,
        "kes_parked_bytes partition=0": 77, "kes_parked_since_timestamp_seconds partition=0": 1_700_000_000.25,
        "kes_parked_full partition=0": 1, "kes_parked_full partition=1": 0, "kes_once_ids partition=0": 6,
        "kes_jobs_pending partition=0": 3, "kes_jobs_parked partition=0": 1, "kes_jobs_running partition=0": 2,
        "kes_jobs_since_timestamp_seconds partition=0": 1_700_000_000.125, "kes_jobs_full partition=0": 1,
        "kes_visit_running partition=0,visit=look": 1, "kes_visit_keys partition=0,visit=look": 8,
        "kes_partition_next_timer_timestamp_seconds partition=0": 1_700_000_000.5, "kes_stage_running name=calls": 1,
        "kes_stage_waiting name=calls": 2, "kes_stage_keys name=calls": 3, "kes_stage_batches name=calls": 4,
        "kes_folders state=kept": 1, "kes_folders state=failing": 0, "kes_folders state=left": 1,
        "kes_folders_set_aside": 2, "kes_folder_bytes partition=0": 400, "kes_folder_gathered_changes partition=0": 5,
        "kes_folder_unwritten_bytes partition=0": 60, "kes_folder_mark_age_seconds partition=0": 0.7,
        "kes_folder_checkpoint_seconds partition=0": 0.08, "kes_folder_recover_seconds partition=0": 0.9,
        "kes_folder_snapshot_age_seconds partition=0": 1.5,
    }  # fmt: skip
    for wanted, number in expected.items():
        name, _, labels = wanted.partition(" ")
        given = dict(label.split("=") for label in labels.split(",")) if labels else {}
        assert value(found, name, **given) == number, wanted
    assert value(found, "kes_partition_lag", partition="1") is None, "its end is not known"
    assert ("process_resident_memory_bytes", ()) in found


def test_labels_are_bounded_whatever_is_measured() -> None:
    source = source_of()
    metrics = PrometheusMetrics(source)
    measure: Any = source._run.measured(source.config).metrics_handler

    def all_of(number: int) -> None:
        measure(EventFailed(number, number, f"KeyError: {number}", "continue"))
        measure(BatchFailed(number, number, f"{number}"))
        measure(PartitionMoved(number, "out", f"member-{number}", 1.0))
        measure(TakeOverDone(number, number, 1, 1.0, 1.0, 1.0))
        measure(MembershipChanged(number, 1, 1, lost=False, cause=f"joined: {number}"))
        measure(CallAbandoned(f"call {number}", number))
        measure(OffsetMismatch(number, 1, 2))

    all_of(0)
    before = len(scraped(metrics))
    for number in range(1, 2000):
        all_of(number)
    assert len(scraped(metrics)) == before


def test_the_users_handler_and_ours_are_both_called_and_a_run_without_ours_has_only_theirs() -> None:
    seen: list[Measurement] = []
    source = source_of(metrics_handler=seen.append)
    assert source._run.measured(source.config) is source.config, "nothing is put between when metrics are off"
    metrics = PrometheusMetrics(source)
    measured = source._run.measured(source.config).metrics_handler
    assert measured is not None
    measured(BatchFailed(0, 1, "no"))
    assert seen == [BatchFailed(0, 1, "no")]
    assert value(scraped(metrics), "kes_failed_batches_total") == 1


def test_two_sources_of_one_process_are_told_apart_by_their_group() -> None:
    first, second = source_of("g"), source_of("h")
    metrics = PrometheusMetrics(first, second)
    second._run.measured(second.config).metrics_handler(BatchFailed(0, 1, "no"))  # type: ignore[misc]
    with metrics.serve("127.0.0.1:0") as server:
        text = get(server, "/metrics")[1]
        assert text.count("# TYPE kes_failed_batches_total counter") == 1
        found = samples(text)
        assert value(found, "kes_failed_batches_total") == 0
        assert value(found, "kes_failed_batches_total", group="h") == 1
        assert get(server, "/ready") == (503, "g: the source is created\nh: the source is created\n")


# -- a source that runs ------------------------------------------------------------------------------------------------


async def in_thread(function: Any, *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def test_a_running_source_is_live_and_ready_and_its_lag_is_known(bench: Bench) -> None:
    gate = asyncio.Event()

    async def wait(ctx: Any, event: Any) -> None:
        await gate.wait()

    metrics = PrometheusMetrics(bench.make(wait, partitions=2))
    with metrics.serve("127.0.0.1:0") as server:
        assert await in_thread(get, server, "/live") == (200, "g: live\n")
        assert await in_thread(get, server, "/ready") == (503, "g: the source is created\n")
        await bench.start("a", "b", "c")
        assert await in_thread(get, server, "/ready") == (200, "g: ready\n")
        await bench.until(lambda: bench.source.statistics().partitions[0].queued_records, "they are queued")
        found = samples((await in_thread(get, server, "/metrics"))[1])
        assert value(found, "kes_partition_lag", partition="0") == 3
        assert value(found, "kes_partition_lag", partition="1") == 0
        said = "g: partitions are more than 2 records behind: 0 (3)\n"
        assert await in_thread(get, server, "/ready?max_lag=2") == (503, said)
        assert await in_thread(get, server, "/ready?max_lag=3") == (200, "g: ready\n")
        gate.set()
        await bench.committed()
        found = samples((await in_thread(get, server, "/metrics"))[1])
        assert value(found, "kes_events_total") == 3
        assert value(found, "kes_partition_lag", partition="0") == 0
        await bench.stop()
        assert await in_thread(get, server, "/ready") == (503, "g: the source is stopped\n")
        assert await in_thread(get, server, "/live") == (200, "g: live\n")


async def test_a_loop_that_stands_still_is_seen_and_does_not_hold_up_a_scrape(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_source, "SCRAPE_SECONDS", 0.2)
    metrics = PrometheusMetrics(bench.make(nothing))
    (observed,) = metrics._sources
    await bench.start()
    with metrics.serve("127.0.0.1:0") as server:
        free, answers = threading.Event(), []

        def look() -> None:
            try:
                answers.append(get(server, "/live"))
                answers.append(get(server, "/ready"))
                answers.append(get(server, "/metrics"))
                observed.health._now = lambda: time.monotonic() + 16.0
                answers.append(get(server, "/live"))
            finally:
                free.set()

        looking = threading.Thread(target=look)
        looking.start()
        free.wait(30.0)  # on the loop
        looking.join()
        live, ready, text, dead = answers
        assert live == (200, "g: live\n"), "it may be a long handler"
        assert ready == (503, "g: the event loop does not answer\n")
        assert text[0] == 200
        found = samples(text[1])
        assert value(found, "kes_loop_answered") == 0
        assert value(found, "kes_group_generation") is None
        assert value(found, "kes_events_total") == 0, "what was measured is there"
        assert dead[0] == 503
        assert dead[1].startswith("g: the event loop has stood still for ")
        observed.health._now = time.monotonic
        assert await in_thread(get, server, "/live") == (200, "g: live\n")
    await bench.end()


async def test_an_application_may_serve_the_registry_on_the_sources_own_loop(bench: Bench) -> None:
    metrics = PrometheusMetrics(bench.make(nothing))
    await bench.start("a")
    await bench.committed()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await make_asgi_app(metrics.registry)(scope, receive, send)
    found = samples(sent[1]["body"].decode())
    assert value(found, "kes_partition_next_offset", partition="0") == 1
    assert value(found, "kes_partition_lag", partition="0") is None, "that is known to the poll thread only"
    await bench.end()


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("9100", ("", 9100)), (":9100", ("", 9100)), ("localhost:0", ("localhost", 0)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "a:b", "65536", "-1", "::1:80", "http://x:1", "٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use HOST:PORT or PORT, as in"):
        parse_address(text)


def test_other_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrometheusMetrics(source_of()).serve("0") as server:
        assert get(server, "/") == (404, "there are /metrics, /live, /ready\n")
        assert get(server, "/ready?max_lag=much")[0] == 400
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 10)) as client:
            client.sendall(b"POST /live HTTP/1.0\r\n\r\n")
            assert b"405 Method Not Allowed" in client.recv(1000)
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 10)) as client:
            client.sendall(b"HEAD /live HTTP/1.0\r\n\r\n")
            head = client.makefile("rb").read()
        assert head.startswith(b"HTTP/1.0 200 OK")
        assert head.endswith(b"\r\n\r\n")
        code, text = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert (code, text[-6:]) == (200, "# EOF\n")


def test_clients_that_hang_hold_up_nothing_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has been waited for longest makes room. A request that is answered makes none."""
    monkeypatch.setattr(http_server, "MOST_CLIENTS", 3)
    monkeypatch.setattr(http_server._Handler, "timeout", 0.5)
    late, clients = threading.Event(), list[socket.socket]()
    probes = {"/live": lambda query: Verdict(True, "yes"), "/late": lambda query: Verdict(late.wait(10), "late")}

    def hangs(words: bytes) -> socket.socket:
        clients.append(socket.create_connection(("127.0.0.1", server.port), 10))
        clients[-1].sendall(words)
        return clients[-1]

    with HttpServer("127.0.0.1:0", nothing, probes) as server, contextlib.ExitStack() as opened:
        opened.callback(lambda: [client.close() for client in clients])
        before = threading.enumerate()
        for words in [b"", b"GET /live HT", b"GET "] * 20:
            hangs(words)
        assert get(server, "/live") == (200, "yes\n")
        assert sum("process_request" in name for name in threads_since(before)) <= 6, "of 61 clients"
        with contextlib.suppress(ConnectionResetError):
            assert clients[0].recv(100) == b"", "it is cut off"
        wait_until(lambda: server._server._room._value == 3, "the clients that hang are given up")
        answered = [hangs(b"GET /late HTTP/1.0\r\n\r\n") for _ in range(3)]
        wait_until(lambda: not (server._server._room._value or server._server.waiting), "all are at work")
        with contextlib.suppress(ConnectionResetError):
            assert hangs(b"GET /live HTTP/1.0\r\n\r\n").recv(100) == b"", "turned away"
        late.set()
        assert [client.recv(12) for client in answered] == [b"HTTP/1.0 200"] * 3
