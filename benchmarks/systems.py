"""The systems under test, by name, each run in a process of its own that is watched from outside."""

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
    """A system cannot be had here: the message says why. It is left out, and the report says so."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a system's process is started: ``command``, with the job as JSON in one more argument, in ``folder`` (none:
    this checkout), with ``variables`` added to the environment. ``versions`` of what it is made of go into the report.
    """

    command: tuple[str, ...]
    folder: Path | None = None
    variables: dict[str, str] = {}
    versions: dict[str, str] = {}


class Progress(Protocol):
    """Asks how many events of its input a group has committed."""

    def __call__(self) -> int: ...

    def close(self) -> None:
        """Free the client."""


class Kind(ABC):
    """A program that does the account workload, exactly once, until SIGTERM. ``defaults``: the labels by which it takes
    part when no systems are named. ``is_peer``: somebody else's; its faults are told, and are no failure of the run.
    ``about``: what it is, with which settings, as a line of Markdown."""

    name: str
    about = ""
    defaults: tuple[str, ...] = ()
    is_peer = False

    @abstractmethod
    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """How to start it with these options; fetches or builds what it needs when first asked, and is quick from then
        on. Raises ``Unavailable``."""

    def progress(self, settings: Mapping[str, Any], job: Job) -> Progress | None:
        """How far it is, if it keeps its offsets elsewhere than in its group. ``settings`` are a client's."""
        return None


class Module(Kind):
    """A module of this package. ``@FOLDER`` takes the same one of another checkout."""

    def __init__(self, name: str, module: str, defaults: tuple[str, ...] = (), about: str = "") -> None:
        self.name, self.module, self.defaults, self.about = name, module, defaults, about

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """By this interpreter."""
        return Launch(command=(sys.executable, "-m", self.module), folder=system.folder)


SCRATCH = "BENCH_SCRATCH"
"""The variable that names a folder of the process's own, empty at its start and deleted after its end."""
REFERENCE = "handwritten:events=5000"
"""What ratios refer to."""
KINDS: dict[str, Kind] = {}


def register(*kinds: Kind) -> None:
    """Make systems known by their names."""
    KINDS.update({kind.name: kind for kind in kinds})


register(
    Module(
        "handwritten",
        "benchmarks.handwritten",
        (REFERENCE, "handwritten:events=1000"),
        "a loop over confluent-kafka: two transactional producers in turn, so many events or 10 ms per transaction, "
        "commits on a thread, msgspec, state in a dict; it survives neither a rebalance nor a failure",
    ),
    Module(
        "engine",
        "benchmarks.engine",
        ("engine",),
        "`EventSource` with its default settings: routing by type, typed events, typed table with changelog, metrics, "
        "group membership",
    ),
    Module(
        "engine_batch",
        "benchmarks.engine_batch",
        ("engine_batch",),
        "the same with a batch handler (`register_event_type(T, batch=True)`), which does for each event of a list "
        "what the plain one does",
    ),
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
        """How to start it. Raises ``Unavailable``."""
        return KINDS[self.name].launch(self, say)

    def progress(self, settings: Mapping[str, Any], job: Job) -> Progress | None:
        """As of its kind."""
        return KINDS[self.name].progress(settings, job)


class Sample(msgspec.Struct, frozen=True):
    """One look at a process: seconds since the run's begin, its events committed, CPU seconds used, RSS in bytes."""

    at: float
    committed: int
    cpu: float
    rss: int


class Child:
    """A process of the run: ``module`` with its job (or other ``arguments``) and environment ``variables``, by this
    interpreter or that of another environment, or any other ``command``. Ends with the block it is used in, and with
    this process."""

    def __init__(
        self,
        module: str,
        job: msgspec.Struct,
        folder: Path | None = None,
        *,
        arguments: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        python: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.module = module
        self._errors = TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        if arguments is None:
            arguments = [msgspec.json.encode(job).decode()]
        self._process = subprocess.Popen(
            [*(command or (str(python or sys.executable), "-m", module)), *arguments],
            cwd=folder or Path(__file__).parents[1],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._stats = psutil.Process(self._process.pid)
        self._result = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

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
        """Raises ``Failed`` if it has ended."""
        if self._process.poll() is not None:
            raise self._failed(f"ended with code {self._process.returncode}")

    def result(self, timeout: float) -> bytes:
        """What it printed, once it has ended by itself with code 0."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failed(f"was not done in {timeout:g} s") from None
        self._listener.join(5)
        if code:
            raise self._failed(f"ended with code {code}")
        return self._result

    def stop(self) -> None:
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

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            self._result = out.read()

    def _failed(self, how: str) -> Failed:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-2000:]
        return Failed(f"{self.module} (process {self.pid}) {how}" + (f"; it said:\n{said}" if said else ""))


@contextlib.contextmanager
def running(
    module: str, job: msgspec.Struct, folder: Path | None = None, *, python: Path | None = None
) -> Iterator[Child]:
    """Run a module of this package with a job; stopped at the end of the block."""
    child = Child(module, job, folder, python=python)
    try:
        yield child
    finally:
        child.stop()


@contextlib.contextmanager
def system_running(system: System, job: Job) -> Iterator[Child]:
    """Run a system under test. Raises ``Unavailable``."""
    launch = system.launch()
    with TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        child = Child(
            system.label,
            msgspec.structs.replace(job, options=system.options),
            launch.folder,
            variables={**launch.variables, SCRATCH: scratch},
            command=launch.command,
        )
        try:
            yield child
        finally:
            child.stop()
