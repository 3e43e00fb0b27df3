"""What happens to a group, by name."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.stalls.group import Group, Stall
from streams.broker import KafkaBroker

SESSION_SECONDS = 6
COLD_SECONDS = 15.0
"""Under load, until a broker that has just started is as quick as it will be."""


class Scenario(msgspec.Struct, frozen=True):
    """``options`` are for every member; ``prepare`` starts the first ones, ``happen`` is watched under load;
    ``stops_broker``: it gets a broker of its own."""

    options: dict[str, str]
    prepare: Callable[[Group], None]
    happen: Callable[[Group], None]
    stops_broker: bool = False


def _start(*instances: str) -> Callable[[Group], None]:
    def start(group: Group) -> None:
        group.start(*instances)
        group.settle(len(instances))

    return start


def _supervise(group: Group) -> None:
    group.supervise(3)
    group.settle(3)


def _planned(group: Group) -> None:
    group.step("join, 1 to 2", lambda: group.start("m2"), 2)
    group.step("join, 2 to 3", lambda: group.start("m3"), 3)
    group.step("leave, 3 to 2 (SIGTERM)", lambda: group.end("m2"), 2)


def _kill(label: str) -> Callable[[Group], None]:
    return lambda group: group.step(f"kill -9, 3 to 2, {label}", lambda: group.kill("m2"), 2)


def _kill_worker(label: str) -> Callable[[Group], None]:
    return lambda group: group.step(f"kill -9 of a supervised worker, {label}", group.kill_worker, 3)


def _freeze(group: Group) -> None:
    def freeze() -> None:
        group.signal("m2", signal.SIGSTOP)
        time.sleep(2 * SESSION_SECONDS)

    group.step("SIGSTOP for two sessions, with standby", freeze, 2)
    group.step("SIGCONT", lambda: group.signal("m2", signal.SIGCONT), 3)


def _roll(group: Group) -> None:
    def roll() -> None:
        for instance in sorted(group.members):
            group.end(instance)
            group.start(instance)
            group.settle(4)

    group.step("rolling restart of 4 members", roll, 4)


def _cooperative(group: Group) -> None:
    group.step("join, 1 to 2, cooperative-sticky", lambda: group.start("m2"), 2)
    group.step("join, 2 to 3, cooperative-sticky", lambda: group.start("m3"), 3)


def _outage(label: str, *, kill: bool) -> Callable[[Group], None]:
    return lambda group: group.step(label, lambda: group.outage(kill=kill), 2)


STANDBY = {"config.num_standbys": "1"}
SCENARIOS = {
    "planned": Scenario({}, _start("m1"), _planned),
    "kill-standby": Scenario(STANDBY, _start("m1", "m2", "m3"), _kill("with standby")),
    "kill": Scenario({}, _start("m1", "m2", "m3"), _kill("without standby")),
    "supervised-standby": Scenario(STANDBY, _supervise, _kill_worker("with standby")),
    "supervised": Scenario({}, _supervise, _kill_worker("without standby")),
    "freeze": Scenario(STANDBY, _start("m1", "m2", "m3"), _freeze),
    "rolling": Scenario({}, _start("m1", "m2", "m3", "m4"), _roll),
    "cooperative": Scenario({"config.strategy": "cooperative-sticky"}, _start("m1"), _cooperative),
    "broker-restart": Scenario({}, _start("m1", "m2"), _outage("broker restart", kill=False), stops_broker=True),
    "broker-kill": Scenario(
        {}, _start("m1", "m2"), _outage("broker kill -9 and restart", kill=True), stops_broker=True
    ),
}


def play(cluster: Cluster | None, name: str, round_: int, rate: int, keep: Path | None = None) -> list[Stall]:
    """One run of one scenario; one that stops its broker needs no ``cluster``. ``keep``: a folder in which the members'
    traces stay. Raises ``Failed``."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if keep is not None:
            folder = keep / f"{name}-{round_}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if cluster is not None and not scenario.stops_broker:
            with Group(cluster, folder, round_, rate, scenario.options) as group:
                return group.run(scenario.prepare, scenario.happen)
        with KafkaBroker(durable=True, heap_mb=1024) as broker:
            own = Cluster(broker.bootstrap_servers)
            with Group(
                own, folder, round_, rate, scenario.options, broker=broker, warm_up_seconds=COLD_SECONDS
            ) as group:
                return group.run(scenario.prepare, scenario.happen)
