"""The systems under test, by name, and the processes of a run, watched from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Protocol

import msgspec
import psutil

from benchmarks.workload import Job


class Failed(Exception):
    """A process of the run ended when it should not, or did not do its work in time."""


class Unavailable(Exception):
    """A system cannot be had here: the message gives the reason. It is left out, and the report shows it."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a system's process: ``command``, with the job as JSON in one more argument, in ``folder`` (none:
    this checkout). The ``versions`` of its parts go into the report."""

    command: tuple[str, ...]
    folder: Path | None = None
    versions: dict[str, str] = {}


class Progress(Protocol):
    """Counts the events of its input that a group has committed."""

    def __call__(self) -> int: ...

    def close(self) -> None:
        """Free the client."""


class Kind(ABC):
    """A program that does the account workload, exactly once, until SIGTERM. ``defaults``: the labels by which it takes
    part when no systems are named. ``is_peer``: of another project; its faults are shown, and are no failure of the
    run."""

    name: str
    defaults: tuple[str, ...] = ()
    is_peer = False

    @abstractmethod
    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """Prepare its start with these options; fetches or builds its parts the first time, and is quick from then on.
        Raises ``Unavailable``."""

    def progress(self, settings: Mapping[str, Any], job: Job) -> Progress | None:
        """Open a view of its progress, if its offsets are elsewhere than in its group. ``settings``: a client's."""
        return None


class Module(Kind):
    """A module of this package, with words before its job. ``@FOLDER`` takes the same one of another checkout."""

    def __init__(self, name: str, module: str, defaults: tuple[str, ...] = ()) -> None:
        self.name, self.defaults = name, defaults
        self.command = (sys.executable, "-m", *module.split())

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """Start it by this interpreter."""
        return Launch(command=self.command, folder=system.folder)


SCRATCH = "BENCH_SCRATCH"
"""The variable that names a folder of the process's own, empty at its start and deleted after its end."""
REFERENCE = "handwritten:events=5000"
"""Ratios are to this system."""
KINDS: dict[str, Kind] = {}


def register(*kinds: Kind) -> None:
    """Make systems known by their names."""
    KINDS.update({kind.name: kind for kind in kinds})


register(
    Module("handwritten", "benchmarks.handwritten", (REFERENCE, "handwritten:events=1000")),
    Module("engine", "benchmarks.engine", ("engine",)),
    Module("engine_batch", "benchmarks.engine batch", ("engine_batch",)),
    Module("loop", "benchmarks.loop"),
    Module("scheduler", "benchmarks.engine scheduler"),
    Module("concurrency", "benchmarks.engine concurrency"),
    Module("parking", "benchmarks.engine parking"),
    Module("once", "benchmarks.engine once"),
    Module("ahead", "benchmarks.engine ahead"),
    Module("durable", "benchmarks.engine durable"),
)


class System(msgspec.Struct, frozen=True):
    """``NAME[@FOLDER][:OPTION=VALUE,...]``; ``@FOLDER`` takes the code of another checkout."""

    label: str
    name: str
    folder: Path | None
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> System:
        """Raises ``ValueError`` for a name that is not known or options that are none."""
        head, _, tail = text.partition(":")
        name, _, folder = head.partition("@")
        if name not in KINDS:
            raise ValueError(f"unknown system {name!r}; there are: {', '.join(KINDS)}")
        options = dict(pair.split("=", 1) for pair in tail.split(",") if pair)
        return cls(text, name, Path(folder) if folder else None, options)

    def launch(self, say: Callable[[str], None] = lambda _: None) -> Launch:
        """Prepare its start. Raises ``Unavailable``."""
        return KINDS[self.name].launch(self, say)


class Sample(msgspec.Struct, frozen=True):
    """One look at a process: seconds since the run's begin, its events committed, CPU seconds used, RSS in bytes."""

    at: float
    committed: int
    cpu: float
    rss: int


class Child:
    """A process of the run: a command, with its job as JSON in one more argument, and ``variables`` of its environment.
    Ends with the block it is used in, and with this process."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        job: msgspec.Struct | None,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._errors = TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._process = subprocess.Popen(
            [*command, *([msgspec.json.encode(job).decode()] if job is not None else [])],
            cwd=folder or Path(__file__).parents[1],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.pid = self._process.pid
        self._stats = psutil.Process(self.pid)
        self._result = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end in an orderly way (SIGTERM), and see to it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._errors.close()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def sample(self, began: float, committed: int) -> Sample:
        """Look at it now. Raises ``Failed`` if it is gone."""
        self.check()
        try:
            with self._stats.oneshot():
                times = self._stats.cpu_times()
                return Sample(
                    time.monotonic() - began, committed, times.user + times.system, self._stats.memory_info().rss
                )
        except psutil.Error as error:
            raise self._failed("is gone") from error

    def check(self) -> None:
        """Check that it has not ended. Raises ``Failed``."""
        if self._process.poll() is not None:
            raise self._failed(f"ended with code {self._process.returncode}")

    def result(self, timeout: float) -> bytes:
        """Wait until it has ended with code 0, and return its output. Raises ``Failed``."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failed(f"was not done in {timeout:g} s") from None
        self._listener.join(5)
        if code:
            raise self._failed(f"ended with code {code}")
        return self._result

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            self._result = out.read()

    def _failed(self, how: str) -> Failed:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-2000:]
        return Failed(f"{self.name} (process {self.pid}) {how}" + (f"; it said:\n{said}" if said else ""))


def running(module: str, job: msgspec.Struct | None, folder: Path | None = None) -> Child:
    """Start a module of this package with a job."""
    return Child(module, (sys.executable, "-m", *module.split()), job, folder)


@contextlib.contextmanager
def system_running(system: System, job: Job) -> Iterator[Child]:
    """Run a system under test. Raises ``Unavailable``."""
    launch = system.launch()
    job = msgspec.structs.replace(job, options=system.options)
    with (
        TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch,
        Child(system.label, launch.command, job, launch.folder, {SCRATCH: scratch}) as child,
    ):
        yield child
