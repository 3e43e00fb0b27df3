"""Both event sources at work: their workers, how far they are, and the one that is killed half way."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from examples.flights.cluster import SOURCES, Cluster, Reach
from examples.flights.events import AIRCRAFT_GROUP, BOARDS_GROUP, BOARDS_TOPIC, BoardPublished
from examples.flights.verify import last_values
from examples.flights.view import Meter, Row, View
from examples.flights.workers import Workers
from streams.errors import StreamsError

AIRCRAFT_WORKERS = 2
BOARDS_WORKERS = 1
POLL_SECONDS = 0.25
KILL_POLL_SECONDS = 0.02
"""While somebody is to be killed: a small run is folded within a second."""
STALL_SECONDS = 60.0
PUBLISH_SECONDS = 20.0


class DemoFailed(StreamsError):
    """The demo cannot go on. The message says why and where to look."""


class Killed(msgspec.Struct):
    """The worker that was killed. ``back_seconds`` is the time until its successor had committed something."""

    worker: str
    pid: int
    at_events: int
    back_seconds: float | None = None


class Fleet:
    """The workers of both event sources.

    A context manager; one thread. Raises ``DemoFailed`` when they cannot go on.
    """

    def __init__(
        self, cluster: Cluster, servers: str, log: IO[bytes], view: View, token_file: Path | None = None
    ) -> None:
        self._cluster, self._view, self._log = cluster, view, log
        self._meters = {group: Meter() for group in SOURCES}
        self._reach: dict[str, Reach] = {}
        self._last_flights: dict[int, int] = {}
        self._moved = time.monotonic()
        self._killed_at = 0.0
        self.killed: Killed | None = None
        self._watchable = token_file
        http = [] if token_file is None else ["--http", "127.0.0.1:0", "--http-tokens", str(token_file)]
        self._workers = {
            AIRCRAFT_GROUP: Workers(
                "examples.flights.aircraft:source",
                AIRCRAFT_WORKERS,
                name=AIRCRAFT_GROUP,
                servers=servers,
                log=log,
                more=http,
            )
        }
        try:
            self._workers[BOARDS_GROUP] = Workers(
                "examples.flights.boards:source", BOARDS_WORKERS, name=BOARDS_GROUP, servers=servers, log=log
            )
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def transactions(self) -> int:
        """Committed so far, by all workers."""
        return sum(workers.transactions for workers in self._workers.values())

    @property
    def restarts(self) -> int:
        """Workers that were started again."""
        return sum(workers.restarts for workers in self._workers.values())

    def stop(self) -> None:
        """Drain all workers and end them. Safe to repeat."""
        for workers in self._workers.values():
            workers.stop()

    @property
    def exit_codes(self) -> dict[str, int]:
        """After ``stop``: how the supervisors ended."""
        return {name: workers.stop() for name, workers in self._workers.items()}

    def fold(self, kill_at: float | None) -> None:
        """Work until both topics are folded; kill one worker once the share ``kill_at`` of the flights is committed."""
        self._view.phase("folding flights into aircraft, facts into boards")
        self._last_flights = self._cluster.last_records(SOURCES[AIRCRAFT_GROUP])
        while not passed(self._look(AIRCRAFT_GROUP), self._last_flights):
            reach = self._reach[AIRCRAFT_GROUP]
            waiting = kill_at is not None and self.killed is None
            if waiting and reach.done >= kill_at * reach.total:
                self._kill(reach)
            self._pause(KILL_POLL_SECONDS if waiting else POLL_SECONDS)
        self._view.note(f"all flights are folded ({self._reach[AIRCRAFT_GROUP].done:,})")
        # Whatever the first event source had to say is committed together with its offsets: the facts are complete.
        last_facts = self._cluster.last_records(SOURCES[BOARDS_GROUP])
        while not passed(self._look(BOARDS_GROUP), last_facts):
            self._pause()
        self._wait_back()

    def wait_published(self, facts: int) -> None:
        """Until the last lines of all boards add up to ``facts``, or for long enough: the check will tell then."""
        deadline = time.monotonic() + PUBLISH_SECONDS
        decoder = msgspec.json.Decoder(BoardPublished)
        while time.monotonic() < deadline:
            lines = map(decoder.decode, last_values(self._cluster.read(BOARDS_TOPIC)).values())
            if sum(line.turnarounds + line.recovered for line in lines) == facts:
                return
            time.sleep(POLL_SECONDS)

    def _look(self, group: str) -> Reach:
        """Ask for both groups, show them; how far ``group`` is."""
        self._show_monitor()
        now = time.monotonic()
        rows = []
        for name, workers in self._workers.items():
            reach = self._cluster.reach(name)
            if name == AIRCRAFT_GROUP:  # Spark's one transaction: what is counted are the flights' events
                reach = reach.up_to(self._last_flights)
            if reach != self._reach.get(name):
                self._moved = now
            self._reach[name] = reach
            rows.append(
                Row(
                    name=name if name == AIRCRAFT_GROUP else f"{name} (offsets)",
                    done=reach.done,
                    total=reach.total,
                    rate=self._meters[name].rate(now, reach.done),
                    lag=reach.lag,
                    commits=workers.transactions,
                    workers=f"{len(workers.pids)}/{workers.number}",
                    restarts=workers.restarts,
                )
            )
        self._view.rows(rows)
        return self._reach[group]

    def _show_monitor(self) -> None:
        """Say once where the workers can be watched. The token is for this terminal only, else for who reads the
        file."""
        address = self._workers[AIRCRAFT_GROUP].monitor
        if self._watchable is None or not address:
            return
        token, self._watchable = self._watchable, None
        if sys.stderr.isatty():
            self._view.note(f"watch the workers in a browser: {address}login#{token.read_text().strip()}")
        else:
            self._view.note(f"the monitor of the workers is at {address}, its token in {token}")

    def _pause(self, seconds: float = POLL_SECONDS) -> None:
        self._note_return()
        stopped = [name for name, workers in self._workers.items() if not workers.running]
        if stopped:
            raise DemoFailed(f"the workers of {', '.join(stopped)} gave up; their log is {self._log.name}")
        if time.monotonic() - self._moved > STALL_SECONDS:
            raise DemoFailed(
                f"nothing was committed for {STALL_SECONDS:.0f} s; the log of the workers is {self._log.name}"
            )
        time.sleep(seconds)

    def _kill(self, reach: Reach) -> None:
        workers = self._workers[AIRCRAFT_GROUP]
        if len(workers.pids) < workers.number:
            return
        worker, pid = workers.kill_one()
        self._killed_at = time.monotonic()
        self.killed = Killed(worker, pid, reach.done)
        self._view.note(f"{worker} (process {pid}) was killed with SIGKILL after {reach.done:,} events, on purpose")

    def _note_return(self) -> None:
        """Say it once the killed worker's successor has committed something."""
        killed, workers = self.killed, self._workers[AIRCRAFT_GROUP]
        if killed is None or killed.back_seconds is not None:
            return
        pid = workers.pids.get(killed.worker)
        if pid is not None and pid != killed.pid and pid in workers.tallies:
            killed.back_seconds = time.monotonic() - self._killed_at
            self._view.note(
                f"{killed.worker} is back as process {pid}, and committing, {killed.back_seconds:.1f} s later"
            )

    def _wait_back(self) -> None:
        """The successor at least runs before everything is stopped (it may have come too late to find work)."""
        killed = self.killed
        while killed is not None and killed.worker not in self._workers[AIRCRAFT_GROUP].pids:
            self._pause()
        self._note_return()


def passed(reach: Reach, last: dict[int, int]) -> bool:
    """Whether everything up to the last records is committed. What follows them are markers of transactions."""
    return all(reach.committed.get(partition, 0) > offset for partition, offset in last.items())
