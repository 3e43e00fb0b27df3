"""A member of the group under test, by itself or as a worker of ``kes run``: its outputs carry its name.

Ten times a second it writes its status to a file of its own, so that the last one is there also after a kill -9.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from benchmarks.child import job_of
from benchmarks.engine import without_handlers
from benchmarks.workload import PARTITIONS, Account, Deposited, Job, Signed
from streams import EventContext, EventSource, Table

JOB_VARIABLE = "KES_BENCH_JOB"
STATUS_SECONDS = 0.1
FRESH_SECONDS = 1.0
"""An older status means nothing."""


class Status(msgspec.Struct, frozen=True):
    """One look at a member: the partitions that it works on, the replicas that are warm, the moves under way."""

    at: float
    generation: int
    active: list[int]
    ready: list[int]
    moving: int
    state: str


def source_of(job: Job, instance: str) -> EventSource[Table[str, Account]]:
    """Build the event source; the option ``folder`` names the folder for its status, others as ``benchmarks.engine``
    has them."""
    name, output = f"{instance}.{os.getpid()}", job.output
    options = {**job.options, "config.instance_id": instance}
    source = without_handlers(msgspec.structs.replace(job, options=options))

    @source.register_event_type(Deposited)
    def deposited(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        key = event.account
        account = ctx.store.get(key) or Account()
        account.count += 1
        account.cents += event.cents
        ctx.store.put(key, account)
        ctx.forward(output, Signed(key, account.count, account.cents, event.sent, name), key=key)

    path = Path(job.options["folder"], f"{name}.json")
    threading.Thread(target=_report, args=(source, path), name="status", daemon=True).start()
    return source


def _report(source: EventSource[Table[str, Account]], path: Path) -> None:
    while True:
        try:
            found = source.statistics()
        except (RuntimeError, AttributeError):  # the loop's own, seen from outside: half built, or just changing
            time.sleep(STATUS_SECONDS / 10)
            continue
        status = Status(
            time.time(),
            found.generation,
            [one.partition for one in found.partitions if one.state == "active"],
            [one.partition for one in found.copies if one.state == "ready"],
            len(found.moves) + sum(one.state != "ready" for one in found.copies),
            found.state.value,
        )
        draft = path.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(status))
        draft.replace(path)
        time.sleep(STATUS_SECONDS)


def statuses(folder: Path) -> dict[str, Status]:
    """Read the last status of each process, by its name (``INSTANCE.PID``)."""
    decode = msgspec.json.Decoder(Status).decode
    return {path.stem: decode(path.read_bytes()) for path in folder.glob("*.json")}


def fresh(found: dict[str, Status], dead: Collection[str]) -> dict[str, Status]:
    """Select those of processes that are alive."""
    since = time.time() - FRESH_SECONDS
    return {name: status for name, status in found.items() if status.at > since and name not in dead}


def is_settled(standing: Iterable[Status], members: int, standbys: int) -> bool:
    """Whether so many members share all partitions evenly, with all replicas warm, and nothing under way."""
    found = list(standing)
    if len(found) != members or any(status.moving or status.state != "running" for status in found):
        return False
    owned = [len(status.active) for status in found]
    active = {partition for status in found for partition in status.active}
    if sum(owned) != PARTITIONS or len(active) != PARTITIONS or max(owned) - min(owned) > 1:
        return False
    replicas = [partition for status in found for partition in status.ready]  # a move may leave one more behind
    return all(replicas.count(partition) >= min(standbys, members - 1) for partition in active)


def source() -> EventSource[Table[str, Account]]:
    """Build the event source for ``kes run``: the job is in the environment."""
    job = msgspec.json.decode(os.environ[JOB_VARIABLE], type=Job)
    return source_of(job, os.environ["KES_INSTANCE_ID"])


if __name__ == "__main__":
    given = job_of(Job)
    source_of(given, given.options["instance"]).run()
