"""The surroundings of a measure: the options, one broker for all, the systems that can be had, and the display."""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.status import Status

from benchmarks.cluster import Cluster
from benchmarks.drain import drain
from benchmarks.measures import Measure
from benchmarks.steady import steady
from benchmarks.systems import Failed, System, Unavailable
from streams.broker import KafkaBroker
from streams.broker.jars import pinned
from streams.sak.java import find_java

MIB = 1024 * 1024
WARM_UP_RECORDS = 100_000
WARM_UP_RATE, WARM_UP_SECONDS = 2_000, 5
WARM_UP = ("handwritten:events=5000", "engine")
COLD_SHARE = 0.1
"""Compilers of Java that take more than this share of a core are still at work. On two cores they take as much of the
machine as a system under test for the first minute, and a broker that is still interpreted takes three times its later
price per record."""
MOST_WARM_UPS = 12

R = TypeVar("R")


class Bench(ExitStack):
    """One call of the command. ``facts``: the circumstances of the figures; measures add versions to them."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any], console: Console, status: Status) -> None:
        super().__init__()
        self.options, self.facts, self.seed = options, facts, int(options.seed)
        self.say, self.now = console.print, status.update
        self._warm: set[str] = set()

    @functools.cached_property
    def broker(self) -> KafkaBroker:
        """The broker of the run, started at its first use."""
        self.now("starting a Kafka broker")
        broker = self.enter_context(
            KafkaBroker(
                durable=True,
                heap_mb=1024,
                properties={"broker.session.timeout.ms": "30000"},  # a busy machine is no reason to give it up
                progress=lambda what, done, total: self.now(f"{what}: {done // MIB} of {total // MIB} MiB"),
            )
        )
        assert broker.pid is not None
        self.facts["kafka"] = pinned()[0]
        self.facts["java"] = find_java().version
        return broker

    def sizes(self, measure: Measure[Any]) -> argparse.Namespace:
        """Return the amount of work of a measure."""
        return self.options.sizes[measure.name]

    @property
    def broker_pid(self) -> int:
        """The broker's process."""
        assert self.broker.pid is not None
        return self.broker.pid

    @functools.cached_property
    def cluster(self) -> Cluster:
        """Topics and records of the run."""
        return Cluster(self.broker.bootstrap_servers)

    @functools.cached_property
    def systems(self) -> list[System]:
        """The systems of ``--systems`` that can be had."""
        return self.able(self.options.systems)

    def able(self, labels: Sequence[str]) -> list[System]:
        """Select the systems that can be had. The reasons for the others are shown, and kept in the facts. Raises
        ``Failed`` for one that is not known."""
        found = []
        for label in labels:
            self.now(f"getting ready: {label}")
            try:
                system = System.parse(label)
                versions = system.launch(self.now).versions
            except ValueError as error:
                raise Failed(str(error)) from None
            except Unavailable as error:
                self.facts.setdefault("not measured", {})[label] = str(error)
                self.say(f"[red]not measured:[/] {label}: {error}")
                continue
            if versions:
                self.facts.setdefault("peers", {})[label] = versions
            found.append(system)
        return found

    def warm_up(self, *, live: bool = False) -> None:
        """Warm the broker up, once, by uncounted drains; ``live``: by runs at a fixed rate as well. A backlog
        does not make the way of single events warm, and the input's own producer is late by hundreds of milliseconds on
        a broker that meets such a load first."""
        if "drains" not in self._warm:
            source = self.cluster.source("warm-up")
            self.cluster.fill(source, self.seed, WARM_UP_RECORDS)
            self._warm_by(
                "drains",
                lambda system: drain(self.cluster, system, source, self.seed, WARM_UP_RECORDS, self.broker_pid),
            )
            self.cluster.delete(source)
        if live and "live" not in self._warm:
            self._warm_by("live", lambda system: steady(self.cluster, system, self.seed, WARM_UP_RATE, WARM_UP_SECONDS))

    def _warm_by(self, what: str, run: Callable[[System], object]) -> None:
        self._warm.add(what)
        share, number = 1.0, 0
        while share > COLD_SHARE and number < MOST_WARM_UPS:
            label = WARM_UP[number % len(WARM_UP)]
            number += 1
            self.now(f"warming the broker up ({what}), not counted, {number}: {label}")
            began, compiled = time.monotonic(), compiler_seconds(self.broker_pid)
            run(System.parse(label))
            share = (compiler_seconds(self.broker_pid) - compiled) / (time.monotonic() - began)
        self.facts.setdefault("warm-up", {})[what] = {"runs": number, "share": share}
        self.say(f"broker warm after {number} {what} runs: its compilers take {share:.0%} of a core")

    def in_turn(
        self,
        what: str,
        rounds: int,
        run: Callable[[System, int], R],
        result: Callable[..., R],
        systems: Sequence[System] | None = None,
        **same: Any,
    ) -> Iterator[R]:
        """``run(system, round)`` for every system (of the run, or these) in each round, each round beginning with
        another one. The failure of a system becomes a ``result`` with these fields, and it is left out afterwards."""
        able = list(self.systems if systems is None else systems)
        for turn in range(1, rounds + 1):
            first = (turn - 1) % max(len(able), 1)
            for system in able[first:] + able[:first]:
                self.now(f"{what}, {turn}/{rounds}: {system.label}")
                try:
                    yield run(system, turn)
                except Failed as error:
                    able.remove(system)
                    yield result(system=system.label, round=turn, fault=f"failed: {error}", **same)


def compiler_seconds(pid: int) -> float:
    """Sum up the processor time that a Java machine's compilers have taken so far."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # the thread ended
        if name.startswith(("C1 Compiler", "C2 Compiler")):
            ticks += sum(map(int, rest.split()[11:13]))  # utime and stime, which are fields 14 and 15 of all
    return ticks / os.sysconf("SC_CLK_TCK")
