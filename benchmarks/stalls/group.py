"""A group under load: members as processes, a generator, a live reader, and the events of their lives."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from benchmarks.cluster import Cluster
from benchmarks.generator import Load, LoadResult
from benchmarks.reader import Gap, Watch, WatchResult
from benchmarks.stalls.member import JOB_VARIABLE, fresh, is_settled, statuses
from benchmarks.systems import Child, Failed, running
from benchmarks.workload import PARTITIONS

WARM_UP_SECONDS = 2.0
"""Under load, before the watch begins."""
CALM_SECONDS = 1.5
"""After the group has settled, before the next action."""
NOISE_SECONDS = 4.0
"""A run is watched so long before anything happens in it."""
PATIENCE_SECONDS = 60.0
LONGEST_SECONDS = 300
"""Of a run: so many seconds of load are drawn."""


class Silence(msgspec.Struct, frozen=True):
    """The longest time without an output of one partition. ``moves``: the number of changes of its writer meanwhile;
    ``at_move``: the longest silence at such a change, in milliseconds."""

    partition: int
    milliseconds: float
    moves: int
    at_move: float = 0.0


class Window(msgspec.Struct, frozen=True):
    """From an action to a while after the group had settled; seconds since the epoch."""

    since: float
    until: float


class Stall(msgspec.Struct, frozen=True):
    """One action in one run, and the silences of the partitions."""

    what: str
    round: int
    generations: int
    silences: list[Silence]
    load_average: float
    fault: str = ""


def silences(gaps: Sequence[Gap], window: Window) -> list[Silence]:
    """Find the longest silence of every partition in the window. One that had begun before counts as a whole, one that
    goes on afterwards up to the end of the window."""
    found = []
    for partition in range(PARTITIONS):
        here = [
            gap for gap in gaps
            if gap.partition == partition and gap.until >= window.since and gap.since <= window.until
        ]  # fmt: skip
        moved = [gap.until - gap.since for gap in here if gap.moved and gap.until <= window.until]
        longest = max((min(gap.until, window.until) - gap.since for gap in here), default=0.0)
        found.append(Silence(partition, _ms(longest), len(moved), _ms(max(moved, default=0.0))))
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


class Group(ExitStack):
    """One run. Ends its processes when the block it is used in ends."""

    def __init__(self, cluster: Cluster, seed: int, rate: int, standbys: int) -> None:
        self.cluster, self._seed, self._rate = cluster, seed, rate
        super().__init__()
        self._folder = Path(self.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        options = {"group.num_standbys": str(standbys), "folder": str(self._folder)}
        self._job = msgspec.structs.replace(cluster.job(), options=options)
        self._standbys = standbys
        self._dead: set[str] = set()
        self.members: dict[str, Child] = {}
        self._steps: list[tuple[Stall, Window]] = []

    def start(self, *instances: str) -> None:
        """Start members."""
        for instance in instances:
            job = msgspec.structs.replace(self._job, options={**self._job.options, "instance": instance})
            self.members[instance] = self.enter_context(running("benchmarks.stalls.member", job))

    def supervise(self, workers: int) -> None:
        """Start a supervisor with so many workers."""
        words = f"-m streams run benchmarks.stalls.member:source -n {workers} --instance-prefix w -q".split()
        variables = {JOB_VARIABLE: msgspec.json.encode(self._job).decode()}
        child = Child("supervisor", [sys.executable, *words], None, variables=variables)
        self.members["supervisor"] = self.enter_context(child)

    def kill(self, instance: str) -> None:
        """Kill a member (kill -9)."""
        child = self.members.pop(instance)
        self._dead.add(f"{instance}.{child.pid}")
        child.send(signal.SIGKILL)

    def kill_worker(self) -> None:
        """Kill one of the supervisor's workers (kill -9)."""
        workers = {one.pid for one in psutil.Process(self.members["supervisor"].pid).children()}
        name = min(
            name for name in fresh(statuses(self._folder), self._dead) if int(name.rpartition(".")[2]) in workers
        )
        self._dead.add(name)
        os.kill(int(name.rpartition(".")[2]), signal.SIGKILL)

    def end(self, instance: str) -> None:
        """Stop a member by SIGTERM, and wait until it has left."""
        child = self.members.pop(instance)
        child.send(signal.SIGTERM)
        self._until(lambda: not child.is_alive, f"{instance} has left")

    def settle(self, members: int) -> None:
        """Wait until so many members share everything. Raises ``Failed``."""

        def settled() -> bool:
            return is_settled(fresh(statuses(self._folder), self._dead).values(), members, self._standbys)

        self._until(settled, f"{members} members share the partitions")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            self._check()
            if time.monotonic() > deadline:
                raise Failed(f"not after {PATIENCE_SECONDS:g} s: {what}; last statuses: {statuses(self._folder)}")
            time.sleep(0.05)

    def _check(self) -> None:
        for child in self.members.values():
            child.check()

    def step(self, what: str, action: Callable[[], None], members: int) -> None:
        """Act, and watch until ``members`` have shared everything again."""
        self._watch(what, action, lambda: self.settle(members))

    def _watch(self, what: str, action: Callable[[], None], settle: Callable[[], None]) -> None:
        before, since = self._generation(), time.time()
        action()
        settle()
        time.sleep(CALM_SECONDS)
        stall = Stall(what, 0, self._generation() - before, [], os.getloadavg()[0])
        self._steps.append((stall, Window(since, time.time())))

    def _generation(self) -> int:
        return max((status.generation for status in statuses(self._folder).values()), default=-1)

    def run(self, turn: int, scenario: Iterator[None]) -> list[Stall]:
        """Play a scenario to its ``yield``; then, under load, to its end; then judge. Raises ``Failed``."""
        job, servers = self._job, self._job.bootstrap_servers
        next(scenario)
        load = Load(
            bootstrap_servers=servers,
            topic=job.source,
            seed=self._seed,
            skip=0,
            events=self._rate * LONGEST_SECONDS,
            rate=self._rate,
            in_turn=True,
        )
        with running("benchmarks.reader", Watch(bootstrap_servers=servers, topic=job.output, gaps=True)) as reader:
            with running("benchmarks.generator", load) as generator:
                time.sleep(WARM_UP_SECONDS)
                self._watch("steady", lambda: None, lambda: time.sleep(NOISE_SECONDS - CALM_SECONDS))
                next(scenario, None)
                generator.send(signal.SIGTERM)
                sent = msgspec.json.decode(generator.result(90), type=LoadResult).sent
            self.cluster.wait_committed(job, sent, self._check, PATIENCE_SECONDS)
            time.sleep(0.5)
            reader.send(signal.SIGTERM)
            gaps = msgspec.json.decode(reader.result(40), type=WatchResult).gaps
        judge, _ = self.cluster.judged(job)
        fault = judge.verdict(self._seed, sent, in_turn=True)
        self.close()
        self.cluster.forget(job, source=True)
        return [
            msgspec.structs.replace(stall, round=turn, silences=silences(gaps, window), fault=fault)
            for stall, window in self._steps
        ]
