"""Two members share the work, one is killed (kill -9): how long is a partition silent, and is everything still right?

Looked at from outside only, so that it is the same for every system: the group's assignment tells when both have their
share, a read_committed reader tells the silences, and the judge tells what was lost or done twice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.generator import Load
from benchmarks.peers.arrivals import PATIENCE_SECONDS, Expect, Gap
from benchmarks.steady import PRIMING_EVENTS
from benchmarks.systems import Child, Failed, System, running, system_running
from benchmarks.workload import Balance, Job, Judge

MEMBERS = 2
CALM_SECONDS = 6
"""Under load, before the kill."""
AFTER_SECONDS = 12
"""Under load, after it: longer than a session."""
SETTLE_SECONDS = 120.0
STEADY_SECONDS = 3.0
"""That shares must last before they count."""
MOVED_SECONDS = 1.0
"""A partition that was silent for longer was the dead member's."""


class Takeover(msgspec.Struct, frozen=True):
    """One kill. Seconds: ``longest`` silence of any partition after it, ``median`` of those that were silent for more
    than a second, which are ``moved``; ``before``: the longest silence while nothing happened, the noise."""

    system: str
    round: int
    rate: int
    fault: str
    longest: float = 0.0
    median: float = 0.0
    moved: int = 0
    before: float = 0.0
    load_average: float = 0.0


def takeover(cluster: Cluster, system: System, seed: int, rate: int, turn: int) -> Takeover:
    """Start two members, let them share, kill the second under load, judge. Raises ``Failed``."""
    job = cluster.job()
    cluster.fill(job.source, seed, PRIMING_EVENTS)
    sent = rate * (CALM_SECONDS + AFTER_SECONDS)
    load = Load(
        bootstrap_servers=job.bootstrap_servers,
        topic=job.source,
        seed=seed,
        skip=PRIMING_EVENTS,
        events=sent,
        rate=rate,
        shape=job.shape,
    )
    expect = Expect(
        bootstrap_servers=job.bootstrap_servers,
        topic=job.output,
        partitions=cluster.partitions,
        events=PRIMING_EVENTS + sent,
    )
    with ExitStack() as stack:
        members = [stack.enter_context(system_running(system, job)) for _ in range(MEMBERS)]
        _until_shared(cluster, job, members)
        _until_primed(cluster, job, system, members)
        reader = stack.enter_context(running("benchmarks.peers.arrivals", expect))
        generator = stack.enter_context(running("benchmarks.generator", load))
        began = time.time()
        time.sleep(CALM_SECONDS)
        members[1].send(signal.SIGKILL)
        killed = time.time()
        generator.result(AFTER_SECONDS + 60)
        gaps = msgspec.json.decode(reader.result(2 * PATIENCE_SECONDS), type=list[Gap])
        members[0].check()
    judge, decode = Judge(cluster.shape), msgspec.json.Decoder(Balance).decode
    for message in cluster.outputs(job):
        judge.hear((message.key() or b"").decode(), decode(message.value() or b""))
    cluster.forget(job, source=True)
    silent = silences(gaps, killed)
    long = sorted(seconds for seconds in silent.values() if seconds > MOVED_SECONDS)
    return Takeover(
        system=system.label,
        round=turn,
        rate=rate,
        fault=judge.verdict(seed, PRIMING_EVENTS + sent),
        longest=max(silent.values(), default=0.0),
        median=long[len(long) // 2] if long else 0.0,
        moved=len(long),
        before=max((gap.seconds for gap in gaps if began + 2 < gap.since and gap.until < killed), default=0.0),
        load_average=os.getloadavg()[0],
    )


def silences(gaps: Sequence[Gap], killed: float) -> dict[int, float]:
    """The longest one of each partition that had not ended at the kill."""
    found: dict[int, float] = {}
    for gap in gaps:
        if gap.until > killed:
            found[gap.partition] = max(found.get(gap.partition, 0.0), gap.seconds)
    return found


def is_shared(shares: Sequence[int], partitions: int) -> bool:
    """Whether two members or more (threads may be members) share, and none has more than its fair share.

    Not that all is assigned: what a donor of this project hands over by a marker in its last transaction belongs to the
    other member from then on, and the group's own words may never say so.
    """
    return len(shares) >= MEMBERS and 0 < max(shares) <= -(-partitions // len(shares))


def _until_shared(cluster: Cluster, job: Job, members: Sequence[Child]) -> None:
    shares: list[int] = []
    since = time.monotonic()

    def shared() -> bool:
        nonlocal since
        shares[:] = cluster.shares(job)
        if not is_shared(shares, cluster.partitions):
            since = time.monotonic()
        return time.monotonic() - since > STEADY_SECONDS

    _until(members, shared, lambda: f"two members have their shares; they have {shares} of {cluster.partitions}")


def _until_primed(cluster: Cluster, job: Job, system: System, members: Sequence[Child]) -> None:
    committed = cluster.progress(system, job)
    try:
        _until(members, lambda: committed() >= PRIMING_EVENTS, lambda: "the first events are committed")
    finally:
        committed.close()


def _until(members: Sequence[Child], condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition():
        for member in members:
            member.check()
        if time.monotonic() > deadline:
            raise Failed(f"not after {SETTLE_SECONDS:g} s: {what()}")
        time.sleep(0.2)
