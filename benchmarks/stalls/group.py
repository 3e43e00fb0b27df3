"""A group under load: members as processes, a generator, a live reader, and what can happen to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil

from benchmarks.cluster import Cluster
from benchmarks.stalls.generator import FeedResult
from benchmarks.stalls.member import JOB_VARIABLE
from benchmarks.stalls.silences import Silence, Window, silences
from benchmarks.stalls.traces import Traces, is_settled
from benchmarks.stalls.workload import Feed, Ledger, Seen, Stepped, Watch
from benchmarks.systems import Child, Failed, running
from streams.broker import KafkaBroker

CALM_SECONDS = 1.5
"""After everybody has settled, before the next thing happens."""
WARM_UP_SECONDS = 2.0
"""Under load, before anything is noted."""
NOISE_SECONDS = 4.0
"""How long a run is watched before anything happens in it."""
PATIENCE_SECONDS = 60.0


class Stall(msgspec.Struct, frozen=True):
    """One thing that happened in one run, and how long which partitions were silent. ``away_ms``: how long the broker
    was not there, from the order to stop (or SIGKILL) until it answered again; 0 if it stayed."""

    what: str
    round: int
    window: Window
    generations: int
    refused: int
    silences: list[Silence]
    load_average: float
    fault: str = ""
    away_ms: float = 0.0


class Group:
    """One run. Ends its processes when the block it is used in ends. ``broker``: given if it may be stopped."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        round_: int,
        rate: int,
        options: dict[str, str],
        *,
        broker: KafkaBroker | None = None,
        warm_up_seconds: float = WARM_UP_SECONDS,
    ) -> None:
        self.cluster = cluster
        self._broker, self._away, self._warm_up = broker, 0.0, warm_up_seconds
        job = cluster.job()
        self._job = msgspec.structs.replace(job, options={**options, "trace": str(folder)})
        self._round = round_
        self._rate = rate
        self._standbys = int(options.get("config.num_standbys", "0"))
        self._folder = folder
        self.traces = Traces(folder)
        self.members: dict[str, Child] = {}
        self._steps: list[tuple[str, Window, int, int, float, float]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- members -------------------------------------------------------------------------------------------------------

    def start(self, *instances: str) -> None:
        """Start members."""
        for instance in instances:
            job = msgspec.structs.replace(self._job, options={**self._job.options, "instance": instance})
            child = Child("benchmarks.stalls.member", job)
            self._stack.callback(child.stop)
            self.members[instance] = child

    def supervise(self, workers: int) -> None:
        """Start a supervisor with so many workers."""
        child = Child(
            "streams",
            self._job,
            arguments=["run", "benchmarks.stalls.member:source", "-n", str(workers), "--instance-prefix", "w", "-q"],
            variables={JOB_VARIABLE: msgspec.json.encode(self._job).decode()},
        )
        self._stack.callback(child.stop)
        self.members["supervisor"] = child

    def kill_worker(self) -> None:
        """kill -9 to one of the supervisor's workers."""
        workers = psutil.Process(self.members["supervisor"].pid).children()
        names = {int(name.rpartition(".")[2]): name for name in self.traces.fresh()}
        victim = min((one for one in workers if one.pid in names), key=lambda one: names[one.pid])
        self.traces.dead.add(names[victim.pid])
        os.kill(victim.pid, signal.SIGKILL)

    def kill(self, instance: str) -> None:
        """kill -9."""
        child = self.members.pop(instance)
        self.traces.dead.add(f"{instance}.{child.pid}")
        child.send(signal.SIGKILL)

    def signal(self, instance: str, number: signal.Signals) -> None:
        """Send a signal."""
        self.members[instance].send(number)

    def end(self, instance: str) -> None:
        """SIGTERM, and wait until it has left."""
        child = self.members.pop(instance)
        child.send(signal.SIGTERM)
        self._until(lambda: not child.is_alive, f"{instance} has left")

    def outage(self, *, kill: bool) -> None:
        """Stop the broker, in an orderly way or by kill -9, and start it again on its data at once."""
        assert self._broker is not None
        began = time.monotonic()
        if kill:
            self._broker.kill()
        self._broker.restart()
        self._away = time.monotonic() - began

    def settle(self, members: int) -> None:
        """Wait until so many members share everything."""
        self._until(lambda: self._settled(members), f"{members} members share the partitions")

    def _settled(self, members: int) -> bool:
        return is_settled(self.traces.fresh().values(), members, self._standbys)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            for child in self.members.values():
                child.check()
            if time.monotonic() > deadline:
                standing = {name: msgspec.structs.asdict(one) for name, one in self.traces.fresh().items()}
                raise Failed(f"not after {PATIENCE_SECONDS:g} s: {what}; they stand as {standing}")
            time.sleep(0.05)

    # -- what happens --------------------------------------------------------------------------------------------------

    def step(self, what: str, action: Callable[[], None], members: int) -> None:
        """Let something happen, and watch until ``members`` have shared everything again."""
        self._watch(what, action, lambda: self.settle(members))

    def calm(self, seconds: float = NOISE_SECONDS) -> None:
        """Watch for a while in which nothing happens: what is seen there is noise."""
        self._watch("steady", lambda: None, lambda: time.sleep(seconds - CALM_SECONDS))

    def _watch(self, what: str, action: Callable[[], None], settle: Callable[[], None]) -> None:
        self._away = 0.0
        before, since = self.traces.generation(), time.time()
        action()
        settle()
        time.sleep(CALM_SECONDS)
        after = self.traces.generation()
        self._steps.append((what, Window(since, time.time()), before, after, os.getloadavg()[0], self._away))

    def run(self, prepare: Callable[[Group], None], happen: Callable[[Group], None]) -> list[Stall]:
        """``prepare`` starts the first members; then, under load, ``happen``; then everything is judged."""
        job = self._job
        prepare(self)
        feed = Feed(bootstrap_servers=job.bootstrap_servers, topic=job.source, rate=self._rate)
        watch = Watch(bootstrap_servers=job.bootstrap_servers, topic=job.output)
        with running("benchmarks.stalls.reader", watch) as reader:
            with running("benchmarks.stalls.generator", feed) as generator:
                time.sleep(self._warm_up)
                self.calm()
                happen(self)
                generator.send(signal.SIGTERM)
                sent = msgspec.json.decode(generator.result(40), type=FeedResult).sent
            self._until_committed(sum(sent))
            time.sleep(0.5)
            reader.send(signal.SIGTERM)
            seen = msgspec.json.decode(reader.result(40), type=list[Seen])
        (self._folder / "seen.json").write_bytes(msgspec.json.encode(seen))
        fault = self._judge(sent)
        self.traces.refresh()
        found = [
            Stall(
                what,
                self._round,
                window,
                after - before,
                self.traces.refused(window.since, window.until),
                silences(seen, window, self.traces),
                load,
                fault,
                away * 1000,
            )
            for what, window, before, after, load, away in self._steps
        ]
        self._stack.close()
        self.cluster.forget(job, source=True)
        return found

    def _until_committed(self, events: int) -> None:
        committed = self.cluster.committed(self._job)
        try:
            self._until(lambda: committed() >= events, f"{events} events are committed")
        finally:
            committed.close()

    def _judge(self, sent: list[int]) -> str:
        ledger, decode = Ledger(), msgspec.json.Decoder(Stepped).decode
        for message in self.cluster.outputs(self._job):
            ledger.hear(message.partition() or 0, (message.key() or b"").decode(), decode(message.value() or b""))
        return ledger.verdict(sent)
