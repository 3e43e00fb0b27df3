"""Fetching the jars: from a small repository on this machine, over real HTTP, with everything that can go wrong."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streams.broker import jars as jars_module
from streams.broker.jars import Jar, errors_named, kafka_jars, pinned
from streams.errors import EmbeddedBrokerError
from tests.unit.waiting import only_new_garbage, wait_until

# The fetching library leaves connections of failed downloads to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONTENT = {f"part{i}-1.0.jar": bytes([65 + i]) * (200_000 + i) for i in range(6)}
BIG = "part5-1.0.jar"

FETCH = """
import json, sys
from streams.broker import jars
listed = tuple(jars.Jar(**jar) for jar in json.loads(sys.argv[1]))
jars.pinned = lambda: ("4.0", listed)
print("begun", flush=True)
print(jars.kafka_jars(lambda what, *_: print(what, flush=True)).folder, flush=True)
"""


class Repository:
    """A Maven repository with faults: ``broken`` bytes, ``stalled`` half way, ``missing`` altogether."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: dict[str, int] = {}
        self.missing: set[str] = set()
        self.stalled = threading.Event()
        self.release = threading.Event()
        self.release.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.serve(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.rpartition("/")[2]
        body = CONTENT.get(name)
        if body is None or name in self.missing:
            request.send_error(404)
            return
        self.asked.append(name)
        if self.broken.get(name, 0) > 0:
            self.broken[name] -= 1
            body = body[:-1] + b"!"
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        try:
            request.wfile.write(body[:100_000])
            if name == BIG and not self.release.is_set():
                self.stalled.set()
                self.release.wait(60)
            request.wfile.write(body[100_000:])
        except OSError:  # the client was killed
            pass


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """The repository that this user's settings name, an empty cache, and a small list of jars."""
    only_new_garbage()
    served = Repository()
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "jgo.conf").write_text(
        f"[repositories]\ncentral = http://127.0.0.1:{served.server.server_port}\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("KES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KES_KAFKA_JARS", raising=False)
    monkeypatch.setattr(jars_module, "pinned", lambda: ("4.0", listed()))
    yield served
    served.release.set()
    served.server.shutdown()
    served.server.server_close()
    for thread in threading.enumerate():
        if thread.name == "fetch-kafka":
            thread.join(30)
    gc.collect()


def listed() -> tuple[Jar, ...]:
    return tuple(
        Jar(name, f"org.example:{name.removesuffix('-1.0.jar')}:1.0", len(body), hashlib.sha256(body).hexdigest())
        for name, body in CONTENT.items()
    )


def whole(folder: Path) -> set[str]:
    """The names of the jars there; every one must be whole."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.jar")}
    assert all(CONTENT[name] == body for name, body in found.items())
    return set(found)


def fetch_in_a_process() -> subprocess.Popen[str]:
    jars = json.dumps([{name: getattr(jar, name) for name in Jar.__slots__} for jar in listed()])
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, jars],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def cached_jars(tmp_path: Path) -> Path:
    return next((tmp_path / "cache" / "kafka").glob("4.0-*")) / "jars"


def test_the_shipped_list_is_complete() -> None:
    version, jars = pinned()
    assert (version, len(jars)) == ("4.3.1", 46)
    assert {"kafka_2.13-4.3.1.jar", "slf4j-simple-1.7.36.jar"} <= {jar.name for jar in jars}
    for jar in jars:
        group, artifact, number = jar.coordinates.split(":")
        assert (bool(group), jar.name, len(jar.sha256), jar.size > 0) == (True, f"{artifact}-{number}.jar", 64, True)


def test_fetched_once_then_offline(repository: Repository) -> None:
    shown: list[tuple[str, int, int]] = []
    found = kafka_jars(lambda *step: shown.append(step))
    assert whole(found.folder) == set(CONTENT)
    assert sorted(repository.asked) == sorted(CONTENT)
    total = sum(len(body) for body in CONTENT.values())
    assert {(what, of) for what, _, of in shown} == {("Kafka 4.0", total)}
    done = [step for _, step, _ in shown]
    assert [*sorted(done), total] == [*done, done[-1]]
    repository.server.shutdown()
    again = kafka_jars(lambda *_: pytest.fail("nothing is to be fetched"))
    assert again == found
    assert [path.name for path in again.paths] == list(CONTENT)
    assert os.pathsep.join(map(str, again.paths)) == again.classpath


def test_a_broken_jar_in_the_cache_is_named_and_fetched_again(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kafka_jars().folder
    (folder / BIG).write_bytes(b"x" * len(CONTENT[BIG]))
    (folder / "part0-1.0.jar").write_bytes(b"short")
    (folder / "part1-1.0.jar").unlink()
    repository.asked.clear()
    kafka_jars()
    assert whole(folder) == set(CONTENT)
    assert sorted(repository.asked) == ["part0-1.0.jar", "part1-1.0.jar", BIG]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(BIG in line and "SHA-256" in line for line in warned)
    assert any("part0-1.0.jar" in line and "5 bytes instead of 200000" in line for line in warned)


def test_a_jar_that_arrives_broken_is_tried_again(repository: Repository) -> None:
    repository.broken[BIG] = 2
    assert whole(kafka_jars().folder) == set(CONTENT)
    assert repository.asked.count(BIG) == 3


def take_down(repository: Repository, _cache: Path) -> None:
    repository.server.shutdown()
    repository.server.server_close()


Fault = Callable[[Repository, Path], object]
FAULTS: list[tuple[Fault, str]] = [
    (lambda served, _: served.broken.update({BIG: 99}), rf"{BIG} cannot be used: it arrived broken: SHA-256 .*mirror"),
    (lambda served, _: served.missing.add(BIG), r"org\.example:part5:1\.0 is in no repository.*KES_KAFKA_JARS"),
    (take_down, r"network.*KES_KAFKA_JARS.*KES_BOOTSTRAP_SERVERS"),
    (lambda _, cache: cache.write_text("no folder"), r"the cache folder .*cache/kafka cannot be used"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=["broken", "in no repository", "no network", "no folder"])
def test_what_cannot_be_fetched_is_named_with_a_way_out(
    repository: Repository, tmp_path: Path, fault: Fault, words: str
) -> None:
    fault(repository, tmp_path / "cache")
    with pytest.raises(EmbeddedBrokerError, match=words):
        kafka_jars()
    assert BIG not in {path.name for path in tmp_path.rglob("*.jar")}


def test_no_jgo_says_what_to_install(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo", None)
    with pytest.raises(EmbeddedBrokerError, match=r"pip install 'kafka-event-source\[broker\]'"):
        kafka_jars()


def test_the_callers_callback_can_end_it(repository: Repository) -> None:
    class EnoughError(Exception):
        pass

    def enough(*_: object) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        kafka_jars(enough)
    assert whole(kafka_jars().folder) == set(CONTENT)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_download_leaves_no_broken_cache(
    repository: Repository, tmp_path: Path, ended_by: signal.Signals
) -> None:
    repository.release.clear()
    with fetch_in_a_process() as process:
        wait_until(lambda: repository.stalled.is_set() and len(whole(cached_jars(tmp_path))) == len(CONTENT) - 1)
        process.send_signal(ended_by)
        process.wait(30)  # the download goes on after a minute
        assert process.returncode != 0
    assert whole(cached_jars(tmp_path)) == set(CONTENT) - {BIG}
    repository.release.set()
    repository.asked.clear()
    assert whole(kafka_jars().folder) == set(CONTENT)
    assert repository.asked == [BIG]
    assert [path.name for path in cached_jars(tmp_path).parent.iterdir() if path.name.startswith("incoming")] == []


def test_two_processes_at_once_fetch_once(repository: Repository, tmp_path: Path) -> None:
    repository.release.clear()
    with fetch_in_a_process() as one:
        wait_until(repository.stalled.is_set)
        with fetch_in_a_process() as two:
            assert two.stdout is not None
            assert two.stdout.readline() == "begun\n"
            assert two.stdout.readline() == "Kafka 4.0 (fetched by another process)\n"
            repository.release.set()
            answers = [process.communicate(timeout=30)[0] for process in (one, two)]
    assert [out.splitlines()[-1] for out in answers] == [str(cached_jars(tmp_path))] * 2
    assert sorted(repository.asked) == sorted(CONTENT)


def test_disk_full_before_the_download(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(EmbeddedBrokerError, match=r"disk is full: fetching Kafka needs 2 MB.*KES_CACHE_DIR"):
        kafka_jars()
    assert repository.asked == []


def test_disk_full_during_the_download(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(jars_module, "_download", full_disk)
        with pytest.raises(EmbeddedBrokerError, match="disk is full under the cache folder"):
            kafka_jars()
    assert whole(kafka_jars().folder) == set(CONTENT)


def test_other_disk_errors_keep_their_text() -> None:
    with (
        pytest.raises(EmbeddedBrokerError, match=r"the place cannot be used: Permission denied \(/x\)"),
        errors_named("the place"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "/x")


def test_given_jars_are_used_and_checked(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.setenv("KES_KAFKA_JARS", str(given))
    with pytest.raises(EmbeddedBrokerError, match=r"KES_KAFKA_JARS names .*holds no kafka_2\.13"):
        kafka_jars()
    for name in ("kafka_2.13-4.3.0.jar", "kafka-clients-4.3.0.jar"):
        (given / name).write_bytes(b"another version")
    first = kafka_jars()
    assert {path.name for path in first.paths} == {"kafka_2.13-4.3.0.jar", "kafka-clients-4.3.0.jar"}
    (given / BIG).write_bytes(CONTENT[BIG])
    assert kafka_jars().key != first.key
    (given / BIG).write_bytes(b"tampered with")
    with pytest.raises(EmbeddedBrokerError, match=rf"{BIG} \(KES_KAFKA_JARS\) is broken"):
        kafka_jars()
    assert repository.asked == []
