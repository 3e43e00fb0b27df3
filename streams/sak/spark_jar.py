"""The tasks' half of Spark's sink in Java (``spark/jvm``): ``kes-spark.jar``, and how it is built from its sources.

``python -m streams.sak.spark_jar`` builds it in an installation. Imports nothing of this package, so that the build of
the wheel can run it, and ``kes doctor`` need not start Spark. It takes a JDK 17 or newer (``JAVA_HOME``, or ``javac``
on the path), and PySpark, whose jars are the class path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

SOURCES: Final = Path(__file__).resolve().parents[1] / "spark" / "jvm"
JAR: Final = SOURCES / "kes-spark.jar"
ADVICE: Final = "with a JDK here, `python -m streams.sak.spark_jar` makes it"
_SERVICE: Final = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
_BUILT: Final = "kes/spark/built.txt"
_FIRST_DAY: Final = (1980, 1, 1, 0, 0, 0)


def sources() -> list[Path]:
    """Return the files, by name."""
    return sorted(SOURCES.glob("*.java"))


def built_with(spark: str) -> str:
    """Return what a jar of these sources says of itself that was built with this version of Spark: their digest, and
    the line of Spark (``4.3``). Spark's internals may differ from one line to the next."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:16]
    line = re.match(r"\d+\.\d+", spark)
    return f"{digest} {line[0] if line else spark}"


def refusal(built: str, spark: str) -> str:
    """Return why a jar that says this of itself is not for this release and this Spark; ``""``: it is."""
    ours, theirs = built_with(spark).split(), built.split()
    if theirs[:1] != ours[:1]:
        return "is of another release than the Python package kafka-event-source"
    if theirs != ours:
        return f"was built with Spark {' '.join(theirs[1:]) or '(not known)'}, and this is Spark {ours[1]}"
    return ""


def problem(spark: str, jar: Path | None = None) -> str:
    """Return why this installation has no jar for a version of Spark; ``""``: it has one. ``ADVICE`` helps."""
    jar = jar or JAR
    if not jar.exists():
        return f"this installation has no {jar.name} (its wheel was built without a JDK and PySpark)"
    try:
        with zipfile.ZipFile(jar) as packed:
            built = packed.read(_BUILT).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        return f"{jar} cannot be read ({error})"
    refused = refusal(built, spark)
    return f"{jar} {refused}" if refused else ""


def installed_spark() -> tuple[str, Path] | None:
    """Return the version of PySpark and the folder of its jars, without importing it; ``None``: there is none with
    jars. (A platform's own PySpark has no metadata of a distribution.)"""
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None or not (jars := Path(spark.origin).with_name("jars")).is_dir():
        return None
    found = re.search(r"__version__.*?([0-9][0-9.]*)", Path(spark.origin).with_name("version.py").read_text())
    return (found[1] if found else "(not known)"), jars


def build(jar: Path = JAR) -> str:
    """Build the jar: the same sources and compiler make the same bytes. Return why that is impossible; ``""``: done."""
    home = os.environ.get("JAVA_HOME")
    compiler = shutil.which("javac", path=None if home is None else f"{home}/bin") or shutil.which("javac")
    if compiler is None:
        return "there is no JDK (javac, by JAVA_HOME or PATH)"
    if (spark := installed_spark()) is None:
        return "PySpark is not installed, whose jars it is compiled with"
    with TemporaryDirectory(prefix="kes-jar-") as folder:
        words = [compiler, "--release", "17", "-cp", f"{spark[1]}/*", "-d", folder, *map(str, sources())]
        ended = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode:
            sys.stderr.write(ended.stdout + ended.stderr)
            return f"javac failed (exit code {ended.returncode})"
        made = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.class")}
    made |= {_SERVICE: b"kes.spark.Grt\n", _BUILT: built_with(spark[0]).encode()}
    begun = jar.with_name(f"{jar.name}.{os.getpid()}")
    with zipfile.ZipFile(begun, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(made):
            packed.writestr(zipfile.ZipInfo(name, _FIRST_DAY), made[name], zipfile.ZIP_DEFLATED)
    begun.replace(jar)
    return ""


if __name__ == "__main__":
    sys.exit(build(*map(Path, sys.argv[1:])) or None)
