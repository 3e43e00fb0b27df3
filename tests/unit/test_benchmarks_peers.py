"""The peers of the benchmark: that they are had with checksums, or that the report says why not. No peer is started."""

from __future__ import annotations

import hashlib
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cluster import made_for
from benchmarks.jars import NoJar, jars
from benchmarks.measures import measures
from benchmarks.peers import kafka_streams, quix
from benchmarks.peers.gkes import CommitLog, Gkes
from benchmarks.peers.kafka_streams import COORDINATES, javac
from benchmarks.peers.programs import SOURCES, checked, required
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
    known = {"kafka-streams": kafka_streams.OPTIONS, "quixstreams": quix.OPTIONS, "gkes": Gkes.options}
    for name, options in known.items():
        assert KINDS[name].is_peer
        for label in KINDS[name].defaults:
            checked(peer(label).options, options)
    checked(system.options, kafka_streams.OPTIONS)
    for label in ("kafka-streams:commits=20", "quixstreams:streams.x=1", "gkes:threads=2"):
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


def test_what_peers_are_made_of_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums; Kafka Streams in the version of the broker, and with a compiler or not at all."""
    assert [coordinates.split(":")[2] for coordinates in COORDINATES] == [pinned()[0]]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"there is no javac, neither beside .* nor on PATH: install a JDK"):
        javac(Java(tmp_path / "jdk" / "bin" / "java", "17.0.1", 17, "PATH"))
    text, sums = ((SOURCES / Gkes.name / name).read_text() for name in ("go.mod", "go.sum"))
    found = required(text, Gkes.modules)
    assert [name for name, module in Gkes.modules.items() if f"{module} v{found[name]} h1:" not in sums] == []
    assert found == {"gkes": "1.0.6", "franz-go": "1.8.0"}


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
