"""The checks of ``kes doctor`` that need no cluster: what is installed on this machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

from streams.cli.findings import OK, PROBLEM, WARNING, Finding
from streams.kafka.questions.cluster_view import librdkafka_version
from streams.sak import leaves, spark_jar

DISTRIBUTION: Final = "kafka-event-source"


def libraries() -> Iterator[Finding]:
    """Versions of the client libraries, and whether they are those that this package is made for."""
    try:
        wanted = [line for line in requires(DISTRIBUTION) or () if "extra ==" not in line]
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        wanted, own = [], "(not installed)"
    yield Finding("libraries", OK, f"kes {own}, Python {platform.python_version()}, librdkafka {librdkafka_version()}")
    is_compiled = leaves.summary() == leaves.COMPILED
    yield Finding("hot path", OK if is_compiled else WARNING, leaves.summary(), "" if is_compiled else leaves.advice())
    for line in wanted:
        name, bounds = re.match(r"([\w.-]+)\s*(.*)", line.partition(";")[0]).groups()  # type: ignore[union-attr]
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("libraries", PROBLEM, f"{name} is not installed", f"pip install '{name}{bounds.strip()}'")
            continue
        if not fits(found, bounds):
            text = f"{name} is {found}, and {bounds.strip()} is needed"
            yield Finding("libraries", PROBLEM, text, f"pip install '{name}{bounds.strip()}'")


def spark_tasks() -> Iterator[Finding]:
    """The language that tasks of Spark encode rows in, where Spark is installed."""
    if (spark := spark_jar.installed_spark()) is None:
        return
    missing = spark_jar.problem(spark[0])
    text = f"Spark {spark[0]}: tasks that write encode in {f'Python: {missing}' if missing else 'Java'}"
    # Python does it as well, so a jar that is not there is no fault; one that would be refused is.
    state = WARNING if missing and spark_jar.JAR.exists() else OK
    yield Finding("spark", state, text, spark_jar.ADVICE if missing else "")


def fits(found: str, bounds: str) -> bool:
    """Check a version against bounds like ``>=2.16.1,<2.17``. Other kinds of bounds are taken for kept."""
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
        if (_numbers(found) >= _numbers(bound)) is not (operator == ">="):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    found = [int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", text)[0])]
    return tuple(found + [0] * (4 - len(found)))
