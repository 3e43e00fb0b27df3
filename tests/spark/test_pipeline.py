"""``Pipeline``: restarts, the stop after a batch, probes and metrics with queries that are made up; the command, and
``kill``, with real ones."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.broker.probe import free_port
from streams.errors import ConfigError, StreamsError
from streams.sak.restarts import RestartPolicy
from streams.spark import Pipeline
from streams.spark.running.pipeline import lag_of
from streams.spark.running.pipeline_metrics import PipelineMetrics
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log, until
from tests.unit.cli_run_kit import get

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = RestartPolicy(first_delay_seconds=0.01, max_delay_seconds=0.02, max_crashes=3)
NO_SPARK: Any = object()


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of pipelines are those of this test alone."""
    monkeypatch.setenv("KES_CACHE_DIR", str(tmp_path / "cache"))


class Query:
    """A query that does what a test says."""

    def __init__(self) -> None:
        self.isActive = True
        self.is_at_work, self.asked = False, 0
        self.lastProgress: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.stops = 0

    @property
    def status(self) -> dict[str, bool]:
        """A pipeline looks at it to stop the query."""
        self.asked += 1
        return {"isTriggerActive": self.is_at_work, "isDataAvailable": self.is_at_work}

    def exception(self) -> Exception | None:
        return self.error

    def ends(self, error: Exception | None = None) -> None:
        self.error, self.isActive = error, False

    def has_done(self, batch: int, *, end: int = 0, latest: int = 0) -> None:
        offsets = [json.dumps({"flights": {"0": number}}) for number in (end, latest)]
        self.lastProgress = {
            "batchId": batch, "numInputRows": 7, "durationMs": {"triggerExecution": 1500},
            "inputRowsPerSecond": 3.0, "processedRowsPerSecond": 4.0,
            "sources": [{"endOffset": offsets[0], "latestOffset": offsets[1]}, {"endOffset": "12"}],
        }  # fmt: skip

    def stop(self) -> None:
        self.stops += 1
        self.isActive = False


class Runs:
    """A pipeline of one query that runs on a thread, where no signals arrive."""

    def __init__(self, *queries: Query | Exception) -> None:
        self.left, self.started = list(queries), 0
        self.pipeline = Pipeline("flights", self.board)
        self.ended: list[Any] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def board(self) -> Callable[[Any], Query]:
        def board(spark: Any) -> Query:
            self.started += 1
            query = self.left.pop(0)
            if isinstance(query, Exception):
                raise query
            return query

        return board

    def _run(self) -> None:
        try:
            self.ended.append(self.pipeline.run(NO_SPARK, policy=AT_ONCE))
        except Exception as error:
            self.ended.append(error)

    def to_the_end(self) -> Any:
        self.thread.start()
        self.thread.join(60)
        return self.ended[0]


def ended(error: Exception | None = None) -> Query:
    query = Query()
    query.ends(error)
    return query


def test_a_failed_query_is_started_again_until_it_finishes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runs = Runs(ended(RuntimeError("broker away\nand a plan of Spark's")), RuntimeError("no such file"), ended())
    assert runs.to_the_end() == 0
    assert runs.started == 3
    assert [record.getMessage() for record in caplog.records if record.name == "streams.spark.running.pipeline"] == [
        "board: failed, and is started again in 0.01 s: RuntimeError: broker away",
        "board: failed, and is started again in 0.02 s: RuntimeError: no such file",
    ]


def test_a_query_that_fails_too_often_ends_the_others() -> None:
    other = Query()
    pipeline = Pipeline("flights", _named("other", lambda _: other), _named("bad", lambda _: ended(RuntimeError("no"))))
    assert pipeline.run(NO_SPARK, policy=AT_ONCE) == 70
    assert other.stops == 1
    assert [(each.name, each.state, each.starts) for each in pipeline.statistics()] == [
        ("other", "finished", 1),
        ("bad", "failed", 4),
    ]


def test_a_query_that_has_to_be_changed_is_not_started_again() -> None:
    """The sink's own words, in the middle of what Spark makes of them."""
    text = "[PYTHON_DATA_SOURCE_ERROR] Traceback\nstreams.errors.ConfigError: sink 'x', batch 3: the marker\n at"
    runs = Runs(ended(RuntimeError(text)))
    assert runs.to_the_end() == 1
    (board,) = runs.pipeline.statistics()
    assert (board.state, board.error) == ("failed", "sink 'x', batch 3: the marker")


@pytest.mark.parametrize("error", [ConfigError("option sink is missing"), ConnectionRefusedError("no Java")])
def test_what_no_restart_helps_is_raised(error: Exception) -> None:
    found = Runs(error).to_the_end()
    assert isinstance(found, StreamsError)
    assert str(error) in str(found)


def test_spark_that_is_gone() -> None:
    """Nothing that is asked of the query then hides the reason."""

    class Gone(Query):
        @property
        def lastProgress(self) -> Any:  # noqa: N802
            raise ConnectionRefusedError("no Java")

        @lastProgress.setter
        def lastProgress(self, progress: Any) -> None:  # noqa: N802
            pass

    found = Runs(Gone()).to_the_end()
    assert isinstance(found, StreamsError)
    assert str(found) == "pipeline 'flights': Spark's process is gone (no Java)"


def test_two_pipelines_of_one_name() -> None:
    query = Query()
    runs = Runs(query)
    runs.thread.start()
    until(lambda: runs.started, "it runs", 30)
    with pytest.raises(ConfigError, match="'flights' runs on this machine already"):
        Pipeline("flights", _named("board", lambda _: Query())).run(NO_SPARK)
    query.ends()
    runs.thread.join(30)
    assert Pipeline("flights", _named("board", lambda _: ended())).run(NO_SPARK) == 0


def test_names_of_queries() -> None:
    for queries in ([], [lambda _: Query()], [_named("a", print), _named("a", print)], [3]):
        with pytest.raises(ConfigError, match="flights"):
            Pipeline("flights", *queries)  # type: ignore[arg-type]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_stops_after_the_batch_a_second_one_at_once(signals: int) -> None:
    query = Query()
    query.has_done(4)
    query.is_at_work = True

    def send() -> None:
        until(lambda: pipeline.statistics()[0].batch == 4, "it runs", 30)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: query.asked > 2, "it is looked at in its batch", 30)
        seen.append(query.stops)
        if signals == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            query.has_done(5)

    seen: list[int] = []
    pipeline = Pipeline("flights", _named("board", lambda _: query))
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=send)
    thread.start()
    assert pipeline.run(NO_SPARK) == 0
    thread.join(30)
    assert seen == [0], "it was stopped in its batch"
    assert query.stops == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_patience_with_a_batch_has_an_end() -> None:
    query, bad = Query(), ended(RuntimeError("no"))
    query.is_at_work = True
    pipeline = Pipeline("flights", _named("a", lambda _: query), _named("b", lambda _: bad))
    assert pipeline.run(NO_SPARK, policy=AT_ONCE, drain_seconds=0.2) == 70
    assert query.stops == 1


def test_lag() -> None:
    query = Query()
    query.has_done(1, end=5, latest=12)
    assert query.lastProgress is not None
    assert lag_of(query.lastProgress) == 7
    ours = {"version": 1, "topics": {"flights": {"id": "x", "offsets": {"0": 4, "1": 2}}}}
    later = {"version": 1, "topics": {"flights": {"id": "x", "offsets": {"0": 9, "1": 2, "2": 3}}}}
    assert lag_of({"sources": [{"endOffset": ours, "latestOffset": later}]}) == 8
    assert lag_of({"sources": [{"endOffset": "12", "latestOffset": None}, {}]}) is None


def test_probes_and_metrics() -> None:
    query = Query()
    runs = Runs(query)
    board = PipelineMetrics(runs.pipeline)
    assert board.live({}) == (True, "board: waiting")
    assert board.ready({}) == (False, "board: does not run: it is being started")
    runs.thread.start()
    until(lambda: runs.pipeline.statistics()[0].state == "running", "it runs", 30)
    assert board.ready({}) == (False, "board: its first batch is not done")
    query.has_done(3, end=5, latest=12)
    until(lambda: runs.pipeline.statistics()[0].batch == 3, "its progress is seen", 30)
    assert board.ready({}) == (True, "board: ready")
    assert board.ready({"max_lag": "6"}) == (False, "board: 7 offsets behind, more than 6")
    with board.serve("127.0.0.1:0") as server:
        lines = dict(line.rsplit(" ", 1) for line in get(server.port, "/metrics")[1].splitlines() if line[0] != "#")
        assert get(server.port, "/ready?max_lag=6")[0] == 503
        assert get(server.port, "/live") == (200, "board: running\n")
    at = '{pipeline="flights",query="board"}'
    names = {name.removesuffix(at): float(value) for name, value in lines.items() if name.endswith(at)}
    assert names == {
        "kes_spark_query_up": 1, "kes_spark_query_starts_total": 1, "kes_spark_batch": 3, "kes_spark_batch_rows": 7,
        "kes_spark_batch_seconds": 1.5, "kes_spark_input_rows_per_second": 3, "kes_spark_processed_rows_per_second": 4,
        "kes_spark_lag": 7,
    }  # fmt: skip
    query.ends(RuntimeError("streams.errors.ConfigError: no topic"))
    runs.thread.join(30)
    assert board.live({}) == (False, "board: failed no topic")


_PIPELINE = """
import streams.spark as kes_spark

BROKER = {{"kafka.bootstrap.servers": "{servers}"}}


def copy(spark):
    stream = spark.readStream.format("grt").options(**BROKER).option("subscribe", "{source}")
    rows = stream.option("startingOffsets", "earliest").load().select("key", "value")
    writer = rows.writeStream.format("grt").options(**BROKER).option("topic", "{target}").option("sink", "copy")
    return writer.option("checkpointLocation", "{folder}/checkpoint").start()


pipeline = kes_spark.Pipeline("copy", copy)
"""


def _kes(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "streams", "spark", "run", *words]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=log, stdout=log, text=True)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "config error: cannot import 'broken' of 'broken:pipeline': ZeroDivisionError: division by zero"),
        ("def pipeline(x):\n    pass", "config error: the factory 'broken:pipeline' cannot be called"),
        ("class pipeline:\n    run = print", "not a streams.spark.Pipeline"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    assert _kes(tmp_path, "broken:pipeline").wait(120) == 1
    text = " ".join((tmp_path / "log").read_text().split())
    assert says in text
    assert "Traceback" not in text


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_with_a_real_query(servers: str, log: Log, make_topic: MakeTopic, tmp_path: Path) -> None:
    """Killed, started again, terminated: the copy has each record once, and the probes say how it is."""
    source, target = make_topic(), make_topic("copy")
    (tmp_path / "copying.py").write_text(
        _PIPELINE.format(servers=servers, source=source, target=target, folder=tmp_path)
    )
    port = free_port()
    for kill, first in ((signal.SIGKILL, 0), (signal.SIGTERM, 50)):
        log.send(source, range(first, first + 50))
        command = _kes(tmp_path, "copying:pipeline", "--metrics", f"127.0.0.1:{port}")
        try:
            until(lambda: len(_values(log, target)) >= first + 50, "the rows are there", 150)  # noqa: B023
            until(lambda: get(port, "/ready?max_lag=0")[0] == 200, "it is ready", 60)
        finally:
            command.send_signal(kill)
            code = command.wait(60)
        assert code == (0 if kill == signal.SIGTERM else -signal.SIGKILL)
    assert sorted(_values(log, target)) == list(range(100))
    assert "copy: stopped" in (tmp_path / "log").read_text()


def _values(log: Log, topic: str) -> list[int]:
    return [int(message.value() or b"") for message in log.records(topic)]


def _named(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def query(spark: Any) -> Any:
        return function(spark)

    query.__name__ = name
    return query
