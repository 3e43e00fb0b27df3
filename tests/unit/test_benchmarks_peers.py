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

from benchmarks import jars as jars_module
from benchmarks.async_work.quix_environment import NoQuixstreams
from benchmarks.cluster import made_for
from benchmarks.jars import NoJar, jars
from benchmarks.measures import measures
from benchmarks.peers import gkes, kafka_streams, quix
from benchmarks.peers.arrivals import Gap
from benchmarks.peers.gkes import CommitLog, required
from benchmarks.peers.kafka_streams import COORDINATES, javac
from benchmarks.peers.measure import Takeovers
from benchmarks.peers.programs import SOURCES, built, checked, said
from benchmarks.peers.takeover import Takeover, is_shared, silences
from benchmarks.spark.connector import connector_jars
from benchmarks.systems import KINDS, System, Unavailable
from streams.broker.jars import pinned
from streams.sak.java import Java
from tests.unit.benchmarks_kit import rows_of, run_of, shown

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


def test_jars_are_taken_from_the_cache_only_when_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches(monkeypatch, JAR)
    (path,) = jars(LISTED, tmp_path / "jars")
    assert (path.name, path.read_bytes()) == ("one-1.jar", JAR)
    fetches(monkeypatch, ConnectionError("no network"))
    assert jars(LISTED, tmp_path / "jars") == [path]
    path.write_bytes(JAR[:-1])
    with pytest.raises(NoJar, match="group:one:1 cannot be fetched: ConnectionError"):
        jars(LISTED, tmp_path / "jars")


def test_a_jar_with_another_checksum_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches(monkeypatch, b"somebody else's")
    with pytest.raises(NoJar, match="group:one:1 arrived with another SHA-256"):
        jars(LISTED, tmp_path / "jars")
    assert not list((tmp_path / "jars").iterdir())
    with pytest.raises(NoJar, match="another SHA-256"):
        connector_jars()


def test_kafka_streams_is_of_the_version_of_the_clients_it_runs_with() -> None:
    assert [coordinates.split(":")[2] for coordinates in COORDINATES] == [pinned()[0]]


def test_without_its_jar_kafka_streams_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches(monkeypatch, ConnectionError("no network"))
    with pytest.raises(Unavailable, match=r"kafka-streams:\S+ cannot be fetched"):
        peer("kafka-streams").launch()


def test_kafka_streams_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = Java(tmp_path / "jdk" / "bin" / "java", "17.0.1", 17, "PATH")
    java.binary.parent.mkdir(parents=True)
    java.binary.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kafka_streams, "find_java", lambda: java)
    with pytest.raises(Unavailable, match=r"there is no javac, neither beside .* nor on PATH: install a JDK"):
        javac(java)
    elsewhere = tmp_path / "javac"
    elsewhere.touch(0o755)
    assert javac(java) == elsewhere
    beside = java.binary.with_name("javac")
    beside.touch()
    assert javac(java) == beside


def test_the_ancestor_needs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no go on PATH"):
        peer("gkes").launch()


def test_the_ancestors_modules_are_pinned_with_checksums() -> None:
    found = required((SOURCES / "gkes" / "go.mod").read_text())
    assert found == {"gkes": "1.0.6", "franz-go": "1.8.0"}
    sums = (SOURCES / "gkes" / "go.sum").read_text()
    assert f"github.com/aws/go-kafka-event-source/streams v{found['gkes']} h1:" in sums
    assert f"github.com/twmb/franz-go v{found['franz-go']} h1:" in sums


def test_quixstreams_needs_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(say: object) -> Path:
        raise NoQuixstreams("pip ended with code 1")

    monkeypatch.setattr(quix, "quixstreams_python", missing)
    with pytest.raises(Unavailable, match="pip ended with code 1"):
        peer("quixstreams").launch()


def test_a_program_is_built_once_for_its_sources_and_its_tool(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "main.go"
    source.write_text("one")
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "program").write_text(source.read_text())

    first = built("it", [source], "go1.21", build)
    assert (built("it", [source], "go1.21", build), len(calls)) == (first, 1)
    assert built("it", [source], "go1.22", build) != first
    source.write_text("two")
    other = built("it", [source], "go1.21", build)
    assert [(folder / "program").read_text() for folder in (first, other)] == ["one", "two"]

    def broken(folder: Path) -> None:
        (folder / "half").touch()
        raise Unavailable("no")

    source.write_text("three")
    before = sorted((cache / "peers").iterdir())
    with pytest.raises(Unavailable):
        built("it", [source], "go1.21", broken)
    assert sorted((cache / "peers").iterdir()) == before


def test_a_tool_that_fails_says_why() -> None:
    with pytest.raises(Unavailable, match=r"ended with code 3; it said: the reason"):
        said([sys.executable, "-c", "import sys; print('more\\nthe reason', file=sys.stderr); sys.exit(3)"], 20)
    with pytest.raises(Unavailable, match="no-such-tool"):
        said(["no-such-tool"], 20)


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


def test_jgo_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo.config", None)
    with pytest.raises(NoJar, match="the package jgo"):
        jars_module.jars(LISTED, tmp_path)


def test_members_share_when_each_has_its_part() -> None:
    assert is_shared([5, 5], 10)
    assert is_shared([3, 3, 2, 2], 10)
    assert not is_shared([], 10)
    assert not is_shared([10], 10)
    assert not is_shared([10, 0], 10)
    assert not is_shared([0, 0], 10)
    assert not is_shared([6, 4], 10)
    assert is_shared([5, 0], 10), "handed over by a marker, which the group is not told"


def test_a_silence_counts_from_before_the_kill_until_the_next_output() -> None:
    gaps = [Gap(0, 10.0, 10.3), Gap(0, 99.8, 106.8), Gap(1, 100.2, 100.5), Gap(0, 107.0, 107.1), Gap(2, 90.0, 99.0)]
    assert silences(gaps, 100.0) == {0: pytest.approx(7.0), 1: pytest.approx(0.3)}


def test_takeovers_are_told_without_figures_of_runs_with_a_fault() -> None:
    found = [
        Takeover("engine", 1, 1_000, "", 6.2, 6.1, 5, 0.06),
        Takeover("engine", 2, 1_000, "", 6.6, 6.1, 5, 0.06),
        Takeover("gkes", 1, 1_000, "17 outputs for 18 events", 40.0, 39.0, 5, 0.06),
    ]
    rows = rows_of(shown(run_of(takeover=found)))
    assert next(row for row in rows if "engine" in row)[1:] == [
        "6.4 (6.2; 6.6)",
        "5 (5; 5)",
        "0.06 (0.06; 0.06)",
        "yes",
    ]
    assert next(row for row in rows if "gkes" in row)[1:] == ["-", "-", "-", "no: 1 of 1 runs"]
    assert Takeovers().in_short(found[2]).endswith("17 outputs for 18 events")
