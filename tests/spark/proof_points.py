"""Faults at named points of a Spark write, inside of the product's own code: nothing of that is replaced.

``ProofSource`` is ``format("grt")`` with points around what the sink does in tasks and in Spark's commit, and around
every call that the commit makes to Kafka. Which point strikes, in which batch, and how, is said by ``Strike``; each
strikes once, over all runs of a job, because it leaves a file. Strikes travel in the environment, which Java hands on
to Spark's Python processes.

Points, in the order they are passed: ``stage.half`` and ``stage.after`` (in a task), ``init.before``, ``init.after``,
``marker.after`` (it is read), ``patch.after`` (batches have their producer, no byte of them is sent), ``begin.after``
(their partitions are in the transaction), ``produce.half`` (some batches are in the log), ``offsets.after``,
``commit.before`` (every row is in the log, the transaction open), ``commit.after`` (Spark does not know yet),
``returned`` (the sink's commit has ended, Spark's commit log is not written).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from streams.kafka.writing import forwarding
from streams.spark.source import GrtDataSource, LocalGrtDataSource
from streams.spark.writing.sink import TaskPart

POINTS: Final = (
    "stage.half", "stage.after", "init.before", "init.after", "marker.after", "patch.after", "begin.after",
    "produce.half", "offsets.after", "commit.before", "commit.after", "returned",
)  # fmt: skip
COMMIT_POINTS: Final = POINTS[2:]
"""Those that the process passes that commits, in the driver."""
ACTIONS: Final = ("kill", "orphan", "freeze", "stand", "exit", "raise", "hold")
BATCH_WRITE: Final = 0
"""The number of the batch of a write that is no stream."""

STRIKES, FOLDER, JOB = "KES_PROOF_STRIKES", "KES_PROOF_FOLDER", "KES_PROOF_JOB"
_HOLD_SECONDS: Final = 240.0


class Strike(msgspec.Struct, frozen=True):
    """``action`` at ``point`` of ``batch``, the first time that it is passed. Once, whatever is started again.

    ``kill``: SIGKILL to the whole job: driver, Java and Python workers. ``freeze``: SIGSTOP to all of it. ``stand``:
    SIGSTOP to this process only. ``exit``: only this process ends.
    ``raise``: an exception. ``hold``: wait until the file ``go`` is in the folder. ``orphan``:
    SIGKILL to all of the job but the process that is at the point, which holds, and then goes on alone.
    """

    point: str
    batch: int
    action: str = "kill"

    def __post_init__(self) -> None:
        assert self.point in POINTS, self.point
        assert self.action in ACTIONS, self.action

    @property
    def mark(self) -> str:
        return f"struck-{self.point}-{self.batch}-{self.action}"


def environment(folder: Path, strikes: list[Strike]) -> dict[str, str]:
    return {STRIKES: msgspec.json.encode(strikes).decode(), FOLDER: str(folder)}


def job_processes(leader: int) -> list[int]:
    """All processes of a job that was started as the leader of a session, however they group themselves."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def signal_job(leader: int, number: int, *, spared: int = 0) -> None:
    """Send it to all of them but the spared one, to this process last."""
    assert leader > 0, "not a job of its own: the test itself would be hit"
    own = os.getpid()
    members = job_processes(leader)
    for pid in sorted(members, key=lambda pid: pid == own):
        if pid != spared:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Plan:
    def __init__(self) -> None:
        self._strikes = msgspec.json.decode(os.environ.get(STRIKES, "[]"), type=list[Strike])
        self._folder = Path(os.environ.get(FOLDER, "."))
        self._leader = int(os.environ.get(JOB, "0"))

    def hit(self, point: str, batch: int, before: Callable[[], object] = lambda: None) -> None:
        """Passing this point. ``before`` is called when it is about to strike."""
        for strike in self._strikes:
            if (strike.point, strike.batch) == (point, batch) and not (self._folder / strike.mark).exists():
                before()
                try:
                    (self._folder / strike.mark).touch(exist_ok=False)
                except FileExistsError:  # another task was quicker
                    return
                self._strike(strike.action)

    def _strike(self, action: str) -> None:
        if action == "kill":
            signal_job(self._leader, signal.SIGKILL)
        elif action == "freeze":
            signal_job(self._leader, signal.SIGSTOP)
        elif action == "stand":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "exit":
            os._exit(9)
        elif action == "raise":
            raise RuntimeError("a strike of the proof")
        else:
            if action == "orphan":
                signal_job(self._leader, signal.SIGKILL, spared=os.getpid())
            deadline = time.monotonic() + _HOLD_SECONDS
            while not (self._folder / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.02)


class _At:
    """Where the process that commits is now."""

    plan: Plan | None = None
    batch = -1

    @classmethod
    def hit(cls, point: str, before: Callable[[], object] = lambda: None) -> None:
        if cls.plan is not None:
            cls.plan.hit(point, cls.batch, before)


class _FaultyForwarder(forwarding.BatchForwarder):
    def init_transactions(self, seconds: float) -> None:
        _At.hit("init.before")
        super().init_transactions(seconds)
        _At.hit("init.after")

    async def _send(self, pieces: dict[Any, Any]) -> None:
        """The points are within the first round of the transaction. Of it, half is in the log when it is sent apart."""
        is_first = not self._enlisted
        if is_first:
            _At.hit("patch.after")
        await self._enlist({(part.topic, part.partition) for part in pieces} - self._enlisted)
        if is_first:
            _At.hit("begin.after")
            parts = [*pieces.items()]
            half = len(parts) // 2
            await super()._send(dict(parts[:half]))
            _At.hit("produce.half")
            pieces = dict(parts[half:])
        await super()._send(pieces)

    def committed(self, *args: Any) -> tuple[int, str] | None:
        found = super().committed(*args)
        _At.hit("marker.after")
        return found

    def send_offsets(self, *args: Any) -> None:
        super().send_offsets(*args)
        _At.hit("offsets.after")

    def commit(self) -> None:
        _At.hit("commit.before")
        super().commit()
        _At.hit("commit.after")


def _put_points_into_clients() -> None:
    """Wherever a module of the product has the client of a commit, it finds ours, in this process."""
    forwarding.BatchForwarder = _FaultyForwarder  # type: ignore[misc]


def _with_points(iterator: Iterator[Any], batch: int) -> Iterator[Any]:
    plan = Plan()
    for item in iterator:
        yield item
        plan.hit("stage.half", batch)


class _PointsAroundWriter:
    """The product's writer, with points around it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or BATCH_WRITE)
        message: WriterCommitMessage = self._real.write(_with_points(iterator, batch))
        Plan().hit("stage.after", batch)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        _At.plan, _At.batch = Plan(), batch[0] if batch else BATCH_WRITE
        _put_points_into_clients()
        self._real.commit(messages, *batch)
        _At.hit("returned")

    @property
    def task_part(self) -> TaskPart:
        part: TaskPart = self._real.task_part
        return part

    def abort(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        self._real.abort(messages, *batch)


class ProofStreamWriter(_PointsAroundWriter, DataSourceStreamArrowWriter):
    """That of a stream."""


class ProofBatchWriter(_PointsAroundWriter, DataSourceArrowWriter):
    """That of a write that is no stream."""


class ProofSource(LocalGrtDataSource):
    def writer(self, schema: t.StructType, overwrite: bool) -> Any:
        return ProofBatchWriter(super().writer(schema, overwrite))

    def streamWriter(self, schema: t.StructType, overwrite: bool) -> Any:  # noqa: N802
        return ProofStreamWriter(super().streamWriter(schema, overwrite))


class ClusterProofSource(ProofSource):
    """The same on a cluster, where nothing is staged in temporary folders."""

    one_machine = GrtDataSource.one_machine
