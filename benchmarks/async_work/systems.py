"""The systems under test: which module, with which options, by which interpreter."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.async_work.workload import Job
from benchmarks.cluster import Cluster
from benchmarks.systems import Child, running


class System(msgspec.Struct, frozen=True):
    """``python``: of another environment."""

    label: str
    module: str
    options: dict[str, str]
    python: str = ""


def ours(how: str, concurrency: int) -> System:
    """``how``: see ``benchmarks.async_work.ours``."""
    options = {"how": how, "concurrency": str(concurrency)}
    return System(f"{how}, {concurrency}", "benchmarks.async_work.ours", options)


def handwritten(concurrency: int) -> System:
    """The loop."""
    return System(f"loop, {concurrency}", "benchmarks.async_work.loop", {"concurrency": str(concurrency)})


def quixstreams(python: Path) -> list[System]:
    """With the same guarantee as the others, and a short commit interval; and as it is without any setting."""
    module = "benchmarks.async_work.quix"
    exactly = {"processing_guarantee": "exactly-once", "commit_interval": "0.1"}
    return [
        System("quixstreams, exactly once, 100 ms", module, exactly, str(python)),
        System("quixstreams, default: at least once", module, {}, str(python)),
    ]


def all_of(concurrencies: Sequence[int], python: Path | None) -> list[System]:
    """Of every kind with every concurrency; the first ones are what ratios refer to."""
    found = [
        system
        for concurrency in concurrencies
        for system in (handwritten(concurrency), ours("scheduler", concurrency), ours("handler", concurrency))
    ]
    return [*found, *([] if python is None else quixstreams(python))]


def of_batches() -> list[System]:
    """Four calls at a time and one event each, which is what ratios refer to; many events each; and more calls."""
    alone, many = ours("scheduler", 4), ours("scheduler", 64)
    batcher = System("batcher, 4 calls of up to 100", alone.module, {"how": "batcher"})
    return [
        msgspec.structs.replace(alone, label="one event a call, 4 at a time"),
        batcher,
        msgspec.structs.replace(many, label="one event a call, 64 at a time"),
    ]


@contextlib.contextmanager
def started(system: System, cluster: Cluster, source: str = "") -> Iterator[tuple[Child, Job]]:
    """Run a system over topics of its own, from a new group; ``source`` names input that is there already."""
    with tempfile.TemporaryDirectory() as folder:
        topics = cluster.job(source)
        job = Job(**msgspec.structs.asdict(topics) | {"options": system.options, "folder": folder})
        with running(system.module, job, python=Path(system.python) if system.python else None) as child:
            yield child, job
        cluster.forget(job, source=not source)
