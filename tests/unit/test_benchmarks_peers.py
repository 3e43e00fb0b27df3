"""The peers of the benchmark: that they are had with checksums, or that the report says why not. No peer is started."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.cluster import made_for
from benchmarks.jars import NoJar, jars
from benchmarks.measures import measures
from benchmarks.peers import gkes, kafka_streams, quix
from benchmarks.peers.gkes import CommitLog, required
from benchmarks.peers.kafka_streams import COORDINATES, javac
from benchmarks.peers.programs import SOURCES, built, checked, output_of
from benchmarks.systems import KINDS, System, Unavailable
from streams.broker.jars import pinned
from streams.sak.java import Java

JAR = b"whole"
LISTED = {"group:one:1": hashlib.sha256(JAR).hexdigest()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KES_CACHE_DIR", str(folder))
    return folder


def peer(text: str) -> System:
    measures()  # the peers are known from then on
    return System.parse(text)


def fetches(monkeypatch: pytest.MonkeyPatch, content: bytes | Exception) -> None:
    """From now on the repository has this for everything."""

    class Context:
        def __init__(self, repo_cache: Path, **_: object) -> None:
            self._place = repo_cache / "arrived.jar"

        def project(self, group: str, artifact: str) -> Any:
            return SimpleNamespace(at_version=lambda _: SimpleNamespace(artifact=lambda: self))

        def resolve(self) -> Path:
            if isinstance(content, Exception):
                raise content
            self._place.write_bytes(content)
            return self._place

    monkeypatch.setattr("jgo.maven.MavenContext", Context)


def test_peers_are_systems_of_the_command_line_and_their_options_are_known() -> None:
    system = peer("kafka-streams:commit_ms=20,streams.consumer.session.timeout.ms=6000")
    assert system.options == {"commit_ms": "20", "streams.consumer.session.timeout.ms": "6000"}
    for name, module in (("kafka-streams", kafka_streams), ("quixstreams", quix), ("gkes", gkes)):
        assert KINDS[name].is_peer
        for label in KINDS[name].defaults:
            checked(peer(label).options, module.OPTIONS)
    checked(system.options, kafka_streams.OPTIONS)


@pytest.mark.parametrize("label", ["kafka-streams:commits=20", "quixstreams:streams.x=1", "gkes:threads=2"])
def test_an_option_that_nobody_would_look_at_is_refused(label: str) -> None:
    with pytest.raises(Unavailable, match=r"there is no option '.*'; there are: "):
        peer(label).launch()


def test_jars_are_fetched_once_and_only_with_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jars"
    fetches(monkeypatch, b"another")
    with pytest.raises(NoJar, match="group:one:1 arrived with another SHA-256"):
        jars(LISTED, folder)
    assert not list(folder.iterdir())
    fetches(monkeypatch, JAR)
    (path,) = jars(LISTED, folder)
    assert (path.name, path.read_bytes()) == ("one-1.jar", JAR)
    fetches(monkeypatch, ConnectionError("no network"))
    assert jars(LISTED, folder) == [path]
    path.write_bytes(JAR[:-1])
    with pytest.raises(NoJar, match="group:one:1 cannot be fetched: ConnectionError"):
        jars(LISTED, folder)
    monkeypatch.setitem(sys.modules, "jgo.config", None)
    with pytest.raises(NoJar, match="the package jgo"):
        jars(LISTED, folder)


def test_kafka_streams_needs_its_jar_of_the_clients_version_and_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [coordinates.split(":")[2] for coordinates in COORDINATES] == [pinned()[0]]
    fetches(monkeypatch, ConnectionError("no network"))
    with pytest.raises(Unavailable, match=r"kafka-streams:\S+ cannot be fetched"):
        peer("kafka-streams").launch()
    java = Java(tmp_path / "jdk" / "bin" / "java", "17.0.1", 17, "PATH")
    java.binary.parent.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"there is no javac, neither beside .* nor on PATH: install a JDK"):
        javac(java)
    for compiler in (tmp_path / "javac", java.binary.with_name("javac")):
        compiler.touch(0o755)
        assert javac(java) == compiler
    with pytest.raises(Unavailable, match="there is no go on PATH"):
        peer("gkes").launch()


def test_the_ancestors_modules_are_pinned_with_checksums() -> None:
    found = required((SOURCES / "gkes" / "go.mod").read_text())
    assert found == {"gkes": "1.0.6", "franz-go": "1.8.0"}
    sums = (SOURCES / "gkes" / "go.sum").read_text()
    assert f"github.com/aws/go-kafka-event-source/streams v{found['gkes']} h1:" in sums
    assert f"github.com/twmb/franz-go v{found['franz-go']} h1:" in sums


def test_quixstreams_is_installed_once_and_never_here(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    fails = True

    def run(command: list[str], seconds: float) -> str:
        ran.append(command)
        if "venv" in command:
            python = Path(command[-1], "bin", "python")
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        if fails and "pip" in command:
            raise Unavailable("no network")
        return '{"quixstreams":"1"}'

    monkeypatch.setattr(quix, "output_of", run)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no network"):
            peer("quixstreams").launch()
    fails = False
    launch = peer("quixstreams").launch()
    assert Path(launch.command[0]).is_relative_to(cache)
    assert launch.versions == {"quixstreams": "1"}
    assert ran[-2][0] == launch.command[0], "its own pip"
    count = len(ran)
    assert peer("quixstreams").launch() == launch
    assert len(ran) == count


def test_a_program_is_built_once_for_its_sources_and_its_tool(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "main.go"
    source.write_text("one")
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "program").write_text(source.read_text())

    def broken(folder: Path) -> None:
        (folder / "half").touch()
        raise Unavailable("no")

    first = built("it", [source], "go1.21", build)
    assert (built("it", [source], "go1.21", build), len(calls)) == (first, 1)
    assert built("it", [source], "go1.22", build) != first
    source.write_text("two")
    other = built("it", [source], "go1.21", build)
    assert [(folder / "program").read_text() for folder in (first, other)] == ["one", "two"]
    before = sorted((cache / "peers").iterdir())
    source.write_text("three")
    with pytest.raises(Unavailable):
        built("it", [source], "go1.21", broken)
    assert sorted((cache / "peers").iterdir()) == before
    with pytest.raises(Unavailable, match=r"ended with code 3; it said: the reason"):
        output_of([sys.executable, "-c", "import sys; print('more\\nthe reason', file=sys.stderr); sys.exit(3)"], 20)
    with pytest.raises(Unavailable, match="no-such-tool"):
        output_of(["no-such-tool"], 20)


def test_how_far_the_ancestor_is_comes_from_its_commit_log() -> None:
    log = CommitLog({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "gkes_commit_log_run001")
    for partition, offset in [(0, 7), (1, 5), (0, 9)]:
        log.hear(struct.pack("<q", partition) + b"in", struct.pack("<q", offset))
    log.hear(b"", b"5d2c1a86-mark")
    log.hear(b"5d2c1a86-mark", b"")
    assert sum(log.offsets.values()) == 14
    log.close()


def test_the_topics_a_system_made_for_itself_are_found_by_its_group() -> None:
    own = {"run001-out", "run001-accounts-changelog", "changelog__run001--drain-in--default", "gkes_commit_log_run001"}
    assert made_for("run001", [*own, "run0010-out", "rerun001-out", "drain-in", "run002-out"]) == own


def test_the_quixstreams_program_counts_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("quixstreams")
    monkeypatch.setattr(stub, "Application", None, raising=False)
    monkeypatch.setitem(sys.modules, "quixstreams", stub)
    spec = importlib.util.spec_from_file_location("accounts", SOURCES / "quix" / "accounts.py")
    assert spec is not None
    assert spec.loader is not None
    accounts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(accounts)
    kept: dict[str, Any] = {}
    state = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    event = {"account": "a", "cents": 30, "sent": 1.5, "note": "n"}
    answers = [accounts.handle(event, "a", 0, [("__grt__", b"Deposited")], state) for _ in range(2)]
    assert answers[1] == {"account": "a", "count": 2, "cents": 60, "sent": 1.5}
    options = {"consumer.fetch.min.bytes": "1", "session_ms": "6000", "transaction_ms": "10000", "commit_ms": "20"}
    assert accounts.of_client(options, "consumer.") == {"fetch.min.bytes": "1", "session.timeout.ms": "6000"}
    assert accounts.of_client(options, "producer.") == {"transaction.timeout.ms": "10000"}
    with pytest.raises(RuntimeError, match="an event of type b'Other'"):
        accounts.handle(event, "a", 0, [("__grt__", b"Other")], state)
