"""The wheel: with the compiled leaves for this platform and Python where there is a C compiler, else of plain Python;
and with the jar for Spark where there are a JDK and PySpark.

``KES_COMPILED_WHEEL=1``: a wheel that cannot be compiled is an error; ``=0``: plain Python. A file in the wheel
(``streams/sak/built.txt``) says which one it is, and why. ``KES_SPARK_JAR=1`` and ``=0`` do the same for the jar.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NOTE: Final = "streams/sak/built.txt"
JAR: Final = "streams/spark/jvm/kes-spark.jar"


class CompiledLeaves(BuildHookInterface[Any]):
    """Adds the compiled files to the wheel. The places of fields are those of the classes in the environment of the
    build, so it asks for the package's own dependencies there."""

    _scratch: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what an isolated environment needs for the leaves: nothing, where they cannot be compiled."""
        needed = ["pyspark>=4.2,<5"] if os.environ.get("KES_SPARK_JAR") == "1" else []
        if no_compiler():
            return needed
        package = self.metadata.core
        return [*needed, *package.dependencies, *package.optional_dependencies["compile"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a copy of the package: the source tree stays as it is, and no older file gets in. Ends the build with
        one sentence if a compiled wheel is demanded, and cannot be made."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._scratch = TemporaryDirectory(prefix="kes-wheel-")
        copy = Path(self._scratch.name)
        problem, built = no_compiler(), list[Path]()
        if not problem:
            left_out = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(Path(self.root, "streams"), copy / "streams", ignore=left_out)
            problem, built = compiled(copy)
        if problem and os.environ.get("KES_COMPILED_WHEEL") == "1":
            self._scratch.cleanup()
            sys.exit(f"kafka-event-source: KES_COMPILED_WHEEL=1 demands a compiled wheel, and {problem}")
        no_jar = spark_jar(Path(self.root), copy / "kes-spark.jar")
        if no_jar and os.environ.get("KES_SPARK_JAR") == "1":
            self._scratch.cleanup()
            sys.exit(f"kafka-event-source: KES_SPARK_JAR=1 demands the jar for Spark, and {no_jar}")
        if not no_jar:
            build_data["force_include"][str(copy / "kes-spark.jar")] = JAR
        note = copy / "built.txt"
        leaves = f"plain: {problem}\n" if problem else f"compiled: {', '.join(versions())}\n"
        note.write_text(leaves + (f"no jar for Spark: {no_jar}\n" if no_jar else "with the jar for Spark\n"))
        build_data["force_include"][str(note)] = NOTE
        if not problem:
            build_data["force_include"] |= {str(path): str(path.relative_to(copy)) for path in built}
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        if self._scratch is not None:
            self._scratch.cleanup()


def no_compiler() -> str:
    """Return why nothing can be compiled, without anything that is installed; ``""``: it may be possible."""
    if os.environ.get("KES_COMPILED_WHEEL") == "0":
        return "KES_COMPILED_WHEEL=0 was set for its build"
    compiler = shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))[0]
    return "" if shutil.which(compiler) else f"there was no C compiler ({compiler}) at its build"


def compiled(folder: Path) -> tuple[str, list[Path]]:
    """Compile the leaves of this copy. Return what kept it from that, if anything, and the files."""
    words = [sys.executable, "-m", "streams.sak.compiling"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    built = [*folder.rglob("*.so")]
    if ended.returncode == 0 and len(built) == len([*folder.rglob("*.pxd")]):
        return "", built
    sys.stderr.write(ended.stdout + ended.stderr)
    said = ended.stderr.strip() or ended.stdout.strip() or "nothing was compiled"
    return f"its build failed: {first_error(said)}", []


def first_error(said: str) -> str:
    """Return what a compiler complains of first (a ``Python.h`` that is not there, say); else the last line, without
    the compiler's arguments."""
    found = re.search(r"(?<= error: ).+", said)
    return found[0] if found else re.sub(r"Command '\[.*\]'", "its command", said.splitlines()[-1])


def spark_jar(root: Path, target: Path) -> str:
    """Build the jar. Return what kept it from that, if anything."""
    if os.environ.get("KES_SPARK_JAR") == "0":
        return "KES_SPARK_JAR=0 was set for its build"
    # -P: modules beside it are called as some of the standard library.
    words = [sys.executable, "-P", str(root / "streams" / "sak" / "spark_jar.py"), str(target)]
    ended = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    return "" if ended.returncode == 0 else (ended.stderr.strip() or "nothing was built").splitlines()[-1]


def versions() -> list[str]:
    """Return what the places of fields are from."""
    from importlib.metadata import version

    return [f"{name} {version(name)}" for name in ("msgspec", "cython")]
