"""Builds the tasks' half of the sink in Java, from the sources beside it: ``python streams/spark/jvm/building.py``.

Imports nothing of this package, so that the build of the wheel can run it. It takes a JDK 17 or newer (``JAVA_HOME``,
or ``javac`` on the path), and PySpark, whose jars are the class path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

HERE: Final = Path(__file__).resolve().parent
JAR: Final = HERE / "kes-spark.jar"
_SERVICE: Final = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
_BUILT: Final = "kes/spark/built.txt"
_FIRST_DAY: Final = (1980, 1, 1, 0, 0, 0)


def sources() -> list[Path]:
    """Return the files, by name."""
    return sorted(HERE.glob("*.java"))


def digest() -> str:
    """Return what the jar is known by: a digest of its sources."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:16]


def built_of(jar: Path) -> str:
    """Return the digest of the sources of a jar."""
    with zipfile.ZipFile(jar) as packed:
        return packed.read(_BUILT).decode()


def build(jar: Path = JAR) -> str:
    """Build the jar: the same sources and compiler make the same bytes. Return why that is impossible; ``""``: done."""
    home = os.environ.get("JAVA_HOME")
    compiler = shutil.which("javac", path=None if home is None else f"{home}/bin") or shutil.which("javac")
    if compiler is None:
        return "there is no JDK (javac, by JAVA_HOME or PATH)"
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None or not (libraries := Path(spark.origin).with_name("jars")).is_dir():
        return "PySpark is not installed, whose jars it is compiled with"
    with TemporaryDirectory(prefix="kes-jar-") as folder:
        words = [compiler, "--release", "17", "-cp", f"{libraries}/*", "-d", folder, *map(str, sources())]
        ended = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode:
            sys.stderr.write(ended.stdout + ended.stderr)
            return f"javac failed (exit code {ended.returncode})"
        made = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.class")}
    made |= {_SERVICE: b"kes.spark.Grt\n", _BUILT: digest().encode()}
    begun = jar.with_name(f"{jar.name}.{os.getpid()}")
    with zipfile.ZipFile(begun, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(made):
            packed.writestr(zipfile.ZipInfo(name, _FIRST_DAY), made[name], zipfile.ZIP_DEFLATED)
    begun.replace(jar)
    return ""


if __name__ == "__main__":
    sys.exit(build(*map(Path, sys.argv[1:])) or None)
