"""The pipeline at work, as one watches it: runs of Spark, workers, files; what is killed, and what is shown."""

from __future__ import annotations

import time
from collections.abc import Sequence

from examples.flights.cluster import CHANGELOGS, Cluster, Reach
from examples.flights.events import AIRCRAFT_GROUP, FLIGHTS_TOPIC
from examples.flights.fleet import DemoFailed, passed
from examples.flights.view import Meter, Row, View
from examples.flights.workers import Workers
from examples.pipeline.arrivals import Arrivals
from examples.pipeline.declared import Declared
from examples.pipeline.stages import Stage
from streams.errors import StreamsError

POLL_SECONDS = 0.25
KILL_POLL_SECONDS = 0.01
"""While there is something to be killed, whose moment is short."""
START_SECONDS, RUN_SECONDS, STALL_SECONDS = 60.0, 600.0, 180.0
MOST_FAILURES = 3
"""Runs that may fail without being killed: Spark gives its Python workers ten seconds to start, on a machine at its
limit not enough."""
WORKER_STAGE = "event source, one of its workers"


class Work:
    """One thread. Raises ``DemoFailed`` when something ends that was not killed (runs of Spark: too often), or nothing
    moves any more."""

    def __init__(self, cluster: Cluster, spark: Declared, workers: Workers, arrivals: Arrivals, view: View) -> None:
        self._cluster, self._spark, self._workers = cluster, spark, workers
        self._arrivals, self._view = arrivals, view
        self._meter = Meter()
        self._reach = Reach(committed={}, stable={})
        self._last: dict[int, int] = {}
        self._shown = 0.0
        self._moved = time.monotonic()
        self._victim: tuple[str, int, Stage] | None = None
        self._failures = 0
        self.runs = 0
        self.starting_seconds = 0.0
        """Until Spark's drivers had started, in all runs together."""

    @property
    def all_arrived(self) -> bool:
        """Whether no file is to come."""
        return self._arrivals.all_arrived

    def wait_for_changelog(self) -> None:
        """The event source makes its changelog when it starts; Spark reads it from then on."""
        self._view.phase("starting the event source")
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._cluster.ends(CHANGELOGS[AIRCRAFT_GROUP])
                return
            except (KeyError, StreamsError):
                if time.monotonic() > deadline or not self._workers.running:
                    raise DemoFailed("the event source does not start; see workers.log") from None
            time.sleep(POLL_SECONDS)

    def run(self, waiting: Sequence[Stage], *, kill_a_worker: bool) -> bool:
        """One run of the declarative pipeline, killed when one of the ``waiting`` stages is at work; whether it came to
        its end."""
        self.runs += 1
        self._view.phase(f"run {self.runs} of the declarative pipeline: starting Spark")
        began = time.monotonic()
        self._spark.start_driver()
        took = time.monotonic() - began
        self.starting_seconds += took
        self._view.phase(f"run {self.runs} of the declarative pipeline (Spark started in {took:.0f} s)")
        self._spark.begin_run()
        deadline = time.monotonic() + RUN_SECONDS
        while (code := self._spark.ended()) is None:
            if stage := next((stage for stage in waiting if stage.at_work()), None):
                self._spark.kill()
                stage.strike()
                self._view.note(f"{stage.name}: Spark was killed with SIGKILL in the middle of it, on purpose")
                return False
            self._look(kill_a_worker)
            if time.monotonic() > deadline:
                raise DemoFailed(f"run {self.runs} takes longer than {RUN_SECONDS:.0f} s; see spark.log")
            time.sleep(KILL_POLL_SECONDS if waiting else POLL_SECONDS)
        if code != 0:
            self._failures += 1
            if self._failures > MOST_FAILURES:
                raise DemoFailed(f"run {self.runs} of the declarative pipeline failed ({code}); see spark.log")
            self._view.note(f"run {self.runs} failed by itself ({code}), and is started again; see spark.log")
            return False
        self._view.note(f"run {self.runs} came to its end")
        return True

    def fold(self, *, kill_a_worker: bool) -> None:
        """Wait until the event source has handled every flight that is in Kafka."""
        self._view.phase("folding flights into aircraft")
        last = self._cluster.last_records(FLIGHTS_TOPIC)
        self._moved = time.monotonic()
        while not passed(self._reach, last) or (self._victim is not None and self._victim[2].back_seconds is None):
            self._look(kill_a_worker)
            if time.monotonic() - self._moved > STALL_SECONDS:
                raise DemoFailed(f"nothing has been folded for {STALL_SECONDS:.0f} s; see workers.log")
            time.sleep(POLL_SECONDS)
        self._view.note(f"all flights that have arrived are folded ({self._arrivals.arrived} files)")

    def killed_worker(self) -> dict[str, float | None]:
        """The stage of the worker that was killed -> seconds until another worked in its place."""
        return {} if self._victim is None else {WORKER_STAGE: self._victim[2].back_seconds}

    def _look(self, kill_a_worker: bool) -> None:
        """Four times a second: ask how far everything is, show it, kill a worker when it is at work."""
        now = time.monotonic()
        if now - self._shown < POLL_SECONDS:
            return
        self._shown = now
        workers, reach = self._workers, self._cluster.reach(AIRCRAFT_GROUP)
        if not workers.running:
            raise DemoFailed("the event source gave up; see workers.log")
        if reach != self._reach:
            self._moved = now
        if reach.stable != self._reach.stable:  # behind the last flights are markers alone: they are no lag
            self._last = self._cluster.last_records(FLIGHTS_TOPIC)
        self._reach, shown = reach, reach.up_to(self._last)
        self._view.rows(
            [
                Row("files", self._arrivals.arrived, self._arrivals.total),
                Row(
                    "aircraft (offsets)", shown.done, shown.total,
                    rate=self._meter.rate(now, shown.done),
                    lag=shown.lag,
                    commits=workers.transactions,
                    workers=f"{len(workers.pids)}/{workers.number}",
                    restarts=workers.restarts,
                ),
            ]
        )  # fmt: skip
        if self._victim is not None:
            self._note_return(*self._victim)
        elif kill_a_worker and shown.done and shown.lag and len(workers.pids) == workers.number:
            worker, pid = workers.kill_one()
            self._victim = worker, pid, Stage(WORKER_STAGE, bool)
            self._victim[2].strike()
            self._view.note(
                f"{worker} (process {pid}) was killed with SIGKILL after {shown.done:,} offsets, on purpose"
            )

    def _note_return(self, worker: str, killed: int, stage: Stage) -> None:
        pid = self._workers.pids.get(worker)
        if stage.back_seconds is None and pid is not None and pid != killed:
            stage.is_back()
            self._view.note(f"{worker} is back as process {pid}, {stage.back_seconds:.1f} s later")
