"""Several processes of one system that share the partitions: as workers of ``kes run``, as members of one group, or,
for the loop written by hand, with a share each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import msgspec
import psutil

from benchmarks.drain import Running
from benchmarks.engine import JOB_VARIABLE
from benchmarks.systems import Child, Failed, Sample, System
from benchmarks.workload import Job


class Fleet:
    """Processes, and those that they started. Looked at as one."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._gone: dict[int, float] = {}
        """CPU seconds of each process as last seen: of one that has ended they stay in the sum."""

    def sample(self, began: float, committed: int) -> Sample:
        """CPU time and memory of all of them. Raises ``Failed`` if one of those that were started is gone."""
        memory = 0
        for child in self._children:
            child.check()
            for process in _tree(child.pid):
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    self._gone[process.pid] = times.user + times.system
                    memory += process.memory_info().rss
        return Sample(time.monotonic() - began, committed, sum(self._gone.values()), memory)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error as error:
        raise Failed(f"process {pid} is gone") from error


def of_workers(number: int) -> Running:
    """So many worker processes of a system."""

    @contextlib.contextmanager
    def running(system: System, job: Job) -> Iterator[Fleet]:
        with contextlib.ExitStack() as stack:
            children: list[Child] = []
            for child in started(system, job, number):
                stack.callback(child.stop)
                children.append(child)
            yield Fleet(children)

    return running


def started(system: System, job: Job, number: int) -> Iterator[Child]:
    """Start them. An event source is supervised, as its users would have it."""
    options = dict(system.options)
    if system.name == "engine":
        told = msgspec.json.encode(msgspec.structs.replace(job, options=options)).decode()
        yield Child(
            "streams",
            job,
            system.folder,
            arguments=["run", "benchmarks.engine:source", "-n", str(number), "--instance-prefix", "w", "-q"],
            variables={JOB_VARIABLE: told},
        )
        return
    launch = system.launch()
    for one in range(number):
        share = {"share": f"{one}/{number}"} if system.name == "handwritten" else {}
        yield Child(
            system.label,
            msgspec.structs.replace(job, options=options | share),
            launch.folder,
            variables=launch.variables,
            command=launch.command,
        )
