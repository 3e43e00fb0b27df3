"""The jars of one pinned Kafka: fetched once by their coordinates, checked against a list shipped here, then offline.

The list (``jars.json``) is the whole dependency set of ``kafka_2.13`` plus a logging backend, without which every
message of the broker is lost. Nothing is resolved at run time, so a repository cannot slip in another version, and
every jar must have the listed SHA-256, wherever it comes from. A download goes to a name of its own, and only a
checked jar gets its final name; a process killed at any moment leaves whole jars, to be used again, and rubbish, to be
swept by the next.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from streams.errors import EmbeddedBrokerError
from streams.sak.cache import cache_folder

log = logging.getLogger(__name__)

_CONNECTIONS = 4
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 0.5
_NETWORK_SECONDS = 30
_WAYS_OUT = (
    "Three ways out: run once with a network (company mirrors: section [repositories] of jgo's settings file, with a "
    "`central` of your own); copy the jars from a machine that has them and name their folder in KES_KAFKA_JARS; or "
    "use a broker that runs already and name it in KES_BOOTSTRAP_SERVERS"
)


class Progress(Protocol):
    """Called with what is being done, how many bytes of it are done, and how many there are (0: not known).

    Calls for one ``what`` never go back and end with ``done == total``. They may come from another thread than the
    caller's, one at a time. An exception of the callback ends the work and reaches the caller.
    """

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


def silent(what: str, done: int, total: int, /) -> None:
    """A ``Progress`` that shows nothing."""


@dataclass(frozen=True, slots=True)
class Jar:
    """One file of the list; ``coordinates`` are ``group:artifact:version``, ``size`` is in bytes."""

    name: str
    coordinates: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class JarSet:
    """Jars that are there and checked. ``key`` is another one for every other content."""

    folder: Path
    paths: tuple[Path, ...]
    key: str

    @property
    def classpath(self) -> str:
        """The value of Java's ``-cp``."""
        return os.pathsep.join(str(path) for path in self.paths)


@functools.cache
def pinned() -> tuple[str, tuple[Jar, ...]]:
    """The Kafka version and the jars of the list shipped with this package."""
    text = json.loads(resources.files("streams.broker").joinpath("jars.json").read_text())
    jars = (Jar(name, jar["coordinates"], jar["bytes"], jar["sha256"]) for name, jar in text["jars"].items())
    return text["kafka"], tuple(jars)


def kafka_jars(progress: Progress = silent) -> JarSet:
    """The jars to run, out of the folder that ``KES_KAFKA_JARS`` names, else out of the cache, fetched if need be.

    Blocks for the download the first time (45 MB), and while another process downloads. Raises
    ``EmbeddedBrokerError``. Any thread.
    """
    if named := os.environ.get("KES_KAFKA_JARS"):
        return _given(Path(named).expanduser().absolute())
    return _fetched(cache_folder() / "kafka", progress)


def _given(folder: Path) -> JarSet:
    paths = sorted(folder.glob("*.jar"))
    for needed in ("kafka_2.13-*.jar", "kafka-clients-*.jar"):
        if not any(path.match(needed) for path in paths):
            raise EmbeddedBrokerError(
                f"KES_KAFKA_JARS names {folder}, which holds no {needed}; name a folder with all jars of a Kafka 4"
            )
    listed = {jar.name: jar for jar in pinned()[1]}
    for path in paths:
        if path.name in listed and (fault := _fault(path, listed[path.name])):
            raise EmbeddedBrokerError(f"the jar {path} (KES_KAFKA_JARS) is broken: {fault}; copy it again")
    names = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    return JarSet(folder, tuple(paths), hashlib.sha256(names.encode()).hexdigest()[:12])


def _fetched(root: Path, progress: Progress) -> JarSet:
    version, jars = pinned()
    key = hashlib.sha256("\n".join(jar.sha256 for jar in jars).encode()).hexdigest()[:12]
    folder = root / f"{version}-{key}" / "jars"
    with errors_named(f"the cache folder {root}"):
        if _broken(folder, jars):
            folder.mkdir(parents=True, exist_ok=True)
            with _sole_fetcher(folder, jars, progress):
                # Checked again: another process may have fetched them while this one waited.
                _fetch(_broken(folder, jars), folder, progress)
    return JarSet(folder, tuple(folder / jar.name for jar in jars), key)


@contextmanager
def _sole_fetcher(folder: Path, jars: tuple[Jar, ...], progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the others show how far that one is. A killed one holds it no longer."""
    lock = FileLock(folder.parent / "fetch.lock")
    total = sum(jar.size for jar in jars)
    shown = 0
    while True:
        try:
            lock.acquire(timeout=_CHECK_SECONDS)
        except Timeout:
            there = sum(
                path.stat().st_size for path in map(folder.joinpath, (jar.name for jar in jars)) if path.exists()
            )
            shown = max(shown, min(there, total))
            progress(f"Kafka {pinned()[0]} (fetched by another process)", shown, total)
        else:
            break
    try:
        yield
    finally:
        lock.release()


_whole: set[tuple[Path, str, int, int]] = set()


def _broken(folder: Path, jars: tuple[Jar, ...]) -> list[Jar]:
    """The jars that have to be fetched, each broken one logged with its name."""
    missing = []
    for jar in jars:
        fault = _fault(folder / jar.name, jar)
        if fault and fault != "missing":
            log.warning("the jar %s is broken (%s) and is fetched again", folder / jar.name, fault)
        if fault:
            missing.append(jar)
    return missing


def _fault(path: Path, jar: Jar) -> str:
    """Return the fault of the file, or nothing. A file is read once per process unless it changes."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return "missing"
    seen = (path, jar.sha256, state.st_size, state.st_mtime_ns)
    if seen in _whole:
        return ""
    if state.st_size != jar.size:
        return f"{state.st_size} bytes instead of {jar.size}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != jar.sha256:
        return f"SHA-256 {found} instead of {jar.sha256}"
    _whole.add(seen)
    return ""


class _Count:
    """Bytes fetched over all jars; what a failed attempt fetched is taken back, but never shown as a step back."""

    def __init__(self, jars: list[Jar], progress: Progress) -> None:
        self._lock = threading.Lock()
        self._by_jar = {jar.name: 0 for jar in jars}
        self._total = sum(jar.size for jar in jars)
        self._shown = 0
        self._progress = progress
        self.cancelled = False

    def set(self, name: str, done: int) -> None:
        if self.cancelled:
            raise _Cancelled
        with self._lock:
            self._by_jar[name] = done
            reached = min(sum(self._by_jar.values()), self._total)
            if reached > self._shown:
                self._shown = reached
                self._progress(f"Kafka {pinned()[0]}", reached, self._total)


class _Cancelled(BaseException):
    """Ends a download thread whose caller is gone."""


def _fetch(jars: list[Jar], folder: Path, progress: Progress) -> None:
    if not jars:
        return
    try:
        import jgo  # noqa: F401
    except ImportError:
        raise EmbeddedBrokerError(
            "the package jgo, which fetches Kafka, is not installed: run `pip install 'kafka-event-source[broker]'`"
        ) from None
    require_space(folder, 2 * sum(jar.size for jar in jars), "fetching Kafka")
    for rubbish in folder.parent.glob("incoming-*"):
        shutil.rmtree(rubbish, ignore_errors=True)
    log.info("fetching %d jars of Kafka %s", len(jars), pinned()[0])
    incoming = Path(tempfile.mkdtemp(prefix="incoming-", dir=folder.parent))
    count = _Count(jars, progress)
    try:
        _in_threads(jars, lambda jar: _fetch_one(jar, incoming, folder, count))
    finally:
        count.cancelled = True
        shutil.rmtree(incoming, ignore_errors=True)


def _in_threads(jars: list[Jar], work: Callable[[Jar], None]) -> None:
    """Run ``work`` for each; the first failure is raised at once.

    Daemon threads, not a pool: an interpreter waits for a pool's threads at its end, and an interrupted download
    must not make it wait for a network that does not answer.
    """
    todo: queue.SimpleQueue[Jar] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for jar in sorted(jars, key=lambda jar: -jar.size):
        todo.put(jar)

    def take() -> None:
        while True:
            try:
                jar = todo.get_nowait()
            except queue.Empty:
                return
            try:
                work(jar)
            except BaseException as error:  # handed to the caller
                done.put(error)
                return
            done.put(None)

    for _ in range(_CONNECTIONS):
        threading.Thread(target=take, name="fetch-kafka", daemon=True).start()
    for _ in jars:
        if (error := done.get()) is not None:
            raise error


def _fetch_one(jar: Jar, incoming: Path, folder: Path, count: _Count) -> None:
    reason: object = None
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt * _PAUSE_SECONDS)
        place = incoming / f"{jar.name}.{attempt}"
        try:
            path = _download(jar, place, count)
        except OSError as error:  # of the disk, or of requests, whose errors are OSErrors too
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = error
        except RuntimeError as error:  # jgo: no repository has it
            raise EmbeddedBrokerError(f"the jar {jar.coordinates} is in no repository. {_WAYS_OUT}") from error
        else:
            fault = _fault(path, jar)
            if not fault:
                path.replace(folder / jar.name)
                count.set(jar.name, jar.size)
                return
            reason = f"it arrived broken: {fault}"
        log.info("fetching %s failed (attempt %d of %d): %s", jar.name, attempt + 1, _ATTEMPTS, reason)
    if isinstance(reason, str):
        raise EmbeddedBrokerError(f"the jar {jar.name} cannot be used: {reason}; a proxy or mirror may have changed it")
    raise EmbeddedBrokerError(
        f"Kafka {pinned()[0]} is not cached and cannot be fetched ({jar.name}: {type(reason).__name__}). {_WAYS_OUT}"
    ) from (reason if isinstance(reason, BaseException) else None)


def _download(jar: Jar, place: Path, count: _Count) -> Path:
    from jgo.config import GlobalSettings
    from jgo.constants import MAVEN_CENTRAL_URL
    from jgo.maven import MavenContext, PythonResolver

    @contextmanager
    def counting(name: str, size: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def more(step: int) -> None:
            nonlocal done
            done += step
            count.set(jar.name, done)

        yield more

    count.set(jar.name, 0)
    group, artifact, version = jar.coordinates.split(":")
    context = MavenContext(
        # An own, empty repository: the user's may hold half a jar of an interrupted download.
        repo_cache=place,
        remote_repos={"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories},
        resolver=PythonResolver(progress_callback=counting),
        timeout=_NETWORK_SECONDS,
    )
    return context.project(group, artifact).at_version(version).artifact().resolve()


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise ``EmbeddedBrokerError`` when the disk under ``folder`` has less than ``needed`` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EmbeddedBrokerError(
            f"the disk is full: {what} needs {needed >> 20} MB in {folder}, {free >> 20} MB are left; "
            "free some, or name another place (cache: KES_CACHE_DIR, data: data_dir or TMPDIR)"
        )


@contextmanager
def errors_named(place: str) -> Iterator[None]:
    """Turn the disk's errors within into ``EmbeddedBrokerError``s that name the place and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EmbeddedBrokerError(f"the disk is full under {place}: free some, or name another place") from error
        where = f" ({error.filename})" if error.filename else ""
        raise EmbeddedBrokerError(f"{place} cannot be used: {error.strerror or error}{where}") from error
