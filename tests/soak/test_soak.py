"""The nightly run: a group of four on a cluster of three, under load, while members and brokers are killed and frozen.

    make soak                                   ten minutes
    SOAK_MINUTES=60 SEED=4711 SOAK_REPORT=report.md make soak
    SOAK_BEFORE=COMMIT                          each start of a member is of this code or of that commit's, at random

Leader of a partition, group coordinator, transaction coordinator and controller go in turn; members at random, also
while a broker is away. Members keep their state in folders, one kind of store each. At the end the replay oracle
compares everything, every record is counted, and what members load from their folders must be what the changelog says.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.broker import KafkaCluster
from streams.model.group import transactional_id
from streams.model.topics import changelog_name
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, Worker, seed_of, wait_until
from tests.broker.releases import unpack
from tests.soak.kit import PARTITIONS, Watch, bank_on
from tests.soak.report import Fault, SoakReport

MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
RATE = float(os.environ.get("SOAK_RATE", "400"))
REPORT = os.environ.get("SOAK_REPORT", "")
BEFORE = os.environ.get("SOAK_BEFORE", "")

pytestmark = [pytest.mark.soak, pytest.mark.broker, pytest.mark.timeout(int(MINUTES * 60) + 900)]

MEMBERS, KEYS, SESSION_SECONDS = 4, 400, 6.0
ENGINES = ["", "SQLite", "RocksDB", ""]
"""Of each member's stores; empty: in memory, kept in files of blocks."""
RECOVERY_SECONDS = 240.0
"""Until a broker that was killed is in sync again: up to 107 s, on cores with ten times the work that they can do."""
AFTER_EFFECT = 1.0
"""Seconds after a fault from which on a record shows that its partition works: some still come out of the pipe."""


class Soak:
    """One run: what is done, in which order, and what is noted."""

    def __init__(self, cluster: KafkaCluster, folder: Path, seed: int, report: SoakReport) -> None:
        self.cluster, self.report, self.seed, self.folder = cluster, report, seed, folder
        self.rng = random.Random(seed)
        self.codes: list[dict[str, str]] = [{}]
        if BEFORE:
            assert unpack(BEFORE, folder / "before"), f"the history is not here, so SOAK_BEFORE={BEFORE} is not"
            self.codes.append({"PYTHONPATH": str(folder / "before")})
        self.group = bank_on(cluster, f"soak-{seed}", folder)
        self.began = time.monotonic()
        self.watch = Watch(self.group)
        self.load = self.group.load(ENDLESS, KEYS, seed, RATE)
        self.members: dict[str, Worker] = {}
        self._roles = ["leader", "group coordinator", "transaction coordinator", "controller"]

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the time is over. Raises ``AssertionError`` when something does not come back."""
        for number in range(MEMBERS):
            self._start(f"member-{number}")
        self._wait_flow(self.began)
        calm_since = time.monotonic()
        self._pause(10, 10)
        self.report.calm = self.watch.largest_gaps(calm_since, time.monotonic())
        end = self.began + MINUTES * 60
        while time.monotonic() < end:
            self.fault_of_a_broker()
            for _ in range(2):
                if time.monotonic() < end:
                    self.fault_of_a_member()
                    self._pause(1, 3)

    def finish(self) -> None:
        """Everybody stops, everything is compared."""
        report = self.report
        self.load.stop()
        report.inputs = self.group.produced
        self.group.wait_handled(seconds=180)
        self._stop()
        self.watch.stop()
        report.seconds = time.monotonic() - self.began
        report.generations = self.group.generations()
        report.outputs = self.watch.records
        report.duplicated = self.watch.seen.total() - len(self.watch.seen)
        sent = Counter(event.account for event in bank.events(report.inputs, KEYS, self.seed))
        expected = {(account, number) for account, count in sent.items() for number in range(1, count + 1)}
        report.lost = len(expected - self.watch.seen.keys())
        if self.watch.seen.keys() - expected:
            report.problems.append(f"{len(self.watch.seen.keys() - expected)} outputs that nobody asked for")
        found = self.group.check()
        report.oracle = str(found).splitlines()[0]
        report.problems += found.differences
        if found.inputs != report.inputs:
            report.problems.append(f"the oracle read {found.inputs} inputs, {report.inputs} were sent")
        if report.lost or report.duplicated:
            report.problems.append(f"{report.lost} outputs lost, {report.duplicated} duplicated")
        self.codes = self.codes[:1]
        for name in sorted(self.members):
            self._start(name)
        self.group.check_stores(standbys=1)  # of the folders that the stop left
        self._stop()

    def _stop(self) -> None:
        for member in self.members.values():
            if member.stop(60) != 0:
                self._problem(f"{member.instance} ended with {member.process.returncode} when it was stopped")

    # -- brokers ------------------------------------------------------------------------------------------------------

    def fault_of_a_broker(self) -> None:
        """The node that has the next role goes, and comes back a few seconds later."""
        role = self._roles.pop(0)
        self._roles.append(role)
        number = self._node_with(role)
        node = self.cluster.node(number)
        how = self.rng.choice(["killed", "killed", "killed", "restarted", "frozen"])
        fault = self._note(f"broker {how} ({role})", f"node {number}")
        act: dict[str, Callable[[], None]] = {"killed": node.kill, "restarted": node.shut_down, "frozen": node.freeze}
        act[how]()
        if self.rng.random() < 0.5:
            self.fault_of_a_member()
        else:
            self._pause(4 if how == "frozen" else 0.5, 8)
        node.thaw() if how == "frozen" else node.restart()
        self.cluster.wait_in_sync(RECOVERY_SECONDS)
        self._recovered(fault)

    def _node_with(self, role: str) -> int:
        group = self.group.group
        if role == "leader":
            topics = [bank.topic_of(group), bank.output_of(group), changelog_name(group, bank.topic_of(group))]
            return self.cluster.leader_of(self.rng.choice(topics), self.rng.randrange(PARTITIONS))
        if role == "group coordinator":
            return self.cluster.group_coordinator(group)
        if role == "transaction coordinator":
            return self.cluster.transaction_coordinator(
                transactional_id(group, f"member-{self.rng.randrange(MEMBERS)}", 0)
            )
        return self.cluster.controller()

    # -- members ------------------------------------------------------------------------------------------------------

    def fault_of_a_member(self) -> None:
        """Killed, frozen past its session, or restarted in good order."""
        self._look_for_the_dead()
        name = self.rng.choice(sorted(self.members))
        member = self.members[name]
        how = self.rng.choice(["killed", "killed", "frozen", "restarted"])
        fault = self._note(f"member {how}", name)
        if how == "killed":
            member.kill()
            self._pause(0, 3)
            self._start(name)
        elif how == "restarted":
            if member.stop(60) != 0:
                self._problem(f"{name} ended with {member.process.returncode} on SIGTERM: {_last_line(member)}")
            self._start(name)
        else:
            member.signal(signal.SIGSTOP)
            self._pause(SESSION_SECONDS + 1, SESSION_SECONDS + 5)
            member.signal(signal.SIGCONT)
        self._recovered(fault)

    def _start(self, name: str) -> None:
        settings = {"BANK_STANDBYS": "1", "BANK_FOLDER": str(self.folder / "state" / name)}
        settings |= {"BANK_ENGINE": ENGINES[int(name[-1])]} | self.rng.choice(self.codes)
        member = self.members[name] = self.group.start(name, **settings)
        wait_until(lambda: member.said("generation") or not member.running, f"{name} is in the group", RECOVERY_SECONDS)

    def _look_for_the_dead(self) -> None:
        """Nobody may end because of what happens to others, or to a broker."""
        for name, member in list(self.members.items()):
            if not member.running:
                self._problem(f"{name} ended with {member.process.returncode} by itself: {_last_line(member)}")
                self._start(name)

    # -- notes --------------------------------------------------------------------------------------------------------

    def _note(self, kind: str, target: str) -> Fault:
        fault = Fault(time.monotonic() - self.began, kind)
        self.report.faults.append(fault)
        self.report.load.append(os.getloadavg()[0])
        print(f"{fault.at:7.1f} s  {kind}: {target}", flush=True)
        return fault

    def _recovered(self, fault: Fault) -> None:
        """Wait until every partition gives something that came after the fault, and note how long readers waited."""
        began = self.began + fault.at
        self._wait_flow(began + AFTER_EFFECT)
        now = time.monotonic()
        fault.recovered = max(now - began, 0.0)
        fault.gaps = self.watch.largest_gaps(began, now)
        print(f"           longest wait {fault.gap:.2f} s, over after {fault.recovered:.1f} s", flush=True)
        self._look_for_the_dead()

    def _wait_flow(self, since: float) -> None:
        def flows() -> bool:
            if self.watch.failure is not None:
                raise self.watch.failure
            return self.watch.all_since(since)

        wait_until(flows, f"every partition gives something again: {self.watch.last}, since {since}", RECOVERY_SECONDS)

    def _pause(self, least: float, most: float) -> None:
        until = time.monotonic() + self.rng.uniform(least, most)
        wait_until(lambda: time.monotonic() >= until, "the next fault")

    def _problem(self, text: str) -> None:
        print(f"           PROBLEM: {text}", flush=True)
        self.report.problems.append(text)


def _last_line(member: Worker) -> str:
    lines = member.log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it wrote nothing"


def test_soak(tmp_path: Path) -> None:
    seed = seed_of()
    print(f"\nSEED={seed} SOAK_MINUTES={MINUTES:g}; logs in {tmp_path}")
    report = SoakReport(
        seed,
        MINUTES,
        f"{MEMBERS} members with one standby per partition on a cluster of three brokers, {PARTITIONS} partitions, "
        f"{RATE:g} deposits/s, session timeout {SESSION_SECONDS:g} s, state in folders"
        + (f", members of this code and of {BEFORE[:8]} by turns" if BEFORE else ""),
    )
    with KafkaCluster(3, start_timeout=RECOVERY_SECONDS) as cluster:
        soak = Soak(cluster, tmp_path, seed, report)
        try:
            soak.run()
            soak.finish()
        except BaseException as error:
            report.problems.append(f"{type(error).__name__}: {error}")
            for number, node in cluster.nodes.items():
                if node.data_dir is not None:
                    shutil.copy(node.data_dir / "kafka.log", tmp_path / f"broker-{number}.log")
            raise
        finally:
            soak.group.close()
            if not report.seconds:
                report.seconds = time.monotonic() - soak.began
            if REPORT:
                Path(REPORT).write_text(report.markdown())
            print(report.markdown())
    assert not report.problems, report.problems
