"""A pipeline that stays up: streaming queries that are started again when they fail, stopped between two batches, and
watched.

Started again means: from the query's checkpoint, by the function that started it first. Whether nothing is lost or
doubled then is the business of the query's sink, not of this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

from filelock import FileLock, Timeout
from pyspark.sql import SparkSession

from streams.errors import ConfigError, OffsetError, StreamsError
from streams.sak.cache import cache_folder
from streams.sak.restarts import RestartPolicy, Restarts
from streams.spark.reading.stream_source import from_json
from streams.spark.running.statistics import QueryStatistics, State
from streams.spark.session import local_session, register

EXIT_DONE, EXIT_PROBLEM, EXIT_GAVE_UP = 0, 1, 70
CHECK_SECONDS: Final = 0.2
"""The time between two checks of the queries."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OURS: Final = re.compile(r"streams\.errors\.(\w+): ([^\n]+)")
"""An error of the toolkit in the text of Spark's exception, which has the stack trace of Python in it."""
_LONGEST: Final = 1_000

_log = logging.getLogger(__name__)


class Query(Protocol):
    """The part of Spark's ``StreamingQuery`` that a pipeline uses."""

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Return whether the query runs."""
        ...

    @property
    def status(self) -> dict[str, Any]:
        """Return what it does just now."""
        ...

    @property
    def lastProgress(self) -> Any:  # noqa: N802
        """Return the progress of the last batch, or ``None``."""
        ...

    def exception(self) -> Exception | None:
        """Return what it failed with."""
        ...

    def stop(self) -> None:
        """Stop it at once."""
        ...


class Pipeline:
    """Queries under one name. Each function gets the session, starts one query and returns it:

        def late_flights(spark): return (... .writeStream.format("grt") ... .start())

        pipeline = Pipeline("flights", late_flights, board)

    ``kes spark run MODULE:pipeline`` runs it, or ``pipeline.run()`` in a program of its own. ``session`` makes the
    session; without it, it is the one that ``spark-submit`` or ``SPARK_REMOTE`` stands for, else a local one.
    """

    def __init__(
        self, name: str, *queries: Callable[[SparkSession], Query], session: Callable[[], SparkSession] | None = None
    ) -> None:
        names = [getattr(query, "__name__", "") for query in queries]
        if not queries or not all(map(callable, queries)):
            raise ConfigError(f"pipeline {name!r}: give functions that take the session, start one query and return it")
        if doubled := {each for each in names if names.count(each) > 1 or not each.isidentifier()}:
            raise ConfigError(
                f"pipeline {name!r}: queries are called like their functions, and {', '.join(sorted(doubled))} is no "
                "name, or twice: def each of them"
            )
        self.name = name
        self._session = session or (lambda: _session(name))
        self._queries = [_Kept(name, query) for name, query in zip(names, queries, strict=True)]
        self._checked_at = time.monotonic()

    def run(
        self,
        spark: SparkSession | None = None,
        *,
        metrics: str = "",
        policy: RestartPolicy | None = None,
        drain_seconds: float = 60.0,
    ) -> int:
        """Run the queries until all are finished, or SIGINT, SIGTERM or SIGHUP (where this is the main thread). Blocks.

        A query that fails is started again after a pause that grows (``policy``). A signal stops each query when its
        batch is done, at the latest after ``drain_seconds``; a second one at once: a batch that is cut off is repeated
        at the next start. ``metrics`` is an address (``HOST:PORT``) for Prometheus (``/metrics``), ``/live`` and
        ``/ready``, and needs the extra ``prometheus``.

        Returns 0: finished or stopped; 1: a query needs its settings changed; 70: a query failed too often. The others
        are stopped then. Raises ``ConfigError`` when a pipeline of this name runs on this machine, and for what the
        functions raise it for; ``StreamsError`` when Spark's process is gone.
        """
        with ExitStack() as stack:
            stack.enter_context(_alone(self.name))
            if metrics:
                stack.enter_context(self._served(metrics))
            if spark is None:
                spark = self._session()
                stack.callback(_end, spark)
            self._checked_at = time.monotonic()
            signals = stack.enter_context(_signals())
            for query in self._queries:
                query.begin(policy or RestartPolicy())
            stack.callback(self._stop, signals, drain_seconds)
            while not signals.received:
                try:
                    code = self._check(spark)
                except Exception as error:
                    if _is_gone(error):
                        raise StreamsError(f"pipeline {self.name!r}: Spark's process is gone ({error})") from error
                    raise
                if code is not None:
                    return code
                signals.wait(CHECK_SECONDS)
            return EXIT_DONE

    def statistics(self) -> list[QueryStatistics]:
        """Return the queries as they were at the last check. From any thread."""
        return [query.statistics() for query in self._queries]

    def silent_seconds(self) -> float:
        """Return how long ago the last check was. From any thread."""
        return time.monotonic() - self._checked_at

    def _check(self, spark: SparkSession) -> int | None:
        """Check all queries; the exit code when the pipeline has come to its end."""
        for query in self._queries:
            query.check(spark, time.monotonic())
        self._checked_at = time.monotonic()
        if failed := [query for query in self._queries if query.state == "failed"]:
            return EXIT_PROBLEM if any(query.is_refused for query in failed) else EXIT_GAVE_UP
        return EXIT_DONE if all(query.state == "finished" for query in self._queries) else None

    def _stop(self, signals: _Signals, drain_seconds: float) -> None:
        end = time.monotonic() + drain_seconds
        running = [query for query in self._queries if query.drains()]
        while running:
            hurry = signals.received > 1 or time.monotonic() > end
            running = [query for query in running if not query.stopped(hurry=hurry)]
            self._checked_at = time.monotonic()
            if running:
                time.sleep(CHECK_SECONDS)

    def _served(self, address: str) -> Any:
        try:
            from streams.spark.running.pipeline_metrics import PipelineMetrics
        except ModuleNotFoundError as error:
            if error.name != "prometheus_client":
                raise
            raise ConfigError("metrics need prometheus_client: pip install 'kafka-event-source[prometheus]'") from error
        return PipelineMetrics(self).serve(address)


class _Kept:
    """One query that is kept alive. Used by the thread of ``run``; ``statistics`` by any."""

    def __init__(self, name: str, start: Callable[[SparkSession], Query]) -> None:
        self.name = name
        self.state: State = "waiting"
        self.is_refused = False
        self._start = start
        self._query: Query | None = None
        self._starts = 0
        self._error = ""
        self._progress: Mapping[str, Any] = {}
        self._at_stop: int | None = None
        self.begin(RestartPolicy())

    def begin(self, policy: RestartPolicy) -> None:
        """Start over: the query is to be started."""
        self._restarts, self._start_at = Restarts(policy), 0.0
        self.state, self.is_refused = "waiting", False

    def check(self, spark: SparkSession, now: float) -> None:
        """Start the query if it is time; see how it is. Raises ``ConfigError`` of the function that starts it."""
        if self.state == "waiting" and now >= self._start_at:
            try:
                self._query = self._start(spark)
            except Exception as error:
                if isinstance(error, ConfigError) or _is_gone(error):
                    raise
                self._failed(error, now)
                return
            self._starts += 1
            self.state = "running"
            _log.info("%s: started%s", self.name, f", start {self._starts}" if self._starts > 1 else "")
        if self.state != "running" or self._query is None:
            return
        self._progress = self._query.lastProgress or self._progress
        if self._query.isActive:
            return
        failure = self._query.exception()
        if failure is not None:
            self._failed(failure, now)
        else:
            self.state = "finished"
            _log.info("%s: finished", self.name)

    def drains(self) -> bool:
        """Note the batch that is under way; ``False`` when nothing runs."""
        if self.state != "running" or self._query is None:
            return False
        with contextlib.suppress(Exception):  # Spark may be gone: seen when the query is stopped
            self._at_stop = _batch_of(self._query.lastProgress)
        return True

    def stopped(self, *, hurry: bool) -> bool:
        """Stop the query if it is between two batches, or at once; ``False``: a batch is under way."""
        assert self._query is not None
        try:
            if self._query.isActive:
                status = self._query.status
                at_work = status["isTriggerActive"] and status["isDataAvailable"]
                if at_work and not hurry and _batch_of(self._query.lastProgress) == self._at_stop:
                    return False
                self._query.stop()
                _log.info("%s: stopped%s", self.name, " in its batch, which the next start repeats" if hurry else "")
        except Exception as error:  # it may fail just now, and Spark may be gone: nothing of it can be waited for
            _log.warning("%s: %s while it was stopped", self.name, _sentence(error)[1])
        self.state = "finished"
        return True

    def statistics(self) -> QueryStatistics:
        """Return the query as it was at the last check."""
        progress = self._progress
        if not progress:
            return QueryStatistics(name=self.name, state=self.state, starts=self._starts, error=self._error)
        return QueryStatistics(
            name=self.name,
            state=self.state,
            starts=self._starts,
            error=self._error,
            batch=progress["batchId"],
            rows=progress["numInputRows"],
            batch_seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
            input_rows_per_second=progress.get("inputRowsPerSecond") or 0.0,
            processed_rows_per_second=progress.get("processedRowsPerSecond") or 0.0,
            lag=lag_of(progress),
        )

    def _failed(self, error: Exception, now: float) -> None:
        kind, self._error = _sentence(error)
        delay = self._restarts.crashed(now)
        self.is_refused = kind == "ConfigError"
        if self.is_refused or delay is None:
            self.state = "failed"
            _log.error("%s: failed%s: %s", self.name, "" if self.is_refused else " too often", self._error)
        else:
            self.state, self._start_at = "waiting", now + delay
            _log.warning("%s: failed, and is started again in %g s: %s", self.name, delay, self._error)


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """Return how many offsets a query was behind the ends of its topics at its last batch, over all sources that say
    their latest offsets as ``format("grt")`` and Spark's Kafka connector do; ``None`` when none does.

    ``progress`` is ``query.lastProgress``.
    """
    found = None
    for source in progress.get("sources", ()):
        try:
            end, latest = (from_json(_parsed(source[name])).at for name in ("endOffset", "latestOffset"))
        except (KeyError, OffsetError):
            continue
        found = (found or 0) + sum(max(0, at - end.get(place, 0)) for place, at in latest.items())
    return found


def _parsed(offset: Any) -> Any:
    """Offsets come as JSON in a text, or as the object."""
    try:
        return json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None


def _batch_of(progress: Any) -> int | None:
    return progress["batchId"] if progress else None


def _sentence(error: BaseException) -> tuple[str, str]:
    """Return kind and text of the error in one line: the toolkit's own, where Spark's exception has one in it."""
    if isinstance(error, StreamsError):
        return type(error).__name__, str(error)
    found: list[tuple[str, str]] = _OURS.findall(str(error))
    if found:
        return found[-1]
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return type(error).__name__, f"{type(error).__name__}: {lines[0]}"[:_LONGEST]


def _end(spark: SparkSession) -> None:
    try:
        spark.stop()
    except Exception as error:  # it is gone already, and the reason is on its way up
        _log.debug("the session cannot be stopped: %s", error)


def _is_gone(error: Exception) -> bool:
    """Check whether Spark's process does not answer any more. Py4J, which says so, is not there with Spark Connect."""
    return isinstance(error, ConnectionError | EOFError) or type(error).__name__ == "Py4JNetworkError"


def _session(name: str) -> SparkSession:
    if {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"} & os.environ.keys():  # of spark-submit, which has its own master
        spark = SparkSession.builder.appName(name).getOrCreate()
        register(spark)
        return spark
    return local_session(name)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold the name on this machine. The lock goes with the process, however that ends."""
    folder = cache_folder() / "spark-pipelines"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"a pipeline called {name!r} runs on this machine already: stop it first, or give this one another name "
            "(and its sinks and checkpoints others, too)"
        ) from None
    try:
        yield
    finally:
        lock.release()


class _Signals:
    """Counts the signals to stop."""

    def __init__(self) -> None:
        self.received = 0
        self._event = threading.Event()

    def note(self, *_: object) -> None:
        self.received += 1
        self._event.set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Take the signals to stop, on the main thread. After the session was made: PySpark puts a handler of its own."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.note) for number in _STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
