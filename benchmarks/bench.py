"""What a measure works with: the options, one broker for all, and the ways to say what is going on."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.status import Status

from benchmarks.cluster import Cluster
from benchmarks.drain import drain
from benchmarks.steady import steady
from benchmarks.systems import Failed, System, Unavailable
from benchmarks.warm import until_warm
from streams.broker import KafkaBroker
from streams.broker.jars import pinned

MIB = 1024 * 1024
WARM_UP_RECORDS = 100_000
WARM_UP_RATE, WARM_UP_SECONDS = 2_000, 5
WARM_UP = ("handwritten:events=5000", "engine")

R = TypeVar("R")


class Bench:
    """One call of the command. ``facts`` is what the figures depend on: measures add versions to it."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any], console: Console, status: Status) -> None:
        self.options, self.facts, self.seed = options, facts, int(options.seed)
        self.say, self.now = console.print, status.update
        self._stack = ExitStack()
        self._broker: KafkaBroker | None = None
        self._cluster: Cluster | None = None
        self._systems: list[System] | None = None
        self._is_warm = self._is_warm_live = False

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def broker(self) -> KafkaBroker:
        """The broker of the run, started when it is first asked for."""
        if self._broker is None:
            self.now("starting a Kafka broker")
            self._broker = self._stack.enter_context(
                KafkaBroker(
                    durable=True,
                    heap_mb=1024,
                    properties={"broker.session.timeout.ms": "30000"},  # a busy machine is no reason to give it up
                    progress=lambda what, done, total: self.now(f"{what}: {done // MIB} of {total // MIB} MiB"),
                )
            )
            self.facts["kafka"] = pinned()[0]
            self.facts["java"] = _java_of(self.broker_pid)
        return self._broker

    @property
    def broker_pid(self) -> int:
        """The broker's process."""
        assert self.broker.pid is not None
        return self.broker.pid

    @property
    def cluster(self) -> Cluster:
        """Topics and records of the run."""
        if self._cluster is None:
            self._cluster = Cluster(self.broker.bootstrap_servers)
        return self._cluster

    @property
    def systems(self) -> list[System]:
        """Those of ``--systems`` that can be had; why others cannot is said, and kept in the facts."""
        if self._systems is None:
            self._systems = self.able(self.options.systems)
        return self._systems

    def able(self, systems: Sequence[System]) -> list[System]:
        """Those of the systems that can be had; why others cannot is said, and kept in the facts."""
        return [system for system in systems if self._has(system)]

    def _has(self, system: System) -> bool:
        self.now(f"getting ready: {system.label}")
        try:
            versions = system.launch(self.now).versions
        except Unavailable as error:
            self.facts.setdefault("not measured", {})[system.label] = str(error)
            self.say(f"[red]not measured:[/] {system.label}: {error}")
            return False
        if versions:
            self.facts.setdefault("peers", {})[system.label] = versions
        return True

    def warm_up(self) -> None:
        """Drains that are not counted, once, until the broker is warm."""
        if self._is_warm:
            return
        self._is_warm = True
        source = self.cluster.source("warm-up")
        self.cluster.fill(source, self.seed, WARM_UP_RECORDS)
        self.warm(
            "drains",
            self.broker_pid,
            lambda system: drain(self.cluster, system, source, self.seed, WARM_UP_RECORDS, self.broker_pid),
        )
        self.cluster.delete(source)

    def warm_up_live(self) -> None:
        """Runs at a fixed rate that are not counted, once: a backlog does not make the way of single events warm,
        and the input's own producer is late by hundreds of milliseconds on a broker that meets such a load first."""
        self.warm_up()
        if self._is_warm_live:
            return
        self._is_warm_live = True
        self.warm(
            f"runs at {WARM_UP_RATE:,}/s",
            self.broker_pid,
            lambda system: steady(self.cluster, system, self.seed, WARM_UP_RATE, WARM_UP_SECONDS),
        )

    def warm(self, what: str, pid: int, run: Callable[[System], object]) -> None:
        """``run`` with the systems of ``WARM_UP`` in turn, until the broker of this process is warm. Says how warm that
        is, and keeps it in the facts."""

        def once(number: int) -> None:
            text = WARM_UP[number % len(WARM_UP)]
            self.now(f"warming the broker up by {what}, not counted, {number + 1}: {text}")
            run(System.parse(text))

        warmth = until_warm(pid, once)
        self.facts.setdefault("warm-up", {})[what] = msgspec.to_builtins(warmth)
        self.say(f"broker warm after {warmth.runs} {what}: its compilers take {warmth.share:.0%} of a core")

    def in_turn(
        self,
        what: str,
        rounds: int,
        run: Callable[[System, int], R],
        failed: Callable[[System, int, str], R],
        systems: Sequence[System] | None = None,
    ) -> Iterator[R]:
        """``run(system, round)`` for every system (of the run, or these) in each round, each round beginning with
        another one. A system that fails is told by ``failed(system, round, why)``, and left out of the rounds after."""
        able = list(self.systems if systems is None else systems)
        for turn in range(1, rounds + 1):
            first = (turn - 1) % max(len(able), 1)
            for system in able[first:] + able[:first]:
                self.now(f"{what}, {turn}/{rounds}: {system.label}")
                try:
                    yield run(system, turn)
                except Failed as error:
                    able.remove(system)
                    yield failed(system, turn, f"failed: {error}")


def _java_of(pid: int) -> str:
    """The version of a process's Java."""
    try:
        java = psutil.Process(pid).exe()
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, psutil.Error, subprocess.CalledProcessError):
        return "not known"
    return said.splitlines()[0].split('"')[1] if '"' in said else said.strip()
