"""A local Spark session that works from ``pip install`` alone, and the registration of the data source.

Four things go wrong with a plain ``SparkSession.builder`` on a fresh machine, and all four end in a message that names
something else: no Java on ``PATH``; the wheel's Java, which does not know one of Spark's arguments; workers that run
another Python than the driver; and a host name that does not resolve to this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

import streams
from streams.errors import ConfigError
from streams.sak import spark_jar
from streams.sak.java import JavaError, spark_java_home
from streams.spark.source import GrtDataSource, LocalGrtDataSource

_LOG4J = Path(__file__).with_name("log4j2.properties")
_log = logging.getLogger(__name__)
_TOLD: set[str] = set()

_SETTINGS: Mapping[str, str] = {
    "spark.log.level": "ERROR",  # an own log4j2 file alone is not enough: the shell mode PySpark runs in says WARN
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.shuffle.partitions": "4",
    # HotSpot never compiles methods of more than 8,000 bytes of bytecode, and Spark makes some when it decodes events:
    # above this size it evaluates expressions one by one, each compiled. Three times as fast.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # A worker that is kept costs memory; a worker that is started costs a second of imports.
    "spark.python.worker.reuse": "true",
}


def local_session(
    app_name: str = "kafka-event-source",
    *,
    cores: int = 2,
    memory: str = "1g",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A local session on ``cores`` threads with ``format("grt")`` registered; stop it with ``.stop()``.

    ``memory`` is the heap of the one Java process. ``settings`` are Spark's own, and win over the ones chosen here
    (loopback only, no web interface, UTC, quiet logs). The first session of a process starts Java and takes some
    seconds. Tasks that write encode in Java where this installation has ``kes-spark.jar`` for this Spark, else in
    Python, and the log says so; ``spark.kes.tasks`` (``java`` or ``python``) demands one of them. When a session is
    already active in this process, that one is returned, with the source registered: Spark keeps one per process, and
    its start-up settings cannot be changed any more.

    Sets ``JAVA_HOME`` and, unless it is set already, ``PYSPARK_PYTHON`` in this process's environment, because that is
    where Spark looks for both. Raises ``ConfigError`` when no usable Java is found, or not a jar that is demanded.
    """
    if (active := SparkSession.getActiveSession()) is not None:
        register(active)
        return active
    try:
        os.environ["JAVA_HOME"] = str(spark_java_home())
    except JavaError as error:
        raise ConfigError(f"Spark needs Java: {error}") from error
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    _let_workers_import_us()
    wanted = {
        **_SETTINGS,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
        **(settings or {}),
    }
    wanted["spark.jars"] = _with_our_jar(wanted.get("spark.jars", ""), wanted.get("spark.kes.tasks"))
    builder = SparkSession.builder.master(f"local[{cores}]").appName(app_name)
    for name, value in wanted.items():
        builder = builder.config(name, value)
    with _no_java_left_behind():
        session = builder.getOrCreate()
        register(session)
    return session


def _with_our_jar(jars: str, tasks: str | None) -> str:
    """The setting ``spark.jars`` with the tasks' half of the sink in Java, where this installation has it and ``tasks``
    does not say Python. Raises ``ConfigError`` where it demands Java in vain."""
    given = [jar for jar in jars.split(",") if jar]
    if tasks == "python" or any(jar.rpartition("/")[2] == spark_jar.JAR.name for jar in given):
        return jars
    if (missing := spark_jar.problem(pyspark.__version__)) == "":
        return ",".join([*given, str(spark_jar.JAR)])
    if tasks == "java":
        raise ConfigError(f"spark.kes.tasks=java: {missing}; {spark_jar.ADVICE}. Without it tasks encode in Python")
    return jars


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("grt")`` and ``df.write.format("grt")`` known to a session. Repeating it is harmless.

    Only needed where Spark does not find it by itself (through ``pyspark_grt``, which is installed with this package),
    and on one machine: after it a session there stages large writes in that machine's temporary folder. A cluster needs
    the package on its workers, and the option ``stagingDir`` for large writes.
    """
    _tell_who_encodes(spark)
    one_machine = str(spark.conf.get("spark.master", "")).startswith("local")
    spark.dataSource.register(LocalGrtDataSource if one_machine else GrtDataSource)


def _tell_who_encodes(spark: SparkSession) -> None:
    """Log, once for each application, that tasks encode in Python for want of a jar, and what helps."""
    classic: Any = spark
    jvm = getattr(classic, "_jvm", None)
    if jvm is None or spark.conf.get("spark.kes.tasks", "java") == "python":
        return  # connected from afar: its server knows; or wanted so
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    application = spark.sparkContext.applicationId
    if application not in _TOLD and loader.getResource("kes/spark/Grt.class") is None:
        _TOLD.add(application)
        missing = spark_jar.problem(spark.version)
        helps = f"{missing}; {spark_jar.ADVICE}" if missing else f"{spark_jar.JAR} is not in the setting spark.jars"
        _log.info("tasks that write encode in Python, which is slower than in Java: %s", helps)


def activate(spark: SparkSession) -> None:
    """Make this the calling thread's active session: where there is none, Spark does not find data sources in Python
    for ``df.write``, and says DATA_SOURCE_NOT_FOUND."""
    classic: Any = spark
    jvm = getattr(classic, "_jvm", None)
    if jvm is not None:  # a session that is not connected from afar
        classic._get_j_spark_session_class(jvm).setActiveSession(classic._jsparkSession)


@contextlib.contextmanager
def _no_java_left_behind() -> Iterator[None]:
    """Kill the Java that the block has started when it fails or is interrupted: no other process would end it, and it
    would stay as long as this process does."""
    from pyspark import SparkContext, java_gateway  # not there in pyspark-client, which starts no Java

    started: list[subprocess.Popen[Any]] = []
    module: Any = java_gateway
    original = module.Popen

    def recorded(*arguments: Any, **settings: Any) -> Any:
        process = original(*arguments, **settings)
        started.append(process)
        return process

    module.Popen = recorded
    try:
        yield
    except BaseException:
        for process in started:
            process.kill()
            process.wait()
        if started:  # what PySpark remembers of it, else the next session would talk to the dead
            context: Any = SparkContext
            context._active_spark_context = context._gateway = context._jvm = None
            sessions: Any = SparkSession
            sessions._instantiatedSession = sessions._activeSession = None
        raise
    finally:
        module.Popen = original


def _let_workers_import_us() -> None:
    """Put the folder of this package on the workers' path: they are started by Java, which knows nothing of ours."""
    root = str(Path(streams.__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
