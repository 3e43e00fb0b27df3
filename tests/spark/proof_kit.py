"""The proof of exactly once: a load, jobs that are attacked, and an oracle that tells every record that is lost,
doubled, out of order or torn."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from confluent_kafka import Producer

from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from tests.spark.log_kit import Log, until
from tests.spark.proof_job import JobSpec
from tests.spark.proof_points import Strike, environment, job_processes, signal_job
from tests.spark.proof_stateful import KEYS

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
BROKER_ENDS_SECONDS = 30.0


class Report(msgspec.Struct, frozen=True):
    """What the oracle has seen. ``aborted``: rows that only readers of uncommitted records see, which is how much the
    attacks hit."""

    events: int
    rows: int
    missing: int
    duplicated: int
    out_of_order: int
    changed: int
    aborted: int
    hanging: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not (self.missing or self.duplicated or self.out_of_order or self.changed or self.hanging)


class Job:
    """One run of a job, in a session of its own."""

    def __init__(self, spec: JobSpec, folder: Path, strikes: list[Strike], number: int) -> None:
        self.log = folder / f"job-{number}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.proof_job", msgspec.json.encode(spec).decode()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment(folder, strikes)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def must_finish(self, seconds: float = PATIENCE) -> None:
        code = self.wait(seconds)
        assert code == 0, f"exit code {code}: {self.tail()}"

    def must_be_killed(self, seconds: float = PATIENCE) -> None:
        """By the strike that waits for it, which takes all of its processes."""
        code = self.wait(seconds)
        assert code == -signal.SIGKILL, f"exit code {code}: {self.tail()}"
        until(lambda: not job_processes(self.process.pid), "all processes of the job have ended", 30)

    def kill(self) -> None:
        """SIGKILL to all of its processes, frozen or not; safe to repeat."""
        signal_job(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def thaw(self) -> None:
        signal_job(self.process.pid, signal.SIGCONT)

    @property
    def frozen(self) -> bool:
        stats = [Path(f"/proc/{pid}/stat") for pid in job_processes(self.process.pid)]
        return bool(stats) and all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


class Trial:
    """A source topic with events, a target topic, and the jobs that copy the one into the other under attack."""

    def __init__(self, servers: str, folder: Path, prefix: str, events: int, *, partitions: int = 4) -> None:
        self.servers, self.folder, self.events = servers, folder, events
        self.source, self.target = prefix + "source", prefix + "target"
        self.checkpoint = folder / "checkpoint"
        self.jobs: list[Job] = []
        self.seen: dict[str, object] = {}
        """What the oracle has seen last, and what had been done."""
        self._sink = prefix + "copy"
        self._admin = TopicAdmin(ClientSettings(servers, {}, client_id="proof"))
        specs = [
            TopicSpec(name=name, partitions=partitions, replication_factor=1) for name in (self.source, self.target)
        ]
        self._admin.create(specs, 60.0)
        self._log = Log(servers)
        self.load()

    def load(self) -> None:
        """Send all events to the source; a second time: as duplicates."""
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "queue.buffering.max.messages": max(self.events, 100_000),
                "linger.ms": 20,
                "log_level": 0,
            }
        )
        for number in range(self.events):
            producer.produce(self.source, value_of(number), key_of(number), headers=[("__grt__", b"Given")])
        assert producer.flush(120) == 0

    def spec(self, **changes: object) -> JobSpec:
        """The job that copies all of it, in batches of a tenth."""
        spec = JobSpec(
            servers=self.servers,
            source=self.source,
            target=self.target,
            sink=self._sink,
            checkpoint=str(self.checkpoint),
            rows_per_batch=max(self.events // 10, 1),
        )
        return msgspec.structs.replace(spec, **changes)

    def start(self, *strikes: Strike, spec: JobSpec | None = None) -> Job:
        job = Job(spec or self.spec(), self.folder, list(strikes), len(self.jobs))
        self.jobs.append(job)
        return job

    def struck(self, strike: Strike) -> bool:
        return (self.folder / strike.mark).exists()

    def wait_struck(self, strike: Strike) -> None:
        """Until it has; the job that it is for must be running."""
        job = self.jobs[-1]
        until(lambda: self.struck(strike) or not job.running, strike.mark)
        assert self.struck(strike), job.tail()

    def release(self) -> None:
        """Whoever holds goes on."""
        (self.folder / "go").touch()

    @property
    def batches_done(self) -> int:
        return len([path for path in (self.checkpoint / "commits").glob("*") if path.name.isdigit()])

    @property
    def query(self) -> str:
        return str(msgspec.json.decode((self.checkpoint / "metadata").read_bytes())["id"])

    @property
    def open_transaction(self) -> bool:
        return any(mark.stable < mark.end for mark in self._admin.watermarks(self.target).values())

    def committed_rows(self) -> int:
        return sum(1 for _ in self._log.records(self.target))

    def check(self, *, patience_seconds: float = BROKER_ENDS_SECONDS) -> Report:
        """The oracle's word. A transaction that is open is given the time that the broker needs to end it."""
        deadline = time.monotonic() + patience_seconds
        while self.open_transaction and time.monotonic() < deadline:
            time.sleep(0.5)
        marks = self._admin.watermarks(self.target)
        hanging = tuple(
            f"{self.target}[{number}]: readers stop at {mark.stable} of {mark.end}"
            for number, mark in marks.items()
            if mark.stable != mark.end
        )
        seen: Counter[int] = Counter()
        last: dict[bytes, int] = {}
        out_of_order = changed = 0
        for message in self._log.records(self.target):
            number, key = int((message.value() or b"-1 ").split(b" ")[0]), message.key() or b""
            seen[number] += 1
            if (key, message.value()) != (key_of(number), value_of(number)) or dict(message.headers() or []) != _TYPE:
                changed += 1
            out_of_order += number <= last.get(key, -1)
            last[key] = max(number, last.get(key, -1))
        rows = seen.total()
        return Report(
            events=self.events,
            rows=rows,
            missing=len(set(range(self.events)) - seen.keys()),
            duplicated=sum(times - 1 for times in seen.values()),
            out_of_order=out_of_order,
            changed=changed,
            aborted=sum(1 for _ in self._log.records(self.target, committed=False)) - rows,
            hanging=hanging,
        )

    def must_be_exact(self, **facts: object) -> Report:
        """Every event once, in order, and no transaction open. ``facts``: what else the line of the report names."""
        report = self.check()
        assert report.exact, report
        assert report.rows == self.events, report
        self.seen = {**msgspec.to_builtins(report), "runs": len(self.jobs), **facts}
        return report

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
        self._admin.close()


_TYPE = {"__grt__": b"Copied"}


def key_of(number: int) -> bytes:
    return b"key-%d" % (number % KEYS)


def value_of(number: int) -> bytes:
    return b"%d %s" % (number, b"." * (60 + number % 7))


def kill_in_transactions(trial: Trial, kills: int, draw: random.Random, spec: JobSpec | None = None) -> int:
    """Run the job until it is done, and kill it ``kills`` times when the broker sees a transaction open on the target,
    a random moment later. Returns how many of the killed left it open: those have hit.

    Not the clock aims, but the log: a transaction is open for some 20 ms of a job of ten seconds.
    """
    hits = 0
    for _ in range(kills):
        job = trial.start(spec=spec)
        before = trial.batches_done
        batches = draw.randrange(3)
        until(lambda: trial.batches_done >= before + batches or not job.running, "batches", PATIENCE)  # noqa: B023
        processes = job_processes(job.process.pid)  # now, since to look them up takes as long as a transaction
        while job.running and not trial.open_transaction:
            pass
        moment = time.monotonic() + draw.uniform(0, 0.015)
        while time.monotonic() < moment:
            pass
        if not job.running:
            break
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.kill()
        hits += trial.open_transaction
    return hits


def run_to_the_end(trial: Trial, spec: JobSpec, *, runs: int = 8) -> int:
    """Wait for the job that runs; if it has failed, or none runs, start it again, as a supervisor would, up to ``runs``
    times. Returns how many failed."""
    for failed in range(runs):
        job = trial.jobs[-1] if trial.jobs and failed == 0 else trial.start(spec=spec)
        if job.wait() == 0:
            return failed
    raise AssertionError(f"no run of {runs} came to its end: {trial.jobs[-1].tail()}")
